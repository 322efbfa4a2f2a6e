"""Measuring what sparse attention does: to given tensors, to a language model, to a diffusion pipeline."""

from sparge.evaluate.capture import AttentionError, Captured, Judged, Recorder, attention_error

__all__ = ["AttentionError", "Captured", "Judged", "Recorder", "attention_error"]
