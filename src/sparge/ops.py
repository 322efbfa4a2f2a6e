"""The stages as torch operators (``torch.ops.sparge.*``), so that torch.compile sees one node each.

    predict(query, key, ...) -> (kv_num_blocks, kv_indices, visible_num_blocks)
    attend(query, key, value, kv_num_blocks, kv_indices, ...) -> (output, lse)
    attention(query, key, value, ...) -> (output, lse)      predict and attend, sharing the passes over K
    dense(query, key, value, ...) -> (output, lse)

All tensors are heads-first. Configuration travels as plain numbers, with a tensor beside each number that may differ
per head. `stats` counts inside the operators: compiled programs are counted too. Nothing here validates; `api` did.
Backends are imported when first used: neither schemas nor fakes need Triton.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparge.block_mask import BlockMask
from sparge.call import Call
from sparge.config import Dense, Mean, Moment, PerHead, Score, Sparsity, TopCdf, TopK, trusted
from sparge.dispatch import choose_backend, kernels_for
from sparge.geometry import Shape
from sparge.stats import counters

_SELECTION = (
    "Tensor? attn_mask, bool is_causal, float scale, str selection, float share, Tensor? share_per_head, "
    "float? similarity, Tensor? similarity_per_head, int min_blocks, bool sink, bool diagonal, int samples, "
    "SymInt[] always_keep"
)
_ARITHMETIC = "str quantization, float? pv_threshold, Tensor? pv_threshold_per_head, str backend"
KERNELS = ("triton", "hopper")
"""Backends that share a pipeline of kernels."""
_LIBRARY = torch.library.Library("sparge", "DEF")
_LIBRARY.define(f"predict(Tensor query, Tensor key, {_SELECTION}, str backend) -> (Tensor, Tensor, Tensor)")
_LIBRARY.define(
    "attend(Tensor query, Tensor key, Tensor value, Tensor kv_num_blocks, Tensor kv_indices, "
    f"Tensor visible_num_blocks, Tensor? attn_mask, bool is_causal, float scale, {_ARITHMETIC}) -> (Tensor, Tensor)"
)
_LIBRARY.define(f"attention(Tensor query, Tensor key, Tensor value, {_SELECTION}, {_ARITHMETIC}) -> (Tensor, Tensor)")
_LIBRARY.define(
    "dense(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, bool is_causal, float scale, str quantization, "
    "bool with_lse, str backend, str reason) -> (Tensor, Tensor)"
)


def predict(
    query: Tensor,
    key: Tensor,
    *,
    sparsity: Sparsity,
    score: Score,
    is_causal: bool,
    scale: float,
    attn_mask: Tensor | None,
    always_keep: tuple[tuple[int, int], ...],
    backend: str,
) -> BlockMask:
    """Stage 1 through its operator."""
    rules = _pack_selection(sparsity, score, is_causal, scale, attn_mask, always_keep)
    counts, indices, visible = torch.ops.sparge.predict(query, key, *rules, backend)
    return BlockMask(counts, indices, visible, query.shape[2], key.shape[2], is_causal)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    sparsity: TopK | TopCdf,
    score: Score,
    is_causal: bool,
    scale: float,
    attn_mask: Tensor | None,
    always_keep: tuple[tuple[int, int], ...],
    quantization: str,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Both stages through one operator."""
    rules = _pack_selection(sparsity, score, is_causal, scale, attn_mask, always_keep)
    return torch.ops.sparge.attention(
        query, key, value, *rules, quantization, *_pack(sparsity.pv_threshold, None), backend
    )


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: BlockMask,
    *,
    scale: float,
    attn_mask: Tensor | None,
    quantization: str,
    pv_threshold: PerHead | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Stage 2 and the output through their operator."""
    return torch.ops.sparge.attend(
        query,
        key,
        value,
        mask.kv_num_blocks,
        mask.kv_indices,
        mask.visible_num_blocks,
        attn_mask,
        mask.is_causal,
        scale,
        quantization,
        *_pack(pv_threshold, None),
        backend,
    )


def dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float,
    quantization: str,
    with_lse: bool,
    backend: str,
    reason: str,
) -> tuple[Tensor, Tensor]:
    """Attention over every visible block through its operator; ``reason`` is what `stats` reports.

    Backend "cuda" is the faster of torch's kernels and ours.

    The LSE is empty unless it is asked for: torch's fastest kernels do not give it.
    """
    return torch.ops.sparge.dense(
        query, key, value, attn_mask, is_causal, scale, quantization, with_lse, backend, reason
    )


def _pack_selection(
    sparsity: Sparsity,
    score: Score,
    is_causal: bool,
    scale: float,
    attn_mask: Tensor | None,
    always_keep: tuple[tuple[int, int], ...],
) -> tuple[Any, ...]:
    """The arguments of ``_SELECTION``."""
    selection, min_blocks, sink, diagonal = "dense", 0, False, False
    share: PerHead = 1.0
    similarity: PerHead | None = None
    if not isinstance(sparsity, Dense):
        selection = "topk" if isinstance(sparsity, TopK) else "topcdf"
        share = sparsity.topk if isinstance(sparsity, TopK) else sparsity.cdf
        similarity, min_blocks = sparsity.similarity_threshold, sparsity.min_blocks
        sink, diagonal = sparsity.keeps_sink(is_causal), sparsity.keeps_diagonal(is_causal)
    return (
        attn_mask,
        is_causal,
        scale,
        selection,
        *_pack(share, 1.0),
        *_pack(similarity, None),
        min_blocks,
        sink,
        diagonal,
        score.samples if isinstance(score, Moment) else 0,
        [edge for pair in always_keep for edge in pair],
    )


class _Selection(NamedTuple):
    """``_SELECTION`` as an operator receives it."""

    attn_mask: Tensor | None
    is_causal: bool
    scale: float
    selection: str
    share: float
    share_per_head: Tensor | None
    similarity: float | None
    similarity_per_head: Tensor | None
    min_blocks: int
    sink: bool
    diagonal: bool
    samples: int
    always_keep: list[int]

    def unpack(self) -> dict[str, Any]:
        """The keywords of a backend's ``predict``."""
        sparsity: Sparsity = Dense()
        if self.selection != "dense":
            amount = self.share if self.share_per_head is None else self.share_per_head
            rules = {
                "min_blocks": self.min_blocks,
                "similarity_threshold": (
                    self.similarity if self.similarity_per_head is None else self.similarity_per_head
                ),
                "sink": self.sink,
                "diagonal": self.diagonal,
            }
            is_topk = self.selection == "topk"
            sparsity = trusted(TopK, topk=amount, **rules) if is_topk else trusted(TopCdf, cdf=amount, **rules)
        return {
            "sparsity": sparsity,
            "score": Moment(self.samples) if self.samples else Mean(),
            "is_causal": self.is_causal,
            "scale": self.scale,
            "attn_mask": self.attn_mask,
            "always_keep": tuple(zip(self.always_keep[::2], self.always_keep[1::2], strict=True)),
        }


def _pack(value: PerHead | None, otherwise: float | None) -> tuple[float | None, Tensor | None]:
    return (otherwise, value.detach()) if isinstance(value, Tensor) else (value, None)


def _shape_of(query: Tensor, key: Tensor, value: Tensor) -> Shape:
    batch, heads, q_len, head_dim = query.shape
    return Shape(batch, heads, key.shape[1], q_len, key.shape[2], head_dim, value.shape[3])


def _fast(quantization: str) -> str:
    return "int8_fp8_fast" if quantization == "int8_fp8_codes" else quantization


def _attend_of(backend: str) -> Any:
    """The launcher of a backend's attention kernel."""
    if backend == "hopper":
        from sparge.backends.hopper import launcher

        return launcher.attend
    from sparge.backends.triton import attention as triton_attention

    return triton_attention.attend


def _stage1(backend: str) -> ModuleType:
    from sparge import reference
    from sparge.backends.torch import predict as torch_predict

    return {"torch": torch_predict, "reference": reference}[backend]


def _stage2(backend: str) -> ModuleType:
    from sparge import reference
    from sparge.backends.torch import blocks as torch_blocks

    return {"torch": torch_blocks, "reference": reference}[backend]


def _predict(query: Tensor, key: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    *packed, backend = arguments
    rules = _Selection(*packed).unpack()
    mask = _predicted(query, key, rules, backend)
    return mask.kv_num_blocks, mask.kv_indices, mask.visible_num_blocks.contiguous()


def _predicted(query: Tensor, key: Tensor, rules: dict[str, Any], backend: str) -> BlockMask:
    shape = _shape_of(query, key, key)
    if backend in KERNELS:
        from sparge.backends.cuda import pipeline

        return pipeline.predict(query, key, Call(shape, **rules))
    if backend == "torch":
        return _stage1(backend).predict(query, key, Call(shape, **rules))
    return _stage1(backend).predict(query, key, shape, **rules)


def _predict_fake(query: Tensor, key: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    shape = _shape_of(query, key, key)
    rows = (shape.batch, shape.heads, shape.q_blocks)
    counts = query.new_empty(rows, dtype=torch.int32)
    return (
        counts,
        query.new_empty((*rows, shape.kv_blocks), dtype=torch.int32),
        torch.empty_like(counts),
    )


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv_num_blocks: Tensor,
    kv_indices: Tensor,
    visible_num_blocks: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float,
    quantization: str,
    pv_threshold: float | None,
    pv_threshold_per_head: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    shape = _shape_of(query, key, value)
    mask = BlockMask(kv_num_blocks, kv_indices, visible_num_blocks, shape.q_len, shape.kv_len, is_causal)
    threshold = pv_threshold if pv_threshold_per_head is None else pv_threshold_per_head
    backend = kernels_for(backend, query.dtype, quantization, has_mask=attn_mask is not None)
    counters.record(f"sparse: {backend}")
    if backend in KERNELS:
        from sparge.backends.cuda import pipeline

        call = Call(
            shape,
            is_causal,
            scale,
            quantization=_fast(quantization),
            pv_threshold=threshold,
            attn_mask=attn_mask,
        )
        totals = counters.block_totals(query.device)
        return pipeline.attention(query, key, value, mask, call, attend=_attend_of(backend), totals=totals)
    counters.add_blocks(kv_num_blocks, visible_num_blocks)
    return _attention_over(query, key, value, mask, shape, scale, attn_mask, quantization, threshold, backend)


def _attention(query: Tensor, key: Tensor, value: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    *packed, quantization, pv_threshold, pv_threshold_per_head, backend = arguments
    rules = _Selection(*packed).unpack()
    threshold = pv_threshold if pv_threshold_per_head is None else pv_threshold_per_head
    shape = _shape_of(query, key, value)
    attn_mask, scale = rules["attn_mask"], rules["scale"]
    backend = kernels_for(backend, query.dtype, quantization, has_mask=attn_mask is not None)
    counters.record(f"sparse: {backend}")
    if backend in KERNELS:
        from sparge.backends.cuda import pipeline

        call = Call(shape, **rules, quantization=_fast(quantization), pv_threshold=threshold)
        totals = counters.block_totals(query.device)
        return pipeline.sparse_attention(query, key, value, call, attend=_attend_of(backend), totals=totals)
    mask = _predicted(query, key, rules, backend)
    counters.add_blocks(mask.kv_num_blocks, mask.visible_num_blocks)
    return _attention_over(query, key, value, mask, shape, scale, attn_mask, quantization, threshold, backend)


def _attend_fake(query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    output = query.new_empty((*query.shape[:3], value.shape[3]))
    return output, query.new_empty(query.shape[:3], dtype=torch.float32)


def _dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float,
    quantization: str,
    with_lse: bool,
    backend: str,
    reason: str,
) -> tuple[Tensor, Tensor]:
    counters.record(f"dense: {reason}")
    shape = _shape_of(query, key, value)
    call: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "attn_mask": attn_mask}
    if backend == "cuda":
        from sparge.backends.cuda import dense as cuda_dense

        kernels = choose_backend("auto", query.device).backend
        kernels = kernels_for(kernels, query.dtype, quantization, has_mask=attn_mask is not None)
        output, lse = cuda_dense.attention(
            query,
            key,
            value,
            Call(shape, **call, quantization=_fast(quantization)),
            with_lse=with_lse,
            attend=_attend_of(kernels),
        )
    elif backend in KERNELS:
        from sparge.backends.cuda import pipeline

        kernels = kernels_for(backend, query.dtype, quantization, has_mask=attn_mask is not None)
        output, lse = pipeline.attention(
            query,
            key,
            value,
            None,
            Call(shape, **call, quantization=_fast(quantization)),
            attend=_attend_of(kernels),
        )
    elif backend == "torch" and quantization == "none":
        from sparge.backends.torch import dense as torch_dense

        output, lse = torch_dense.attention(query, key, value, shape, **call)
    else:
        mask = _predicted(query, key, {**call, "sparsity": Dense(), "score": Mean(), "always_keep": ()}, backend)
        output, lse = _attention_over(query, key, value, mask, shape, scale, attn_mask, quantization, None, backend)
    return output, lse if with_lse else lse.new_empty(0)


def _dense_fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,  # noqa: ARG001
    is_causal: bool,  # noqa: ARG001
    scale: float,  # noqa: ARG001
    quantization: str,  # noqa: ARG001
    with_lse: bool,
    *_: object,
) -> tuple[Tensor, Tensor]:
    output, lse = _attend_fake(query, key, value)
    return output, lse if with_lse else lse.new_empty(0)


def _attention_over(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: BlockMask,
    shape: Shape,
    scale: float,
    attn_mask: Tensor | None,
    quantization: str,
    pv_threshold: PerHead | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    output, lse = _stage2(backend).attention(
        query,
        key,
        value,
        mask,
        shape,
        scale=scale,
        attn_mask=attn_mask,
        quantization=quantization,
        pv_threshold=pv_threshold,
    )[:2]
    return output.to(query.dtype), lse.float()


def _in_place(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run on the query's device, without autocast and out of reach of `replace_sdpa`: the stages are ours."""

    @functools.wraps(function)
    def run(query: Tensor, *arguments: Any) -> Any:
        device = query.device.type
        with torch._C.DisableTorchFunction():
            if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
                with torch.cuda.device_of(query):  # kernels are launched on the current device
                    return function(query, *arguments)
            with torch.cuda.device_of(query), torch.autocast(device, enabled=False):
                return function(query, *arguments)

    return run


for _name, _real, _fake in (
    ("predict", _predict, _predict_fake),
    ("attend", _attend, _attend_fake),
    ("attention", _attention, _attend_fake),
    ("dense", _dense, _dense_fake),
):
    _LIBRARY.impl(_name, _in_place(_real), "CompositeExplicitAutograd")
    torch.library.register_fake(f"sparge::{_name}", _fake, lib=_LIBRARY)
