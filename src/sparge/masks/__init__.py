"""Visibility of blocks and tokens: geometry, windows, masks, segments, token orders."""
