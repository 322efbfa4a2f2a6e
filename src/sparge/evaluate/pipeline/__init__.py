"""What sparse attention does to a diffusers pipeline, against the same pipeline dense: `sparge eval pipeline`.

load       a pipeline from a hub name or a folder
output     what a pipeline returns, as frames of bytes
images     PSNR, SSIM, LPIPS, temporal difference
reach      how a variant gets at the attention of a pipeline, one that `sparge.enable` does not know included
generate   one call from a seed, timed as a whole and by step
errors     how far attention itself is from exact attention, by layer and step
store      frames kept beside the rows, so that a run that goes on compares with the same ones
run        all of it for a number of variants, resumable
summary, pictures, page   what came out, as numbers with intervals and as a page
command    `sparge eval pipeline`
"""

from sparge.evaluate.pipeline.run import Progress, Result, evaluate_pipeline

__all__ = ["Progress", "Result", "evaluate_pipeline"]
