# `make demo` and `make test` need Python >= 3.10 and make; everything else is set up in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
SOURCES := src tests benchmarks

.PHONY: demo test lint format bench tables clean

$(READY): pyproject.toml requirements-dev.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "sparge needs Python 3.10 or newer, got " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet -e '.[plot]'
	touch $(READY)

demo: $(READY)  ## the main job on this machine: a table, and sparge-demo.html
	$(BIN)/sparge demo

test: lint  ## lint, types, all tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto  # one worker a core; torch threads on top would fight over it
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(BIN)/python -m pytest -n auto tests/kernels

lint: $(READY)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
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

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
