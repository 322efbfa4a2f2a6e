"""From arguments to a running call: checks, the choice between dense and sparse, torch operators, repeated calls."""
