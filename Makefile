# The commands of README and CI, nothing else. `make` alone lists them.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CARGO_TARGET_DIR ?= $(CURDIR)/target
export CARGO_TARGET_DIR
# maturin refuses to choose between two environments.
unexport CONDA_PREFIX

RUST_SOURCES := Cargo.toml Cargo.lock $(shell find rust -name '*.rs' -o -name Cargo.toml)
CARGO_TEST := cargo $(if $(shell command -v cargo-nextest),nextest run,test) --no-fail-fast
DEVELOP = VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/maturin develop --release --quiet

.DEFAULT_GOAL := help
.PHONY: help demo build test test-all test-rust test-loom test-python lint bench clean

help: ## List the commands
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

demo: $(BIN)/.built ## Run a small model with and without speculation, and compare
	$(BIN)/slipstream fetch demo
	$(BIN)/python benches/decode.py --demo

build: $(BIN)/.built ## Build the release extension into .venv

test: test-rust test-loom test-python ## Run all tests but the slow ones

test-all: test-rust test-loom $(BIN)/.built-dev ## Run all tests
	$(BIN)/python -m pytest -m "slow or not slow"

test-rust: ## Run the Rust tests
	$(CARGO_TEST)

# The flag changes what everything is built with, so it builds apart.
test-loom: ## Check the lock-free parts under every order of their steps
	RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=$(CARGO_TARGET_DIR)/loom LOOM_MAX_PREEMPTIONS=2 \
		cargo test --lib -- ::model:: ::loom_models::

test-python: $(BIN)/.built-dev ## Run the Python tests
	timeout 1200 $(BIN)/python -m pytest

lint: $(BIN)/.built-dev ## Check formatting, lints and types
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest --mypy-config-file=pyproject.toml slipstream._core

bench: $(BIN)/.built ## Measure kernels and decoding on this machine
	cargo bench
	$(BIN)/slipstream fetch demo
	$(BIN)/python benches/decode.py --repeat 5 --json

clean: ## Remove everything that was built
	rm -rf $(VENV) target python/slipstream/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/maturin:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "maturin>=1.9,<2"

# maturin installs the package and what it needs; cargo rebuilds only what changed.
$(BIN)/.built: $(BIN)/maturin pyproject.toml $(RUST_SOURCES)
	$(DEVELOP)
	touch $@

# With what the tests and lints need; torch and transformers are large.
$(BIN)/.built-dev: $(BIN)/maturin pyproject.toml $(RUST_SOURCES)
	$(DEVELOP) --extras test,lint
	touch $@ $(BIN)/.built
