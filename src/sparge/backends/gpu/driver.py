"""Launch a call's kernels through the CUDA driver, with arguments laid out in memory beforehand.

A launch through Triton inspects every argument and takes 7 to 14 us; a launch through the driver takes 4 to 5 us. All
launches of a call are therefore one CUDA graph. Launching it takes 4 us for any number of kernels, plus 1 us for each
kernel whose arguments have changed since the last launch. In memory, there are:

    slots               one 64-bit address per tensor of a call, shared by all of its launches
    parameters          for each launch, pointers to its arguments: slots, tensor maps and constants
    tensor maps         encoded TMA descriptors; if a tensor moves, only the address inside is replaced

A graph cannot be launched into a stream that is being captured; there, kernels are launched one by one.

The argument layout of a compiled kernel is read from the parameter list of its PTX.
"""

from __future__ import annotations

import ctypes
import functools
import re
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel

SUCCESS = 0
INVALID_CONTEXT = 201
"""Status of a launch from a thread without a CUDA context."""
TENSOR_MAP_BYTES = 128
TENSOR_MAP_ALIGNMENT = 64
L2_PROMOTION_128B = 2
TMA_HOST_DTYPES = {8: 10, 9: 8, 10: 9}
"""Data types of tensor maps for which the driver's numbers (values) differ from the numbers in Triton (keys)."""

_ENTRY = re.compile(r"\.entry\s+\w+\s*\(([^)]*)\)", re.DOTALL)
_PARAMETER = re.compile(r"\.([busf])(8|16|32|64)\b[^\[]*(?:\[(\d+)\])?")


class UnsupportedKernel(Exception):
    """Raised for a kernel whose arguments this module cannot lay out. Its calls are not replayed."""


class Parameter(NamedTuple):
    """One parameter of a compiled kernel: its size in bytes, and whether it is a floating-point number."""

    size: int
    is_float: bool


class KernelNode(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS: a kernel launch in a graph."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("parameters", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


class MemsetNode(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS: memory that a graph sets to a value."""

    _fields_ = (
        ("address", ctypes.c_uint64),
        ("pitch", ctypes.c_size_t),
        ("value", ctypes.c_uint),
        ("element_bytes", ctypes.c_uint),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class Driver:
    """The functions of libcuda that a replay calls. Each returns a status."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        self.launch: Callable[..., int] = library.cuLaunchKernel
        self.memset: Callable[..., int] = library.cuMemsetD32Async
        self.encode_tensor_map: Callable[..., int] = library.cuTensorMapEncodeTiled
        self.replace_address: Callable[..., int] = library.cuTensorMapReplaceAddress
        self.create_graph: Callable[..., int] = library.cuGraphCreate
        self.add_kernel: Callable[..., int] = library.cuGraphAddKernelNode_v2
        self.add_memset: Callable[..., int] = library.cuGraphAddMemsetNode
        self.instantiate: Callable[..., int] = library.cuGraphInstantiateWithFlags
        self.update_kernel: Callable[..., int] = library.cuGraphExecKernelNodeSetParams_v2
        self.update_memset: Callable[..., int] = library.cuGraphExecMemsetNodeSetParams
        self.launch_graph: Callable[..., int] = library.cuGraphLaunch
        self.destroy_graph: Callable[..., int] = library.cuGraphDestroy
        self.destroy_executable: Callable[..., int] = library.cuGraphExecDestroy
        self._library = library

    def current_context(self) -> ctypes.c_void_p:
        """Return the CUDA context of this thread."""
        context = ctypes.c_void_p()
        self.check(self._library.cuCtxGetCurrent(ctypes.byref(context)), "cuCtxGetCurrent")
        return context

    def set_context(self, context: ctypes.c_void_p) -> None:
        """Make a context current in this thread."""
        self.check(self._library.cuCtxSetCurrent(context), "cuCtxSetCurrent")

    def check(self, status: int, what: str) -> None:
        """Raise RuntimeError unless a call succeeded."""
        if status != SUCCESS:
            name = ctypes.c_char_p()
            self._library.cuGetErrorName(status, ctypes.byref(name))
            raise RuntimeError(f"{what}: expected CUDA_SUCCESS, got {(name.value or b'?').decode()} ({status})")


@functools.cache
def load() -> Driver:
    """Load libcuda once per process."""
    return Driver()


def parameters_of(compiled: CompiledKernel) -> list[Parameter]:
    """Return the parameters of a compiled kernel, in order, as its PTX declares them."""
    entry = _ENTRY.search(compiled.asm["ptx"])
    if entry is None:
        raise UnsupportedKernel("PTX without an entry")
    found = []
    for line in entry.group(1).split(","):
        if line.strip():
            match = _PARAMETER.search(line)
            if match is None:
                raise UnsupportedKernel(f"PTX parameter {line.strip()!r}")
            kind, bits, count = match.groups()
            found.append(Parameter(int(bits) // 8 * int(count or 1), kind == "f"))
    return found


_INTEGERS: dict[int, Any] = {1: ctypes.c_int8, 2: ctypes.c_int16, 4: ctypes.c_int32, 8: ctypes.c_int64}
_FLOATS: dict[int, Any] = {4: ctypes.c_float, 8: ctypes.c_double}


class LaunchRecord(NamedTuple):
    """One launch of a recorded call.

    Attributes:
        compiled: the kernel.
        programs: size of the one-dimensional grid.
        descriptors: Gluon's TMA descriptors, whose tensors are the first ones of the launch.
        places: the slot of each tensor, starting with the tensors of the descriptors.
        values: strides, numbers and compile-time values, in the order of the kernel's signature after its tensors.
        after: indices of the launches that must complete before this one begins.
    """

    compiled: CompiledKernel
    programs: int
    descriptors: list[Any]
    places: list[int]
    values: list[Any]
    after: tuple[int, ...]


class BoundLaunches:
    """Launches with arguments in memory; `start` stores the addresses of a call's tensors and launches all kernels.

    A lock guards the memory, so threads may start the same launches on different tensors.
    """

    def __init__(
        self, records: Sequence[LaunchRecord], num_slots: int, moving: set[int], zero_bytes: int, driver: Driver
    ) -> None:
        """Lay out the arguments.

        Args:
            num_slots: number of tensors of the call.
            moving: slots of inputs and results, whose addresses change with every call; the others rarely change.
            zero_bytes: size of the memory that is cleared before the first launch.

        Raises:
            UnsupportedKernel: a kernel needs scratch memory, or Triton passes it unknown arguments.
        """
        self._driver = driver
        self._lock = threading.Lock()
        self._zero_bytes = zero_bytes
        self._compiled = [record.compiled for record in records]  # keeps the machine code loaded
        self._slots = (ctypes.c_uint64 * max(num_slots, 1))()
        self._fill = struct.Struct(f"{num_slots}Q").pack_into
        self._addresses: list[int] = []
        self._fixed_slots = [place for place in range(num_slots) if place not in moving]
        self._fixed_addresses: list[int] = []
        self._zeros_at = -1
        self._tensor_maps: list[list[Any]] = []
        self._memory: list[Any] = []  # keeps the arguments in place
        self._kernels = [self._bind(record) for record in records]
        self._context = driver.current_context()
        self._updates: list[Callable[[], int]] = []
        self._moving_updates: list[Callable[[], int]] = []
        self._graph = ctypes.c_void_p()
        self._executable = ctypes.c_void_p()
        self._graph_launch: Callable[..., int] | None = None
        self._moves = [bool(moving & set(record.places)) for record in records]
        self._after = [record.after for record in records]

    def start(self, addresses: list[int], stream: int, zeros: int, *, is_capturing: bool) -> None:
        """Launch all kernels on a stream.

        Args:
            addresses: one per slot.
            stream: a raw stream handle.
            zeros: address of the memory that is cleared first.
            is_capturing: whether the stream is being captured, so that no graph can be launched into it.
        """
        driver = self._driver
        with self._lock:
            before, self._addresses = self._addresses, []  # stays empty if a driver call below fails
            if addresses != before:
                self._fill(self._slots, 0, *addresses)
                for tensor_map in self._tensor_maps:
                    address = addresses[tensor_map[0]]
                    if tensor_map[2] != address:
                        driver.check(driver.replace_address(tensor_map[1], ctypes.c_void_p(address)), "TMA address")
                        tensor_map[2] = address
            if is_capturing:
                self._start_one_by_one(stream, zeros)  # the graph keeps its old arguments
                return
            if self._graph_launch is None:
                self._graph_launch = self._instantiate(zeros)
            elif addresses != before:
                self._update(addresses, zeros, is_complete=not before)
            launch = functools.partial(self._graph_launch, ctypes.c_void_p(stream))
            status = launch()
            if status != SUCCESS:
                self._retry(launch, status)
            self._addresses = addresses

    def _update(self, addresses: list[int], zeros: int, *, is_complete: bool) -> None:
        """Update the kernels of the graph: only those that access inputs or results, or all if the workspace moved."""
        fixed = [addresses[place] for place in self._fixed_slots]
        is_complete = is_complete or fixed != self._fixed_addresses
        for update in self._updates if is_complete else self._moving_updates:
            status = update()
            if status != SUCCESS:
                self._retry(update, status)
        self._fixed_addresses = fixed
        if self._zero_bytes and zeros != self._zeros_at:
            self._memset.address = zeros
            self._retry(self._update_memset, self._update_memset())
            self._zeros_at = zeros

    def _retry(self, function: Callable[[], int], status: int) -> None:
        """Repeat a driver call if it failed because this thread had no CUDA context; raise if it failed otherwise."""
        if status == INVALID_CONTEXT:
            self._driver.set_context(self._context)
            status = function()
        self._driver.check(status, "launch of recorded kernels")

    def _start_one_by_one(self, stream: int, zeros: int) -> None:
        """Launch the kernels one by one."""
        driver, handle = self._driver, ctypes.c_void_p(stream)
        if self._zero_bytes:
            words = ctypes.c_size_t(self._zero_bytes // 4)
            driver.check(driver.memset(ctypes.c_uint64(zeros), 0, words, handle), "cuMemsetD32Async")
        for kernel in self._kernels:
            function, parameters = ctypes.c_void_p(kernel.function), ctypes.c_void_p(kernel.parameters)
            sizes = (*kernel.grid, *kernel.block, kernel.shared_bytes)
            driver.check(driver.launch(function, *sizes, handle, parameters, None), "cuLaunchKernel")

    def _instantiate(self, zeros: int) -> Callable[..., int]:
        """Create the graph with the current arguments, and return the function that launches it."""
        driver = self._driver
        graph, executable = self._graph, self._executable  # kept, because updates refer to the graph's nodes
        driver.check(driver.create_graph(ctypes.byref(graph), 0), "cuGraphCreate")

        def add(function: Callable[..., int], after: Sequence[ctypes.c_void_p], *arguments: Any) -> ctypes.c_void_p:
            node = ctypes.c_void_p()
            before = (ctypes.c_void_p * max(len(after), 1))(*[other.value for other in after])
            count = ctypes.c_size_t(len(after))
            driver.check(function(ctypes.byref(node), graph, before, count, *arguments), "CUDA graph")
            return node

        first: list[ctypes.c_void_p] = []
        nodes: list[ctypes.c_void_p] = []
        if self._zero_bytes:
            self._memset = MemsetNode(zeros, 0, 0, 4, self._zero_bytes // 4, 1)
            self._zeros_at = zeros
            cleared = add(driver.add_memset, (), ctypes.byref(self._memset), self._context)
            first.append(cleared)
            arguments = (executable, cleared, ctypes.byref(self._memset), self._context)
            self._update_memset = functools.partial(driver.update_memset, *arguments)
        for kernel, moves, after in zip(self._kernels, self._moves, self._after, strict=True):
            node = add(driver.add_kernel, [nodes[index] for index in after] or first, ctypes.byref(kernel))
            nodes.append(node)
            update = functools.partial(driver.update_kernel, executable, node, ctypes.byref(kernel))
            self._updates.append(update)
            if moves:
                self._moving_updates.append(update)
        status = driver.instantiate(ctypes.byref(executable), graph, ctypes.c_ulonglong(0))
        driver.check(status, "cuGraphInstantiateWithFlags")
        self._fixed_addresses = [int(self._slots[place]) for place in self._fixed_slots]
        return functools.partial(driver.launch_graph, executable)

    def __del__(self) -> None:
        # At exit, the driver frees graphs itself, and may be unloaded before Python deletes this object.
        if getattr(self, "_graph_launch", None) is not None and not sys.is_finalizing():
            self._driver.destroy_executable(self._executable)
            self._driver.destroy_graph(self._graph)

    def _bind(self, record: LaunchRecord) -> KernelNode:
        compiled = record.compiled
        metadata = compiled.metadata
        if metadata.global_scratch_size or metadata.profile_scratch_size or metadata.num_ctas != 1:
            raise UnsupportedKernel(f"{compiled.name}: scratch memory or clusters")
        if metadata.launch_cooperative_grid or metadata.launch_pdl:
            raise UnsupportedKernel(f"{compiled.name}: launch attributes")
        declared = parameters_of(compiled)
        addresses: list[int] = []

        def add_constant(value: int | float) -> None:
            size, is_float = _next(declared, len(addresses), compiled)
            kinds = _FLOATS if is_float or isinstance(value, float) else _INTEGERS
            constant = kinds[size](value)
            self._memory.append(constant)
            addresses.append(ctypes.addressof(constant))

        maps = iter(metadata.tensordesc_meta or ())
        for descriptor, place in zip(record.descriptors, record.places, strict=False):
            if _next(declared, len(addresses), compiled).size != TENSOR_MAP_BYTES:
                raise UnsupportedKernel(f"{compiled.name}: a descriptor that is no tensor map")
            memory = ctypes.create_string_buffer(TENSOR_MAP_BYTES + TENSOR_MAP_ALIGNMENT)
            self._memory.append(memory)
            address = -(-ctypes.addressof(memory) // TENSOR_MAP_ALIGNMENT) * TENSOR_MAP_ALIGNMENT
            base = descriptor.base.data_ptr()
            self._encode(address, base, descriptor, next(maps))
            self._tensor_maps.append([place, ctypes.c_void_p(address), base])
            addresses.append(address)
            for number in (*descriptor.shape, *descriptor.strides):
                add_constant(number)
        first_slot = ctypes.addressof(self._slots)
        for place in record.places[len(record.descriptors) :]:
            _next(declared, len(addresses), compiled)
            addresses.append(first_slot + 8 * place)
        signature = list(compiled.src.signature.values())  # tensors may be grouped: values are counted from the end
        types = signature[len(signature) - len(record.values) :]
        for kind, value in zip(types, record.values, strict=True):
            for each_kind, each_value in _flattened(kind, value):
                if each_kind != "constexpr":
                    add_constant(each_value)
        unused = declared[len(addresses) :]  # pointers to scratch memory, which this kernel does not use
        if any(parameter.size != 8 for parameter in unused) or len(unused) > 2:
            raise UnsupportedKernel(f"{compiled.name}: {len(unused)} parameters are not known")
        null = ctypes.c_uint64()
        parameters = (ctypes.c_void_p * len(declared))(*addresses, *[ctypes.addressof(null)] * len(unused))
        self._memory += [null, parameters]
        return KernelNode(
            compiled.function,
            (record.programs, 1, 1),
            (32 * metadata.num_warps, 1, 1),
            metadata.shared,
            ctypes.addressof(parameters),
            None,
            None,
            None,
        )

    def _encode(self, address: int, base: int, descriptor: Any, meta: Any) -> None:
        """Encode a TMA descriptor as Triton does: innermost dimension first, strides in bytes."""
        rank, size = len(descriptor.shape), meta["elem_size"]
        dtype = TMA_HOST_DTYPES.get(meta["elem_type"], meta["elem_type"])
        shape = (ctypes.c_uint64 * rank)(*reversed(descriptor.shape))
        strides = (ctypes.c_uint64 * rank)(*[size * stride for stride in reversed(descriptor.strides[:-1])])
        box = (ctypes.c_uint32 * rank)(*reversed(meta["block_size"]))
        steps = (ctypes.c_uint32 * rank)(*[1] * rank)
        if meta["fp4_padded"] or descriptor.padding != "zero" or meta.get("is_im2col"):
            raise UnsupportedKernel("a descriptor with unusual options")
        status = self._driver.encode_tensor_map(
            ctypes.c_void_p(address),
            dtype,
            rank,
            ctypes.c_void_p(base),
            shape,
            strides,
            box,
            steps,
            0,
            meta["swizzle"],
            L2_PROMOTION_128B,
            0,
        )
        self._driver.check(status, "cuTensorMapEncodeTiled")


def _next(declared: list[Parameter], index: int, compiled: CompiledKernel) -> Parameter:
    if index >= len(declared):
        raise UnsupportedKernel(f"{compiled.name}: expected more than {len(declared)} parameters")
    return declared[index]


def _flattened(kind: Any, value: Any) -> list[tuple[Any, Any]]:
    """Return pairs of type and value: one for an argument, one for each entry of nested tuples."""
    if isinstance(kind, tuple):
        return [pair for each in zip(kind, value, strict=True) for pair in _flattened(*each)]
    return [(kind, value)]
