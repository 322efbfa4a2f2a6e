"""Importing sparge needs no optional dependency, has no side effect and loads few modules."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import sparge

SOURCE = Path(sparge.__file__).parent
MAX_MODULES = 40
OPTIONAL = ("triton", "matplotlib", "rich", "typer")

BLOCK = f"""
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {OPTIONAL}:
            raise ImportError(f"{{name}} is blocked")

sys.meta_path.insert(0, Blocked())
"""


def run(program: str) -> Any:
    """What a fresh Python prints as its last line, read as JSON."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_works_without_optional_dependencies() -> None:
    loaded, errors = run(
        BLOCK
        + f"""
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
    )
    assert loaded == []
    *exact, eight_bit, _ = errors
    assert len(errors) == 5, "the block works"
    assert max(exact) < 2e-6
    assert eight_bit < 0.3


def test_leaves_the_process_alone() -> None:
    before, after, loaded = run(
        """
import json, logging, os, sys, threading, warnings
import torch

def state():
    return [
        torch.get_num_threads(),
        torch.get_num_interop_threads(),
        str(torch.get_default_dtype()),
        str(torch.get_default_device()),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.cuda.is_initialized(),
        int(torch.initial_seed() == seed),
        torch.get_rng_state().sum().item(),
        len(logging.getLogger().handlers),
        logging.getLogger().level,
        len(warnings.filters),
        threading.active_count(),
        dict(os.environ),
        os.getcwd(),
    ]

seed = torch.initial_seed()
before = state()
known = set(sys.modules)
import sparge
print(json.dumps([before, state(), sorted(set(sys.modules) - known)]))
"""
    )
    assert before == after
    assert before[7] is False
    ours = {name for name in loaded if name.partition(".")[0] == "sparge"}
    assert "sparge.api" in ours
    loaded_backends = {name for name in ours if name.startswith("sparge.backends.")}
    assert loaded_backends == {"sparge.backends.base", "sparge.backends.output_layout"}
    assert not any(name.startswith(("sparge.evaluate", "sparge.cli", "sparge.bench", "sparge.demo")) for name in ours)
    assert not {name.partition(".")[0] for name in loaded} & {*OPTIONAL, "numpy", "PIL", "pandas"}


def test_prints_and_warns_nothing() -> None:
    program = "import torch, sparge"
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_imports_few_modules() -> None:
    """A module costs about 1 ms to import, so their number bounds the time without measuring it."""
    ours, others = run(
        """
import json, sys, torch
known = set(sys.modules)
import sparge
loaded = set(sys.modules) - known
ours = {name for name in loaded if name.partition(".")[0] == "sparge"}
print(json.dumps([sorted(ours), sorted(loaded - ours)]))
"""
    )
    assert len(ours) <= MAX_MODULES, ours
    assert others == [], "torch has imported every other module that sparge needs"


def test_engines_are_imported_in_their_own_modules_alone() -> None:
    """vLLM runs the plug-ins of every process: they import no engine's classes, and no model of a framework."""
    loaded = run(
        """
import json, sys, torch, sparge
import sparge.serving, sparge.serving.sparse_attn
print(json.dumps(sorted(sys.modules)))
"""
    )
    assert not {name.partition(".")[0] for name in loaded} & {
        "vllm",
        "vllm_omni",
        "transformers",
        "diffusers",
        *OPTIONAL,
    }
    for path in SOURCE.rglob("*.py"):
        own = {"serving/vllm.py", "serving/vllm_omni.py"}
        if str(path.relative_to(SOURCE)) in own:
            continue
        top = ast.parse(path.read_text()).body
        names = {alias.name for node in top if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module or "" for node in top if isinstance(node, ast.ImportFrom)}
        assert not {name.partition(".")[0] for name in names} & {"vllm", "vllm_omni"}, path
