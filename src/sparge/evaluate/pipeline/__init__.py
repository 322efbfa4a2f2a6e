"""Evaluate sparse attention in a diffusers pipeline against the same pipeline with dense attention.

load           a pipeline from a hub name or a folder
generate       one call of the pipeline from a seed, timed as a whole and by step
frames         the output of a pipeline as 8-bit frames, and a store of frames for resumed runs
apply          apply a policy, also to models that `sparge.enable` does not support
errors         error of the attention outputs, by layer and step
image_metrics  PSNR, SSIM, LPIPS, temporal difference
run            run the dense pipeline and all variants, resumable
summary, gallery, page   tables with intervals, images, HTML page
"""

from sparge.evaluate.pipeline.run import Result, evaluate_pipeline

__all__ = ["Result", "evaluate_pipeline"]
