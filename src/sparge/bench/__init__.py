"""``sparge bench``: speed beside density and error, as rows."""
