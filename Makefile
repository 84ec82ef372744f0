# `make quickstart` and `make test` are all that a fresh clone needs; both install what they use.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# Arguments for every pip call, e.g. PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu" where the
# package index offers only CUDA builds of torch (gigabytes), or an internal mirror.
PIP_ARGS ?=
# An interpreter; empty: the first of python3.11 and python3.12 that works.
PYTHON ?=
# Extra arguments for pytest, e.g. PYTEST_ARGS="tests/unit/rollout -k greedy".
PYTEST_ARGS ?=
# Seconds for a whole test session.
TEST_BUDGET_S ?= 1500
TEST_FULL_BUDGET_S ?= 10800

VENV := .venv
PY := $(VENV)/bin/python
export PYTHON PIP_ARGS

.PHONY: help install install-dev install-sglang install-slurm quickstart test test-full lint format clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

install: ## .venv from requirements/base.lock, only when the lock changed; the package itself, editable
	@tools/install.sh base

install-dev: ## install, plus requirements/dev.lock (tests, lint)
	@tools/install.sh base dev

install-sglang: ## .venv-sglang with a real SGLang (its pins clash with Megatron's)
	@if [ -x tools/install_sglang.sh ]; then tools/install_sglang.sh; else echo "install-sglang: tools/install_sglang.sh is missing" >&2; exit 1; fi

install-slurm: ## Slurm and munge from Debian, when root and missing
	@tools/install_slurm.sh

quickstart: install ## tiny model -> warm start -> PACS -> Hugging Face checkpoint, on two CPU cores
	@$(PY) -m examples.quickstart.run

test: install-dev install-sglang install-slurm ## every test but the GPU's and the long ones
	@$(PY) -m pytest -m "not gpu and not full" --session-timeout=$(TEST_BUDGET_S) $(PYTEST_ARGS)

test-full: install-dev install-sglang install-slurm ## also kills, seeds and other long tests
	@$(PY) -m pytest -m "not gpu" --session-timeout=$(TEST_FULL_BUDGET_S) $(PYTEST_ARGS)

lint: install-dev ## ruff, format check, types, shell scripts
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@$(VENV)/bin/shellcheck tools/*.sh slurm/*.sbatch slurm/container/*.sh

format: install-dev ## let ruff fix and format
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

clean: ## environments, caches and build output; runs/ stays
	rm -rf $(VENV) .venv-sglang .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
