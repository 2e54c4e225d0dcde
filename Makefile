# `make help` lists the targets. Build results are cached outside the checkout.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CLUSTER_CLI := PYTHONPATH=cluster $(PYTHON) -m torchrun_cluster
CODE := api controller runtime plugin sdk cluster bench docs examples manifests tests
# Parallel test processes.
WORKERS ?= 2
# The same for unit tests, on two cores: many of them wait for processes.
UNIT_WORKERS ?= 4
# The same for integration tests, which also wait. Each process has its own control plane.
INTEGRATION_WORKERS ?= 3
# The same for e2e, with a cluster each; 0 runs the tests in turn, for which their timeouts are set.
E2E_WORKERS ?= 0
# Both print the tests, and the fixtures, that take longest.
SLOWEST := --durations=25 --durations-min=1
# Versions for `make matrix`, in addition to Kubernetes 1.37, which all other targets use.
PYTHONS ?= 3.11 3.12 3.13
RELEASES ?= 1.33 1.34 1.35 1.36
export PYTHONDONTWRITEBYTECODE := 1
CHECK_PYTHON = $(PYTHON) -c 'import sys; sys.exit("missing: Python 3.11 or later (PYTHON=...)" if sys.version_info < (3, 11) else 0)'

##@ The commands

demo: ## A real two-node PyTorch run from a local directory, from nothing to Succeeded
	@$(CHECK_PYTHON)
	@$(PYTHON) examples/demo.py --plan
	@$(MAKE) --no-print-directory $(BIN)/.plugin
	$(PYTHON) examples/demo.py

# Unit tests need the processor, and tests on clusters mostly wait for servers: side by side they take two
# thirds of the time. Unit tests have a lower priority, because the others have timeouts.
test: lint types walls docs ## All checks that a change must pass
	@$(MAKE) --no-print-directory --jobs=2 unit-beside on-clusters

unit-beside:
	@echo "make unit runs beside the tests on clusters, with its output in build/unit.log"
	@mkdir -p build && nice -n 10 $(MAKE) --no-print-directory unit > build/unit.log 2>&1 || { cat build/unit.log; exit 1; }
	@grep -E ' passed.* in |^TOTAL' build/unit.log

on-clusters: local integration
	@$(MAKE) --no-print-directory e2e

# Of `make all`; a suite is a make target, with its variables after colons. Fast ones first.
SUITES ?= lint types walls docs unit unit-long lowest-versions local gpu recipes thorough faults integration-all e2e-all ha \
	faults-proxied monitoring demo bench:ARGS=--quick soak:MINUTES=3 e2e-kind \
	$(PYTHONS:%=matrix-python-%) $(RELEASES:%=matrix-kubernetes-%)

# pytest writes JUnit files beside the logs: tests/conftest.py.
all: $(VENV)/.ready ## Every suite, the long ones too, for hours; goes on after a failure; results in build/all
	@rm -rf build/all && mkdir -p build/all
	@for suite in $(SUITES); do \
	  name=$${suite%%:*}; result=passed; SECONDS=0; echo "$$(date +%T) $$name: output in build/all/$$name.log"; \
	  TORCHRUN_TEST_JUNIT=$$PWD/build/all/$$name $(MAKE) --keep-going --no-print-directory $${suite//:/ } \
	    > build/all/$$name.log 2>&1 || result=FAILED; \
	  printf '%-24s %s in %d min %d s; %s\n' $$name $$result $$((SECONDS / 60)) $$((SECONDS % 60)) \
	    "$$(grep -E '^=+ .* in [0-9.]+s' build/all/$$name.log | tail -1 | tr -d =)" >> build/all/summary; \
	done
	@cat build/all/summary; ! grep -q FAILED build/all/summary

##@ Parts of the test

lint: $(VENV)/.ready ## Format and lint
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)

types: $(VENV)/.ready ## mypy, strict: the sources and the helpers of the tests
	cd manifests/monitoring && ../../$(BIN)/mypy --strict --cache-dir ../../.mypy_cache generate.py
	$(BIN)/mypy api controller runtime plugin sdk cluster bench tests docs

walls: $(VENV)/.ready ## Check the direction of imports
	$(BIN)/lint-imports

docs: $(VENV)/.docs ## Build the site in build/site; fails on broken links and anchors
	$(BIN)/sphinx-build -q -E -W --keep-going -c docs . build/site
	@echo "build/site/index.html"

unit: $(VENV)/.ready ## No cluster, no network; the pure core at 100% of its branches
	$(BIN)/pytest tests/unit -n $(UNIT_WORKERS) --dist worksteal --cov --cov-report=
	$(BIN)/coverage report --include='controller/torchrun_controller/reconcile/*' --fail-under=100
	$(BIN)/coverage report

# In turn: some of them measure times.
unit-long: $(VENV)/.ready ## The long unit tests: with processes, or measured times
	$(BIN)/pytest tests/unit -m long --long

test-of: $(VENV)/.ready ## FILE=...: the unit tests of one source file, in seconds (ARGS="-k deadline")
	$(BIN)/python tests/mirrors.py $(FILE) $(ARGS)

thorough: $(VENV)/.ready ## Each property of the pure core with 1,000 examples
	$(BIN)/pytest tests/unit/reconcile --hypothesis-profile=thorough --timeout=0 -n $(WORKERS)

local: $(VENV)/.ready ## kubectl torchrun run --local with real launchers: what users type, as a table
	$(BIN)/pytest tests/local $(SLOWEST) $(ARGS)

# Before the tests: their timeouts are shorter than the first build.
programs: ## Build the programs of a cluster once, in the cache
	$(CLUSTER_CLI) binaries
	$(CLUSTER_CLI) binaries actionlint helm kwok versitygw

integration: $(VENV)/.ready programs ## A real API server, no pods
	$(BIN)/pytest tests/integration -n $(INTEGRATION_WORKERS) --dist loadfile $(SLOWEST) $(ARGS)

# A test upgrades Kubernetes. The releases are built before it: other tests measure times.
UPGRADE := 1.36 1.37
# `make ha` runs its tests alone: they have limits of seconds.
REPLICA_TESTS := tests/integration/test_high_availability.py tests/integration/test_many_kills.py
integration-all: $(VENV)/.ready programs ## The long integration tests as well, without those of make ha
	for release in $(UPGRADE); do KUBERNETES=$$release $(CLUSTER_CLI) binaries etcd kube-apiserver kube-controller-manager kube-scheduler kubectl; done
	$(BIN)/pytest tests/integration $(REPLICA_TESTS:%=--ignore=%) -n $(INTEGRATION_WORKERS) --dist loadfile --long $(SLOWEST) $(ARGS)

ha: $(VENV)/.ready programs ## Replicas: 50 kills of the leader under 200 running jobs, take-overs measured
	$(BIN)/pytest $(REPLICA_TESTS) --long -rP

e2e: $(VENV)/.ready $(BIN)/.plugin ## Real pods and real torch
	$(BIN)/pytest tests/e2e -n $(E2E_WORKERS) --dist loadfile $(SLOWEST) $(ARGS)

e2e-all: $(VENV)/.ready $(BIN)/.plugin ## The long end-to-end suite as well
	$(BIN)/pytest tests/e2e -n $(E2E_WORKERS) --dist loadfile --long $(SLOWEST) $(ARGS)

# With the Docker engine that answers, or as root with one that is started for it and needs no registry.
KIND_E2E := tests/e2e/test_run.py tests/e2e/test_life.py tests/e2e/test_sync.py
e2e-kind: $(VENV)/.ready $(BIN)/.plugin ## Docker and kind: make demo, the core of the end-to-end suite, nothing left behind
	$(BIN)/pytest tests/kind --long
	CLUSTER=kind $(CLUSTER_CLI) with-docker --kind $(BIN)/pytest $(KIND_E2E) --long

# The Python of the recipes is built before the tests, and kept in the cache.
recipes: $(VENV)/.ready ## The scripts of examples/recipes and the launcher, under a real torchrun on CPUs
	python=$$(PYTHONPATH=cluster:tests $(BIN)/python -m recipes.environment) && \
	TORCHRUN_TEST_TORCH_PYTHON=$$python $(BIN)/pytest tests/recipes tests/local tests/unit/examples/test_gpt.py \
	  tests/unit/runtime/launch/test_torchrun.py tests/unit/runtime/launch/test_reload.py --long

gpu: $(VENV)/.ready ## CUDA and NCCL under the launcher, on one GPU of this machine (ARGS=--table for docs/gpu.md); skipped without
	$(BIN)/pytest tests/gpu -rP $(ARGS)

# RUNS=5 make restart-times
restart-times: export TORCHRUN_RESTART_RUNS = $(or $(RUNS),30)
restart-times: $(VENV)/.ready $(BIN)/.plugin ## Restarts in the same pods beside new gangs, with real torch
	$(BIN)/pytest tests/e2e/test_restart_times.py --long -rP

# RUNS=5 make stop-times
stop-times: export TORCHRUN_STOP_RUNS = $(or $(RUNS),30)
stop-times: $(VENV)/.ready $(BIN)/.plugin ## Planned stops by each source, with real torch: lost steps and seconds
	$(BIN)/pytest tests/e2e/test_stop_times.py --long -rP

monitoring: $(VENV)/.ready ## Every panel and alert, by a real Prometheus that scrapes real controllers
	$(CLUSTER_CLI) binaries kwok prometheus promtool
	$(BIN)/pytest tests/monitoring

##@ Every supported version

matrix: lowest-versions $(PYTHONS:%=matrix-python-%) $(RELEASES:%=matrix-kubernetes-%) ## Unit and integration on each Python, integration and a real run on each Kubernetes

# In the environments .venv/pythonX.Y.
matrix-python-%: programs
	@python$* -c 'import venv, ensurepip' || { echo "python$* does not run here: install it with its venv module and put it on PATH" \
	  "(Debian: apt-get install python$*-venv; uv python install $*; pyenv shell with all of $(PYTHONS))"; exit 1; }
	$(MAKE) VENV=.venv/python$* PYTHON=python$* unit integration

# On the oldest Python: old versions have no wheels for newer ones.
lowest-versions: ## Import everything with the lowest versions of the dependencies
	python$(firstword $(PYTHONS)) -m venv --clear $(VENV)/lowest
	$(PYTHON) tests/lowest_versions.py > $(VENV)/lowest/requirements.txt
	$(VENV)/lowest/bin/pip install --quiet --requirement $(VENV)/lowest/requirements.txt
	PYTHONPATH=api:controller:runtime:plugin $(VENV)/lowest/bin/python tests/lowest_versions.py --import

matrix-kubernetes-%: $(VENV)/.ready $(BIN)/.plugin
	KUBERNETES=$* $(MAKE) integration
	KUBERNETES=$* CLUSTER=local $(BIN)/pytest tests/e2e/test_run.py

##@ The image

IMAGE ?= docker.io/library/torchrun-controller:0.1.0
IMAGE_INPUTS := pyproject.toml README.md LICENSE requirements api controller runtime
IMAGE_BUILD = $(CLUSTER_CLI) image build --tag $(IMAGE) $(addprefix --input=,$(IMAGE_INPUTS)) \
	$(if $(BASE),--build-arg BASE=$(BASE)) --build-arg REVISION=$$(git rev-parse HEAD)

image: ## The controller's image by Docker or buildah, as an archive (IMAGE=..., BASE=...); prints its size
	archive=$$($(IMAGE_BUILD)) && echo $$archive && $(CLUSTER_CLI) image size $$archive --base $$($(CLUSTER_CLI) image base)

sbom: ## The image's Python packages as CycloneDX, from the image itself, in sbom.cdx.json
	$(CLUSTER_CLI) image cat $$($(IMAGE_BUILD)) /opt/torchrun/sbom.cdx.json > sbom.cdx.json

##@ Releases

# The registry of the image, and the URL with a folder for each release: docs/releasing.md.
REGISTRY ?= registry.example.com
DOWNLOADS ?= https://releases.example.com/torchrun-controller
RELEASE_CLI := PYTHONPATH=cluster $(PYTHON) -m torchrun_release
NEEDS_VERSION = $(if $(VERSION),,$(error set VERSION, for example: make $@ VERSION=0.2.0))

version: ## VERSION=...: set the version in all files
	@$(NEEDS_VERSION)$(RELEASE_CLI) version $(VERSION)

release: ## VERSION=...: every file of a release, in dist/, from the current commit (REGISTRY=..., DOWNLOADS=..., BASE=...)
	@$(NEEDS_VERSION)$(CHECK_PYTHON)
	@$(if $(BASE),BASE_IMAGE=$(BASE)) $(RELEASE_CLI) build $(VERSION) --registry $(REGISTRY) --downloads $(DOWNLOADS)

##@ Working on it

venv: $(VENV)/.ready ## The development environment

format: $(VENV)/.ready ## Format the code, and fix what ruff can fix
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

# Every picture of the docs, from declarations and the recording.
DRAW = for script in docs/draw_*.py; do $(BIN)/python $$script; done

generate: $(VENV)/.ready ## CRDs, reference pages, pictures, golden files
	$(BIN)/python -m torchrun_api.generate.crd manifests/crd
	$(BIN)/python -m torchrun_api.generate.contract_reference runtime/torchrun_runtime/launch/contract.py docs/environment.md
	$(BIN)/python -m torchrun_api.generate.metadata_keys docs/labels.md
	$(BIN)/python -m torchrun_api.generate.exit_code_reference docs/exit-codes.md
	$(BIN)/python -m torchrun_controller.settings_reference docs/settings.md
	$(BIN)/python -m torchrun_controller.metrics.reference docs/metrics.md
	$(BIN)/python manifests/monitoring/generate.py
	$(BIN)/python docs/phases_page.py
	$(BIN)/python docs/client_references.py
	$(DRAW)
	$(BIN)/pytest -q tests/unit/reconcile --update-golden

pictures: $(VENV)/.ready $(BIN)/.plugin ## Record the terminal on a real cluster, and draw every picture
	$(BIN)/pytest tests/e2e/record_terminal.py
	$(DRAW)

run: $(VENV)/.ready ## The controller on this machine against the current cluster (RUNTIME_IMAGE=...)
	$(BIN)/torchrun-controller --runtime-image $${RUNTIME_IMAGE:?set RUNTIME_IMAGE to an image of this project that the cluster can pull}

debug: $(VENV)/.ready $(BIN)/.plugin ## The controller on this machine on a local cluster: breakpoint() opens pdb, or DEBUGPY=5678
	$(BIN)/python examples/debug.py

hooks: $(VENV)/.ready ## Format, lint, types and walls before each commit
	$(BIN)/pre-commit install

# A fixed hash seed, so that the names of fault points are reproducible.
faults: $(VENV)/.ready ## Faults at every request and every event, in virtual time
	PYTHONHASHSEED=0 $(BIN)/pytest tests/faults -n $(WORKERS) --dist worksteal

# PAIRS=1000 SEED=7 make faults-pairs: as many, and others than make faults draws.
faults-pairs: export TORCHRUN_FAULTS_PAIRS = $(or $(PAIRS),10000)
faults-pairs: export TORCHRUN_FAULTS_SEED = $(or $(SEED),1)
faults-pairs: $(VENV)/.ready ## Two faults at a time, in virtual time
	PYTHONHASHSEED=0 $(BIN)/pytest tests/faults/test_pairs.py -n $(WORKERS) --dist worksteal -rP

# RUNS=5000 SEED=7 make faults-time-travel
faults-time-travel: export TORCHRUN_FAULTS_TRAVELS = $(or $(RUNS),2000)
faults-time-travel: export TORCHRUN_FAULTS_SEED = $(or $(SEED),1)
faults-time-travel: $(VENV)/.ready ## Restarts against an API server that lives in the past, in virtual time
	PYTHONHASHSEED=0 $(BIN)/pytest tests/faults/test_travel.py -n $(WORKERS) --dist worksteal -rP

# RUNS=100 SEED=7 make faults-proxied
faults-proxied: export TORCHRUN_PROXIED = $(or $(RUNS),12)
faults-proxied: export TORCHRUN_TEST_SEED = $(or $(SEED),1)
faults-proxied: $(VENV)/.ready programs ## Single faults at random points of the scenarios on a real API server
	$(BIN)/pytest tests/integration/test_proxied.py -n 0 --long -rP

# An hour by hand, MINUTES=3 for CI; memory is judged from 20 minutes on.
MINUTES ?= 60
soak: $(VENV)/.ready programs ## Jobs arrive while controllers are killed, the API server restarts, watches break
	PYTHONPATH=tests:cluster:bench $(BIN)/python -m soak --minutes $(MINUTES) $(SOAK)

# make bench PART="shapes churn" measures some parts, ARGS=--quick sees that they work; --help lists them.
bench: $(BIN)/.controller programs ## The controller beside bare clients and JobSet, in the same run
	PYTHONPATH=bench:cluster $(BIN)/python -m torchrun_bench $(PART:%=--part %) $(ARGS)

admission-bench: $(VENV)/.ready ## What admission makes of three traces, in a simulation
	PYTHONPATH=bench $(BIN)/python -m torchrun_bench.admission $(ARGS)

cluster-up: ## A Kubernetes: CLUSTER=current, kind or local
	$(CLUSTER_CLI) up

cluster-status: ## What runs
	$(CLUSTER_CLI) status

cluster-down: ## Remove it again
	$(CLUSTER_CLI) down

clean: ## Remove what was built in the checkout
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage* build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

help: ## This list
	@awk 'BEGIN {FS = ":.*## "} /^##@/ {printf "\n%s\n", substr($$0, 5)} \
	  /^[a-z0-9-]+:.*## / {printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/.ready: pyproject.toml
	$(CHECK_PYTHON)
	@echo "The development environment is made in $(VENV), once: some minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/pip install --quiet --editable . --group dev
	touch $@

$(VENV)/.docs: $(VENV)/.ready
	$(BIN)/pip install --quiet --group docs
	touch $@

# The plugin as users have it: in its own environment, with a kubectl-torchrun to put on PATH.
# It does not need the development environment, so make demo creates only this one.
$(BIN)/.plugin: $(shell find plugin api controller/torchrun_controller/reconcile runtime/torchrun_runtime/launch -name '*.py' -o -name pyproject.toml)
	$(PYTHON) -m venv $(VENV)/plugin
	$(VENV)/plugin/bin/pip install --quiet ./plugin
	mkdir -p $(BIN)
	touch $@

# The controller as its image has it: without what its developers need.
$(BIN)/.controller: $(VENV)/.ready
	$(PYTHON) -m venv $(VENV)/controller
	$(VENV)/controller/bin/pip install --quiet --editable .
	touch $@

.PHONY: $(shell sed -n 's/^\([a-z0-9-]*\):.*\#\# .*/\1/p' $(firstword $(MAKEFILE_LIST))) unit-beside on-clusters
