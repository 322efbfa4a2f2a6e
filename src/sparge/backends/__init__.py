"""Implementations of the two stages. A backend may import geometry, config, visibility and block_mask, never `api`."""
