#!/usr/bin/env bash
# Inside an NGC PyTorch image: this project from its lock, and SGLang in an environment of its own.
#   install.sh CHECKOUT            called by Dockerfile and pacs-megatron.def
#   install.sh CHECKOUT --list     prints what it would install
# The image's torch, Transformer Engine, Apex, Triton and numpy stay: they were built together. Everything else comes at the
# lock's versions without resolving, so that nothing can replace them; the last line fails the build if they do not fit.
set -euo pipefail
checkout=$1
kept='torch|triton|numpy|setuptools|pip'
lock=$(grep -E '^[A-Za-z0-9_.-]+==' "$checkout/requirements/base.lock" | grep -vE "^($kept)==")
sglang=$(grep -E '^sglang==' "$checkout/requirements/sglang-gpu.txt")
if [ "${2:-}" = --list ]; then
    printf '%s\n' "$lock" "$sglang"
    exit
fi
# NGC's constraint file pins what its image holds, our lock's other packages included.
export PIP_CONSTRAINT='' PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
python -m pip install --no-deps -r /dev/stdin <<<"$lock"
python -m pip install --no-deps "$checkout"
# SGLang's pins clash with Megatron's: rollout.servers.python names this interpreter. (Ubuntu's python has no ensurepip.)
python -m pip install virtualenv
python -m virtualenv --quiet /opt/sglang
/opt/sglang/bin/python -m pip install "$sglang"
python - <<'PYTHON'
import sys

import megatron.core
import torch
import transformer_engine.pytorch
from packaging.version import Version

from pacs_megatron.preflight.doctor import TE_RANGE, installed
from pacs_megatron.preflight.doctor import version_problems

problems = [str(check) for check in version_problems()]
low, high = TE_RANGE
found = installed("transformer-engine") or transformer_engine.__version__
if not low <= Version(found) < high:
    problems.append(f"Transformer Engine {found}; megatron-core {megatron.core.__version__} needs >= {low}, < {high}")
print(f"torch {torch.__version__}, Transformer Engine {found}, megatron-core {megatron.core.__version__}")
sys.exit("\n".join(problems) or 0)
PYTHON
