# Everything runs inside .venv, which is built on first use from python3 alone.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
FRAMEWORKS := $(VENV)/.frameworks
PATHS = $(wildcard src tests benchmarks examples scripts)

# Where this is set, each of the many processes of a test run would compile every file anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-fast test-system test-slow test-frameworks test-ray fuzz lint format docs try-versions chaos \
	requirements clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(READY) ## 8 real processes train with PmSGD, DmSGD and DecentLaM; a table and a report
	rm -rf out/demo
	$(BIN)/torchrun --nproc-per-node 8 examples/compare.py out/demo

# A file's tests share processes, so a worker takes whole files, in the order that tests/conftest.py
# gives. One worker more than two cores have: tests also wait, for timeouts and for each other.
TESTS = $(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder

test: $(READY) ## run the tests, except those of whole commands and the slow ones
	$(TESTS)

# One file of each kind: the recursions, the topologies, torch's contract on one node, and real
# processes against the simulator.
FAST = tests/algorithms tests/topology tests/simulation tests/test_imports.py tests/test_optim.py \
	tests/test_optimizer.py tests/test_options.py tests/exchange/test_shared_memory.py

test-fast: $(READY) ## run the tests for the inner loop, in about a minute
	$(TESTS) $(FAST)

test-system: $(READY) ## run the tests of whole commands, launchers, hosts and studies
	$(TESTS) -m "system and not slow"

test-slow: $(READY) ## run the slow tests only
	$(BIN)/python -m pytest -q -m slow

test-frameworks: $(FRAMEWORKS) ## run the tests with Lightning, Hugging Face and timm
	$(BIN)/python -m pytest -q tests/integrations -k "not ray"

# On its own, because Ray gives its processes 30 seconds to start, which a busy machine may not have.
test-ray: $(FRAMEWORKS) ## run the tests with Ray Train
	$(BIN)/python -m pytest -q tests/integrations -k ray

fuzz: $(READY) ## 2,000 inputs that nobody meant, none of which may end in a traceback
	$(BIN)/python -m tests.fuzzing --inputs 2000

lint: $(READY) ## check style, formatting and types; changes nothing
	$(BIN)/ruff check $(PATHS)
	$(BIN)/ruff format --check $(PATHS)
	$(BIN)/mypy src

format: $(READY) ## reformat the code and apply the safe fixes
	$(BIN)/ruff check --fix-only $(PATHS)
	$(BIN)/ruff format $(PATHS)

docs: $(READY) ## build the documentation site into out/site; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open out/site/index.html"

try-versions: $(READY) ## build the package, try it with every Python here, oldest and newest torch
	$(BIN)/python scripts/try_versions.py --extras

chaos: $(READY) ## 100 elastic runs in which processes are killed, stopped and cut off
	$(BIN)/python benchmarks/chaos.py --runs 100 --out out/chaos.json

requirements: $(READY) ## pin the newest versions requirements.in allows
	$(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 \
		--no-emit-index-url --no-emit-find-links --no-header --no-annotate \
		requirements.in --output-file requirements.txt
	$(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 \
		--no-emit-index-url --no-emit-find-links --no-header --no-annotate \
		--constraint requirements.txt requirements-frameworks.in \
		--output-file requirements-frameworks.txt

clean: ## delete .venv, outputs, caches and build artifacts
	rm -rf $(VENV) out build dist .mypy_cache .pytest_cache .ruff_cache
	find $(PATHS) -type d -name __pycache__ -prune -exec rm -rf {} +

# pip fetches uv and nothing else; uv installs the rest.
$(READY): requirements.txt pyproject.toml
	@command -v $(PYTHON) >/dev/null || { \
		echo "decentlam needs Python 3.11 or newer, but there is no '$(PYTHON)' here." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit( \
		"decentlam needs Python 3.11 or newer, but $(PYTHON) is %d.%d. " \
		"Try: make PYTHON=python3.12 test" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint requirements.txt uv
	$(BIN)/uv pip install --compile-bytecode --python $(BIN)/python --requirements requirements.txt
	$(BIN)/uv pip install --python $(BIN)/python --no-deps --no-build-isolation --editable .
	@touch $@

# Large, and only for `make test-frameworks`.
$(FRAMEWORKS): requirements-frameworks.txt $(READY)
	$(BIN)/uv pip install --compile-bytecode --python $(BIN)/python \
		--requirements requirements-frameworks.txt
	@touch $@
