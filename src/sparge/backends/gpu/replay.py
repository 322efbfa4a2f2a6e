"""Record the launches of a call once, and replay them on other tensors.

A model makes the same call thousands of times, with the same shapes, strides and options. Selecting configurations,
allocating buffers and preparing launches takes longer than a short call runs on the device. None of this depends on the
data, so a replay only updates addresses.

    replayed        run a call and record it, or replay an earlier recording
    Recorder        collects the buffers and launches of a call while it runs
    Replay          a recording: launches with their arguments in memory (`driver`), and the layout of the workspace
    constant        cache a small tensor, for example marked blocks or a threshold per head

A call is replayed if torch computes nothing between its kernels, and if its kernels only access inputs, results,
constants, buffers of `launch`, and views that start at the address of one of these. All other calls run step by step
every time. So do calls on a stream that is being captured, because a graph cannot be launched into it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from sparge.backends.gpu import driver
from sparge.backends.gpu.config_table import active_overrides
from sparge.backends.gpu.driver import BoundLaunches, LaunchRecord
from sparge.call import Call
from sparge.masks.block_mask import BlockMask

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel

MAX_RECORDINGS = 64
"""Maximum number of recordings of one `Call`. They differ in strides, alignment or device, for example."""
MAX_CONSTANTS = 256
ALIGNMENT = 512
"""Alignment of buffers in bytes, as in torch's allocator. (Kernels are compiled for multiples of 16.)"""

ALLOCATIONS = (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default)
"""Operators of torch that a recorded call may contain, besides views."""

current_recorder: ContextVar[Recorder | None] = ContextVar("current_recorder", default=None)
"""The recorder of the call that runs in this thread, if any."""
_constants: dict[Hashable, Tensor] = {}

Results = TypeVar("Results", bound=tuple[Tensor, ...])


def replayed(
    recordings: dict[Any, Any] | None, kind: Hashable, inputs: Sequence[Tensor | None], run: Callable[[], Results]
) -> Results:
    """Return the results of ``run``, by replaying a recording if the same call was recorded before.

    Args:
        recordings: the recordings of a call, usually `Call.recordings`; None to record nothing.
        kind: everything that the launches depend on, except the `Call` and the metadata of the inputs.
        inputs: the tensors that ``run`` reads, and existing tensors that it writes to.
        run: a function that launches kernels without synchronizing. Either all of its results are buffers that
            `launch` allocated, or all of them are inputs.
    """
    if recordings is None:
        return run()
    key_of_call = _key_of(kind, inputs)
    tensors = [tensor for tensor in inputs if tensor is not None]
    if key_of_call in recordings:
        replay: Replay | None = recordings[key_of_call]
        if replay is None or _is_capturing():
            return run()
        created = replay.run([tensor.data_ptr() for tensor in tensors])
        results = created if replay.returned is None else tuple([tensors[index] for index in replay.returned])
        return results  # type: ignore[return-value]
    recorder = Recorder(tensors)
    token = current_recorder.set(recorder)
    try:
        with recorder:
            results = run()
    finally:
        current_recorder.reset(token)
    replay = recorder.finish(results)
    if len(recordings) >= MAX_RECORDINGS:
        recordings.clear()
    recordings[key_of_call] = replay
    return results


def recorded(recordings: dict[Any, Any] | None, kind: Hashable, inputs: Sequence[Tensor | None]) -> Replay | None:
    """Return the recording of `replayed` for a call with these inputs; None if it cannot be replayed."""
    return None if recordings is None else recordings.get(_key_of(kind, inputs))


def recordings_of(call: Call) -> dict[Any, Any] | None:
    """Return the recordings of a call; None if it has per-head options, whose conversion by torch is not recorded."""
    return None if call.has_per_head_numbers else call.recordings


def lists_of(mask: BlockMask) -> tuple[Tensor, Tensor, Tensor]:
    """Return the three tensors of a block mask."""
    return mask.kv_num_blocks, mask.kv_indices, mask.visible_num_blocks


def _key_of(kind: Hashable, inputs: Sequence[Tensor | None]) -> Hashable:
    """Return everything that a recording depends on, except its call."""
    tensors = [tensor for tensor in inputs if tensor is not None]
    addresses = [tensor.data_ptr() for tensor in tensors]
    return (
        kind,
        active_overrides(),
        tuple([tensor is None for tensor in inputs]),
        tuple([addresses.index(address) for address in addresses]),  # which inputs start at the same address
        tuple([address & 15 for address in addresses]),
        tuple([(tensor.dtype, tensor.device, tensor.stride()) for tensor in tensors]),
    )


def constant(key: Hashable, device: torch.device, make: Callable[[], Tensor]) -> Tensor:
    """Return a tensor that is created once per key and device. Kernels must not write to it.

    Creation synchronizes the device, so that kernels on every stream may read the tensor. During CUDA graph capture,
    the tensor belongs to the graph and is not cached.
    """
    tensor = _constants.get((key, device))
    if tensor is None:
        with _disable_current_modes():  # a recorder must not see the operators of ``make``
            tensor = make()
        if device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                return tensor
            torch.cuda.synchronize(device)
        if len(_constants) >= MAX_CONSTANTS:
            _constants.clear()  # replays keep references to the constants they read
        tensor = _constants.setdefault((key, device), tensor)
    register_constant(tensor)
    return tensor


def register_constant(tensor: Tensor) -> None:
    """Register a tensor that kernels of the recorded call read, and that is the same tensor in every replay."""
    recorder = current_recorder.get()
    if recorder is not None:
        recorder.constants.append(tensor)


@contextmanager
def in_branch(name: str) -> Iterator[None]:
    """Put the enclosed launches into a branch of the recorded CUDA graph. Branches run concurrently.

    Branches start after the last launch outside of a branch, and the next launch outside of a branch waits for all of
    them. Kernels of one branch must not access memory that another branch writes, except by atomic maxima.
    """
    recorder = current_recorder.get()
    if recorder is None:
        yield
        return
    recorder.branch = name
    try:
        yield
    finally:
        recorder.branch = None


def _empty(sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate uninitialized memory on the current device, bypassing torch's dispatcher if possible."""
    if device.type == "cuda" and _empty_strided_cuda is not None:
        return _empty_strided_cuda(sizes, strides, dtype)
    return torch.empty_strided(sizes, strides, dtype=dtype, device=device)


def _current_stream(index: int) -> int:
    """Return the handle of the current stream of a device."""
    return torch._C._cuda_getCurrentRawStream(index)


def _is_capturing() -> bool:
    """Return whether the current stream is being captured into a CUDA graph."""
    return torch._C._cuda_isCurrentStreamCapturing()


_empty_strided_cuda: Callable[..., Tensor] | None = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


ResultSpec: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Sizes, strides and dtype of a result."""


@dataclass(eq=False)
class Replay:
    """A recorded call. Its tensors have slots in this order: inputs, results, buffers, constants.

    Attributes:
        results: sizes, strides and dtypes of the results to create.
        returned: indices of the inputs that the call returns as its results; None if it creates its results.
        offsets: offset of each buffer in the workspace. The workspace starts with the memory that is cleared first.
    """

    launches: BoundLaunches
    results: Sequence[ResultSpec]
    returned: tuple[int, ...] | None
    offsets: list[int]
    workspace_bytes: int
    constants: list[Tensor]
    device: torch.device

    def __post_init__(self) -> None:
        self._constant_addresses = [tensor.data_ptr() for tensor in self.constants]
        self._index = self.device.index or 0
        self._last_bytes = 0
        if self.results:
            sizes, _, dtype = self.results[-1]
            self._last_bytes = _aligned(math.prod(sizes) * dtype.itemsize)

    def run(self, inputs: Sequence[int]) -> tuple[Tensor, ...]:
        """Launch all kernels on the current stream, on inputs at these addresses. Return the created results."""
        device = self.device
        results = tuple([_empty(sizes, strides, dtype, device) for sizes, strides, dtype in self.results])
        workspace = _empty((self.workspace_bytes,), (1,), torch.uint8, device)
        self._start([*inputs, *[result.data_ptr() for result in results]], workspace.data_ptr())
        return results

    def run_without_lse(self, inputs: Sequence[int]) -> Tensor:
        """Launch a call whose results are output and LSE, and return the output. The workspace holds the unused LSE."""
        output = _empty(*self.results[0], self.device)
        workspace = _empty((self.workspace_bytes + self._last_bytes,), (1,), torch.uint8, self.device)
        start = workspace.data_ptr()
        self._start([*inputs, output.data_ptr(), start + self.workspace_bytes], start)
        return output

    def _start(self, addresses: list[int], workspace: int) -> None:
        addresses += [workspace + offset for offset in self.offsets]
        addresses += self._constant_addresses
        self.launches.start(addresses, _current_stream(self._index))


class Recorder(TorchDispatchMode):
    """Collects the buffers and launches of one call, and detects operators of torch that a replay could not repeat.

    All tensors are referenced until the call ends, so that no ``id`` is reused.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.inputs = inputs
        self.buffers: list[Tensor] = []
        self.zeros: list[Tensor] = []
        self.constants: list[Tensor] = []
        self.launches: list[tuple[CompiledKernel | None, int, list[Any], list[Tensor], list[Any]]] = []
        self.branches: list[str | None] = []
        self.branch: str | None = None
        self.torch_computed = False

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        clears = func is torch.ops.aten.zero_.default and any(args[0] is buffer for buffer in self.zeros)
        self.torch_computed |= not clears and func not in ALLOCATIONS and not _is_view(func)
        return func(*args, **(kwargs or {}))

    def add_buffer(self, buffer: Tensor, *, is_zero: bool = False) -> None:
        """Register a buffer of this call; ``is_zero``: it is cleared before its first use."""
        self.buffers.append(buffer)
        if is_zero:
            self.zeros.append(buffer)

    def add_launch(
        self,
        compiled: CompiledKernel | None,
        programs: int,
        descriptors: list[Any],
        tensors: list[Tensor],
        values: list[Any],
    ) -> None:
        """Register a launch.

        Args:
            compiled: the kernel; None in Triton's interpreter.
            tensors: the tensors of ``descriptors``, then those passed by pointer.
            values: the other arguments in the order of the signature.
        """
        self.launches.append((compiled, programs, descriptors, tensors, values))
        self.branches.append(self.branch)

    def finish(self, results: Sequence[Tensor]) -> Replay | None:
        """Return the recording; None if the call cannot be replayed (see the module docstring)."""
        inputs = {id(tensor): index for index, tensor in enumerate(self.inputs)}
        returned = None
        if results and all(id(result) in inputs for result in results):
            returned, results = tuple([inputs[id(result)] for result in results]), ()
        result_ids, zero_ids = {id(result) for result in results}, {id(buffer) for buffer in self.zeros}
        if self.torch_computed or not result_ids <= {id(buffer) for buffer in self.buffers} - zero_ids:
            return None
        shared = [buffer for buffer in self.buffers if id(buffer) not in result_ids | zero_ids]
        tensors = [*self.inputs, *results, *self.zeros, *shared, *self.constants]
        # Views are identified by their start. Nothing is freed while a call is recorded, so addresses are unique.
        slots = {tensor.data_ptr(): slot for slot, tensor in reversed(list(enumerate(tensors)))}
        records = []
        for launch, after in zip(self.launches, _predecessors(self.branches), strict=True):
            compiled, programs, descriptors, accessed, values = launch
            slots_of_launch = [slots.get(tensor.data_ptr(), -1) for tensor in accessed]
            if compiled is None or _needs_scratch(compiled) or -1 in slots_of_launch:
                return None
            records.append(LaunchRecord(compiled, programs, descriptors, slots_of_launch, values, after))
        offsets, zero_bytes = [], 0
        for buffer in self.zeros:
            offsets.append(zero_bytes)
            zero_bytes += _aligned(buffer.nbytes)
        steps: dict[int, list[int]] = {}  # when the tensor of a slot is in use, in ascending order
        for record, span in zip(records, _spans(self.branches), strict=True):
            for slot in record.slots:
                steps.setdefault(slot, []).extend(span)
        num_moving = len(self.inputs) + len(results)
        first_shared = num_moving + len(self.zeros)
        uses = [steps.get(first_shared + index, []) for index in range(len(shared))]
        shared_offsets, shared_bytes = _pack([buffer.nbytes for buffer in shared], uses)
        return Replay(
            BoundLaunches(records, len(tensors), num_moving, zero_bytes, driver.load()),
            [(tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in results],
            returned,
            [*offsets, *[zero_bytes + offset for offset in shared_offsets]],
            zero_bytes + shared_bytes,
            self.constants,
            self.inputs[0].device,
        )


def _needs_scratch(compiled: CompiledKernel) -> bool:
    """Return whether a kernel uses scratch memory, as instrumented kernels do."""
    return bool(compiled.metadata.global_scratch_size or compiled.metadata.profile_scratch_size)


@functools.cache
def _is_view(func: Any) -> bool:
    """Return whether an operator returns a view and writes to nothing.

    Some of these operators may copy (``contiguous`` in inference mode). `Recorder.finish` detects a copy by its
    address, which differs from those of all tensors of the call.
    """
    aliases = [argument.alias_info for argument in func._schema.arguments if argument.alias_info is not None]
    return bool(aliases) and not any(alias.is_write for alias in aliases)


def _predecessors(branches: Sequence[str | None]) -> list[tuple[int, ...]]:
    """Return, for each launch, the indices of the launches that must finish before it.

    Args:
        branches: for each launch, the name of its parallel branch, or None for a launch outside of branches.
    """
    predecessors: list[tuple[int, ...]] = []
    trunk: tuple[int, ...] = ()
    ends: dict[str, int] = {}
    for index, branch in enumerate(branches):
        if branch is None:
            predecessors.append(tuple(ends.values()) or trunk)
            trunk, ends = (index,), {}
        else:
            predecessors.append((ends[branch],) if branch in ends else trunk)
            ends[branch] = index
    return predecessors


def _spans(branches: Sequence[str | None]) -> list[tuple[int, int]]:
    """Return, for each launch, the first and the last launch of the group of branches that it belongs to."""
    spans = [(index, index) for index in range(len(branches))]
    start = 0
    for index in range(len(branches) + 1):
        if index == len(branches) or branches[index] is None:
            spans[start:index] = [(start, index - 1)] * (index - start)
            start = index + 1
    return spans


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _pack(sizes: list[int], uses: list[list[int]]) -> tuple[list[int], int]:
    """Return the offset of each buffer in one workspace, and the size of the workspace.

    Buffers that are never in use at the same time may share memory. Large buffers are placed first, each at the lowest
    offset that is free during its use.

    Args:
        sizes: bytes of each buffer.
        uses: for each buffer, the indices of the launches that use it, in ascending order.
    """
    placed: dict[int, tuple[int, int, int, int]] = {}  # first use, last use, offset, end
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        first, last = (uses[index][0], uses[index][-1]) if uses[index] else (0, 0)
        width = _aligned(sizes[index])
        taken = sorted((start, end) for since, until, start, end in placed.values() if since <= last and first <= until)
        offset = 0
        for start, end in taken:
            if start - offset >= width:
                break
            offset = max(offset, end)
        placed[index] = (first, last, offset, offset + width)
    return [placed[index][2] for index in range(len(sizes))], max((end for *_, end in placed.values()), default=0)
