#!/usr/bin/env bash
# Brings an environment to its locks: `tools/install.sh base [dev]` fills .venv, `tools/install.sh sglang` and `docs` fill
# .venv-sglang and .venv-docs, `sglang-gpu` fills .venv-sglang-gpu. `gpu`, `te` and `current` fill .venv-gpu, .venv-te and
# .venv-current: the base and dev locks on Python 3.12 with the pins of requirements/gpu.txt, te.txt or current.txt instead.
# Stamp files skip a lock that did not change since its last complete installation.
set -euo pipefail
cd "$(dirname "$0")/.."
export PIP_DISABLE_PIP_VERSION_CHECK=1

find_python() {
    local candidate
    # pyenv's shim of a version that is not selected exists and fails, so its folders come last.
    for candidate in ${PYTHON:-$pythons "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12.*/bin/python3.12}; do
        if "$candidate" -c "import sys, venv, ensurepip; sys.exit(($oldest) > sys.version_info[:2] or sys.version_info[:2] > (3, 12))" \
            2>/dev/null; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    echo "install: no usable Python from ${oldest/, /.} to 3.12 with the venv module among: ${PYTHON:-$pythons}." \
        "Install one, or set PYTHON=/path/to/python3.12." >&2
    return 1
}

# Packages into $venv. uv (from PyPI) replaces a pip at its defaults: docs/measurements/install.md has the figures.
# pip runs where the user configured it (an index, a folder of wheels, PIP_ARGS), and where uv fails.
packages() {
    if [ -n "$uv" ]; then
        "$uv" pip install -q --python "$py" "$@" && return
        echo "install: uv failed; pip is used instead" >&2
        uv=""
    fi
    # shellcheck disable=SC2086  # PIP_ARGS is a list of words
    "$py" -m pip install -q ${PIP_ARGS:-} "$@"
}

find_uv() {
    if [ -z "${PIP_ARGS:-}" ] && ! "$py" -m pip config list |
        grep -E '\.(index-url|extra-index-url|find-links|no-index|proxy|client-cert|trusted-host|constraint|no-binary|only-binary)=' >/dev/null; then
        "$py" -m pip install -q uv==0.13.9 2>/dev/null && echo "$venv/bin/uv"
    fi
    return 0
}

# The CPU build of torch saves gigabytes. It is chosen where there is no NVIDIA driver and the package index has it.
torch_of() { # lock
    local torch
    torch=$(grep '^torch==' "$1")
    # shellcheck disable=SC2086
    if [[ "$venv" != *gpu ]] && [ -z "$uv" ] && ! command -v nvidia-smi >/dev/null && [ ! -e /proc/driver/nvidia/version ] &&
        "$py" -m pip install -q --dry-run --no-deps ${PIP_ARGS:-} "$torch+cpu" >/dev/null 2>&1; then
        torch+=+cpu
    fi
    echo "$torch"
}

oldest="3, 11" pythons="python3.11 python3.12 python3"
case "$*" in
    sglang | docs) venv=.venv-$1 ;;
    gpu | sglang-gpu | te | current)
        venv=.venv-$1 oldest="3, 12" pythons=python3.12
        ;;
    "base" | "base dev") venv=.venv ;;
    *) echo "usage: tools/install.sh base [dev] | sglang | docs | gpu | sglang-gpu | te | current" >&2 && exit 2 ;;
esac
py=$venv/bin/python
# A creation that was interrupted has no working pip.
if ! "$py" -m pip --version >/dev/null 2>&1; then
    python=$(find_python)
    echo "install: $venv with $python" >&2
    rm -rf "$venv"
    "$python" -m venv "$venv"
fi

export UV_SYSTEM_CERTS=1
version=$("$py" -c 'import sys; print(*sys.version_info[:2], sep=".")')
below=""
for name in "$@"; do
    lock=requirements/$name.lock
    if [ "$name" = sglang-gpu ]; then lock=requirements/$name.txt; fi
    if [[ "$name" =~ ^(gpu|te|current)$ ]]; then
        lock=$venv/$name.lock
        replaced=$(grep -v '^#' "requirements/$name.txt" | cut -d= -f1 | paste -sd'|')
        { grep -hvE "^($replaced)==" requirements/base.lock requirements/dev.lock && cat "requirements/$name.txt"; } >"$lock"
    fi
    below=$(printf '%s %s ' "$below" "$version" | cat - "$lock" | sha256sum | cut -d' ' -f1)
    stamp=$venv/.lock-$name
    if [ "$(cat "$stamp" 2>/dev/null)" = "$below" ]; then continue; fi
    rm -f "$stamp"
    echo "install: $lock" >&2
    : "${uv=$(find_uv)}"
    # With dependencies: a CUDA build of torch requires nvidia-* wheels, which no lock names.
    if grep -q '^torch==' "$lock"; then packages -c "$lock" "$(torch_of "$lock")"; fi
    if [ "$name" = sglang ]; then
        packages --no-deps -r "$lock"
        # Stand-ins for two CUDA-only packages. SGLang imports them; a dense model on CPU never calls them.
        site=$("$py" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        echo "$PWD/tests/support/sglang_cpu" >"$site/sglang_cpu_stubs.pth"
        "$py" -W ignore -c 'import sgl_kernel, torchvision, sglang'
    else
        packages -r "$lock"
        "$py" -m pip check
    fi
    echo "$below" >"$stamp"
done
if [[ "$venv" = *gpu ]] && ! "$py" -c 'import sys, torch; sys.exit(torch.version.cuda is None)'; then
    echo "install: $venv has a CPU build of torch from pip's configured index; name one with the CUDA build," \
        "e.g. PIP_ARGS='--index-url https://pypi.org/simple', and remove $venv" >&2
    exit 1
fi
if [ "$venv" = .venv-te ]; then # guards of servers ignore PYTHONPATH
    echo "$PWD" >"$("$py" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/checkout.pth"
fi
if [[ "$venv" =~ ^.venv-(gpu|te)$ ]] && ! "$py" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("transformer_engine") is None)'; then
    site=$("$py" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    if [ "$venv" = .venv-te ] && [ -n "${PACS_TE_PACK:-}" ]; then # transformer_engine-*.tar.xz and libtransformer_engine-*.so.xz for torch 2.11, Python 3.12
        tar -C "$site" -xJf "$PACS_TE_PACK"/transformer_engine-*.tar.xz
        xz -dc "$PACS_TE_PACK"/libtransformer_engine-*.so.xz >"$site/transformer_engine/wheel_lib/libtransformer_engine.so"
    else
        echo "install: compiling Transformer Engine's extension for torch, about half an hour with MAX_JOBS=${MAX_JOBS:-1}" >&2
        # nvcc, of which its setup reads the version, and headers; torch's packages have the rest. No CUDA toolkit is needed.
        "$py" -m pip install -q --no-deps nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-cuda-cccl==13.0.85
        headers=$site/nvidia
        CUDA_HOME=$headers/cu13 CPATH=$headers/cu13/include:$headers/cu13/include/cccl:$headers/cudnn/include:$headers/nccl/include \
            NVTE_PYTORCH_FORCE_BUILD=TRUE MAX_JOBS=${MAX_JOBS:-1} "$py" -m pip install --no-deps --no-build-isolation \
            transformer_engine==2.11.0 transformer_engine_cu13==2.11.0 transformer_engine_torch==2.11.0
    fi
fi
if ! [[ "$venv" =~ ^.venv(-current|-gpu)?$ ]]; then exit; fi

package=$(sha256sum pyproject.toml | cut -d' ' -f1)
if [ "$(cat "$venv/.package" 2>/dev/null)" != "$package $PWD" ]; then
    # --no-build-isolation: setuptools is in the lock, so nothing else is fetched.
    "$py" -m pip install -q --no-deps --no-build-isolation -e .
    echo "$package $PWD" >"$venv/.package"
fi
