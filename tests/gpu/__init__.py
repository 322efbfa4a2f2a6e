"""Tests of a backend on a device: a package, so that its conftest and the one above keep different names."""
