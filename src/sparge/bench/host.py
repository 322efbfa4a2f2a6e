"""Suite "host" of ``sparge bench``: launch overhead per call, for each kind of call.

The device work is tiny (one head), so the queue stays empty, and the time of a call is host time. Calls are timed one
by one, in batches with a synchronization before each batch. The batches of all kinds take turns, and a row contains the
median. A CPU has no queue, so there the time includes the computation, on fewer tokens.

Columns of a row: ``total_us``, the microseconds of the whole call; ``over_sdpa_us``, the difference from SDPA;
``launches``, the number of kernels, fills and copies on the device, counted by the profiler.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from sparge import api
from sparge.backends import base
from sparge.bench.cases import Problem, Row
from sparge.bench.timing import Variant, attempt, reason
from sparge.call import forget_recordings
from sparge.dispatch import call_cache
from sparge.evaluate.timing import host_seconds, take_turns
from sparge.integrations import sdpa
from sparge.integrations.layers import Layer
from sparge.integrations.transformers import attention as transformers_integration
from sparge.masks.ordering import order_of
from sparge.policy import Policy
from sparge.varlen import varlen_attention

CPU_PROBLEM = Problem(128, 1, 16)
TOPK = 0.25
BATCH = 8
"""Calls between two synchronizations. Their launches are far fewer than the capacity of the queue."""
TURNS, QUICK_TURNS = 60, 10
BASELINE, RUNS_DENSE = "SDPA", ", runs dense"


@dataclass(frozen=True)
class HostCall:
    """A kind of call. ``prepare`` runs before every call and is not timed."""

    variant: Variant
    prepare: Callable[[], object] | None = None


def calls_on(problem: Problem, device: torch.device) -> dict[str, HostCall]:
    """Return the kinds of calls, keyed by name, with SDPA first."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    size = (1, problem.heads, problem.tokens, problem.head_dim)
    q, k, v = (torch.randn(size, dtype=dtype, device=device, generator=generator) for _ in range(3))
    backend = base.resolve("auto", device)
    named: dict[str, Any] = {"backend": backend}  # calls with a named backend never fall back to dense
    sparse = partial(api.attention, q, k, v, topk=TOPK, **named)
    padding = torch.arange(problem.tokens, device=device) < problem.tokens * 7 // 8
    full = padding.expand(problem.tokens, -1).contiguous()[None, None]
    blocks = api.predict(q, k, topk=TOPK, **named)
    packed_q, packed_k, packed_v = (tensor[0].transpose(0, 1).contiguous() for tensor in (q, k, v))  # (tokens, H, D)
    bounds = [0, problem.tokens // 2, problem.tokens]
    packed = partial(varlen_attention, packed_q, packed_k, packed_v, bounds, bounds, topk=TOPK, **named)
    sparse_policy = Policy(topk=TOPK, **named)

    def stock() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)  # attribute lookup in every call, as in a model

    def in_order() -> Tensor:
        order = order_of((problem.tokens // 64, 8, 8), "hilbert", device)
        moved = [order.apply(tensor) for tensor in (q, k, v)]
        return order.undo(api.attention(moved[0], moved[1], moved[2], topk=TOPK, score="spread", **named))

    scope = sdpa.Scope(Layer("", sparse_policy), grid=(problem.tokens // 64, 8, 8))
    calls: dict[str, Callable[[], object]] = {
        BASELINE: stock,
        f"attention{RUNS_DENSE}": partial(api.attention, q, k, v),
        "attention": sparse,
        "attention, key padding": partial(sparse, padding[None, None, None]),
        "attention, full mask": partial(sparse, full),
        "attention, Hilbert order": in_order,
        "varlen_attention": packed,
        "block_sparse_attention": partial(api.block_sparse_attention, q, k, v, blocks, **named),
        "enabled layer, Hilbert order": partial(sdpa.sparse_sdpa, scope, q, k, v),
    }
    found = {name: HostCall(Variant(call)) for name, call in (calls | _frameworks(q, k, v)).items()}
    for name, policy in ((f"replace_sdpa{RUNS_DENSE}", Policy()), ("replace_sdpa", sparse_policy)):
        found[name] = HostCall(Variant(stock, partial(sdpa.replace_sdpa, policy)))
    if device.type == "cuda":
        found["attention, first of its kind"] = HostCall(Variant(sparse), _clear_caches)
    return found


def _clear_caches() -> None:
    """Clear all caches of repeated calls."""
    call_cache.forget()
    forget_recordings()


def _frameworks(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], object]]:
    """Return calls of the installed frameworks, stock and with an integration whose policy runs them dense."""
    calls: dict[str, Callable[[], object]] = {}
    try:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
    except ImportError:
        pass
    else:
        module = nn.Module()
        module.is_causal = False  # type: ignore[assignment]
        transformers_integration.register(Policy())
        calls["transformers, stock"] = partial(sdpa_attention_forward, module, q, k, v, None)
        forward = transformers_integration.attention_forward
        calls[f"transformers{RUNS_DENSE}"] = partial(forward, module, q, k, v, None)
    try:
        from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
    except ImportError:
        pass
    else:
        from sparge.integrations.diffusers import backend

        tokens_first = [tensor.transpose(1, 2) for tensor in (q, k, v)]
        dispatch = partial(dispatch_attention_fn, *tokens_first)
        calls["diffusers, stock"] = partial(dispatch, backend=AttentionBackendName.NATIVE)
        calls[f"diffusers{RUNS_DENSE}"] = partial(dispatch, backend=backend.register(Policy()))
    return calls


@torch.no_grad()
def host_rows(problem: Problem, device: torch.device, *, turns: int = TURNS) -> Iterator[Row]:
    """Yield one row for each kind of call. The row of a failed call contains the reason."""
    calls = calls_on(problem, device)
    problems: dict[str, dict[str, str]] = {name: {} for name in calls}
    launches: dict[str, int | None] = {}
    clocks: dict[str, Callable[[], float]] = {}
    for name, call in calls.items():
        try:
            for _ in range(3):  # compile, tune and record
                call.variant.once()
        except Exception as error:
            problems[name]["call"] = reason(error)
            continue
        clocks[name] = partial(_clock, call, device)
        if device.type == "cuda":
            launches[name] = attempt(problems[name], "launches", partial(count_launches, call.variant))
    medians = {name: 1e6 * statistics.median(values) for name, values in take_turns(clocks, turns).items()}
    for name in calls:
        total = medians.get(name)
        yield {
            "suite": "host",
            "call": name,
            "device": device.type,
            **asdict(problem),
            "turns": turns,
            "total_us": total,
            "over_sdpa_us": None if total is None else total - medians[BASELINE],
            "launches": launches.get(name),
            "problems": problems[name],
        }


def count_launches(variant: Variant) -> int:
    """Return the number of kernels, fills and copies that one call runs on a CUDA device."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        variant.once()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profiled.events() or ())


def _clock(call: HostCall, device: torch.device) -> float:
    """Return the median seconds of the calls of a batch. With ``prepare``, the batch is a single call."""
    with call.variant.context():
        if call.prepare is None:
            call.variant.run()  # another kind of call may have cleared the recording
        else:
            call.prepare()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return statistics.median(host_seconds(call.variant.run) for _ in range(BATCH if call.prepare is None else 1))
