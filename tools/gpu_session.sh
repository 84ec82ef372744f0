#!/usr/bin/env bash
# Everything that needs a GPU, unattended: tests/gpu, then benchmarks/train_step.py for each preset. Results stay in a folder.
#   tools/gpu_session.sh [results folder] [preset ...]
# PYTHON names the interpreter (default: .venv/bin/python if it is there, else python3). One failure does not end the rest.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
out=${1:-results/gpu-$(date -u +%Y%m%dT%H%M%SZ)}
shift || true
presets=("$@")
[ ${#presets[@]} -gt 0 ] || presets=(qwen3-0.6b qwen3-1.7b qwen3-4b)
python=${PYTHON:-}
[ -n "$python" ] || { [ -x .venv/bin/python ] && python=.venv/bin/python || python=python3; }
mkdir -p "$out"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
failed=0
run() { # name, command...
    local name=$1
    shift
    echo "== $name"
    "$@" >"$out/$name.log" 2>&1 || { failed=1; echo "   failed with $?; see $out/$name.log"; }
}
{ git rev-parse HEAD; git status --short; nvidia-smi; "$python" -m pip list; } >"$out/environment.log" 2>&1
run tests-gpu "$python" -m pytest tests/gpu -m gpu -v --session-timeout=3000 -p no:cacheprovider
tail -n 3 "$out/tests-gpu.log"
for preset in "${presets[@]}"; do
    run "train-step-$preset" "$python" benchmarks/train_step.py --preset "$preset" --out "$out/train-step-$preset"
    cat "$out/train-step-$preset/table.txt" 2>/dev/null
done
echo "results: $out"
exit $failed
