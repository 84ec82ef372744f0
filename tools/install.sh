#!/usr/bin/env bash
# Brings an environment to its locks. A stamp file skips a lock that has not changed since.
#   tools/install.sh base [dev]   .venv: the package; with dev also tests and lint
#   tools/install.sh other        .venv-other: base and dev on the other row than .venv
#   tools/install.sh sglang       .venv-sglang: SGLang on a CPU, on .venv's version of Python
#   tools/install.sh docs         .venv-docs: the documentation site
#   tools/install.sh gpu          .venv-gpu: base, dev, Transformer Engine; Python 3.12 or 3.13
#   tools/install.sh sglang-gpu   .venv-sglang-gpu: SGLang on GPUs; Python 3.12 or 3.13
#   tools/install.sh te           .venv-te: the test row of PACS_TE_PACK (docs/compatibility.md)
# The version of Python is the row: 3.12 and 3.13 get today's stack, 3.11 the light one. Markers in
# requirements/*.lock separate them. The active python3 decides, then the newest one by name.
# PYTHON=/path/to/python decides first, and replaces a .venv of another version.
set -euo pipefail
cd "$(dirname "$0")/.."
export PIP_DISABLE_PIP_VERSION_CHECK=1 UV_SYSTEM_CERTS=1
te=2.20.2

version_of() { # interpreter
    "$1" -c 'import sys; print(*sys.version_info[:2], sep=".")' 2>/dev/null
}

# The interpreter of a new environment: of one of $versions, with the venv module.
find_python() {
    local candidates=(python3) candidate version
    for version in $versions; do candidates+=("python$version"); done
    # pyenv's shim of a version that is not selected exists and fails, so its folders come last.
    for version in $versions; do
        candidates+=("${PYENV_ROOT:-${HOME:-}/.pyenv}/versions/$version".*/bin/python3)
    done
    if [ -n "${PYTHON:-}" ]; then candidates=("$PYTHON"); fi

    for candidate in "${candidates[@]}"; do
        if [[ " $versions " == *" $(version_of "$candidate") "* ]] &&
            "$candidate" -c 'import venv, ensurepip' 2>/dev/null; then
            # Of a virtual environment, the interpreter below it.
            "$candidate" -c 'import sys; print(sys._base_executable)'
            return
        fi
    done
    echo "install: $venv needs Python ${versions// / or } with the venv module, found none" \
        "among: ${PYTHON:-python3 python${versions// / python}}." \
        "Install one, or set PYTHON=/path/to/python${versions%% *}." >&2
    return 1
}

# Packages into $venv. uv (from PyPI) replaces a pip at its defaults: docs/measurements/install.md
# has the figures. pip runs where the user configured it (an index, a folder of wheels, PIP_ARGS),
# and where uv fails.
packages() {
    if [ -n "$uv" ]; then
        with_time "uv to install packages" "$uv" pip install -q --python "$py" "$@" && return
        echo "install: uv failed; pip is used instead" >&2
        uv=""
    fi
    # shellcheck disable=SC2086  # PIP_ARGS is a list of words
    with_time "pip to install packages" "$py" -m pip install -q ${PIP_ARGS:-} "$@"
}

# Runs a command and reports the wait for it: every 5 s, after a minute every minute.
with_time() { # reason command...
    local reason=$1 started=$SECONDS ticker code=0
    shift
    while sleep $((SECONDS - started < 60 ? 5 : 60)) &>/dev/null; do
        echo "install: waiting for $reason: $((SECONDS - started)) s" >&2
    done &
    ticker=$!
    "$@" || code=$?
    { kill "$ticker" && wait "$ticker"; } 2>/dev/null || true
    return "$code"
}

quiet() { # command...
    "$@" >/dev/null 2>&1
}

find_uv() {
    local options='index-url|extra-index-url|find-links|no-index|proxy|cert|client-cert'
    options+='|trusted-host|constraint|no-binary|only-binary'
    if [ -z "${PIP_ARGS:-}" ] &&
        ! "$py" -m pip config list | grep -E "\.($options)=" >/dev/null; then
        with_time "pip to install uv" quiet "$py" -m pip install -q uv==0.13.9 &&
            echo "$venv/bin/uv"
    fi
    return 0
}

# Environments with Transformer Engine, which is compiled for the CUDA build of torch.
needs_cuda() {
    [[ "$venv" = *gpu || "$venv" = .venv-te ]]
}

# The CPU build of torch saves gigabytes. It is chosen where there is no NVIDIA driver and the
# package index has it.
torch_of() { # lock
    local torch other_row='<'
    if [ "$version" = 3.11 ]; then other_row='>='; fi
    torch=$(grep '^torch==' "$1" | grep -v "python_version $other_row" | cut -d';' -f1)
    # shellcheck disable=SC2086
    if ! needs_cuda && [ -z "$uv" ] &&
        ! command -v nvidia-smi >/dev/null && [ ! -e /proc/driver/nvidia/version ] &&
        with_time "the index to list builds of torch" \
            quiet "$py" -m pip install -q --dry-run --no-deps ${PIP_ARGS:-} "$torch+cpu"; then
        torch+=+cpu
    fi
    echo "$torch"
}

# base.lock and dev.lock with the pins of requirements/$1.txt instead of theirs.
with_pins() { # name
    local names
    names=$(grep -v '^#' "requirements/$1.txt" | cut -d= -f1 | paste -sd'|')
    grep -hvE "^($names)==" requirements/base.lock requirements/dev.lock
    cat "requirements/$1.txt"
}

# Transformer Engine's library and Python code from PyPI's wheels; its extension for torch from its
# source. nvcc, of which its setup reads the version, and headers are PyPI's too, so no CUDA toolkit
# is needed.
compile_transformer_engine() {
    if [ -d "$site/transformer_engine_torch-$te.dist-info" ]; then return; fi
    echo "install: compiling Transformer Engine's extension for torch," \
        "about half an hour with MAX_JOBS=${MAX_JOBS:-1}" >&2
    # shellcheck disable=SC2086  # PIP_ARGS is a list of words
    with_time "pip to install nvcc" "$py" -m pip install -q --no-deps ${PIP_ARGS:-} \
        nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-cuda-cccl==13.0.85
    local cuda=$site/nvidia/cu13 include
    include=$cuda/include:$cuda/include/cccl:$site/nvidia/cudnn/include:$site/nvidia/nccl/include
    # shellcheck disable=SC2086
    CUDA_HOME=$cuda CPATH=$include NVTE_PYTORCH_FORCE_BUILD=TRUE MAX_JOBS=${MAX_JOBS:-1} \
        "$py" -m pip install --no-deps --no-build-isolation ${PIP_ARGS:-} \
        transformer_engine==$te transformer_engine_cu13==$te transformer_engine_torch==$te
}

# Transformer Engine 2.11 for torch 2.11 and Python 3.12, already compiled.
unpack_transformer_engine() {
    if [ -d "$site/transformer_engine" ]; then return; fi
    tar -C "$site" -xJf "$PACS_TE_PACK"/transformer_engine-*.tar.xz
    xz -dc "$PACS_TE_PACK"/libtransformer_engine-*.so.xz \
        >"$site/transformer_engine/wheel_lib/libtransformer_engine.so"
}

locks=("$@") venv=.venv-$1 versions="3.13 3.12 3.11"
case "$*" in
    base | "base dev") venv=.venv ;;
    docs) ;;
    gpu | sglang-gpu) versions="3.13 3.12" ;;
    te)
        versions=3.12
        if [ ! -d "${PACS_TE_PACK:-}" ]; then
            echo "install: te needs PACS_TE_PACK=/path/to/pack (docs/compatibility.md)" >&2
            exit 2
        fi
        ;;
    sglang)
        # One torch on both sides.
        if [ -z "${PYTHON:-}" ]; then
            versions=$(version_of .venv/bin/python || echo "$versions")
        fi
        ;;
    other)
        locks=(base dev) versions=3.11
        if [ "$(version_of .venv/bin/python)" = 3.11 ]; then versions="3.13 3.12"; fi
        unset PYTHON
        ;;
    *)
        echo "usage: tools/install.sh base [dev]|other|sglang|docs|gpu|sglang-gpu|te" >&2
        exit 2
        ;;
esac

py=$venv/bin/python
wanted=$versions
if [ -n "${PYTHON:-}" ]; then wanted=$(version_of "$PYTHON" || true); fi
# A creation that was interrupted has no working pip.
if [[ " $wanted " != *" $(version_of "$py") "* ]] || ! "$py" -m pip --version >/dev/null 2>&1; then
    python=$(find_python)
    echo "install: $venv with $python" >&2
    rm -rf "$venv"
    with_time "$venv" "$python" -m venv "$venv"
fi

version=$(version_of "$py")
site=$("$py" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
below=""
for name in "${locks[@]}"; do
    lock=requirements/$name.lock
    case $name in
        sglang-gpu) lock=requirements/sglang-gpu.txt ;;
        gpu | te) lock=$venv/$name.lock && with_pins "$name" >"$lock" ;;
    esac
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
        # Stand-ins for CUDA-only packages. SGLang imports them; a dense model on CPU calls none.
        echo "$PWD/tests/support/sglang_cpu" >"$site/sglang_cpu_stubs.pth"
        with_time "sglang to load" "$py" -W ignore -c 'import sgl_kernel, torchvision, sglang'
    else
        packages -r "$lock"
        with_time "pip to check the packages" "$py" -m pip check
    fi
    echo "$below" >"$stamp"
done
if needs_cuda &&
    ! "$py" -c 'import sys, torch; sys.exit(torch.version.cuda is None)'; then
    echo "install: $venv has a CPU build of torch from pip's configured index; name one with the" \
        "CUDA build, e.g. PIP_ARGS='--index-url https://pypi.org/simple', and remove $venv" >&2
    exit 1
fi
case $venv in
    .venv-gpu) compile_transformer_engine ;;
    .venv-te) unpack_transformer_engine ;;
    .venv | .venv-other) ;;
    *) exit ;;
esac

package=$(sha256sum pyproject.toml | cut -d' ' -f1)
if [ "$(cat "$venv/.package" 2>/dev/null)" != "$package $PWD" ]; then
    # --no-build-isolation: setuptools is in the lock, so nothing else is fetched.
    with_time "pip to install the package itself" \
        "$py" -m pip install -q --no-deps --no-build-isolation -e .
    echo "$package $PWD" >"$venv/.package"
fi
