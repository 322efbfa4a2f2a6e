"""Which backend serves a call, and when dense attention is the better choice. Decisions carry their reason."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparge.geometry import Shape

BACKENDS = ("torch", "reference")

CROSSOVER_KEYS = 2048
CROSSOVER_QUERIES = 128
CROSSOVER_SCORES = 2**23
"""Below any of these (the last: scores over all heads) dense attention is faster on the torch backend: measured, see
docs/performance.md, "Crossover"."""


@dataclass(frozen=True)
class Choice:
    """A backend's name and why it was taken."""

    backend: str
    reason: str


def choose_backend(backend: str, device: torch.device) -> Choice:
    """Resolve "auto", and raise where the chosen backend cannot serve the device.

    Raises:
        ValueError: unknown backend.
        NotImplementedError: the backend cannot serve the device.
    """
    if backend != "auto" and backend not in BACKENDS:
        listed = ", ".join(map(repr, ("auto", *BACKENDS)))
        raise ValueError(f"backend: expected one of {listed}, got {backend!r}")
    if backend != "auto":
        choice = Choice(backend, "asked for by name")
    elif device.type == "cpu":
        choice = Choice("torch", "gathers kept blocks for torch's CPU attention")
    else:
        choice = Choice("torch", f"runs on any device; no kernels for {device.type!r} in this version")
    if device.type == "meta":
        raise NotImplementedError(f"backend {choice.backend!r}: expected a device that holds data, got 'meta'")
    if choice.backend == "reference" and device.type == "mps":
        raise NotImplementedError("backend 'reference': expected a device with float64, got 'mps'")
    return choice


def resolve_quantization(quantization: str) -> str:
    """ "auto" means the fastest arithmetic: none of the backends here is faster in 8 bits."""
    return "none" if quantization == "auto" else quantization


def prefers_dense(shape: Shape) -> bool:
    """Whether prediction would cost more than it saves at these sizes."""
    scores = shape.batch * shape.heads * shape.q_len * shape.kv_len
    return shape.kv_len < CROSSOVER_KEYS or shape.q_len < CROSSOVER_QUERIES or scores < CROSSOVER_SCORES
