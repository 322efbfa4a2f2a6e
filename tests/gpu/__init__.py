"""Tests of a backend on a device. A package, so that conftest.py has a different module name than the parent's."""
