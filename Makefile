# Everything runs in a virtual environment of its own, .venv, made on first use.
SHELL := /bin/sh
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STUBS := api/v1beta1/api.proto api/podresources/v1/api.proto api/pluginregistration/v1/api.proto
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test lint format bench soak coverage proto proto-check clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; '$(PYTHON)' is older or missing. Try: make PYTHON=python3.12 …" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "No virtual environment could be made. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }

$(VENV)/.run: $(BIN)/python setup.cfg constraints.txt
	@echo "installing into $(VENV) …"
	@$(PIP) --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@$(PIP) --editable '.[dev]'
	@touch $@

$(VENV)/.proto: $(VENV)/.dev
	@$(PIP) --editable '.[dev,proto]'
	@touch $@

demo: $(VENV)/.run ## the plugin on simulated GPUs with an embedded kubelet, step by step
	@$(BIN)/deviceplugin demo

test: $(VENV)/.dev ## all tests (needs cc for the fake driver library)
	@$(BIN)/python -m pytest

lint: $(VENV)/.proto ## ruff, mypy --strict, import contracts, stubs up to date
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(MAKE) --no-print-directory proto-check

format: $(VENV)/.dev ## let ruff format and fix
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

bench: $(VENV)/.dev ## figures as one JSON object
	@$(BIN)/python -m tests.bench

SECONDS ?= 60
soak: $(VENV)/.dev ## a storm of faults, plugin kills, long outages (SECONDS=60 for each)
	@$(BIN)/python -m tests.soak --seconds $(SECONDS)

coverage: $(VENV)/.dev ## branch coverage of the tests, child processes included
	@$(BIN)/coverage erase
	@$(BIN)/coverage run -m pytest
	@$(BIN)/coverage combine --quiet
	@$(BIN)/coverage report

proto: $(VENV)/.proto ## generate the gRPC stubs from api/
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I. --python_out=. --grpc_python_out=. \
	  --mypy_out=quiet:. --mypy_grpc_out=quiet:. $(STUBS)

proto-check: $(VENV)/.proto ## fail when the stubs differ from what api/ generates
	@out=$$(mktemp -d) && trap 'rm -rf "$$out"' EXIT && \
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I. --python_out="$$out" --grpc_python_out="$$out" \
	  --mypy_out=quiet:"$$out" --mypy_grpc_out=quiet:"$$out" $(STUBS) && \
	(cd "$$out" && find . -type f) | while read -r f; do \
	  cmp -s "$$out/$$f" "$$f" || { echo "$$f is not what its .proto generates: run 'make proto' and commit" >&2; exit 1; }; \
	done

clean: ## remove the virtual environment and all caches
	@rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage .coverage.* htmlcov
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
