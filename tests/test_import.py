"""Importing sparge needs no optional dependencies, has no side effects and loads few modules."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import sparge

SOURCE = Path(sparge.__file__).parent
MAX_MODULES = 40
OPTIONAL = ("triton", "matplotlib", "rich", "typer")

BLOCK_OPTIONAL = f"""
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {OPTIONAL}:
            raise ImportError(f"{{name}} is blocked")

sys.meta_path.insert(0, Blocked())
"""


def test_works_without_optional_dependencies() -> None:
    program = f"""{BLOCK_OPTIONAL}
import json, torch, sparge
errors = []
for options in ({{"backend": "torch"}}, {{"backend": "reference"}}, {{}}, {{"quantization": "int8_fp8"}}):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 300, 32) for _ in range(3))
    out = sparge.attention(q, k, v, is_causal=True, topk=1.0, **options)
    exact = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    errors.append(float((out - exact).abs().max()))
mask = sparge.predict(q, k, topk=0.5)
sparge.block_sparse_attention(q, k, v, mask)
try:
    import triton
except ImportError:
    errors.append(0.0)
print(json.dumps([sorted(set(sys.modules) & set({OPTIONAL})), errors]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    loaded, errors = json.loads(done.stdout.splitlines()[-1])
    assert loaded == []
    *exact, quantized, _ = errors
    assert len(errors) == 5, "importing a blocked package raises"
    assert max(exact) < 2e-6
    assert quantized < 0.3


@pytest.fixture(scope="module")
def imported() -> dict[str, Any]:
    """Import torch, sparge and the plug-ins of serving engines in a fresh Python process; return its state after each.

    Warnings are errors in that process, and it prints nothing but the JSON.
    """
    program = """
import json, logging, os, sys, threading, warnings
import torch

def state():
    return {
        "threads": torch.get_num_threads(),
        "interop threads": torch.get_num_interop_threads(),
        "dtype": str(torch.get_default_dtype()),
        "device": str(torch.get_default_device()),
        "gradients": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "CUDA is initialized": torch.cuda.is_initialized(),
        "seed": torch.initial_seed(),
        "random state": torch.get_rng_state().sum().item(),
        "log handlers": len(logging.getLogger().handlers),
        "log level": logging.getLogger().level,
        "warning filters": len(warnings.filters),
        "active threads": threading.active_count(),
        "environment": dict(os.environ),
        "folder": os.getcwd(),
    }

result = {"before": state()}
known = set(sys.modules)
import sparge
result |= {"after": state(), "loaded": sorted(set(sys.modules) - known)}
import sparge.serving, sparge.serving.sparse_attn
print(json.dumps(result | {"with plug-ins": sorted(sys.modules)}))
"""
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_import_has_no_side_effects(imported: dict[str, Any]) -> None:
    assert imported["before"] == imported["after"]
    assert imported["before"]["CUDA is initialized"] is False


def test_import_loads_few_modules(imported: dict[str, Any]) -> None:
    """A module takes about 1 ms to import, so the number of modules bounds the import time without measuring it."""
    ours = {name for name in imported["loaded"] if name.partition(".")[0] == "sparge"}
    assert set(imported["loaded"]) == ours, "torch has imported every other module that sparge needs"
    assert len(ours) <= MAX_MODULES, ours
    assert "sparge.api" in ours
    loaded_backends = {name for name in ours if name.startswith("sparge.backends.")}
    assert loaded_backends == {"sparge.backends.base", "sparge.backends.output_layout"}
    assert not any(name.startswith(("sparge.evaluate", "sparge.cli", "sparge.bench", "sparge.demo")) for name in ours)


def test_only_the_engine_integrations_import_the_engines(imported: dict[str, Any]) -> None:
    """vLLM loads the plug-ins in every process, so they import no engine and no framework."""
    engines = {"vllm", "vllm_omni"}
    packages = {name.partition(".")[0] for name in imported["with plug-ins"]}
    assert not packages & {*engines, "transformers", "diffusers", *OPTIONAL}
    for path in SOURCE.rglob("*.py"):
        plug_ins = {"serving/vllm.py", "serving/vllm_omni.py"}
        if str(path.relative_to(SOURCE)) in plug_ins:
            continue
        top = ast.parse(path.read_text()).body
        names = {alias.name for node in top if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module or "" for node in top if isinstance(node, ast.ImportFrom)}
        assert not {name.partition(".")[0] for name in names} & engines, path
