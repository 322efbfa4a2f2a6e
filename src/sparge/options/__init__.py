"""What a caller may choose: selection rules and scores, as frozen values."""
