"""The worker is a program for processes that compile kernels; this one may be interpreting them."""

from __future__ import annotations

import importlib.util

collect_ignore = ["worker.py"]
if importlib.util.find_spec("triton") is None:
    collect_ignore.append("test_compile.py")
