"""``sparge sweep``: launch configurations derived anew, each with its measured reason (docs/configurations.md)."""
