# The two commands: `make demo` and `make test`. Both set up .venv first, if need be.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

#: Any Python from 3.11 on: make PYTHON=python3.12 demo
PYTHON ?= python3
#: Wall-clock minutes that the demo's tuning run may take.
DEMO_MINUTES ?= 5

# The demo and `make ui` leave nothing in the home folder, unless the user says where.
TUNEWRIGHT_HOME ?= $(CURDIR)/.tunewright
PREFECT_HOME ?= $(TUNEWRIGHT_HOME)/prefect

# A Python 3.10 for the relay engine: make RELAY_PYTHON=/path/of/python3.10 relay-env
RELAY_PYTHON ?= $(shell for python in python3.10 "$(HOME)"/.pyenv/versions/3.10*/bin/python; do \
  "$$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info[:2] != (3, 10))' 2>/dev/null && { echo "$$python"; break; }; done)

BIN := .venv/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# --no-compile: pip would write a .pyc file for all that is installed, a minute and a half of CPU time;
# Python writes those that are imported.
PIP_INSTALL := $(BIN)/python -m pip install -qq --no-compile

.PHONY: help venv relay-python relay-env demo ui check test bench-measure bench-tracking bench-fleet bench-latency granularity clean

help: ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 22

venv: .venv/.ready ## set up .venv from the pinned versions

.venv/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Tunewright needs Python 3.11 or later; '$(PYTHON)' is not. Name another: make PYTHON=python3.12 $(or $(MAKECMDGOALS),venv)" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "'$(PYTHON)' cannot make virtual environments: install its venv package (Debian: python3-venv)" >&2; exit 1; }
	@for compiler in g++ gcc clang++ clang; do command -v $$compiler >/dev/null && exit 0; done; \
	  echo "no C compiler found: install g++ or clang, which links the compiled models" >&2; exit 1
	@echo "setting up .venv, a few minutes ..." >&2
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@# Two at a time and without the resolver, which has nothing to decide. Of
	@# rapidocr-onnxruntime only the model files are wanted, without its dependencies.
	@sed -e '/^#/d' constraints.txt | xargs -P 2 -n 36 $(PIP_INSTALL) --no-deps
	@$(PIP_INSTALL) --no-deps --editable .
	@# Another Python or platform may need packages beside these: then the resolver adds them.
	@missing=$$($(BIN)/python -m pip check | grep -vE '^(rapidocr-onnxruntime|No broken) ' || true); \
	  test -z "$$missing" || $(PIP_INSTALL) --constraint constraints.txt --editable '.[dev]'
	@touch $@

relay-python: ## print the Python 3.10 that the relay engine would get, nothing where there is none
	@echo "$(RELAY_PYTHON)"

relay-env: .venv-relay/.ready ## set up .venv-relay: the relay engine's TVM, pinned, on Python 3.10

.venv-relay/.ready: constraints-relay.txt
	@test -n "$(RELAY_PYTHON)" || { \
	  echo "no Python 3.10 with venv found, which the relay engine needs; name one: make RELAY_PYTHON=/path/of/python3.10 relay-env" >&2; exit 1; }
	@echo "setting up .venv-relay, a minute or two ..." >&2
	@test -x .venv-relay/bin/python || "$(RELAY_PYTHON)" -m venv .venv-relay
	@sed -e '/^#/d' constraints-relay.txt | xargs .venv-relay/bin/python -m pip install -qq --no-compile --no-deps
	@.venv-relay/bin/python -c 'from tvm import relay, autotvm; import onnx, xgboost'
	@touch $@

demo: export TUNEWRIGHT_HOME := $(TUNEWRIGHT_HOME)
demo: export PREFECT_HOME := $(PREFECT_HOME)
demo: .venv/.ready ## tune a real model (the PP-OCR text recogniser); the last line is JSON
	@model=$$($(BIN)/python benchmarks/packaged_model.py recogniser); \
	  $(BIN)/tunewright tune "$$model" --shape x=1,3,48,320 --minutes $(DEMO_MINUTES) --name pp-ocr-recogniser

ui: export TUNEWRIGHT_HOME := $(TUNEWRIGHT_HOME)
ui: .venv/.ready ## the MLflow UI on what the demo left
	@$(BIN)/tunewright ui

check: .venv/.ready ## lint, format and types, as CI checks them
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: .venv/.ready ## the tests, on the real parts
	@# Two at a time: most of a test is the start of a command. A file's tests share what is slow to make.
	$(BIN)/python -m pytest -n 2 --dist loadfile

bench-measure: .venv/.ready ## measuring against stock, kills, warm start (docs/benchmarks.md); the last line is JSON
	@$(BIN)/python -m benchmarks.measure $(BENCH)

bench-tracking: .venv/.ready ## MLflow under load, killed and filled again (docs/results.md); the last line is JSON
	@$(BIN)/python -m benchmarks.tracking $(BENCH)

bench-fleet: .venv/.ready ## the fleet unattended, under faults, with 64 simulated devices, a quiet night (docs/fleet.md); last line JSON
	@$(BIN)/python -m benchmarks.fleet $(BENCH)

bench-latency: .venv/.ready ## latency against onnxruntime and OpenVINO, seven models (docs/latency.md); the last line is JSON
	@$(BIN)/python -c 'import openvino' 2>/dev/null || $(PIP_INSTALL) --no-deps openvino==2026.4.1 || echo "without OpenVINO" >&2
	@$(BIN)/python -m benchmarks.latency $(BENCH)

granularity: .venv/.ready .venv-relay/.ready ## the experiment of TVM's RFC 64 on both engines, hours; writes its page; the last line is JSON
	@$(BIN)/python -m benchmarks.granularity $(BENCH)

clean: ## remove the environment, caches and what the demo left
	rm -rf .venv .venv-relay .tunewright .cache .pytest_cache .mypy_cache .ruff_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
