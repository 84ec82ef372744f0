#!/bin/sh
# The study on its second task (docs/study.md), one run at a time; start it again and it goes on after the last line of
# its logs.   PYTHONPATH=. sh benchmarks/study_partial.sh LOGS FOLDER
set -eu
logs=$1
folder=$2
python=${PYTHON:-python}
mkdir -p "$logs"

objectives="pacs"
for name in grpo ppo dr_grpo rloo reinforce_pp dapo gspo cispo real; do
    objectives="$objectives examples/objectives/$name.yaml"
done
measure() {
    "$python" benchmarks/defaults.py "$@" --task partial --folder "$folder" --workers 1
}

# Stage 1, the same budget for each objective: three rates, two seeds of their own.
measure $objectives --seeds 5 6 --only '{"lr":1e-4}' '{"lr":2e-4}' '{"lr":4e-4}' --log "$logs/tuning.jsonl"
# Beta, of PACS alone: in a log of its own, so that PACS gets no more points to choose from in stage 2.
for beta in 0.5 2; do
    measure pacs --seeds 5 6 --log "$logs/beta.jsonl" \
        --only "{\"lr\":1e-4,\"beta\":$beta}" "{\"lr\":2e-4,\"beta\":$beta}" "{\"lr\":4e-4,\"beta\":$beta}"
done
# Stage 2, the best rate of stage 1.
measure $objectives --seeds 0 1 2 3 4 --best-of "$logs/tuning.jsonl" --log "$logs/final.jsonl"
measure pacs examples/objectives/grpo.yaml examples/objectives/ppo.yaml --seeds 7 8 9 10 11 \
    --best-of "$logs/tuning.jsonl" --log "$logs/final.jsonl"
