"""Stages before attention, and kernel launching, shared by the GPU backends."""
