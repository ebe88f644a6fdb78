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
NATIVE := $(wildcard csrc/*.hpp csrc/*.cpp csrc/tests/*.hpp csrc/tests/*.cpp)
# The folder: an editable install finds it only if it held a file then.
RIGS := $(wildcard studies/rigs)
STUDIES := $(wildcard studies/[0-9]*/run.py)
EXAMPLES_FACTOR ?= 30
OPERATIONS ?= 10000
WORKERS ?= 3

.PHONY: help setup demo test test-all host-tests soak sanitize sanitize-address sanitize-thread bench studies-quick lint format clean

help:  ## show this list
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22

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

# CONTRIBUTING.md says what belongs where.
test: setup host-tests  ## what every change must pass, by WORKERS (3) processes
	$(BIN)/python -m tests.upstream_ops
	$(BIN)/pytest -n $(WORKERS) --dist worksteal --durations 30

test-all: setup host-tests  ## every test, with every fault and every combination: before a release
	$(BIN)/python -m tests.upstream_ops
	ZFTUNE_TESTS=all $(BIN)/pytest -n $(WORKERS) --dist worksteal

CONFIGURE = PATH="$(CURDIR)/$(BIN):$$PATH" cmake -S . -G Ninja --log-level=WARNING \
	-DPython_EXECUTABLE="$(CURDIR)/$(BIN)/python" -Dnanobind_DIR="$$($(BIN)/python -m nanobind --cmake_dir)" \
	-DZENFLOW_WERROR=ON -DZENFLOW_TESTS=ON

host-tests: setup  ## the tests of csrc alone
	$(CONFIGURE) -B build/host-tests -DCMAKE_BUILD_TYPE=Release
	$(BIN)/cmake --build build/host-tests --target host_tests
	build/host-tests/host_tests

PROPERTIES := $(addprefix tests/zenflow/test_,$(addsuffix .py,invariants knobs added_groups between_passes auto checkpoint ledger script_programs))

KILLS ?= 200
FAULTS ?= 50
FUZZ_S ?= 600

soak: setup  ## OPERATIONS (10000), EXAMPLES_FACTOR (30) as many cases, KILLS (200), FAULTS (50) of each kind, FUZZ_S (600)
	$(BIN)/python -m tests.zenflow.soak --operations $(OPERATIONS)
	ZENFLOW_EXAMPLES_FACTOR=$(EXAMPLES_FACTOR) $(BIN)/pytest $(PROPERTIES) -m hypothesis --timeout 0 \
		--hypothesis-show-statistics
	ZFTUNE_TESTS=all $(BIN)/pytest tests/zftune/check -m hypothesis --timeout 0 --hypothesis-show-statistics
	ZFTUNE_KILLS=$(KILLS) $(BIN)/pytest tests/zftune/store/test_processes.py tests/zftune/tuner/test_killed.py \
		tests/zenflow/test_fsdp_ends.py \
		-k killed --timeout 0
	ZFTUNE_FAULTS=$(FAULTS) $(BIN)/pytest -n $(WORKERS) tests/zftune/daemon/faults --timeout 0
	ZFTUNE_FUZZ_S=$(FUZZ_S) $(BIN)/pytest -n $(WORKERS) tests/zftune/daemon/test_api.py \
		tests/zftune/daemon/brain/test_schemathesis.py -k "garbage or schemathesis" --timeout 0

sanitize: sanitize-address sanitize-thread  ## the native module's tests under ASan with UBSan, then under TSan

# Native code driven from Python; runs of whole models would only be slow.
SANITIZED_TESTS := $(addprefix tests/zenflow/,test_bandwidth.py test_native.py test_native_kernels.py test_engine_faults.py)

sanitize-address: RUNTIME = libasan.so
sanitize-thread: RUNTIME = libtsan.so

# Python is not instrumented: the runtime, and the C++ library whose throw it hooks, come first by LD_PRELOAD; what the
# interpreter keeps until it ends is no leak of ours, and races inside other libraries are not looked for.
sanitize-address sanitize-thread: sanitize-%: setup
	$(CONFIGURE) -B build/sanitize-$* \
		-DCMAKE_CXX_COMPILER=$(CXX) -DCMAKE_BUILD_TYPE=RelWithDebInfo -DZENFLOW_SANITIZE=$*
	$(BIN)/cmake --build build/sanitize-$*
	TSAN_OPTIONS=halt_on_error=1 build/sanitize-$*/host_tests
	export LD_PRELOAD="$$($(CXX) -print-file-name=$(RUNTIME)) $$($(CXX) -print-file-name=libstdc++.so)" \
		PYTHONPATH="$(CURDIR)/tests/sanitize" \
		ZENFLOW_NATIVE_FILE="$$(echo "$(CURDIR)"/build/sanitize-$*/_native.*.so)" \
		ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1 \
		TSAN_OPTIONS=halt_on_error=1:allocator_may_return_null=1:ignore_noninstrumented_modules=1; \
	$(BIN)/python -c 'import os; from zenflow import _native as n; assert n.__file__ == os.environ["ZENFLOW_NATIVE_FILE"]'; \
	$(BIN)/python -m pytest -p no:cacheprovider --capture=sys --timeout 900 $(SANITIZED_TESTS)

bench: setup  ## the host's memory bandwidth over thread counts and update intervals
	$(BIN)/python studies/007-host-bandwidth/run.py --again

studies-quick: setup  ## every study in its short form
	for study in $(STUDIES); do $(BIN)/python "$$study" --quick --again; done

lint: setup  ## formatting, lint, types, import directions, the project's own rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	for study in $(STUDIES); do $(BIN)/mypy "$$study" || exit 1; done  # one by one: all of them are called run
	$(BIN)/lint-imports
	$(BIN)/python tools/source_rules.py
	$(BIN)/clang-format --dry-run --Werror $(NATIVE)

format: setup  ## format Python and C++ in place
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(NATIVE)

clean:  ## remove what setup, lint, tests and quick studies made, .venv included
	rm -rf $(VENV) build dist studies/*/results/quick .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
