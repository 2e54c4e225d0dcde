# make help lists what there is. Everything that is built is cached outside the checkout.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CLUSTER := PYTHONPATH=cluster $(PYTHON) -m torchrun_cluster
CODE := api controller runtime plugin cluster bench examples tests
# Processes that run tests side by side; those of the integration tests have control planes of their own.
WORKERS ?= 2
# The same for e2e, with a node each; 0: one after the other, as its time limits are meant.
E2E_WORKERS ?= 0
export PYTHONDONTWRITEBYTECODE := 1

##@ The two commands

demo: $(BIN)/.plugin ## A real two-node PyTorch run from a local directory, from nothing to Succeeded
	$(PYTHON) examples/demo.py

test: lint types walls unit integration e2e ## Everything that must hold before a change lands

##@ Parts of the test

lint: $(VENV)/.ready ## Format and lint
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)

types: $(VENV)/.ready ## mypy, strict
	$(BIN)/mypy api controller runtime plugin cluster bench

walls: $(VENV)/.ready ## Who may import whom
	$(BIN)/lint-imports

unit: $(VENV)/.ready ## No cluster, no network; the pure core at 100% of its branches
	$(BIN)/pytest tests/unit -n $(WORKERS) --dist worksteal --cov --cov-report=
	$(BIN)/coverage report --include='controller/torchrun_controller/reconcile/*' --fail-under=100
	$(BIN)/coverage report --fail-under=90

thorough: $(VENV)/.ready ## Each property of the pure core with 1,000 examples
	$(BIN)/pytest tests/unit/reconcile --hypothesis-profile=thorough --timeout=0 -n $(WORKERS)

# Before the tests, none of which may take as long as the first build does.
programs: ## The programs of a cluster, built once and kept in the cache
	$(CLUSTER) binaries
	$(CLUSTER) binaries kwok versitygw

integration: $(VENV)/.ready programs ## A real API server, no pods
	$(BIN)/pytest tests/integration -n $(WORKERS) --dist loadfile

e2e: $(VENV)/.ready $(BIN)/.plugin ## Real pods and real torch
	$(BIN)/pytest tests/e2e -n $(E2E_WORKERS) --dist loadfile

e2e-all: $(VENV)/.ready $(BIN)/.plugin ## The long end-to-end suite as well
	$(BIN)/pytest tests/e2e -n $(E2E_WORKERS) --dist loadfile --long

##@ Working on it

venv: $(VENV)/.ready ## The development environment

format: $(VENV)/.ready ## Format and mend what can be mended
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

generate: $(VENV)/.ready ## CRDs and API reference from the types
	$(BIN)/python -m torchrun_api.crd manifests/crd
	$(BIN)/pytest -q tests/unit/reconcile --update-golden

run: $(VENV)/.ready ## The controller on this machine against the current cluster (RUNTIME_IMAGE=...)
	$(BIN)/torchrun-controller --runtime-image $${RUNTIME_IMAGE:?set RUNTIME_IMAGE to an image of this project that the cluster can pull}

bench: $(VENV)/.ready ## Starts beside a bare client in the same run, and restarts of gangs
	PYTHONPATH=bench:cluster $(BIN)/python -m torchrun_bench

cluster-up: ## A Kubernetes: CLUSTER=current, kind or local
	$(CLUSTER) up

cluster-status: ## What runs
	$(CLUSTER) status

cluster-down: ## Remove it again
	$(CLUSTER) down

clean: ## Remove what was built in the checkout
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage* build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

help: ## This list
	@awk 'BEGIN {FS = ":.*## "} /^##@/ {printf "\n%s\n", substr($$0, 5)} \
	  /^[a-z0-9-]+:.*## / {printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/pip install --quiet --editable . --group dev
	touch $@

# The plugin as users have it: in an environment of its own, with a kubectl-torchrun to put on PATH.
$(BIN)/.plugin: $(VENV)/.ready $(shell find plugin api -name '*.py' -o -name pyproject.toml)
	$(PYTHON) -m venv $(VENV)/plugin
	$(VENV)/plugin/bin/pip install --quiet ./plugin
	touch $@

.PHONY: demo test lint types walls unit thorough programs integration e2e e2e-all venv format generate run bench \
	cluster-up cluster-status cluster-down clean help
