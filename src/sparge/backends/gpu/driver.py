"""Launch all kernels of a call as one CUDA graph, with arguments laid out in memory beforehand.

A launch through Triton inspects every argument and takes 7 to 14 us, and a launch through the driver takes 4 to 5 us.
Launching a graph takes 4 us for any number of kernels, plus 1 us for each kernel whose arguments have changed since the
last launch. The memory contains:

    slots               one 64-bit address per tensor of a call, shared by all of its launches
    parameters          for each launch, pointers to its arguments: slots, tensor maps and numbers
    tensor maps         encoded TMA descriptors; if a tensor moves, only the address inside is replaced
"""

from __future__ import annotations

import ctypes
import functools
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
"""Data types of tensor maps that Triton and the driver number differently: {Triton's number: the driver's number}."""
MAX_SCRATCH_POINTERS = 4
"""Upper bound, for all releases of Triton, on the scratch-memory pointers that it appends to a kernel's parameters."""


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
    """The functions of libcuda that a replay calls. The attributes are C functions, which return a status."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
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


class LaunchRecord(NamedTuple):
    """One launch of a recorded call.

    Attributes:
        compiled: the kernel.
        programs: size of the one-dimensional grid.
        descriptors: Gluon's TMA descriptors.
        slots: the slot of each tensor, starting with the tensors of the descriptors.
        values: strides, numbers and compile-time values, in the order of the kernel's signature after its tensors.
        after: indices of the launches that must complete before this one begins.
    """

    compiled: CompiledKernel
    programs: int
    descriptors: list[Any]
    slots: list[int]
    values: list[Any]
    after: tuple[int, ...]


class TensorMap:
    """An encoded TMA descriptor in memory.

    Attributes:
        slot, base: the slot and the current address of the tensor.
        pointer: the address of the encoded descriptor.
    """

    def __init__(self, descriptor: Any, meta: Any, slot: int, driver: Driver) -> None:
        """Encode a descriptor as Triton does: innermost dimension first, strides in bytes."""
        self.slot, self.base = slot, descriptor.base.data_ptr()
        self._memory = ctypes.create_string_buffer(TENSOR_MAP_BYTES + TENSOR_MAP_ALIGNMENT)
        aligned = -(-ctypes.addressof(self._memory) // TENSOR_MAP_ALIGNMENT) * TENSOR_MAP_ALIGNMENT
        self.pointer = ctypes.c_void_p(aligned)
        rank, size = len(descriptor.shape), meta["elem_size"]
        status = driver.encode_tensor_map(
            self.pointer,
            TMA_HOST_DTYPES.get(meta["elem_type"], meta["elem_type"]),
            rank,
            ctypes.c_void_p(self.base),
            (ctypes.c_uint64 * rank)(*reversed(descriptor.shape)),
            (ctypes.c_uint64 * rank)(*[size * stride for stride in reversed(descriptor.strides[:-1])]),
            (ctypes.c_uint32 * rank)(*reversed(meta["block_size"])),
            (ctypes.c_uint32 * rank)(*[1] * rank),  # steps between elements
            0,
            meta["swizzle"],
            L2_PROMOTION_128B,
            0,
        )
        driver.check(status, "cuTensorMapEncodeTiled")


class BoundLaunches:
    """Launches with arguments in memory. `start` stores the addresses of a call's tensors and launches all kernels.

    The first slots are for inputs and results, whose addresses change with every call. The other slots are for buffers
    in a workspace, which rarely moves, and for constants. A lock guards the memory, so that several threads may start
    the same launches on different tensors.
    """

    def __init__(
        self, records: Sequence[LaunchRecord], num_slots: int, num_moving: int, zero_bytes: int, driver: Driver
    ) -> None:
        """Lay out the arguments.

        Args:
            num_slots: number of tensors of the call.
            num_moving: number of inputs and results.
            zero_bytes: size of the memory that is cleared before the first launch. It starts at slot ``num_moving``.
        """
        self._driver = driver
        self._lock = threading.Lock()
        self._num_moving = num_moving
        self._zero_bytes = zero_bytes
        self._slots = (ctypes.c_uint64 * max(num_slots, 1))()
        self._fill = struct.Struct(f"{num_slots}Q").pack_into
        self._addresses: list[int] = []
        self._tensor_maps: list[TensorMap] = []
        self._memory: list[Any] = [record.compiled for record in records]  # references to machine code and arguments
        self._kernels = [
            (self._bind(record), record.after, any(slot < num_moving for slot in record.slots)) for record in records
        ]
        self._context = driver.current_context()
        self._updates: list[Callable[[], int]] = []
        self._moving_updates: list[Callable[[], int]] = []
        self._graph = ctypes.c_void_p()
        self._executable = ctypes.c_void_p()
        self._graph_launch: Callable[..., int] | None = None

    def start(self, addresses: list[int], stream: int) -> None:
        """Launch all kernels.

        Args:
            addresses: one per slot.
            stream: the raw handle of a stream that is not being captured.
        """
        driver, moving = self._driver, self._num_moving
        with self._lock:
            before, self._addresses = self._addresses, []  # stays empty if a driver call below fails
            if addresses != before:
                self._fill(self._slots, 0, *addresses)
                for tensor_map in self._tensor_maps:
                    base = addresses[tensor_map.slot]
                    if tensor_map.base != base:
                        driver.check(driver.replace_address(tensor_map.pointer, ctypes.c_void_p(base)), "TMA address")
                        tensor_map.base = base
            updates: Sequence[Callable[[], int]] = ()
            if self._graph_launch is None:
                self._graph_launch = self._instantiate()
            elif addresses[moving:] != before[moving:]:
                updates = self._updates
            elif addresses != before:
                updates = self._moving_updates
            self._call([*updates, functools.partial(self._graph_launch, ctypes.c_void_p(stream))])
            self._addresses = addresses

    def _call(self, calls: Sequence[Callable[[], int]]) -> None:
        """Call the driver. If a call fails because this thread has no CUDA context, set the context and repeat it."""
        for call in calls:
            status = call()
            if status == INVALID_CONTEXT:
                self._driver.set_context(self._context)
                status = call()
            if status != SUCCESS:
                self._driver.check(status, "launch of recorded kernels")

    def _instantiate(self) -> Callable[..., int]:
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
            # Locals, because a closure over self would keep it alive until the garbage collector runs
            slots, start, context = self._slots, self._num_moving, self._context
            memset = MemsetNode(slots[start], 0, 0, 4, self._zero_bytes // 4, 1)
            first.append(add(driver.add_memset, (), ctypes.byref(memset), context))

            def update_memset() -> int:
                memset.address = slots[start]
                return driver.update_memset(executable, first[0], ctypes.byref(memset), context)

            self._updates.append(update_memset)
        for kernel, after, moves in self._kernels:
            node = add(driver.add_kernel, [nodes[index] for index in after] or first, ctypes.byref(kernel))
            nodes.append(node)
            update = functools.partial(driver.update_kernel, executable, node, ctypes.byref(kernel))
            self._updates.append(update)
            if moves:
                self._moving_updates.append(update)
        status = driver.instantiate(ctypes.byref(executable), graph, ctypes.c_ulonglong(0))
        driver.check(status, "cuGraphInstantiateWithFlags")
        return functools.partial(driver.launch_graph, executable)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # At exit, the driver frees graphs itself, and may be unloaded before Python deletes this object.
        if getattr(self, "_graph_launch", None) is not None and not is_finalizing():
            self._driver.destroy_executable(self._executable)
            self._driver.destroy_graph(self._graph)

    def _bind(self, record: LaunchRecord) -> KernelNode:
        """Lay out the arguments of a launch in memory, and return the node that points to them."""
        compiled, metadata = record.compiled, record.compiled.metadata
        addresses: list[int] = []

        def add_number(value: int | float, kind: str) -> None:
            # The driver reads only as many low bytes of an integer as the kernel declares.
            number = ctypes.c_float(value) if kind == "fp32" else ctypes.c_int64(int(value))
            self._memory.append(number)
            addresses.append(ctypes.addressof(number))

        for descriptor, meta, slot in zip(
            record.descriptors, metadata.tensordesc_meta or (), record.slots, strict=False
        ):
            tensor_map = TensorMap(descriptor, meta, slot, self._driver)
            self._tensor_maps.append(tensor_map)
            addresses.append(tensor_map.pointer.value or 0)
            for number in (*descriptor.shape, *descriptor.strides):
                add_number(number, "i64")
        addresses += [ctypes.addressof(self._slots) + 8 * slot for slot in record.slots[len(record.descriptors) :]]
        signature = list(compiled.src.signature.values())  # tensors may be grouped: values are counted from the end
        for kind, value in zip(signature[len(signature) - len(record.values) :], record.values, strict=True):
            for each_kind, each_value in _flattened(kind, value):
                if each_kind != "constexpr":
                    add_number(each_value, each_kind)
        null = ctypes.c_uint64()  # the kernel uses no scratch memory
        addresses += [ctypes.addressof(null)] * MAX_SCRATCH_POINTERS
        parameters = (ctypes.c_void_p * len(addresses))(*addresses)
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


def _flattened(kind: Any, value: Any) -> list[tuple[Any, Any]]:
    """Return the (type, value) pair of an argument, or one pair for each entry of an argument with nested tuples."""
    if isinstance(kind, tuple):
        return [pair for each in zip(kind, value, strict=True) for pair in _flattened(*each)]
    return [(kind, value)]
