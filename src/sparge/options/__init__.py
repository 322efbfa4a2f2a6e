"""Options of a caller: selection rules and scores, as frozen values."""
