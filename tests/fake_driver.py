"""A fake of the CUDA driver (`backends.gpu.driver.Driver`) whose kernels are Python functions.

Like the real driver, it copies the arguments of a kernel when a node is added or updated; later changes have no effect.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sparge.backends.gpu.driver import INVALID_CONTEXT, SUCCESS

Arguments = list[bytes]
Kernel = Callable[[int, Arguments], None]
"""Called with the number of programs and the bytes of each parameter."""


@dataclass
class Graph:
    nodes: dict[int, Callable[[], None]] = field(default_factory=dict)
    after: dict[int, set[int]] = field(default_factory=dict)

    def in_order(self) -> list[int]:
        """Return the nodes in a topological order that runs the last-added nodes as early as possible."""
        left, done = list(reversed(self.nodes)), []
        while left:
            ready = next(node for node in left if self.after[node] <= set(done))
            left.remove(ready)
            done.append(ready)
        return done


class FakeDriver:
    """Run kernels registered with `add_function` as soon as they are launched.

    With ``reorders``, nodes that do not depend on each other do not run in the order in which they were added.
    """

    def __init__(self, *, reorders: bool = True) -> None:
        self.reorders = reorders
        self.handles = itertools.count(1)
        self.functions: dict[int, tuple[Kernel, Sequence[int]]] = {}
        self.graphs: dict[int, Graph] = {}
        self.updates = 0
        self.graph_launches = 0
        self.has_context = True

    def add_function(self, kernel: Kernel, sizes: Sequence[int]) -> int:
        """Return a handle of a kernel whose parameters have these sizes in bytes."""
        handle = next(self.handles)
        self.functions[handle] = kernel, sizes
        return handle

    def _bind_kernel(self, node: Any) -> Callable[[], None]:
        kernel, sizes = self.functions[node.function]
        addresses = (ctypes.c_void_p * len(sizes)).from_address(node.parameters)
        arguments = [ctypes.string_at(address, size) for address, size in zip(addresses, sizes, strict=True)]
        programs = node.grid[0]
        return lambda: kernel(programs, arguments)

    def encode_tensor_map(self, tensor_map: Any, _dtype: int, _rank: int, base: Any, *_: Any) -> int:
        return self.replace_address(tensor_map, base)

    def replace_address(self, tensor_map: Any, address: Any) -> int:
        ctypes.c_uint64.from_address(tensor_map.value).value = address.value
        return SUCCESS

    def create_graph(self, graph: Any, _flags: int) -> int:
        graph._obj.value = next(self.handles)
        self.graphs[graph._obj.value] = Graph()
        return SUCCESS

    def _add(self, node: Any, graph: Any, after: Any, count: Any, run: Callable[[], None]) -> int:
        node._obj.value = next(self.handles)
        self.graphs[graph.value].nodes[node._obj.value] = run
        self.graphs[graph.value].after[node._obj.value] = set(after[: count.value])
        return SUCCESS

    def add_kernel(self, node: Any, graph: Any, after: Any, count: Any, kernel: Any) -> int:
        return self._add(node, graph, after, count, self._bind_kernel(kernel._obj))

    def add_memset(self, node: Any, graph: Any, after: Any, count: Any, memset: Any, _context: Any) -> int:
        return self._add(node, graph, after, count, self._bind_memset(memset._obj))

    def _bind_memset(self, memset: Any) -> Callable[[], None]:
        address, size = memset.address, memset.element_bytes * memset.width
        return lambda: ctypes.memset(address, 0, size) and None

    def instantiate(self, executable: Any, graph: Any, _flags: Any) -> int:
        executable._obj.value = graph.value
        return SUCCESS

    def update_kernel(self, executable: Any, node: Any, kernel: Any) -> int:
        self.updates += 1
        self.graphs[executable.value].nodes[node.value] = self._bind_kernel(kernel._obj)
        return SUCCESS

    def update_memset(self, executable: Any, node: Any, memset: Any, _context: Any) -> int:
        self.graphs[executable.value].nodes[node.value] = self._bind_memset(memset._obj)
        return SUCCESS

    def launch_graph(self, executable: Any, _stream: Any) -> int:
        if not self.has_context:
            return INVALID_CONTEXT
        self.graph_launches += 1
        graph = self.graphs[executable.value]
        for node in graph.in_order() if self.reorders else graph.nodes:
            graph.nodes[node]()
        return SUCCESS

    def destroy_graph(self, graph: Any) -> int:
        self.graphs.pop(graph.value)
        return SUCCESS

    def destroy_executable(self, _executable: Any) -> int:
        return SUCCESS

    def current_context(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(1)

    def set_context(self, _context: ctypes.c_void_p) -> None:
        self.has_context = True

    def check(self, status: int, what: str) -> None:
        assert status == SUCCESS, (status, what)
