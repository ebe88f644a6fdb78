# Commands of the checkout. Each installs what it needs first; `make setup` does nothing when nothing changed.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/zftune-setup.stamp
BUILD_TOOLS := pip setuptools wheel scikit-build-core nanobind cmake ninja
NATIVE := $(wildcard csrc/*.hpp csrc/*.cpp)
# The folder: an editable install finds it only if it held a file then.
RIGS := $(wildcard studies/rigs)

.PHONY: help setup demo test lint format clean

help:  ## show this list
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

setup: $(STAMP)  ## make .venv, install the pinned packages, build the native module

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml constraints.txt CMakeLists.txt zftune/__init__.py $(NATIVE) $(RIGS) | $(BIN)/python
	$(BIN)/python -m pip install --quiet -c constraints.txt $(BUILD_TOOLS)
	PATH="$(CURDIR)/$(BIN):$$PATH" SKBUILD_CMAKE_DEFINE=ZENFLOW_WERROR=ON \
		$(BIN)/python -m pip install --quiet --no-build-isolation -c constraints.txt -e ".[demo,dev]"
	touch $@

demo: setup  ## profile a real offloaded training run: ZeRO-Offload, ZenFlow and no offloading side by side
	$(BIN)/zftune profile

test: setup  ## the whole test suite
	$(BIN)/pytest

lint: setup  ## formatting, lint, types, import directions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run --Werror $(NATIVE)

format: setup  ## format Python and C++ in place
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(NATIVE)

clean:  ## remove what setup, lint and tests made, .venv included
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
