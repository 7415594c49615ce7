# Everything runs inside .venv, which is built on first use from python3 alone.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PATHS = $(wildcard src tests benchmarks examples)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-slow lint format bench requirements clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(READY) ## 8 real processes train with PmSGD, DmSGD and DecentLaM; a table and a report
	rm -rf out/demo
	$(BIN)/python -m decentlam.launch -n 8 examples/compare.py out/demo

test: $(READY) ## run the tests, except the slow ones
	$(BIN)/python -m pytest -q -n 2 --dist loadfile

test-slow: $(READY) ## run the slow tests only
	$(BIN)/python -m pytest -q -m slow

lint: $(READY) ## check style, formatting and types; changes nothing
	$(BIN)/ruff check $(PATHS)
	$(BIN)/ruff format --check $(PATHS)
	$(BIN)/mypy src

format: $(READY) ## reformat the code and apply the safe fixes
	$(BIN)/ruff check --fix-only $(PATHS)
	$(BIN)/ruff format $(PATHS)

bench: $(READY) ## time the simulator
	$(BIN)/python benchmarks/simulator.py

requirements: $(READY) ## pin the newest versions requirements.in allows
	$(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 \
		--no-emit-index-url --no-emit-find-links --no-header --no-annotate \
		requirements.in --output-file requirements.txt

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
