#!/usr/bin/env bash
# One stage of the GPU measurements, at most 9 minutes; the same command continues a stage that was cut off.
#   tools/gpu_session.sh STAGE RESULTS [--dry-run-cpu]
#   1 correctness: Transformer Engine's modules, FP8 recipes and fp32 against the CPU path    2 speed: 0.6B and 1.7B
#   3 speed: 4B, MoE, recomputation, the head      4 `plan` against measured memory, its constants against stages 2 and 3
# PYTHON names the interpreter (default: .venv/bin/python if it exists, else python3). Each part has a limit below the
# stage's; a part with a result is skipped. RESULTS/stageN gets a log of every part, its JSON, and at the end table.txt and
# result.json of the stage.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
stage=${1:?stage 1 to 4}
out=${2:?results folder}/stage$stage
dry=${3:-}
python=${PYTHON:-}
[ -n "$python" ] || { [ -x .venv/bin/python ] && python=.venv/bin/python || python=python3; }
mkdir -p "$out"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTORCH_NVML_BASED_CUDA_CHECK=1
limit_s=530
failed=0

part() { # name, seconds at most, command...
    local name=$1 seconds=$2 start=$SECONDS status=0
    shift 2
    if [ -e "$out/$name.done" ]; then
        echo "== $name: has a result"
        return
    fi
    local left=$((limit_s - SECONDS))
    [ "$seconds" -gt "$left" ] && seconds=$left
    if [ "$seconds" -lt 20 ]; then
        echo "== $name: no time left in this stage; run the same command again"
        failed=1
        return
    fi
    timeout --kill-after=5 "$seconds" "$@" >"$out/$name.log" 2>&1 || status=$?
    echo "$status $((SECONDS - start)) $seconds" >"$out/$name.status"
    echo "== $name: exit code $status after $((SECONDS - start)) s of at most $seconds s"
    [ -e "$out/$name/table.txt" ] && cat "$out/$name/table.txt"
    if [ $status -eq 0 ]; then touch "$out/$name.done"; else tail -n 5 "$out/$name.log" && failed=1; fi
}

# Correctness and memory do not depend on what runs beside them, so these parts run side by side.
beside() { # part or steps, with its arguments
    "$@" &
}

steps() { # name, seconds, part that measured the same CPU reference, arguments of the benchmark
    local name=$1 seconds=$2 same=$3 file reference=()
    shift 3
    for file in "$out/$same/fp32-cpu.json" "$out/$name/fp32-cpu.json"; do
        [ -e "$file" ] && reference=(--reference "$file")
    done
    part "$name" "$seconds" "$python" benchmarks/train_step.py ${dry:+--dry-run-cpu} --out "$out/$name" "$@" "${reference[@]}"
}

summary() { # table.txt and result.json of the stage from the parts that ran
    "$python" - "$out" <<'END'
import json, pathlib, sys

out = pathlib.Path(sys.argv[1])
parts, lines = {}, []
for file in sorted(out.glob("*.status"), key=lambda path: path.stat().st_mtime):
    code, seconds, limit = map(int, file.read_text().split())
    result, table = out / file.stem / "result.json", out / file.stem / "table.txt"
    parts[file.stem] = {"exit_code": code, "seconds": seconds, "limit_s": limit}
    parts[file.stem]["result"] = json.loads(result.read_text()) if result.exists() else None
    lines.append(f"== {file.stem}: {'passed' if code == 0 else f'exit code {code}'}, {seconds} s of at most {limit} s")
    lines += table.read_text().splitlines() if table.exists() else []
(out / "result.json").write_text(json.dumps({"commit": (out / "environment.log").read_text().split()[0], "parts": parts}))
(out / "table.txt").write_text("\n".join(lines) + "\n")
END
}

{
    git rev-parse HEAD 2>/dev/null || echo "${COMMIT:-unknown}"
    nvidia-smi
    "$python" -m pip list
} >"$out/environment.log" 2>&1
case $stage in
    1)
        part import 60 "$python" -c "import torch, megatron.core; print(torch.__version__, megatron.core.__version__)"
        beside part modules 60 "$python" benchmarks/te_modules.py ${dry:+--dry-run-cpu} --out "$out/modules"
        if [ -z "$dry" ]; then
            beside part head 60 "$python" -m pytest tests/gpu/policy/test_head.py -q
            beside part offload 120 "$python" -m pytest tests/gpu/policy/test_offload.py -q
            beside part resume 150 "$python" -m pytest tests/gpu/policy/test_state.py -q -n 3
            beside part profile 60 "$python" -m pytest tests/gpu/observability -q
        fi
        # The first measures the CPU reference of the others, unless an earlier run has left it.
        steps check-fp32 130 check-fp32 --only-check --cases fp32
        for case in bf16 fp8-tensorwise fp8-blockwise fp8-delayed; do
            beside steps "check-$case" 100 check-fp32 --only-check --cases "$case"
        done
        wait
        ;;
    2)
        for case in bf16 fp8-tensorwise fp8-blockwise fp8-delayed; do
            steps "0.6b-$case" 110 0.6b-bf16 --preset qwen3-0.6b --cases "$case"
        done
        steps 1.7b-bf16 110 1.7b-bf16 --preset qwen3-1.7b --cases bf16
        steps 1.7b-fp8-blockwise 110 1.7b-bf16 --preset qwen3-1.7b --cases fp8-blockwise
        ;;
    3)
        steps 4b-bf16 150 4b-bf16 --preset qwen3-4b --cases bf16
        steps 4b-bf16-recompute 110 4b-bf16-recompute --preset qwen3-4b --cases bf16 --recompute full
        steps moe-bf16 130 moe-bf16 --preset qwen3-30b-a3b --cases bf16
        steps moe-fp8-blockwise 110 moe-bf16 --preset qwen3-30b-a3b --cases fp8-blockwise
        mkdir -p "$out/head"
        part head 120 "$python" benchmarks/head.py --out "$out/head/result.json" ${dry:+--tokens 256 --hidden 64 --vocab 8192 --repeats 1}
        steps 4b-fp8-blockwise 110 4b-bf16 --preset qwen3-4b --cases fp8-blockwise
        ;;
    4)
        if [ -n "$dry" ]; then
            part plan-exact 260 "$python" -m pytest tests/distributed/workbench/plan/test_memory.py -q -k "one or tp2-tied"
        else
            for case in qwen3-none qwen3-full qwen3_moe-none qwen3_moe-full; do
                beside part "plan-$case" 110 "$python" -m pytest "tests/gpu/workbench/plan/test_memory.py::test_one_stage_is_as_planned[$case]" -q
            done
            wait
        fi
        part constants 60 "$python" benchmarks/fit_constants.py "${out%/*}" "$out/constants"
        ;;
    *)
        echo "gpu_session: stage $stage is not 1, 2, 3 or 4" >&2
        exit 2
        ;;
esac
summary
echo "results: $out"
# A part that ran beside others cannot set `failed`: its status file tells.
for file in "$out"/*.status; do
    grep -q '^0 ' "$file" || failed=1
done
exit $failed
