# Everything a user or a CI machine calls. `make help` lists it.
#
#   TORCH   what to hand to pip for PyTorch; on a GPU machine give a CUDA build, for example
#           make serve TORCH="torch==2.13.0 --index-url <your CUDA wheel index>"
#   TRITON  what to hand to pip for Triton, which compiles and interprets kernels without a GPU too;
#           3.7.1 is the pair of PyTorch 2.13
#   PYTHON  interpreter for the virtual environment, 3.11 to 3.13
#   PRESET  preset or YAML file that `make serve` starts
#   ARGS    further arguments of serve, demo and bench

SHELL := /bin/bash
TORCH ?= torch==2.13.0
TRITON ?= triton==3.7.1
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null \
	&& echo $$p && break; done)
PRESET ?= example
ARGS ?=
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.moe-runtime-ready

export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help install etcd serve demo test test-rdma lint format bench docs clean

help:
	@echo "make serve   start the example model on this machine (http://127.0.0.1:8000)"
	@echo "make demo    kill workers under load and compare every token"
	@echo "make test    the test suite        make lint    formatting, types, floors, spelling"
	@echo "make test-rdma   the tests on RDMA devices, in a virtual machine where this one has none"
	@echo "make etcd    an etcd server, for the tests of elected masters (as root)"
	@echo "make bench   benchmarks            make clean   remove what the others made"

install: $(READY)

# The stamp makes every later call instant; what is installed already is never installed again.
$(READY): pyproject.toml setup.py transfer/native.c $(wildcard transfer/compiled/*.c) \
		dispatch/native.c kvstore/native.c kvstore/rows.c $(wildcard kvstore/compiled/*.c) \
		moe_runtime/models/tiles.c
	@test -n "$(PYTHON)" || { echo "no Python 3.11, 3.12 or 3.13 found; set PYTHON=" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@if $(BIN)/python tools/installed.py 2>/dev/null; then :; else \
		set -e; echo "installing into $(VENV), a minute or two ..."; \
		$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/pip install --quiet $(TORCH); \
		$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/pip install --quiet $(TRITON); \
		$(BIN)/pip install --quiet --editable '.[dev]'; fi
# In place, as an editable install has it. Without a compiler this only warns.
	@$(BIN)/python setup.py --quiet build_ext --inplace
	@touch $@

# For the tests of elected masters, which are skipped without it.
etcd:
	@command -v etcd >/dev/null || { set -e; \
		command -v apt-get >/dev/null || { echo "no apt-get: install etcd 3.4 or later"; exit 1; }; \
		apt-get update -qq; \
		DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends etcd-server; }

serve: $(READY)
	@exec $(BIN)/moe-runtime serve --config $(PRESET) $(ARGS)

demo: $(READY)
	@exec $(BIN)/moe-runtime demo $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest $(ARGS)

# With REQUIRE_RDMA=1 (as in CI) it fails where it cannot run; else it says why and goes on.
# A guest that dies (status 125) is booted once more; a test that fails is never repeated.
REQUIRE_RDMA ?=
RDMA_TESTS := $(BIN)/python -m pytest -p no:cacheprovider -m rdma tests/rdma $(ARGS)
test-rdma: $(READY)
	@export REQUIRE_RDMA=$(REQUIRE_RDMA); \
	if compgen -G "/dev/infiniband/uverbs*" >/dev/null; then exec $(RDMA_TESTS); fi; \
	in_guest() { tools/rdma-vm --nics 4 --timeout 900 -- $(RDMA_TESTS); }; \
	status=0; in_guest || status=$$?; \
	if [ $$status = 125 ]; then \
		echo "the virtual machine died (above): booted once more"; \
		status=0; in_guest || status=$$?; fi; \
	if [ $$status = 69 ] && [ -z "$$REQUIRE_RDMA" ]; then \
		echo "SKIPPED: the tests on RDMA devices (the reason is above)"; \
	else exit $$status; fi

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(READY)
	$(BIN)/moe-runtime config schema --format markdown > docs/configuration.md

# Each writes benchmarks/results/<name>.jsonl; one that lacks what it measures (a GPU) says so and
# ends with status 2. Peers are compared where they are installed:
# `python -m benchmarks.bench_serving --vllm-python PATH` adds vLLM.
bench: $(READY)
	@for bench in benchmarks/bench_*.py; do \
		name=$$(basename $$bench .py); echo "== $$name"; \
		$(BIN)/python -m benchmarks.$$name $(ARGS) || [ $$? -eq 2 ] || exit 1; done

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f transfer/_native*.so dispatch/_native*.so kvstore/_native*.so kvstore/_rows*.so moe_runtime/models/_tiles*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
