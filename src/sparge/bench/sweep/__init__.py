"""``sparge sweep``: derive launch configurations with their measured reasons (docs/configurations.md)."""
