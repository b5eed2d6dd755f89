# Everything here needs only Python >= 3.11, make and a package index. uv is taken from PATH or put into .uv/,
# the environment goes to .venv/, nothing is installed outside this folder.

.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

BOOTSTRAP_PYTHON ?= python3
UV_ON_PATH := $(shell uv --version 2>/dev/null | awk '{ split($$2, v, "."); if (v[1] > 0 || v[2] >= 8) print "uv" }')
UV := $(or $(UV_ON_PATH),.uv/bin/uv)
PYTHON := .venv/bin/python

# Without bytecode every start of `trainer` would compile its sources again. Redirecting it would hide what uv compiled.
unexport PYTHONDONTWRITEBYTECODE
unexport PYTHONPYCACHEPREFIX
# No step below may depend on a model hub.
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

TESTS ?= tests
PYTEST_FLAGS ?=
ONE_THREAD := OMP_NUM_THREADS=1
PARALLEL ?= -n 2 --dist loadfile

.PHONY: help
help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

.uv/bin/uv:
	@echo "uv is not on PATH: installing it into .uv/"
	@$(BOOTSTRAP_PYTHON) -m venv .uv
	@.uv/bin/python -m pip install --quiet --disable-pip-version-check uv

UV_NEEDED := $(filter .uv/bin/uv,$(UV))

.PHONY: sync
sync: $(UV_NEEDED) ## create or update .venv from uv.lock
	@$(UV) sync --locked --inexact

.PHONY: sync-demo
sync-demo: $(UV_NEEDED)
	@$(UV) sync --locked --inexact --group demo

.PHONY: demo
demo: sync-demo ## fine-tune a real model, kill it, resume it, compare (SHORT=1: a tiny random model, for CI)
	@$(PYTHON) -m scripts.demo $(if $(filter-out 0,$(SHORT)),--short)

.PHONY: demo-rl
demo-rl: sync ## reward makes a small model better; killed, resumed, compared (SHORT=1: a few steps, for CI)
	@$(PYTHON) -m scripts.demo.rl $(if $(filter-out 0,$(SHORT)),--short)

.PHONY: test
test: lint types ## lint, types and the test suite
	@$(ONE_THREAD) $(PYTHON) -m pytest $(PARALLEL) $(PYTEST_FLAGS) $(TESTS)

.PHONY: test-full
test-full: lint types ## the same with the slow tests
	@$(ONE_THREAD) $(PYTHON) -m pytest $(PARALLEL) $(PYTEST_FLAGS) -m "not gpu" $(TESTS)

N ?= 10

.PHONY: soak
soak: sync ## kill a run at N random instants (N=10, NPROC=1, RL=1: of trainer rl) and compare its end with one left alone
	@$(ONE_THREAD) $(PYTHON) -m scripts.soak --kills $(N) --nproc $(or $(NPROC),1) $(if $(filter-out 0,$(RL)),--rl)

.PHONY: lint
lint: sync ## ruff: rules and formatting
	@$(PYTHON) -m ruff check
	@$(PYTHON) -m ruff format --check

.PHONY: types
types: sync ## pyright
	@$(PYTHON) -m pyright

.PHONY: bench
bench: sync ## measure, and write benchmarks/results/*.json
	@$(PYTHON) -m benchmarks $(BENCH)

.PHONY: vllm
vllm: $(UV_NEEDED) ## make .vllm, the environment of the servers that engine.type = "vllm" asks
	@UV=$(UV) scripts/vllm_env.sh

.PHONY: clean
clean: ## remove caches, demo files and demo runs (keeps .venv)
	rm -rf .cache .pytest_cache .ruff_cache .hypothesis dist build runs/demo runs/demo-short runs/demo-rl runs/demo-rl-short
	find src tests scripts benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
