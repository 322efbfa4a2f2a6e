"""Budgets for every layer of a model from a few inputs: `calibrate` measures, a `Profile` keeps and chooses."""

from sparge.calibration.measure import calibrate, check
from sparge.calibration.profile import Curve, Profile

__all__ = ["Curve", "Profile", "calibrate", "check"]
