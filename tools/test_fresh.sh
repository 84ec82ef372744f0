#!/usr/bin/env bash
# The two README commands as a new user runs them: a clone of HEAD, an empty home, pip's defaults, no Slurm from before.
#   tools/test_fresh.sh [interpreter]   (default: the active python3)
# FRESH_DIR names the parent of the temporary folder, which needs 15 GB. Prints the minutes of each part.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(command -v "${1:-${PYTHON:-python3}}")
folder=$(mktemp -d "${FRESH_DIR:-/tmp}/fresh-XXXXXX")
trap 'rm -rf "$folder"' EXIT
mkdir "$folder/home"
git clone -q . "$folder/checkout"
commit=$(git rev-parse HEAD)
echo "test-fresh: commit $commit, $("$python" --version), $(nproc) cores, load $(cut -d' ' -f1-3 /proc/loadavg)"

# Without them the index is out of reach behind a proxy.
network=()
for name in http_proxy https_proxy no_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY SSL_CERT_FILE; do
    if [ -n "${!name:-}" ]; then network+=("$name=${!name}"); fi
done

failed=0
part() { # name, command...
    local name=$1 start=$SECONDS status=0
    shift
    env -i HOME="$folder/home" PATH="${PATH}" LANG="${LANG:-C.UTF-8}" PYTHON="$python" PACS_CI=1 "${network[@]}" \
        make -C "$folder/checkout" --no-print-directory "$@" || status=$?
    echo "test-fresh: $name: $(((SECONDS - start) / 60)) min $(((SECONDS - start) % 60)) s, exit code $status"
    [ $status -eq 0 ] || failed=1
}
part "make quickstart, installation included" quickstart
part "installation for make test" install-dev install-sglang install-slurm install-sandbox
part "make test" test
du -sch "$folder/checkout/.venv" "$folder/checkout/.venv-sglang" | tail -n 1 | sed 's/^/test-fresh: both environments: /'
exit $failed
