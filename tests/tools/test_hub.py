"""The kernel for the Hugging Face Hub: the output of tools/hub/build.py, loaded offline by the Hub's client."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import sparge
from sparge.options.common import BACKENDS
from test_readme import REPOSITORY, Run, run

__all__ = ["run"]  # a fixture

HUB = REPOSITORY / "tools" / "hub"
SOURCE = Path(sparge.__file__).parent
needs_client = pytest.mark.skipif(
    importlib.util.find_spec("kernels") is None, reason="expected the package kernels (requirements-dev.txt)"
)


def load(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def builder() -> ModuleType:
    return load(HUB / "build.py", "hub_build")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the build in ``SPARGE_KERNEL`` (set by `make kernel`), or a new build that needs no other packages."""
    if "SPARGE_KERNEL" in os.environ:
        return Path(os.environ["SPARGE_KERNEL"])
    folder = tmp_path_factory.mktemp("repository")
    command = [sys.executable, "-I", "-S", HUB / "build.py", folder, "--source", "someone/sparge"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    variant = folder / "build" / "torch-universal"
    assert done.stdout == f"{variant}: {identity_of(variant)}\n{folder / 'torch-ext' / 'sparge'}\n"
    return folder


@pytest.fixture(scope="module")
def variant(repository: Path) -> Path:
    return repository / "build" / "torch-universal"


@pytest.fixture(scope="module")
def kernel(repository: Path) -> ModuleType:
    from kernels import get_local_kernel

    return get_local_kernel(repository)


def identity_of(variant: Path) -> str:
    return json.loads((variant / "metadata.json").read_text())["id"]


class TestRelativeImports:
    """Imports of the package become relative; nothing else changes."""

    @pytest.mark.parametrize(
        ("module", "is_package", "text", "expected"),
        [
            (
                "sparge.api",
                False,
                "from sparge.call import Call, x as y\n",
                "from .call import Call, x as y\n",
            ),
            ("sparge.api", False, "from sparge import ops, decide\n", "from . import ops, decide\n"),
            ("sparge", True, "from sparge.api import attention\n", "from .api import attention\n"),
            ("sparge.backends.torch", True, "from sparge.backends import base\n", "from .. import base\n"),
            ("sparge.backends.torch", True, "from sparge.backends.torch.dense import f\n", "from .dense import f\n"),
            ("sparge.backends.gpu.launch", False, "from sparge.options import X\n", "from ...options import X\n"),
            ("sparge.backends.base", False, "import sparge.options as c\n", "from .. import options as c\n"),
            ("sparge.a", False, "import sparge.b.c as d; x = 1\n", "from .b import c as d; x = 1\n"),
            ("sparge.a", False, "from sparge.b import (\n    c,  # why\n)\n", "from .b import (\n    c,  # why\n)\n"),
            ("sparge.a", False, "def f():\n    from sparge.b import c\n", "def f():\n    from .b import c\n"),
            (
                "sparge.a",
                False,
                "if TYPE_CHECKING:\n    from sparge.b import c\n",
                "if TYPE_CHECKING:\n    from .b import c\n",
            ),
            ("sparge.a", False, "if 'ä': from sparge.b import c\n", "if 'ä': from .b import c\n"),
            ("sparge.a", False, "import torch, math\nfrom spargex import sparge_y\n", "same"),
            (
                "sparge.a",
                False,
                '"""Of `sparge.b`.\n\n>>> from sparge import c\n"""\nx = "sparge runs dense"\n',
                "same",
            ),
            ("sparge.a", False, 'class A:\n    x: int\n    """sparge"""\n', "same"),
        ],
    )
    def test_imports(self, builder: ModuleType, module: str, is_package: bool, text: str, expected: str) -> None:
        assert builder.relative_imports(text, module, is_package=is_package) == (
            text if expected == "same" else expected
        )

    @pytest.mark.parametrize(
        "text",
        [
            "import sparge\n",
            "import sparge as s\n",
            "import sparge.options\n",
            "import torch, sparge.options as c\n",
            "from \\\n    sparge import ops\n",
            "f = torch.ops.sparge.attention\n",
            'x = importlib.import_module("sparge.policy")\n',
            'x = importlib.import_module(f"sparge.backends.{name}")\n',
            'x = Library("sparge", "DEF")\n',
            'register_fake("sparge::attend", f)\n',
            'register_fake(f"sparge::{name}", f)\n',
            "def f():\n    return sparge.attention\n",
        ],
    )
    def test_other_references_to_the_package_raise(self, builder: ModuleType, text: str) -> None:
        with pytest.raises(ValueError, match=r"sparge\.a, line \d: expected .*, got "):
            builder.relative_imports(text, "sparge.a")


class TestTree:
    def test_contains_every_backend(self, variant: Path) -> None:
        copied = {path.stem if path.is_file() else path.name for path in (variant / "backends").iterdir()}
        assert copied >= set(BACKENDS)

    def test_files_equal_the_library_except_for_imports(self, variant: Path) -> None:
        names = {path.relative_to(variant).as_posix() for path in variant.rglob("*.py")}
        generated = {"__init__.py"}
        assert generated < names
        changed = 0
        for name in names - generated:
            before, after = ((folder / name).read_text().splitlines() for folder in (SOURCE, variant))
            if name == "compat/__init__.py":  # the page contains a module that is not imported
                assert after == ast.get_docstring(ast.parse("\n".join(before)), clean=False).join(['"""'] * 2).split(
                    "\n"
                )
                continue
            for old, new in zip(before, after, strict=True):
                if old != new:
                    changed += 1
                    assert re.fullmatch(r"\s*from sparge[\w.]* import .*", old), f"{name}: {old}"
                    assert re.fullmatch(r"\s*from \.[\w.]* import .*", new), f"{name}: {new}"
        assert changed > 150

    def test_contains_no_models_commands_or_evaluations(self, variant: Path) -> None:
        outside = {
            "integrations",
            "calibration",
            "evaluate",
            "bench",
            "demo",
            "cli",
            "distributed",
            "serving",
            "console.py",
            "profile.py",
        }
        assert not outside & {path.name for path in variant.iterdir()}
        assert {path.name for path in (variant / "compat").iterdir()} == {"__init__.py", "flash_attention.py"}

    def test_needs_only_torch_and_triton(self, variant: Path) -> None:
        """The Hub's client also allows einops, helion and a few other packages, which are not needed."""
        roots = set()
        for path in variant.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    roots |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and not node.level:
                    roots.add(str(node.module).partition(".")[0])
        drawing, checking = {"matplotlib"}, {"typing_extensions"}  # for drawing masks; for type checkers
        assert roots - set(sys.stdlib_module_names) == {"torch", "triton"} | drawing | checking

    def test_contains_the_license(self, repository: Path) -> None:
        assert (repository / "LICENSE").read_text() == (REPOSITORY / "LICENSE").read_text()

    def test_id_depends_on_file_names(self, builder: ModuleType) -> None:
        files = {"a.py": "x", "b.py": "y"}
        others = [{"a.py": "x", "b.py": "z"}, {"a.py": "xb.py", "y": ""}, {"a.py": "x"}, {"a.py": "x", "c.py": "y"}]
        digests = {builder.digest_of(each) for each in (files, *others)}
        assert len(digests) == 5
        assert builder.digest_of(dict(reversed(files.items()))) in digests

    def test_new_build_replaces_the_old_build(self, builder: ModuleType, tmp_path: Path) -> None:
        builder.write(tmp_path / "folder", {"a.py": "old", "b/c.py": "left over"})
        builder.write(tmp_path / "folder", {"a.py": "new"})
        assert [path.name for path in (tmp_path / "folder").rglob("*")] == ["a.py"]
        assert (tmp_path / "folder" / "a.py").read_text() == "new"

    @needs_client
    @pytest.mark.skipif("SPARGE_KERNEL" in os.environ, reason="expected a build with its source")
    def test_source_for_the_hub_builder(self, repository: Path, variant: Path, tmp_path: Path) -> None:
        """The Hub's builder writes `_ops`; all other modules equal the tested build."""
        from kernels._rust import Backend, Build

        folder = repository / "torch-ext" / "sparge"
        assert Build.open(repository).general.backends == [Backend.CPU, Backend.CUDA]
        text = (repository / "build.toml").read_text()
        assert 'repo-id = "someone/sparge"' in text
        (tmp_path / "build.toml").write_text(text.replace('"cpu"', '"abacus"'))
        with pytest.raises(ValueError):
            Build.open(tmp_path)
        texts = [
            {path.relative_to(each).as_posix(): path.read_text() for path in each.rglob("*.py")}
            for each in (folder, variant)
        ]
        assert texts[1].pop("_ops.py")
        assert texts[0] == texts[1]
        theirs = """
import torch

ops = torch.ops._sparge_by_the_builder

def add_op_namespace_prefix(op_name):
    return f"_sparge_by_the_builder::{op_name}"
"""
        (folder / "_ops.py").write_text(theirs)
        with Seen() as seen:
            CALLS["causal"](load(folder / "__init__.py", "_sparge_source"))
        assert "_sparge_by_the_builder" in seen.namespaces

    @needs_client
    def test_client_reads_the_metadata_and_finds_the_digests(self, variant: Path) -> None:
        from kernels import Metadata
        from kernels._rust import Digest, DigestAlgorithm

        metadata = Metadata.read_from_file(variant / "metadata.json")
        assert (str(metadata.name), metadata.version, metadata.license) == ("sparge", 1, "apache-2.0")
        assert metadata.python_depends == []
        assert metadata.id.isidentifier()
        metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))


def tensors(length: int, *, kv_heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value with four heads of 32 channels."""
    generator = torch.Generator().manual_seed(length)
    query, key, value = (torch.randn(1, heads, length, 32, generator=generator) for heads in (4, kv_heads, kv_heads))
    return query, key, value


class Seen(TorchDispatchMode):
    """Record the namespaces of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.namespaces: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.namespaces.add(func.namespace)
        return func(*args, **(kwargs or {}))


def run_packed(library: Any, **options: Any) -> Any:
    query, key, value = (tensor[0].transpose(0, 1) for tensor in tensors(700))
    bounds = torch.tensor([0, 300, 700], dtype=torch.int32)
    return library.varlen_attention(query, key, value, bounds, bounds, backend="torch", return_lse=True, **options)


def run_with_mask(library: Any) -> Any:
    query, key, value = tensors(500, kv_heads=4)
    mask = library.predict(query, key, sparsity=library.TopCdf(0.7), backend="torch")
    return library.block_sparse_attention(query, key, value, mask, backend="torch"), mask.to_dense()


def run_attention(library: Any, **options: Any) -> Any:
    return library.attention(*tensors(700), enable_gqa=True, return_lse=True, **options)


CALLS: dict[str, Callable[[Any], Any]] = {
    "causal": lambda library: run_attention(library, topk=0.3, is_causal=True, backend="torch"),
    "means": lambda library: run_attention(library, topk=0.3, backend="torch"),
    "8 bits": lambda library: run_attention(library, topk=0.3, quantization="int8_fp8"),
    "reference": lambda library: run_attention(library, topk=0.3, backend="reference"),
    "below the crossover": lambda library: run_attention(library),
    "mask": run_with_mask,
    "packed": lambda library: run_packed(library, topk=0.3, causal=True),
}


@needs_client
class TestLoaded:
    """The library and its builds run in one process, return bitwise equal results, and share no state."""

    @pytest.mark.parametrize("name", CALLS)
    def test_same_bits_as_the_library_with_separate_operators(
        self, kernel: ModuleType, variant: Path, name: str
    ) -> None:
        kernel.reset_stats()
        sparge.reset_stats()
        with Seen() as seen:
            got = CALLS[name](kernel)
        assert seen.namespaces - {"aten", "prim"} == {identity_of(variant)}
        assert sparge.stats().calls == 0
        expected = CALLS[name](sparge)
        assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))
        assert kernel.stats().reasons == sparge.stats().reasons
        assert kernel.stats().density == sparge.stats().density

    def test_public_names(self, kernel: ModuleType) -> None:
        assert set(kernel.__all__) - set(sparge.__all__) == {"flash_attn_func", "flash_attn_varlen_func"}
        models = {"Policy", "Profile", "calibrate", "disable", "enable", "register", "replace_sdpa"}
        assert set(sparge.__all__) - set(kernel.__all__) == models
        assert all(hasattr(kernel, name) for name in kernel.__all__)
        assert kernel.__version__ == sparge.__version__

    def test_two_builds(self, kernel: ModuleType, builder: ModuleType, tmp_path: Path) -> None:
        from kernels import get_local_kernel

        shutil.copytree(SOURCE, tmp_path / "source", ignore=shutil.ignore_patterns("__pycache__"))
        (tmp_path / "source" / "_version.py").write_text('__version__ = "9.9"\n')
        other = identity_of(builder.build(tmp_path, tmp_path / "source"))
        newer = get_local_kernel(tmp_path)
        assert (newer.__version__, newer.__name__) == ("9.9", other)
        assert other != kernel.__name__
        for library in (kernel, newer, sparge):
            library.reset_stats()
        results = [CALLS["causal"](library) for library in (kernel, newer, newer)]
        assert all(torch.equal(result[0], results[0][0]) for result in results)
        assert [library.stats().calls for library in (kernel, newer, sparge)] == [1, 2, 0]
        attributes = {sys.modules[f"{name}.varlen"]._BOUNDS_CACHE for name in (kernel.__name__, other, "sparge")}
        assert len(attributes) == 3, "tensors cache bounds separately for each build"
        with pytest.raises(TypeError, match="mask: expected a BlockMask"):
            query, key, value = tensors(300, kv_heads=4)
            kernel.block_sparse_attention(query, key, value, newer.predict(query, key))

    def test_same_build_in_two_folders(self, kernel: ModuleType, repository: Path, tmp_path: Path) -> None:
        from kernels import get_local_kernel

        shutil.copytree(repository / "build", tmp_path / "build")
        again = get_local_kernel(tmp_path)
        assert again.attention is kernel.attention

    def test_compiles(self, kernel: ModuleType, variant: Path) -> None:
        torch._dynamo.reset()
        graphs: list[torch.fx.GraphModule] = []

        def count_graphs(graph: torch.fx.GraphModule, _: object) -> object:
            graphs.append(graph)
            return graph.forward

        def run(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor) -> Any:
            output = kernel.attention(query, key, value, topk=0.3, is_causal=True, backend="torch")
            mask = kernel.predict(query, key, topk=0.5, backend="torch")
            tokens = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
            return output, mask.kv_num_blocks, kernel.varlen_attention(*tokens, bounds, bounds, backend="torch")

        compiled = torch.compile(run, backend=count_graphs, fullgraph=True, dynamic=True)
        for length in (300, 500):
            inputs = (*tensors(length, kv_heads=4), torch.tensor([0, 100, length]))
            assert all(torch.equal(*pair) for pair in zip(compiled(*inputs), run(*inputs), strict=True))
        (graph,) = graphs
        called = {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}
        expected = {f"{identity_of(variant)}.{name}" for name in ("predict", "attention", "varlen")}
        assert expected <= called


@needs_client
def test_page_runs(
    run: Run, repository: Path, kernel: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "kernel").symlink_to(repository)
    monkeypatch.setenv("LOCAL_KERNELS", f"organization/sparge={repository}")
    kernel.reset_stats()
    left = run(REPOSITORY / "docs" / "hub.md")
    assert left["kernel"] is kernel
    assert left["model"].config._attn_implementation == "organization/sparge"
    assert kernel.stats().reasons == {"sparse: torch": 2, "dense: below the crossover": 2}


def run_alone(program: str, **variables: str) -> Any:
    """Run a program in a Python that cannot import the library, and return the JSON in the last line of its output."""
    block = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "sparge":
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Blocked())
"""
    environment = os.environ | variables | {"HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", block + program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@needs_client
@pytest.mark.timeout(120)
def test_transformers_by_name(repository: Path, variant: Path) -> None:
    """``attn_implementation="someone/sparge"`` works offline with LOCAL_KERNELS, without the library."""
    pytest.importorskip("transformers")
    program = """
import importlib, json, torch
from kernels import get_kernel
from transformers import (
    Gemma2Config, Gemma2ForCausalLM, GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM
)

NAME = "someone/sparge"
kernel = get_kernel(NAME, version=1)
report = {"kernel": kernel.__name__}
sizes = dict(vocab_size=99, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=16, max_position_embeddings=4096)
torch.manual_seed(0)

def compare(model, exact, **inputs):
    kernel.reset_stats()
    logits = {}
    for name in (NAME, exact):
        model.set_attn_implementation(name)
        with torch.no_grad():
            logits[name] = model(**inputs, use_cache=False).logits.double()
    kept = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    error = (logits[NAME] - logits[exact])[kept].abs().max() / logits[exact][kept].abs().max()
    return {"error": float(error), "reasons": kernel.stats().reasons, "density": kernel.stats().density}

llama = LlamaForCausalLM._from_config(LlamaConfig(**sizes), attn_implementation=NAME).eval()
report["implementation"] = llama.config._attn_implementation
ids = torch.randint(99, (2, 200))
report["batch"] = compare(llama, "sdpa", input_ids=ids)
padding = torch.ones_like(ids)
padding[1, :50] = 0
report["padding"] = compare(llama, "sdpa", input_ids=ids, attention_mask=padding)
positions = torch.cat([torch.arange(80), torch.arange(120)])[None]
report["packed"] = compare(llama, "sdpa", input_ids=ids[:1], position_ids=positions)
gpt = GptOssConfig(**sizes, num_local_experts=2, num_experts_per_tok=1, sliding_window=50)
gpt = GptOssForCausalLM._from_config(gpt, attn_implementation="eager").eval()
for layer in gpt.model.layers:
    layer.self_attn.sinks.data.normal_().add_(4.0)
report["sinks"] = compare(gpt, "eager", input_ids=ids)
prompt = ids[:1, :100]
sampled = {}
for name in (NAME, "sdpa"):
    llama.set_attn_implementation(name)
    sampled[name] = llama.generate(prompt, max_new_tokens=5, do_sample=False).tolist()
report["equal generation"] = sampled[NAME] == sampled["sdpa"]
llama.set_attn_implementation(NAME)
gemma = Gemma2ForCausalLM._from_config(Gemma2Config(**sizes), attn_implementation=NAME).eval().requires_grad_(False)
for what, model in (("gradients", llama), ("capped scores", gemma)):
    try:
        model(prompt)
    except NotImplementedError as error:
        report[what] = str(error)
torch_backend = importlib.import_module(kernel.__name__ + ".backends.torch")
always = importlib.import_module(kernel.__name__ + ".backends.base").ALWAYS
torch_backend.TorchBackend.crossover = lambda *_: always
report["sparse"] = compare(llama, "sdpa", input_ids=torch.randint(99, (1, 2048)))
report["ours"] = [name for name in sys.modules if name.partition(".")[0] == "sparge"]
print(json.dumps(report))
"""
    report = run_alone(program, LOCAL_KERNELS=f"someone/sparge={repository}")
    assert report["kernel"] == identity_of(variant)
    assert report["implementation"] == "someone/sparge"
    for case in ("batch", "padding", "packed", "sinks"):
        assert report[case]["error"] < 1e-5, f"{case}: dense against dense, two layers of float32"
        (reason,) = report[case]["reasons"]
        assert reason.startswith("dense: ")
    assert report["equal generation"]
    assert "gradients" in report["gradients"]
    assert report["capped scores"].startswith("softcap: expected 0.0")
    assert report["sparse"]["reasons"] == {"sparse: torch": 2}
    assert report["sparse"]["density"] == pytest.approx(0.5, abs=0.01)
    assert 1e-5 < report["sparse"]["error"] < 0.5
    assert report["ours"] == []
