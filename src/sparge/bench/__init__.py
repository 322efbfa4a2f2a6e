"""``sparge bench``: measure speed, density and error of attention."""
