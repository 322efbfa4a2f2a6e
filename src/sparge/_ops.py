"""The namespace of this library's torch operators: ``torch.ops.sparge``.

The namespace is the name of the package, so a copy of the package under another name (a Hugging Face Hub kernel, see
docs/hub.md) registers its own operators. The Hub's builder replaces this module with one that defines the same two
names.
"""

from __future__ import annotations

import torch

ops = getattr(torch.ops, __name__.rpartition(".")[0].replace(".", "_"))


def add_op_namespace_prefix(op_name: str) -> str:
    """Return the full name of an operator: "sparge::attention"."""
    return f"{ops.name}::{op_name}"
