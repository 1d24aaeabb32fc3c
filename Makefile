# Each target sets up what it needs in .venv and then does its job.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: scan test bench clean

scan: .venv/installed
	$(BIN)/rankprobe scan

test: .venv/developing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest

bench: .venv/developing
	$(BIN)/python -m benchmarks.bench_watch
	$(BIN)/python -m benchmarks.bench_paths
	$(BIN)/python -m benchmarks.bench_paths --registry

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e .
	touch $@

.venv/developing: .venv/installed
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $@

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
