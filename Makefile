# Everything here sets itself up: a fresh clone needs Python 3.11 and make, nothing else.
SHELL := /bin/bash
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
RECIPE ?= tiny-zero2
RUN_ARGS ?=
REHEARSED ?= tiny-fsdp
# Most tests wait for processes of their own; two at once keep two cores busy.
TEST_WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help install run test test-full test-faults rehearse check fix compile golden clean

help: ## Show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: $(STAMP) ## Make .venv with everything, at the versions of constraints.txt

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not on PATH; penstock needs Python 3.11 (or set PYTHON=...)" >&2; exit 1; }
	@echo "Installing into $(VENV): torch (CPU or CUDA, as your pip is set up; up to a few GB), deepspeed, kfp, google-cloud-aiplatform"
	@echo "and what they need, at the versions of constraints.txt. Your pip settings (index, proxy, cache) are honoured."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@# torch first and by its exact version: a range would let pip take a newer build with other accelerators' libraries.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $$(grep -E '^torch==' constraints.txt)
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

run: $(STAMP) ## Run RECIPE (default tiny-zero2) on the embedded Vertex AI: stage, train on two nodes, gate, register
	$(BIN)/penstock run $(RECIPE) --state build/demo --reset --prepare pipelines/examples/stdlib_corpus.py $(RUN_ARGS)

test: $(STAMP) ## Run the test suite
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile -m 'not full'

test-full: $(STAMP) ## Run the long matrices too
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile

test-faults: $(STAMP) ## Plant each fault of tests/numerics/faults and show that the tests notice
	$(BIN)/python tests/numerics/faults/run.py

rehearse: $(STAMP) ## Every fault that training has to survive: on REHEARSED (a recipe, with a table) and on a tiny job
	$(BIN)/python tests/rehearse/run.py $(REHEARSED)
	$(BIN)/python -m pytest -rs tests/e2e/test_faults.py tests/rehearse

check: $(STAMP) ## Format, lint, types, import rules, proportion
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tests/architecture/proportion.py

fix: $(STAMP) ## Format and apply the linter's safe fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

compile: $(STAMP) ## Compile RECIPE to build/RECIPE.yaml and print its SHA-256
	$(BIN)/penstock compile $(RECIPE)

golden: $(STAMP) ## Write tests/golden anew; read the diff before you commit it
	PYTHONPATH=tests $(BIN)/python -m golden.regenerate

bench-%: $(STAMP) ## Run tests/benchmarks/bench_<name>.py (train, compile): peers and us in one run, as ratios
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	PYTHONPATH=tests $(BIN)/python -m benchmarks.bench_$*

clean: ## Remove build/, caches and .venv
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache $(VENV)
