"""Stages and launching shared by the GPU backends."""
