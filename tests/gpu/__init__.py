"""Tests of a backend on a device. A package, so that its conftest and the parent's have different names."""
