"""Options of attention calls: selection rules and scores, as frozen values."""
