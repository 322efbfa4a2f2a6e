"""A pipeline dense and in any number of variants, from the same prompts and seeds; what is done stays done."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparge.evaluate.machine import describe_gpu, describe_machine
from sparge.evaluate.pipeline import images
from sparge.evaluate.pipeline.errors import ErrorRecorder
from sparge.evaluate.pipeline.generate import Generated, check_arguments, device_of, generate, parameters_of, quiet
from sparge.evaluate.pipeline.output import Pixels
from sparge.evaluate.pipeline.reach import denoisers, is_known, reached
from sparge.evaluate.pipeline.store import FrameStore, digest_of
from sparge.evaluate.rows import Row, Rows
from sparge.evaluate.variants import Ran, Variant, check_labels
from sparge.profile import fingerprint
from sparge.stats import stats

KEY = ("part", "prompt", "seed", "variant", "policy")
"""What tells rows apart. Parts: "dense", "variant" and "errors"."""

DENSE = "dense"
"""The variant of rows about the pipeline itself."""

PROMPTS = (
    "A red fox walks through fresh snow at sunrise, its breath visible in the cold air",
    "A busy harbour at night, lanterns on the boats, their light broken by small waves",
)
"""For pipelines that take a prompt and get none."""

SHOWN_CLIPS, SHOWN_PICTURES = 2, 5
"""How many clips or pictures of each variant are kept for the page, from the first on."""

WARM_UP_STEPS = 2
FIXED_SCHEDULE = ("timesteps", "sigmas", "strength")
"""Arguments that do not go with another number of steps."""


@dataclass(frozen=True)
class Progress:
    """Calls of the pipeline that are done, of how many, what is done next, and how many an earlier run had done."""

    done: int
    total: int
    doing: str
    found: int = 0


class Item(NamedTuple):
    """What is generated. ``prompt`` is None for pipelines that take none."""

    prompt: str | None
    seed: int


@dataclass(frozen=True)
class Result:
    """What came out.

    Attributes:
        name: of the pipeline.
        kind: its class.
        is_known: `sparge.enable` takes it; if not, all SDPA calls of its denoiser were subject to the policies.
        arguments: of each call.
        variants: in the order they were asked for.
        items: prompts and seeds.
        rows: one for each dense run, each variant of it, and each variant's errors.
        store: frames of the dense runs, and the first ones of the variants.
        path: where the rows are, if anywhere.
    """

    name: str
    kind: str
    is_known: bool
    arguments: dict[str, Any]
    variants: tuple[Variant, ...]
    items: tuple[Item, ...]
    rows: tuple[Row, ...]
    store: FrameStore = field(repr=False)
    path: Path | None = None

    def frames(self, item: Item, variant: Variant | None) -> Pixels | None:
        """Frames (F, H, W, 3) that were kept; those of the dense run without a variant."""
        row = self.row("dense" if variant is None else "variant", item, variant)
        return self.store.get([row["run_id"], *(row[name] for name in KEY), row["digest"]])

    def row(self, part: str, item: Item, variant: Variant | None) -> Row:
        """The row about a piece of work."""
        wanted = _place(part, item, variant)
        return next(row for row in self.rows if all(row[name] == value for name, value in wanted.items()))


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
    progress: Callable[[Progress], None] | None = None,
) -> Result:
    """Generate from every prompt and seed, dense and in every variant, and compare.

    Args:
        pipe: a diffusers pipeline, on its device.
        variants: what to compare with the dense pipeline (`parse_variant`).
        prompts: two of its own by default, where the pipeline takes a prompt.
        seeds: 0 by default; 0 and 1 where there are fewer than two prompts.
        arguments: of every call: num_inference_steps, height, width, num_frames, guidance_scale, ...
        name: of the pipeline, for rows; what it was loaded from by default.
        rows: a file of JSON lines to which every finished piece is added; frames go to a folder beside it. The same
            call with the same file goes on where an earlier one stopped.
        errors: also run each variant once more on the first prompt and seed, and compare every attention call with
            exact attention: slow.
        warm_up: run everything for two steps before it is timed.
        progress: told before each call of the pipeline.

    Raises:
        ValueError: arguments, variants or prompts that the pipeline does not take.
    """
    arguments = dict(arguments or {})
    check_arguments(pipe, arguments)
    check_labels(variants)
    items = _items(pipe, prompts, seeds, arguments)
    known = is_known(pipe)
    for variant in variants:  # what cannot work is said before the first minute is spent
        with variant.applied(pipe, reached):
            pass
    described = _described(pipe, name, arguments)
    kept = Rows(rows, described, KEY)
    store = FrameStore(None if rows is None else rows.with_suffix(".frames"))
    run = _Run(pipe, tuple(variants), items, arguments, kept, store, errors, warm_up, progress)
    with quiet(pipe):
        run.run()
    return Result(
        described["model"],
        described["pipeline"],
        known,
        arguments,
        tuple(variants),
        items,
        tuple(kept.get(**place) for place in run.places()),
        store,
        rows,
    )


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


def _described(pipe: Any, name: str | None, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What must agree for rows to be of one run."""
    device = device_of(pipe)
    machine = describe_machine()
    found = describe_gpu().gpu if device.type == "cuda" else f"{machine.processor}, {machine.threads} threads"
    return {
        "model": name or str(getattr(pipe, "name_or_path", "") or type(pipe).__name__),
        "pipeline": type(pipe).__name__,
        "dtype": str(pipe.dtype).removeprefix("torch."),
        "weights": fingerprint(denoisers(pipe)),
        "device": f"{device.type}: {found}",
        "torch": machine.torch,
        "sparge": machine.sparge,
        "arguments": {argument: _plain(value) for argument, value in sorted(arguments.items())},
    }


def _plain(value: Any) -> Any:
    """Something for JSON that differs where the value does."""
    if isinstance(value, (str, int, float, bool, type(None))):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, Tensor):
        return digest_of(value.detach().cpu().float().numpy())
    if hasattr(value, "tobytes"):  # a PIL image or an array
        import numpy as np

        return digest_of(np.asarray(value))
    return repr(value)


def _place(part: str, item: Item, variant: Variant | None) -> dict[str, Any]:
    """The key of a row."""
    label, policy = DENSE, ""
    if variant is not None:
        label, policy = variant.label, f"{variant.kind} {variant.kernel} {variant.policy.to_json()}"
    return dict(zip(KEY, (part, item.prompt, item.seed, label, policy), strict=True))


@dataclass
class _Run:
    """The work, in the order it is done: every prompt and seed dense, then in each variant; errors last."""

    pipe: Any
    variants: tuple[Variant, ...]
    items: tuple[Item, ...]
    arguments: dict[str, Any]
    rows: Rows
    store: FrameStore
    errors: bool
    warm_up: bool
    progress: Callable[[Progress], None] | None
    done: int = 0
    warm: set[str] = field(default_factory=set)

    def places(self) -> list[dict[str, Any]]:
        """The keys of all rows."""
        found = [_place("dense", item, None) for item in self.items]
        found += [_place("variant", item, variant) for item in self.items for variant in self.variants]
        return found + [_place("errors", self.items[0], variant) for variant in self._with_errors()]

    def run(self) -> None:
        for item in self.items:
            exact = self._dense(item)
            for variant in self.variants:
                self._variant(item, variant, exact)
        for variant in self._with_errors():
            self._errors(self.items[0], variant)

    def _with_errors(self) -> list[Variant]:
        return [variant for variant in self.variants if self.errors and variant.kind != "sdpa"]

    def _tell(self, doing: str) -> None:
        if self.progress is not None:
            self.progress(Progress(self.done, len(self.places()), doing, self.rows.found))

    def _frames_name(self, place: Mapping[str, Any], digest: str) -> list[Any]:
        return [self.rows.run_id, *place.values(), digest]

    def _dense(self, item: Item) -> Pixels:
        place = _place("dense", item, None)
        pixels = None
        if self.rows.has(**place):
            pixels = self.store.get(self._frames_name(place, self.rows.get(**place)["digest"]))
        if pixels is None:
            made = self._timed(item, None)
            pixels = made.frames.pixels
            row = {**place, **_facts(made), "shape": list(pixels.shape), "is_video": made.frames.is_video}
            self.store.put(self._frames_name(place, row["digest"]), pixels)
            self.rows.add(row)
        self.done += 1
        return pixels

    def _variant(self, item: Item, variant: Variant, exact: Pixels) -> None:
        place = _place("variant", item, variant)
        dense = self.rows.get(**_place("dense", item, None))
        if not self.rows.has(**place) or self.rows.get(**place)["dense_digest"] != dense["digest"]:
            made = self._timed(item, variant)
            ran = Ran.of(stats())
            pixels = made.frames.pixels
            measured = _compare(pixels, exact, dense["is_video"], device_of(self.pipe))
            row = {**place, **_facts(made), "dense_digest": dense["digest"], **asdict(ran), **measured}
            if item in self.items[: SHOWN_CLIPS if dense["is_video"] else SHOWN_PICTURES]:
                self.store.put(self._frames_name(place, row["digest"]), pixels)
            self.rows.add(row)
        self.done += 1

    def _errors(self, item: Item, variant: Variant) -> None:
        place = _place("errors", item, variant)
        if not self.rows.has(**place):
            self._tell(f"errors of {variant.label}")
            recorder = ErrorRecorder(variant)
            with recorder.recording(self.pipe):
                generate(self.pipe, *item, self.arguments)
            self.rows.add({**place, **asdict(recorder.errors())})
        self.done += 1

    def _timed(self, item: Item, variant: Variant | None) -> Generated:
        label = DENSE if variant is None else variant.label
        if self.warm_up and label not in self.warm:
            self._tell(f"{label}: warm-up")
            self._generate(item, None if variant is None else _without_step_rules(variant), self._short_arguments())
        self.warm.add(label)
        self._tell(f"{label}: {'' if item.prompt is None else repr(item.prompt[:40]) + ', '}seed {item.seed}")
        return self._generate(item, variant, self.arguments)

    def _generate(self, item: Item, variant: Variant | None, arguments: dict[str, Any]) -> Generated:
        try:
            if variant is None:
                return generate(self.pipe, *item, arguments)
            with variant.applied(self.pipe, reached):
                return generate(self.pipe, *item, arguments)
        except ValueError as error:
            if item.prompt in PROMPTS:
                told = "no prompt was given, so this is one of sparge's own: give --prompt"
                raise ValueError(f"{error} ({told})") from error
            raise

    def _short_arguments(self) -> dict[str, Any]:
        """For a warm-up: few steps, where the schedule is free."""
        name = "num_inference_steps"
        if name not in parameters_of(self.pipe) or any(fixed in self.arguments for fixed in FIXED_SCHEDULE):
            return self.arguments
        return {**self.arguments, name: min(WARM_UP_STEPS, self.arguments.get(name, WARM_UP_STEPS))}


def _without_step_rules(variant: Variant) -> Variant:
    """So that two steps see the sparse kernels."""
    return replace(variant, policy=replace(variant.policy, dense_first_steps=0, dense_last_steps=0, dense_steps=()))


def _facts(made: Generated) -> Row:
    """What is known of any run."""
    steps = [round(seconds, 6) for seconds in made.step_seconds]
    return {
        "seconds": made.seconds,
        "step_seconds": statistics.fmean(steps) if steps else None,  # a median would hide dense steps
        "all_step_seconds": steps,
        "is_finite": made.frames.is_finite,
        "digest": digest_of(made.frames.pixels),
    }


def _compare(pixels: Pixels, exact: Pixels, is_video: bool, device: torch.device) -> Row:
    """Metrics of a row. JSON has no infinity: the PSNR of equal frames is None."""
    if pixels.shape != exact.shape:
        raise ValueError(f"pipeline: expected frames of the dense shape {exact.shape}, got {pixels.shape}")
    device = device if device.type == "cuda" else torch.device("cpu")
    pair = torch.tensor(pixels, device=device), torch.tensor(exact, device=device)
    return {
        "psnr": _finite(images.psnr(*pair)),
        "psnr_frames": [_finite(value) for value in images.psnr_by_frame(*pair)],
        "ssim": images.ssim(*pair) if min(pixels.shape[1:3]) >= images.WINDOW else None,
        "lpips": images.lpips(*pair) if images.lpips_missing() is None else None,
        "temporal_difference": images.temporal_difference(*pair) if is_video and len(pixels) > 1 else None,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
