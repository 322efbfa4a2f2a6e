"""Run a pipeline dense and in several variants on the same prompts and seeds. Runs are resumable."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparge.evaluate.capture import device_of
from sparge.evaluate.pipeline import image_metrics
from sparge.evaluate.pipeline.apply import applied_to_pipeline, denoisers, is_supported
from sparge.evaluate.pipeline.errors import ErrorRecorder
from sparge.evaluate.pipeline.frames import FrameStore, Pixels, digest_of
from sparge.evaluate.pipeline.generate import Generated, check_arguments, generate, parameters_of, without_progress_bar
from sparge.evaluate.rows import Progress, Row, Rows, Work, describe_run
from sparge.evaluate.variants import Variant, check_labels, stats_of_run

KEY = ("part", "prompt", "seed", "variant", "policy")
"""The fields that identify a row. Parts: "dense", "variant" and "errors"."""

DENSE = "dense"
"""The variant in rows of the dense pipeline itself."""

PROMPTS = (
    "A red fox walks through fresh snow at sunrise, its breath visible in the cold air",
    "A busy harbor at night, lanterns on the boats, their light broken by small waves",
)
"""Default prompts, for pipelines that take a prompt."""

SHOWN = 3
"""Number of clips or images per variant that are stored for the page: the first ones."""

WARM_UP_STEPS = 2
FIXED_SCHEDULE = ("timesteps", "sigmas", "strength")
"""Arguments that fix the number of steps."""


class Item(NamedTuple):
    """A prompt and a seed. ``prompt`` is None for pipelines that take none."""

    prompt: str | None
    seed: int


@dataclass(frozen=True)
class Result:
    """The result of an evaluation.

    Attributes:
        is_supported: whether `sparge.enable` supports the pipeline; if not, policies apply to its SDPA calls.
        variants: the variants in the given order.
        items: prompts and seeds.
        rows: one row per dense run, per run of a variant, and per variant with errors.
        reused: number of rows of an earlier run.
        store: frames of all dense runs, and the first frames of the variants.
    """

    is_supported: bool
    variants: tuple[Variant, ...]
    items: tuple[Item, ...]
    rows: tuple[Row, ...]
    reused: int
    store: FrameStore = field(repr=False)

    def frames(self, item: Item, variant: Variant | None) -> Pixels:
        """Return the frames (F, H, W, 3) of the dense run, or of a variant for one of the first `SHOWN` items."""
        return self.store.get(self.row("dense" if variant is None else "variant", item, variant)["digest"])

    def row(self, part: str, item: Item, variant: Variant | None) -> Row:
        """Return the row of a piece of work."""
        key = _key(part, item, variant)
        return next(row for row in self.rows if all(row[name] == value for name, value in key.items()))


def evaluate_pipeline(
    pipe: Any,
    variants: Sequence[Variant],
    *,
    prompts: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    arguments: Mapping[str, Any] | None = None,
    name: str | None = None,
    rows: Path | None = None,
    errors: bool = False,
    warm_up: bool = True,
    progress: Progress | None = None,
) -> Result:
    """Generate from every prompt and seed, dense and in every variant, and compare.

    Args:
        pipe: a diffusers pipeline, on its device.
        variants: compared with the dense pipeline (`parse_variant`).
        prompts: two built-in prompts by default, if the pipeline takes a prompt.
        seeds: 0 by default; 0 and 1 if there are fewer than two prompts.
        arguments: arguments of every call: num_inference_steps, height, width, num_frames, guidance_scale, ...
        name: name of the pipeline, for rows; by default the name it was loaded from.
        rows: a file of JSON lines to which each finished call is added; frames are stored in a folder next to it. The
            same call with the same file resumes an interrupted run.
        errors: also run each variant once more on the first prompt and seed, and compare every attention call with
            exact attention (slow).
        warm_up: run each variant for two steps before it is timed.
        progress: called before each call of the pipeline with a description of it, the number of earlier calls, and
            their total number.

    Raises:
        ValueError: the pipeline does not take an argument, variant or prompt.
    """
    arguments = dict(arguments or {})
    check_arguments(pipe, arguments)
    check_labels(variants)
    items = _items(pipe, prompts, seeds, arguments)
    for variant in variants:  # raise errors before any work
        with variant.applied(pipe, applied_to_pipeline):
            pass
    kind = type(pipe).__name__
    name = name or str(getattr(pipe, "name_or_path", "") or kind)
    identity = {argument: _json_value(value) for argument, value in sorted(arguments.items())}
    described = describe_run(name, denoisers(pipe), pipe.dtype, device_of(pipe), pipeline=kind, arguments=identity)
    stored = Rows(rows, described, KEY)
    store = FrameStore(None if rows is None else rows.with_suffix(".frames"))
    evaluation = _Evaluation(pipe, items, variants, arguments, stored, store, warm_up)
    with without_progress_bar(pipe):
        finished = stored.complete(evaluation.work(errors), progress)
    return Result(is_supported(pipe), tuple(variants), items, tuple(finished), stored.reused, store)


def _items(
    pipe: Any, prompts: Sequence[str] | None, seeds: Sequence[int] | None, arguments: Mapping[str, Any]
) -> tuple[Item, ...]:
    takes_prompt = "prompt" in parameters_of(pipe)
    if prompts and not takes_prompt:
        raise ValueError(f"prompts: expected none for {type(pipe).__name__}, which takes no prompt, got {len(prompts)}")
    if not prompts and takes_prompt and "prompt_embeds" not in arguments:
        prompts = PROMPTS
    texts: Sequence[str | None] = prompts or (None,)
    if not seeds:
        seeds = (0,) if len(texts) > 1 else (0, 1)
    return tuple(dict.fromkeys(Item(text, seed) for text in texts for seed in seeds))


def _json_value(value: Any) -> Any:
    """Return a JSON value that identifies an argument. Images, arrays and tensors become digests."""
    if isinstance(value, (str, int, float, bool, type(None))):
        return value
    if isinstance(value, (list, tuple)):
        return [_json_value(part) for part in value]
    if isinstance(value, Tensor):
        return digest_of(value.detach().cpu().float().numpy())
    return digest_of(np.asarray(value)) if hasattr(value, "tobytes") else repr(value)


def _key(part: str, item: Item, variant: Variant | None) -> dict[str, Any]:
    """Return the key of a row."""
    label, policy = DENSE, ""
    if variant is not None:
        label, policy = variant.label, f"{variant.kind} {variant.kernel} {variant.policy.to_json()}"
    return dict(zip(KEY, (part, item.prompt, item.seed, label, policy), strict=True))


@dataclass
class _Evaluation:
    """A pipeline, and the rows and frames to which its results are added."""

    pipe: Any
    items: tuple[Item, ...]
    variants: Sequence[Variant]
    arguments: dict[str, Any]
    rows: Rows
    store: FrameStore
    warm_up: bool
    warm: set[str] = field(default_factory=set)  # variants after their warm-up

    def work(self, errors: bool) -> list[Work]:
        """Return the work in order: variants are compared with the dense frames that precede them."""
        work: list[Work] = []
        for item in self.items:
            about = f"{'' if item.prompt is None else repr(item.prompt[:40]) + ', '}seed {item.seed}"
            for variant in (None, *self.variants):
                key = _key("dense" if variant is None else "variant", item, variant)
                row = self.rows.get(**key)
                if row is not None and self._is_stored(item, variant) and not self.store.has(row["digest"]):
                    self.rows.forget(**key)  # its frames are lost
                run = partial(self._dense, item) if variant is None else partial(self._compare, item, variant)
                work.append((key, f"{key['variant']}: {about}", run))
        for variant in self.variants:
            if errors and variant.kind != "sdpa":
                run = partial(self._errors, self.items[0], variant)
                work.append((_key("errors", self.items[0], variant), f"errors of {variant.label}", run))
        return work

    def _is_stored(self, item: Item, variant: Variant | None) -> bool:
        return variant is None or item in self.items[:SHOWN]

    def _dense(self, item: Item) -> Row:
        generated = self._timed(item, None)
        self.store.put(generated.frames.pixels)
        return {
            **_timing(generated),
            "shape": list(generated.frames.pixels.shape),
            "is_video": generated.frames.is_video,
        }

    def _compare(self, item: Item, variant: Variant) -> Row:
        generated = self._timed(item, variant)
        ran = stats_of_run()
        dense = self.rows.get(**_key("dense", item, None))
        assert dense is not None
        exact = self.store.get(dense["digest"])
        measured = _metrics(generated.frames.pixels, exact, dense["is_video"], device_of(self.pipe))
        if self._is_stored(item, variant):
            self.store.put(generated.frames.pixels)
        return {**_timing(generated), **ran, **measured}

    def _errors(self, item: Item, variant: Variant) -> Row:
        recorder = ErrorRecorder(variant)
        with recorder.recording(self.pipe):
            generate(self.pipe, *item, self.arguments)
        return recorder.errors()

    def _timed(self, item: Item, variant: Variant | None) -> Generated:
        """Return the output of one call. The first call of each variant follows a warm-up of few steps.

        The warm-up ignores rules about steps, so that it runs the sparse kernels.
        """
        label = DENSE if variant is None else variant.label
        if self.warm_up and label not in self.warm:
            few, steps = dict(self.arguments), "num_inference_steps"
            if steps in parameters_of(self.pipe) and not any(fixed in few for fixed in FIXED_SCHEDULE):
                few[steps] = min(WARM_UP_STEPS, few.get(steps, WARM_UP_STEPS))
            rules: dict[str, Any] = {"dense_first_steps": 0, "dense_last_steps": 0, "dense_steps": ()}
            plain = variant and replace(variant, policy=replace(variant.policy, **rules))
            self._generate(item, plain, few)
        self.warm.add(label)
        return self._generate(item, variant, self.arguments)

    def _generate(self, item: Item, variant: Variant | None, arguments: dict[str, Any]) -> Generated:
        try:
            with nullcontext() if variant is None else variant.applied(self.pipe, applied_to_pipeline):
                return generate(self.pipe, *item, arguments)
        except ValueError as error:
            if item.prompt in PROMPTS:
                raise ValueError(f"{error} (this is a built-in prompt; use --prompt for your own)") from error
            raise


def _timing(generated: Generated) -> Row:
    steps = [round(seconds, 6) for seconds in generated.step_seconds]
    return {
        "seconds": generated.seconds,
        "step_seconds": statistics.fmean(steps) if steps else None,  # a median would ignore a few dense steps
        "all_step_seconds": steps,
        "is_finite": generated.frames.is_finite,
        "digest": digest_of(generated.frames.pixels),
    }


def _metrics(pixels: Pixels, exact: Pixels, is_video: bool, device: torch.device) -> Row:
    """Return the metrics of a row. The PSNR of equal frames is None, because JSON has no infinity."""
    if pixels.shape != exact.shape:
        raise ValueError(f"pipeline: expected frames of the dense shape {exact.shape}, got {pixels.shape}")
    device = device if device.type == "cuda" else torch.device("cpu")
    pair = torch.tensor(pixels, device=device), torch.tensor(exact, device=device)
    psnr = image_metrics.psnr(*pair)
    return {
        "psnr": psnr if math.isfinite(psnr) else None,
        "ssim": image_metrics.ssim(*pair) if min(pixels.shape[1:3]) >= image_metrics.WINDOW else None,
        "lpips": image_metrics.lpips(*pair) if image_metrics.lpips_unavailable_reason() is None else None,
        "temporal_difference": image_metrics.temporal_difference(*pair) if is_video and len(pixels) > 1 else None,
    }
