"""Measure the effect of sparse attention on tensors, on a language model and on a diffusion pipeline."""

from sparge.evaluate.capture import AttentionError, Captured, MaskError, Recorder, attention_error

__all__ = ["AttentionError", "Captured", "MaskError", "Recorder", "attention_error"]
