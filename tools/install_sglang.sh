#!/usr/bin/env bash
# Make (or complete) the virtual environment of the real SGLang server on CPU: .venv-sglang, 2.4 GB, apart from the
# trainer's because their pins clash. Does nothing when the environment already holds this lock.
# On a GPU cluster use an image that holds SGLang instead and point `rollout.python` at its interpreter.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${1:-$root/.venv-sglang}"
# The lock holds wheels for 3.11; PYTHON may name another version for the trainer.
python=python3.11
if [[ -n "${PYTHON:-}" ]] && "$PYTHON" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; then
    python="$PYTHON"
fi
lock="$root/requirements/sglang.lock"
stamp="$venv/.lock.sha256"
want="$(cat "$lock" "${BASH_SOURCE[0]}" | sha256sum | cut -d' ' -f1)"

if [[ -f "$stamp" && "$(cat "$stamp")" == "$want" ]]; then
    exit 0
fi
"$python" -c 'import sys, venv; sys.exit(sys.version_info[:2] != (3, 11))' || {
    echo "install_sglang.sh: needs Python 3.11, which requirements/sglang.lock was made for; say PYTHON=/path/to/it" >&2
    exit 2
}
# A creation that was interrupted has no working pip yet.
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    rm -rf "$venv"
    "$python" -m venv "$venv"
fi
# shellcheck disable=SC2086  # PIP_ARGS is a list of words
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps ${PIP_ARGS:-} --requirement "$lock"
# Stand-ins for two CUDA-only packages that sglang imports and a dense model on CPU never calls.
site="$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
echo "$root/tests/support/sglang_cpu" > "$site/sglang_cpu_stubs.pth"
"$venv/bin/python" -c 'import sgl_kernel, torchvision, sglang'
echo "$want" > "$stamp"
