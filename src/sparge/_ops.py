"""Namespace of this library's operators in torch: ``torch.ops.sparge``.

The namespace is the name of the package, so that a copy under another name (a kernel of the Hugging Face hub, see
docs/hub.md) has operators of its own. The hub's builder puts a module with these two names in place of this one.
"""

from __future__ import annotations

import torch

ops = getattr(torch.ops, __name__.rpartition(".")[0].replace(".", "_"))


def add_op_namespace_prefix(op_name: str) -> str:
    """Return the full name of an operator: "sparge::attention"."""
    return f"{ops.name}::{op_name}"
