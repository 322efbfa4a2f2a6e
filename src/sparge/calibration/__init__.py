"""Measure budgets for every layer of a model from a few inputs. `sparge.profile` stores and applies them."""

from sparge.calibration.measure import calibrate, check

__all__ = ["calibrate", "check"]
