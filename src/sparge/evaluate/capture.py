"""Record the inputs of attention inside a model, store them, and measure sparse attention on them.

Recorder           records query, key and value of chosen layers and steps while a model runs
save, load         recordings as safetensors
attention_error    density, mass recall and output error of the predicted blocks, and of the best blocks
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparge import api, integrations
from sparge.backends import base
from sparge.backends.torch.predict import always_kept_blocks, select_blocks
from sparge.call import Call
from sparge.dispatch import validation
from sparge.evaluate.metrics import block_mass, mass_recall, relative_l1
from sparge.integrations.calls import substituted
from sparge.integrations.layers import Steps
from sparge.masks.block_mask import BlockMask
from sparge.options.common import PerHead, Quantization, ScoreName, Skipped
from sparge.options.rules import Dense, Selection
from sparge.options.scores import Score
from sparge.policy import Policy

MAX_BYTES = 64 * 2**20
"""Default limit on the size of a recording."""


@dataclass(frozen=True)
class Captured:
    """The inputs of one attention call.

    Attributes:
        layer: the name of the layer, as in `sparge.stats`.
        step: the denoising step, counted from 0; None outside a schedule.
        query: (B, H, S_q, D).
        key, value: (B, H_kv, S_k, D).
        is_causal: aligned bottom-right.
        scale: factor on the scores.
    """

    layer: str
    step: int | None
    query: Tensor
    key: Tensor
    value: Tensor
    is_causal: bool
    scale: float

    @property
    def bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.query, self.key, self.value))


class Recorder:
    """Records attention calls of a model, which runs dense as usual.

    Args:
        layers: a regular expression that layer names must match; all layers by default.
        steps: denoising steps to record, from 0; all by default.
        heads: indices of the query heads to record, with the key heads they use; all by default.
        calls: number of calls to record per layer and step; guidance makes two.
        max_bytes: limit on the size of all recordings. Calls that would exceed it are not recorded, and are counted in
            ``omitted``.
        dtype: dtype of the recordings.

    Example:
        >>> import torch, sparge
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=99, hidden_size=32, intermediate_size=64,
        ...                                      num_hidden_layers=2, num_attention_heads=2)).eval()
        >>> recorder = Recorder(layers=r"layers\\.1\\b")
        >>> with torch.no_grad(), recorder.recording(model):
        ...     _ = model(torch.arange(96)[None])
        >>> [(call.layer, tuple(call.query.shape)) for call in recorder.calls]
        [('model.layers.1.self_attn', (1, 2, 96, 16))]
    """

    def __init__(
        self,
        layers: str = "",
        steps: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
        calls: int = 1,
        max_bytes: int = MAX_BYTES,
        dtype: torch.dtype = torch.float16,
    ) -> None:
        self._layers = re.compile(layers)
        self._steps = None if steps is None else frozenset(steps)
        self._heads = None if heads is None else list(heads)
        self._calls_per_step = calls
        self._max_bytes = max_bytes
        self._dtype = dtype
        self._schedule = Steps(Policy())
        self._has_schedule = False
        self.calls: list[Captured] = []
        self.omitted = 0

    @contextmanager
    def recording(self, model: Any) -> Iterator[Recorder]:
        """Record self-attention calls of a transformers model, a diffusers pipeline or its transformer."""
        backend = base.resolve("auto", device_of(model))
        integrations.enable(model, Policy(topk=1.0, backend=backend, order="row"))  # keep the model's token order
        with ExitStack() as stack:
            stack.callback(integrations.disable, model)
            self._has_schedule = stack.enter_context(tracked_schedule(model, self._schedule))
            stack.enter_context(substituted(self._record))
            yield self

    def _record(
        self, layer: str, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **call: Any
    ) -> Tensor:
        step = self._schedule.index if self._has_schedule else None
        is_selected = self._layers.search(layer) and (self._steps is None or step in self._steps)
        recorded = [one for one in self.calls if (one.layer, one.step) == (layer, step)]
        is_plain = attn_mask is None and call.get("window") is None
        if is_selected and is_plain and len(recorded) < self._calls_per_step:
            scale = query.shape[3] ** -0.5 if call["scale"] is None else call["scale"]
            self._add(Captured(layer, step, query, key, value, call["is_causal"], scale))
        return exact_output(query, key, value, attn_mask, call)

    def _add(self, call: Captured) -> None:
        tensors = {"query": call.query, "key": call.key, "value": call.value}
        if self._heads is not None:
            group = call.query.shape[1] // call.key.shape[1]
            sources = list(dict.fromkeys(head // group for head in self._heads))
            per_key_head = len(self._heads) // len(sources)
            if [head // group for head in self._heads] != [source for source in sources for _ in range(per_key_head)]:
                raise ValueError(
                    f"heads: expected equally many query heads of each key head, sorted by key head, got {self._heads} "
                    f"in groups of {group}"
                )
            heads = {"query": self._heads, "key": sources, "value": sources}
            tensors = {name: tensor[:, heads[name]] for name, tensor in tensors.items()}
        numbers = sum(tensor.numel() for tensor in tensors.values())
        if sum(one.bytes for one in self.calls) + numbers * self._dtype.itemsize > self._max_bytes:
            self.omitted += 1
            return
        kept: dict[str, Any] = {
            name: tensor.detach().to("cpu", self._dtype, copy=True) for name, tensor in tensors.items()
        }
        self.calls.append(replace(call, **kept))


def exact_output(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, call: dict[str, Any]) -> Tensor:
    """Return the output that `sparge.attention` would have without skipping blocks and without quantization."""
    exact = {**call, "sparsity": Dense(), "always_keep": None, "exact_queries": None, "quantization": "none"}
    return api.attention(query, key, value, attn_mask, **exact)


def device_of(model: Any) -> torch.device:
    """Return the device on which a model or pipeline computes, even if its weights are offloaded."""
    if isinstance(model, torch.nn.Module):
        return next(model.parameters()).device
    return torch.device(model._execution_device)


@contextmanager
def tracked_schedule(model: Any, steps: Steps) -> Iterator[bool]:
    """Track the position of a pipeline's scheduler in ``steps`` within the context. Yield False without a scheduler."""
    scheduler = getattr(model, "scheduler", None)
    if not (hasattr(scheduler, "set_timesteps") and hasattr(scheduler, "step")):
        yield False
        return
    from sparge.integrations.diffusers.schedule import Schedule

    schedule = Schedule(steps, users=1, pipeline=model)
    try:
        yield True
    finally:
        schedule.leave()


def save(calls: Sequence[Captured], path: str | Path) -> None:
    """Write recordings as one safetensors file."""
    from safetensors.torch import save_file

    tensors, metadata = {}, []
    for number, call in enumerate(calls):
        for name in ("query", "key", "value"):
            tensors[f"{number}.{name}"] = getattr(call, name).contiguous()
        metadata.append({"layer": call.layer, "step": call.step, "is_causal": call.is_causal, "scale": call.scale})
    save_file(tensors, str(path), metadata={"calls": json.dumps(metadata)})


def load(path: str | Path) -> list[Captured]:
    """Return recordings that `save` wrote."""
    from safetensors import safe_open

    with safe_open(str(path), framework="pt") as file:
        metadata = file.metadata() or {}
        if "calls" not in metadata:
            raise ValueError(f"{path}: expected recordings of sparge.evaluate, got another safetensors file")
        return [
            Captured(**fields, **{name: file.get_tensor(f"{number}.{name}") for name in ("query", "key", "value")})
            for number, fields in enumerate(json.loads(metadata["calls"]))
        ]


def true_mask(
    query: Tensor,
    key: Tensor,
    *,
    sparsity: Selection,
    is_causal: bool = False,
    scale: float | None = None,
    always_keep: Sequence[tuple[int, int]] | None = None,
    exact_queries: Sequence[tuple[int, int]] | None = None,
) -> BlockMask:
    """Return the mask that a rule selects from the true attention mass: the upper bound for any score."""
    query, key, _, shape = validation.check_query_key_value(query, key, key, "HND", True)
    mass = block_mass(query, key.repeat_interleave(shape.group, 1), is_causal=is_causal, scale=scale)
    call = Call(
        shape=shape,
        is_causal=is_causal,
        scale=validation.check_scale(scale, shape.head_dim),
        sparsity=validation.resolve_sparsity(None, sparsity, shape.heads),
        always_keep=validation.check_ranges("always_keep", always_keep, shape.kv_len, "keys"),
        exact_queries=validation.check_ranges("exact_queries", exact_queries, shape.q_len, "queries"),
    )
    return select_blocks(mass, call)


@dataclass(frozen=True)
class MaskError:
    """Results of one mask.

    Attributes:
        density: kept blocks as a share of the visible blocks.
        mass_recall: share of the attention mass in kept blocks.
        recall_beyond_sink: mass recall without the first key block, which every causal rule keeps.
        relative_l1: sum |output - exact| / sum |exact|.
        cosine: mean cosine similarity of the rows of the output and of the exact output.
    """

    density: float
    mass_recall: float
    recall_beyond_sink: float
    relative_l1: float
    cosine: float


@dataclass(frozen=True)
class AttentionError:
    """Results of the predicted blocks, and of the oracle.

    The oracle keeps the same number of blocks per query block, but those with the most attention mass.
    """

    predicted: MaskError
    oracle: MaskError


def attention_error(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    topk: PerHead | None = None,
    sparsity: Selection | None = None,
    score: ScoreName | Score = "moment",
    quantization: Quantization = "none",
    skipped: Skipped = "auto",
    always_keep: Sequence[tuple[int, int]] | None = None,
    backend: str = "auto",
) -> AttentionError:
    """Measure sparse against exact attention on given tensors, for the predicted blocks and for the best blocks.

    Args:
        query: (B, H, S_q, D).
        key: (B, H_kv, S_k, D); H a multiple of H_kv.
        value: (B, H_kv, S_k, D_v).
        quantization: quantization of both outputs; "none" by default, which isolates the error of the selection.

    The other arguments are those of `sparge.attention`. Memory is linear in the length, and the time is several times
    that of dense attention in float32.

    Example:
        >>> import torch
        >>> q, k, v = (torch.randn(1, 2, 2048, 32) for _ in range(3))
        >>> error = attention_error(q, k, v, topk=0.5)
        >>> error.predicted.density == error.oracle.density == 0.5
        True
        >>> error.predicted.mass_recall <= error.oracle.mass_recall
        True
    """
    heads, group = query.shape[1], query.shape[1] // key.shape[1]
    rule = validation.resolve_sparsity(topk, sparsity, heads)
    if not isinstance(rule, Selection):
        raise TypeError(f"sparsity: expected a rule that skips blocks, got {rule!r}")
    common: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "always_keep": always_keep}
    mask = api.predict(query, key, sparsity=rule, score=score, enable_gqa=True, backend=backend, **common)
    mass = block_mass(query, key.repeat_interleave(group, 1), is_causal=is_causal, scale=scale)
    dense: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": True, "sparsity": Dense()}
    exact = api.attention(query.float(), key.float(), value.float(), quantization="none", **dense)

    def error_of(mask: BlockMask) -> MaskError:
        options: dict[str, Any] = {"quantization": quantization, "skipped": skipped, "backend": backend}
        output = api.block_sparse_attention(query, key, value, mask, scale=scale, enable_gqa=True, **options)
        assert isinstance(output, Tensor)
        beyond_sink, kept = mass[..., 1:], mask.to_dense()[..., 1:]
        return MaskError(
            density=mask.density(),
            mass_recall=mass_recall(mask, mass),
            recall_beyond_sink=float((beyond_sink * kept).sum() / beyond_sink.sum().clamp(min=1e-30)),
            relative_l1=relative_l1(output, exact),
            cosine=float(F.cosine_similarity(output.double(), exact.double(), dim=-1).mean()),
        )

    *_, shape = validation.check_query_key_value(query, key, key, "HND", True)
    ranges = validation.check_ranges("always_keep", always_keep, shape.kv_len, "keys")
    call = Call(shape=shape, is_causal=is_causal, scale=1.0, sparsity=rule, always_keep=ranges)
    return AttentionError(error_of(mask), error_of(_best_blocks(mask, mass, call)))


def _best_blocks(mask: BlockMask, mass: Tensor, call: Call) -> BlockMask:
    """Return a mask with the same number of blocks per query block: forced blocks, then blocks with the most mass."""
    kept = mask.to_dense()
    forced = always_kept_blocks(call, mass.device) & kept  # without invisible blocks
    counts = kept.sum(-1, keepdim=True)
    order = (mass + 2.0 * forced).argsort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(mass.shape[-1], device=mass.device)
    kept = torch.zeros_like(forced).scatter_(-1, order, (ranks < counts).expand_as(forced))
    return BlockMask.from_dense(kept, q_len=mask.q_len, kv_len=mask.kv_len, is_causal=call.is_causal)
