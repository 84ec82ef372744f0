#!/usr/bin/env bash
# Brings .venv to the named locks: `tools/install.sh base [dev]`. A lock is installed only when it, the lock below it or
# the interpreter changed since the last complete installation (stamp files), so a second call takes no time.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3}; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit((3, 11) > sys.version_info[:2] or sys.version_info[:2] > (3, 12))' \
            2>/dev/null; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    echo "install: no usable Python 3.11 or 3.12 with the venv module among: ${PYTHON:-python3.11 python3.12 python3}." \
        "Install one, or say PYTHON=/path/to/python3.11." >&2
    return 1
}

# A creation that was interrupted has no working pip yet.
if ! $venv/bin/python -m pip --version >/dev/null 2>&1; then
    python=$(find_python)
    echo "install: $venv with $python" >&2
    rm -rf $venv
    "$python" -m venv $venv
fi

version=$($venv/bin/python -c 'import sys; print(*sys.version_info[:2], sep=".")')
below=""
for name in "$@"; do
    lock=requirements/$name.lock
    below=$(printf '%s %s ' "$below" "$version" | cat - "$lock" | sha256sum | cut -d' ' -f1)
    stamp=$venv/.lock-$name
    if [ "$(cat "$stamp" 2>/dev/null)" != "$below" ]; then
        rm -f "$stamp"
        echo "install: $lock" >&2
        # Not --no-deps: a CUDA build of torch brings its nvidia-* wheels, which the lock does not name.
        # shellcheck disable=SC2086  # PIP_ARGS is a list of words
        $venv/bin/python -m pip install -q --disable-pip-version-check ${PIP_ARGS:-} -r "$lock"
        $venv/bin/python -m pip check
        echo "$below" >"$stamp"
    fi
done

package=$(sha256sum pyproject.toml | cut -d' ' -f1)
if [ "$(cat $venv/.package 2>/dev/null)" != "$package $PWD" ]; then
    # --no-build-isolation: setuptools is in the lock, so nothing else is fetched.
    $venv/bin/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
    echo "$package $PWD" >$venv/.package
fi
