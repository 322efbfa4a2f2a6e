"""The ``sparge`` command."""
