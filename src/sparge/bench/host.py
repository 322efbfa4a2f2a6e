"""Suite "host" of ``sparge bench``: launch overhead per call, for each kind of call.

The device work is tiny (one head), so the time of a call is the time of the host. Calls are timed one by one, in
batches with a synchronization before each batch. The batches of all kinds take turns, and a row contains the median.
On a CPU, the time includes the computation, on fewer tokens.

Columns of a row: ``total_us``, the microseconds of the whole call; ``over_sdpa_us``, the difference from SDPA;
``launches``, the number of kernels, fills and copies on the device, counted by the profiler.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from sparge import api
from sparge.backends import base
from sparge.bench.cases import Problem, Row
from sparge.bench.timing import TimedCall, attempt, reason
from sparge.call import forget_recordings
from sparge.dispatch import call_cache
from sparge.evaluate.machine import describe_machine
from sparge.evaluate.timing import host_seconds, take_turns
from sparge.integrations import sdpa
from sparge.integrations.layers import Layer
from sparge.integrations.transformers import attention as transformers_integration
from sparge.masks.ordering import order_of
from sparge.policy import Policy
from sparge.varlen import varlen_attention

CUDA_PROBLEM, CPU_PROBLEM = Problem(4096, 1), Problem(128, 1, 16)
TOPK = 0.25
BATCH = 8
"""Calls between two synchronizations. Their launches are far fewer than the capacity of the queue."""
TURNS, QUICK_TURNS = 60, 10
BASELINE, RUNS_DENSE, FIRST = "SDPA", ", runs dense", "attention, first of its kind"


def calls_on(problem: Problem, device: torch.device) -> dict[str, TimedCall]:
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
        query, key, value = (order.apply(tensor) for tensor in (q, k, v))
        return order.undo(api.attention(query, key, value, topk=TOPK, score="spread", **named))

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
    timed = {name: TimedCall(call) for name, call in (calls | _frameworks(q, k, v)).items()}
    for name, policy in ((f"replace_sdpa{RUNS_DENSE}", Policy()), ("replace_sdpa", sparse_policy)):
        timed[name] = TimedCall(stock, partial(sdpa.replace_sdpa, policy))
    if device.type == "cuda":
        timed[FIRST] = TimedCall(sparse)
    return timed


def _frameworks(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], object]]:
    """Return two calls for each installed framework: its own attention, and sparge under a policy that runs dense."""
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
def host_rows(quick: bool) -> Iterator[Row]:
    """Yield one row for each kind of call on the current CUDA device, or on the CPU if there is none.

    The row of a failed call contains the reason.
    """
    has_cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if has_cuda else torch.device("cpu")
    problem, turns = CUDA_PROBLEM if has_cuda else CPU_PROBLEM, QUICK_TURNS if quick else TURNS
    calls = calls_on(problem, device)
    problems: dict[str, dict[str, str]] = {name: {} for name in calls}
    launches: dict[str, int | None] = {}
    clocks: dict[str, Callable[[], float]] = {}
    for name, call in calls.items():
        try:
            for _ in range(3):  # compile, tune and record
                call.once()
        except Exception as error:
            problems[name]["call"] = reason(error)
            continue
        clocks[name] = partial(_clock, call, device, clears_caches=name == FIRST)
        if has_cuda:
            launches[name] = attempt(problems[name], "launches", partial(count_launches, call))
    medians = {name: 1e6 * statistics.median(times) for name, times in take_turns(clocks, turns).items()}
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
            **asdict(describe_machine()),
        }


def count_launches(call: TimedCall) -> int:
    """Return the number of kernels, fills and copies that one call runs on a CUDA device."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        call.once()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profiled.events() or ())


def _clock(call: TimedCall, device: torch.device, *, clears_caches: bool) -> float:
    """Return the median seconds of the calls of a batch, or of one call after clearing caches (``clears_caches``)."""
    with call.context():
        if clears_caches:
            call_cache.forget()
            forget_recordings()
        else:
            call.run()  # another kind of call may have cleared the recording
        if device.type == "cuda":
            torch.cuda.synchronize()
        return statistics.median(host_seconds(call.run) for _ in range(1 if clears_caches else BATCH))
