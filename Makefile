# `make quickstart` and `make test` are all that a fresh clone needs; both install what they use.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# Arguments for every pip call, e.g. PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu" for a CPU build of
# torch (saves gigabytes), or an internal mirror.
PIP_ARGS ?=
# An interpreter of Python 3.11, 3.12 or 3.13; empty: python3, else the newest by name.
PYTHON ?=
# Extra arguments for pytest, e.g. PYTEST_ARGS="tests/unit/rollout -k greedy", or PYTEST_ARGS="-n 8" on a host with many cores.
PYTEST_ARGS ?=
# Two test files at once: most tests wait for processes that they start.
WORKERS := -n 2 --dist=loadfile --no-loadscope-reorder
# Three for test-full: with two, cores are idle for a part of the time. They take up to 16 GiB of memory.
FULL_WORKERS := $(WORKERS:2=3)

VENV := .venv
PY := $(VENV)/bin/python
export PYTHON PIP_ARGS

.PHONY: help install install-dev install-sglang install-gpu install-slurm install-sandbox quickstart test test-full campaign test-te test-other test-current test-fresh lint docs format clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

install: ## .venv from requirements/base.lock, only when the lock changed; the package itself, editable
	@tools/install.sh base

install-dev: ## install, plus requirements/dev.lock (tests, lint)
	@tools/install.sh base dev

install-sglang: ## .venv-sglang with a real SGLang (its pins clash with Megatron's)
	@tools/install.sh sglang

install-gpu: ## for GPUs, Python 3.12 or 3.13: .venv-gpu with Transformer Engine (compiled: half an hour, MAX_JOBS=8 is faster), .venv-sglang-gpu
	@tools/install.sh gpu
	@tools/install.sh sglang-gpu

install-slurm: ## Slurm and munge from Debian, when root and missing
	@tools/install_slurm.sh

install-sandbox: ## bubblewrap from Debian, when root and missing
	@tools/install_sandbox.sh

quickstart: install ## tiny model -> warm start -> PACS -> Hugging Face checkpoint, on two CPU cores
	@$(PY) -m examples.quickstart.run

# What depends on the versions of Megatron-Core, torch and Python.
OTHER_TESTS := $(addprefix tests/unit/,checkpoint convert embedded models parallel policy training workbench/certify workbench/plan workbench/preflight) \
	$(addprefix tests/distributed/,training/test_main_beside.py training/test_main_node_of_eight_hybrids.py policy/test_model_families.py policy/test_gated_delta.py policy/test_logits.py workbench/certify/test_run_hybrids.py workbench/plan/test_memory.py) \
	tests/distributed/checkpoint/test_run_checkpoint.py tests/distributed/convert/test_convert.py \
	tests/integration/checkpoint/test_run_checkpoint.py tests/integration/examples/quickstart \
	tests/fake_cuda/workbench/trace/test_linear_attention.py
TE_VENV := .venv-$(if $(PACS_TE_PACK),te,gpu)
TEST_TOOLS := install-dev install-sglang install-slurm install-sandbox

test: $(TEST_TOOLS) ## what a change needs: about 12 minutes on two idle cores
	@$(PY) -m pytest $(WORKERS) -m "not gpu and not full and not campaign" $(PYTEST_ARGS)

test-full: $(TEST_TOOLS) ## every other test, up to two hours, and test-te and test-other where installed; resumes
	@$(PY) -m pytest $(FULL_WORKERS) -m "full and not campaign" --resume=.pytest_cache/test-full $(PYTEST_ARGS)
	@if [ -x $(TE_VENV)/bin/python ]; then $(MAKE) --no-print-directory test-te; fi
	@if [ -x .venv-other/bin/python ]; then $(MAKE) --no-print-directory test-other; fi

campaign: $(TEST_TOOLS) ## once a release: seeds, kills, studies; the same command resumes
	@$(PY) -m pytest -m campaign --resume=.pytest_cache/campaign $(PYTEST_ARGS)

test-te: ## tests/te: real Transformer Engine modules without a GPU, in .venv-gpu; with PACS_TE_PACK in .venv-te
	@tools/install.sh $(TE_VENV:.venv-%=%)
	@$(TE_VENV)/bin/python -m pytest $(WORKERS) tests/te -m "not campaign" $(PYTEST_ARGS)

test-other: install-dev ## a part of the tests on the other row: today's stack where .venv has Python 3.11, and vice versa
	@tools/install.sh other
	@.venv-other/bin/python -m pytest $(WORKERS) -m "not gpu and not campaign and not sglang and not slurm" $(OTHER_TESTS) $(PYTEST_ARGS)

test-current: test-other

test-fresh: ## quickstart and test in a clone of HEAD, with an empty home and pip's defaults
	@tools/test_fresh.sh

lint: install-dev ## ruff, format check, types, shell scripts
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@$(VENV)/bin/shellcheck .ci/run tools/*.sh slurm/*.sbatch slurm/container/*.sh

docs: ## the documentation site in build/docs; a warning or a broken internal link is an error
	@tools/install.sh docs
	@.venv-docs/bin/python -m sphinx -q -W --keep-going -E -c docs -d build/doctrees . build/docs
	@echo "open build/docs/index.html"

format: install-dev ## let ruff fix and format
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

clean: ## environments but those for GPUs, caches and build output; runs/ stays
	rm -rf $(VENV) .venv-sglang .venv-other .venv-te .venv-docs .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
