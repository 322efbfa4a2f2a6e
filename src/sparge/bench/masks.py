"""Full (S_q x S_k) masks of the suite "masks" of ``sparge bench``, and exact attention under them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sparge.bench.cases import Problem

DOCUMENTS = 8
"""Number of documents of equal length. A window reaches one document's length to either side."""


def _documents(problem: Problem, device: torch.device) -> Tensor:
    number = torch.arange(problem.tokens, device=device) * DOCUMENTS // problem.tokens
    return (number[-problem.queries :, None] == number)[None, None]


def _window(problem: Problem, device: torch.device) -> Tensor:
    place = torch.arange(problem.tokens, device=device, dtype=torch.int32)
    return ((place[-problem.queries :, None] - place).abs() <= problem.tokens // DOCUMENTS)[None, None]


def _random(problem: Problem, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(1)
    size = (1, 1, problem.queries, problem.tokens)
    return torch.randint(2, size, dtype=torch.uint8, device=device, generator=generator) == 1


def _bias(problem: Problem, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(1)
    size = (1, problem.heads, problem.queries, problem.tokens)
    return torch.randn(size, dtype=torch.bfloat16, device=device, generator=generator)


MASKS: dict[str, Callable[[Problem, torch.device], Tensor]] = {
    "documents": _documents,
    "window": _window,
    "random": _random,
    "bias": _bias,
}
"""Bool (1, 1, queries, tokens); "bias" is bfloat16 (1, H, queries, tokens)."""


def exact_under_mask(query: Tensor, key: Tensor, value: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
    """Return exact attention of some queries in float64, one head at a time: (1, H, rows, D)."""
    scale = query.shape[3] ** -0.5
    outputs = []
    for head in range(query.shape[1]):
        entries = mask[0, head % mask.shape[1], rows]
        scores = query[0, head, rows].double() @ key[0, head].double().mT * scale
        scores = scores.masked_fill(~entries, -torch.inf) if mask.dtype == torch.bool else scores + entries.double()
        outputs.append(scores.softmax(-1) @ value[0, head].double())
    return torch.stack(outputs)[None]
