#!/usr/bin/env bash
# Make (or complete) the virtual environment of the real SGLang server on CPU: .venv-sglang, 2.4 GB, apart from the
# trainer's because their pins clash. Does nothing when the environment already holds this lock.
# On a GPU cluster use an image that holds SGLang instead and point `rollout.python` at its interpreter.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${1:-$root/.venv-sglang}"
python="${PYTHON:-python3.11}"
lock="$root/requirements/sglang.lock"
stamp="$venv/.lock.sha256"
want="$(cat "$lock" "${BASH_SOURCE[0]}" | sha256sum | cut -d' ' -f1)"

if [[ -f "$stamp" && "$(cat "$stamp")" == "$want" ]]; then
    exit 0
fi
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || {
    echo "install_sglang.sh: $python is not Python 3.11, which requirements/sglang.lock was made for; set PYTHON" >&2
    exit 2
}
[[ -x "$venv/bin/python" ]] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --requirement "$lock"
# Stand-ins for two CUDA-only packages that sglang imports and a dense model on CPU never calls.
site="$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
echo "$root/tests/support/sglang_cpu" > "$site/sglang_cpu_stubs.pth"
"$venv/bin/python" -c 'import sgl_kernel, torchvision, sglang'
echo "$want" > "$stamp"
