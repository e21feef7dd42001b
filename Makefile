# The commands that people and CI run. Everything comes from uv.lock and Cargo.lock; uv is fetched if it is missing.
SHELL := /bin/bash
.DEFAULT_GOAL := help
UV := $(shell command -v uv 2>/dev/null || echo .uv/bin/uv)
RUN := $(UV) run --no-sync

.PHONY: help
help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

.uv/bin/uv:
	python3 -m venv .uv && .uv/bin/python -m pip install --quiet --disable-pip-version-check uv

.PHONY: build
build: $(filter .uv/bin/uv,$(UV)) ## environment with every development tool, and the extension
	$(UV) sync --locked

.PHONY: demo
demo: $(filter .uv/bin/uv,$(UV)) ## learn Countdown from scratch on this machine
	$(UV) sync --locked --no-dev --inexact
	$(RUN) rlox-grpo demo --out runs/demo

.PHONY: test
test: build ## the whole suite: cargo, then pytest
	cargo test --quiet
	$(RUN) pytest

.PHONY: lint
lint: build ## formatting, clippy, ruff, mypy
	cargo fmt --check
	cargo clippy --all-targets -- -D warnings
	cargo clippy --features python -- -D warnings
	$(RUN) ruff format --check .
	$(RUN) ruff check .
	$(RUN) mypy

.PHONY: bench
bench: build ## kernels beside NumPy, torch and rlox; JSON and a table under benches/results
	$(RUN) pytest benches/test_kernels.py --benchmark-json=benches/results/kernels.json
	$(RUN) python benches/table.py benches/results/kernels.json > benches/results/kernels.md
