"""Evaluate sparse attention in a diffusers pipeline against the same pipeline with dense attention.

This is `sparge eval pipeline`.

load           a pipeline from a hub name or a folder
output         the output of a pipeline as frames of bytes
image_metrics  PSNR, SSIM, LPIPS, temporal difference
reach          how a variant is applied to a pipeline, also to models that `sparge.enable` does not support
generate       one call from a seed, timed as a whole and by step
errors         error of the attention outputs, by layer and step
store          frames kept beside the rows, so that a resumed run compares with the same frames
run            all of it for several variants, resumable
summary, gallery, page   results as numbers with intervals, as images and as a page
command        `sparge eval pipeline`
"""

from sparge.evaluate.pipeline.run import Progress, Result, evaluate_pipeline

__all__ = ["Progress", "Result", "evaluate_pipeline"]
