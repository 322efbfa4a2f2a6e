"""Which blocks and tokens may be seen: geometry, windows, masks, segments, token orders."""
