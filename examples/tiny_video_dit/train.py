"""Train the model from scratch in stages with growing clips, each for a given number of seconds.

python examples/tiny_video_dit/train.py --photographs photographs.npz --output run \
    --stages single:90 short:80 long:320
python examples/tiny_video_dit/train.py --photographs photographs.npz --output run-image \
    --resume run/single.pt --stages image:90 --cooldown 0.4

The input is (1 - sigma) clip + sigma noise, and the model predicts the clip. The loss is that of the velocity: the
squared error of the predicted clip divided by sigma^2.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from clips import Images, clip_times, draw_scenes, render
from diffusers import WanTransformer3DModel
from packing import load_packed, save_packed
from pipeline import SLOTS, TRANSFORMER, one_hot_tokens, with_positions
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

SIGMA_FLOOR = 0.1
"""Lower bound of sigma in the weight 1 / sigma^2."""
SIGMAS = (0.3, 0.6, 0.9, 0.98)
"""Noise levels at which the error is measured."""
DROPPED = 0.1
"""Fraction of the captions that are dropped, for classifier-free guidance."""
SHAPE_WEIGHT = 5.0
"""Weight in the loss of a pixel near a shape. Most of a clip is background, which the model soon memorizes: without
this weight, a caption with another shape changed the error by less than 1 % after the first stage."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """Training on clips of one size."""

    frames: int  # the first frames of a clip
    size: int  # height and width of a clip
    batch: int  # clips per step
    noise: float  # mean of the logit of sigma: longer and larger clips need more noise
    spread: float = 1.5  # standard deviation of the logit of sigma
    photograph: int = 384  # height and width of the photographs
    rate: float = 1.0  # factor of the optimizers' learning rates


STAGES = {
    "single": Stage(frames=1, size=256, batch=64, noise=1.3),
    "short": Stage(frames=5, size=256, batch=16, noise=1.8),
    "long": Stage(frames=17, size=256, batch=6, noise=2.6, rate=0.7),
    "image": Stage(frames=1, size=512, batch=24, noise=2.0, photograph=768, rate=0.7),
}
PIPELINE = {
    "single": {"num_frames": 1, "shift": 3.0},
    "short": {"num_frames": 5, "shift": 6.0},
    "long": {"shift": 12.0},
    "image": {"num_frames": 1, "height": 512, "width": 512, "shift": 8.0},
}
"""Default arguments of the pipeline after each stage."""


class Errors(NamedTuple):
    """Mean squared errors of all pixels, near the shape, and near the shape with a caption that names another shape."""

    all: float
    near: float
    other: float


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalized updates (Jordan et al., 2024), for all matrices of one shape at a time."""

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.01):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # noqa: ARG002, as in every optimizer
        for group in self.param_groups:
            shapes: dict[torch.Size, list[nn.Parameter]] = {}
            for param in group["params"]:
                if param.grad is not None:
                    shapes.setdefault(param.shape, []).append(param)
                    if not self.state[param]:
                        self.state[param]["momentum"] = torch.zeros_like(param)
            for shape, params in shapes.items():
                grads = [param.grad for param in params]
                averages = [self.state[param]["momentum"] for param in params]
                torch._foreach_lerp_(averages, grads, 1 - group["momentum"])
                ahead = torch._foreach_lerp(grads, averages, group["momentum"])
                updates = orthogonal(torch.stack(ahead))
                torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
                size = 0.2 * math.sqrt(max(shape))  # as large as AdamW's updates
                torch._foreach_add_(params, list(updates.to(params[0].dtype)), alpha=-group["lr"] * size)


def orthogonal(matrices: Tensor) -> Tensor:
    """Return matrices (N, rows, columns) with singular values near 1, by five Newton-Schulz steps."""
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    is_tall = x.shape[1] > x.shape[2]
    if is_tall:
        x = x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if is_tall else x


class Trainer:
    """A model, the moving average of its weights, its optimizers, and the number of steps so far."""

    def __init__(self, config: dict[str, Any], device: str, compiled: bool = False, seed: int = 0):
        torch.manual_seed(seed)
        self.model = WanTransformer3DModel(**config).to(device)
        nn.init.zeros_(self.model.proj_out.weight)
        nn.init.zeros_(self.model.proj_out.bias)
        self.average = copy.deepcopy(self.model).eval().requires_grad_(False)
        self.device, self.seed, self.step, self.stage_step = device, seed, 0, 0
        self.stage = ""
        self._parameters = list(self.model.parameters())
        self._averages = list(self.average.parameters())
        inside = [param for param in self.model.blocks.parameters() if param.ndim == 2]
        chosen = {id(param) for param in inside}
        others = [param for param in self._parameters if id(param) not in chosen]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(others, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=device == "cuda"),
            Muon(inside, lr=3e-3),
        ]
        self._rates = [optimizer.param_groups[0]["lr"] for optimizer in self.optimizers]
        for model in (self.model, self.average):
            _embed_patches_by_matmul(model)
        if compiled:
            torch._dynamo.config.recompile_limit = 32
            self.model.compile_repeated_blocks(fullgraph=True, dynamic=False)

    def save(self, path: Path) -> None:
        state = {
            "model": self.model.state_dict(),
            "average": self.average.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "progress": {"step": self.step, "stage_step": self.stage_step, "stage": self.stage},
        }
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(path)

    def load(self, path: Path) -> None:
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.average.load_state_dict(state["average"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        for name, value in state["progress"].items():
            setattr(self, name, value)

    def load_weights(self, folder: Path) -> None:
        """Start from packed weights, with new optimizer states."""
        weights = load_packed(folder).transformer.state_dict()
        self.model.load_state_dict(weights)
        self.average.load_state_dict(weights)

    def enter(self, stage: str) -> None:
        """Start a stage, or continue it."""
        if stage != self.stage:
            self.stage, self.stage_step = stage, 0

    def train_step(self, stage: Stage, images: Images, rate: float = 1.0) -> Tensor:
        """Take one step. Its random numbers depend only on the seed and the number of the step."""
        generator = torch.Generator(self.device).manual_seed(self.seed * 1_000_003 + self.step)
        clips, near, indices = batch(stage, images, generator)
        warm = min(1.0, (self.stage_step + 1) / (100 if self.step == self.stage_step else 20))
        for optimizer, full in zip(self.optimizers, self._rates, strict=True):
            optimizer.param_groups[0]["lr"] = full * rate * stage.rate * warm
        sigma = torch.randn(len(clips), generator=generator, device=self.device)
        sigma = torch.sigmoid(stage.noise + stage.spread * sigma)
        weight = 1 + (SHAPE_WEIGHT - 1) * near
        loss = velocity_loss(self.model, clips, indices, sigma, generator, weight / weight.mean()).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(self._parameters, 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        decay = min(0.997, (1 + self.step) / (10 + self.step))
        torch._foreach_lerp_(self._averages, self._parameters, 1 - decay)
        self.step += 1
        self.stage_step += 1
        return loss.detach()

    @torch.no_grad()
    def validate(self, stage: Stage, images: Images, sigmas: tuple[float, ...] = SIGMAS) -> list[Errors]:
        """Return the errors of the averaged weights at these noise levels, on the same clips and noise each time."""
        generator = torch.Generator(self.device).manual_seed(2**31 + 7)
        clips, near, indices = batch(stage, images, generator)
        near = near / near.mean()
        drawn = generator.get_state()

        def error(level: float, indices: Tensor, weight: Tensor | float = 1.0) -> float:
            sigma = torch.full((len(clips),), level, device=self.device)
            losses = velocity_loss(self.average, clips, indices, sigma, generator.set_state(drawn), weight)
            return losses.mean().item() * max(level, SIGMA_FLOOR) ** 2

        return [
            Errors(error(level, indices), error(level, indices, near), error(level, other_shapes(indices), near))
            for level in sigmas
        ]


def batch(stage: Stage, images: Images, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return clips and masks from `render`, and the indices of their captions as from `slot_indices`."""
    scene = draw_scenes(stage.batch, generator)
    kept = torch.rand(stage.batch, 1, generator=generator, device=generator.device) >= DROPPED
    times = clip_times(stage.frames, generator.device)
    return *render(images, scene, times, stage.size, stage.size), (scene.words + 1) * kept


def other_shapes(indices: Tensor) -> Tensor:
    """Return the captions with another shape. Captions without a shape do not change."""
    slot = list(SLOTS).index("shape")
    shape = indices[:, slot]
    changed = indices.clone()
    changed[:, slot] = torch.where(shape > 0, shape % len(SLOTS["shape"]) + 1, 0)
    return changed


def velocity_loss(
    model: WanTransformer3DModel,
    clips: Tensor,
    indices: Tensor,
    sigma: Tensor,
    generator: torch.Generator,
    weight: Tensor | float = 1.0,
) -> Tensor:
    """Return the weighted squared error of each predicted clip divided by sigma^2, (B,)."""
    level = sigma.view(-1, 1, 1, 1, 1)
    noise = torch.randn(clips.shape, generator=generator, device=clips.device)
    noisy = (1 - level) * clips + level * noise
    with torch.autocast(clips.device.type, torch.bfloat16, enabled=clips.is_cuda):
        predicted = model(
            hidden_states=with_positions(noisy),
            timestep=sigma * 1000,
            encoder_hidden_states=one_hot_tokens(indices),
            return_dict=False,
        )[0]
    error = ((predicted.float() - clips).square() * weight).mean(dim=(1, 2, 3, 4))
    return error / sigma.clamp(min=SIGMA_FLOOR).square()


def _embed_patches_by_matmul(model: WanTransformer3DModel) -> None:
    """Embed patches with a matrix product, which trains far faster than a 3-D convolution."""
    embedding = model.patch_embedding
    depth, height, width = embedding.kernel_size

    def forward(clips: Tensor) -> Tensor:
        batch_size, channels, frames, rows, columns = clips.shape
        split = clips.view(
            batch_size, channels, frames // depth, depth, rows // height, height, columns // width, width
        )
        patches = split.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4)
        return F.linear(patches, embedding.weight.flatten(1), embedding.bias).permute(0, 4, 1, 2, 3)

    embedding.forward = forward


@contextlib.contextmanager
def fast_attention() -> Iterator[None]:
    """Prefer cuDNN's attention."""
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(order, set_priority=True):
        yield


def run_stage(
    trainer: Trainer,
    name: str,
    stage: Stage,
    images: Images,
    seconds: float,
    cooldown: float,
    output: Path,
    every: int = 50,
) -> None:
    """Train one stage for `seconds`. The learning rate falls to 0 over the last fraction `cooldown` of the time."""
    trainer.enter(name)
    trainer.train_step(stage, images, rate=0.0)  # compiles before the timer starts
    _synchronize(trainer.device)
    start = mark = saved = time.monotonic()
    losses: list[Tensor] = []
    while (elapsed := time.monotonic() - start) < seconds:
        left = 1 - elapsed / seconds
        losses.append(trainer.train_step(stage, images, rate=min(1.0, left / cooldown) if cooldown else 1.0))
        if trainer.stage_step % 10 == 0:
            _synchronize(trainer.device)  # otherwise the host runs ahead of the device
        if len(losses) == every:
            mean = torch.stack(losses).mean().item()
            now = time.monotonic()
            rate = f"{(now - mark) / every * 1000:.1f} ms per step"
            print(f"{name} {trainer.stage_step} loss {mean:.4f} {rate} {now - start:.0f} s", flush=True)
            if not math.isfinite(mean):
                raise FloatingPointError(f"expected a finite loss, got {mean}")
            losses, mark = [], now
        if time.monotonic() - saved > 120:
            trainer.save(output / f"{name}.pt")
            saved = time.monotonic()
    print(f"{name} done: {trainer.stage_step} steps", flush=True)
    for sigma, errors in zip(SIGMAS, trainer.validate(stage, images), strict=True):
        message = f"{errors.all:.5f}, near the shape {errors.near:.5f}, caption with another shape {errors.other:.5f}"
        print(f"{name} error at sigma {sigma}: {message}", flush=True)
    trainer.save(output / f"{name}.pt")
    save_packed(trainer.average, output / f"weights-{name}", **PIPELINE[name])


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--photographs", type=Path, required=True, help="file that photographs.py wrote")
    parser.add_argument("--output", type=Path, required=True, help="folder for checkpoints and packed weights")
    parser.add_argument(
        "--stages", nargs="+", required=True, metavar="NAME:SECONDS", help=f"stages in order: {', '.join(STAGES)}"
    )
    begin = parser.add_mutually_exclusive_group()
    begin.add_argument("--resume", type=Path, help="checkpoint to continue from")
    begin.add_argument("--weights", type=Path, help="folder of packed weights to start from")
    parser.add_argument(
        "--cooldown",
        type=float,
        default=0.3,
        help="final fraction of the last stage with a falling rate",
    )
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--no-compile", action="store_true", help="do not compile the transformer blocks")
    args = parser.parse_args()
    plan = [(name, float(seconds)) for name, _, seconds in (stage.partition(":") for stage in args.stages)]
    unknown = [name for name, _ in plan if name not in STAGES]
    if unknown:
        parser.error(f"--stages: expected one of {', '.join(STAGES)}, got {', '.join(unknown)}")

    args.output.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    trainer = Trainer(TRANSFORMER, device, device == "cuda" and not args.no_compile, args.seed)
    if args.resume:
        trainer.load(args.resume)
    elif args.weights:
        trainer.load_weights(args.weights)
    print(f"{trainer.model.num_parameters() / 1e6:.1f} million parameters, from step {trainer.step}", flush=True)
    with fast_attention():
        for number, (name, seconds) in enumerate(plan):
            began = time.monotonic()
            stage = STAGES[name]
            images = Images.load(args.photographs, stage.photograph, device)
            cooldown = args.cooldown if number == len(plan) - 1 else 0.0
            run_stage(trainer, name, stage, images, seconds, cooldown, args.output)
            print(f"{name}: {time.monotonic() - began:.0f} s in total", flush=True)


if __name__ == "__main__":
    main()
