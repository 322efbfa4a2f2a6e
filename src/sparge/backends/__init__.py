"""Implementations of prediction and attention. A backend never imports `sparge.api`."""
