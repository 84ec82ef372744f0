#!/bin/sh
# The study's later methods on its first task (docs/study.md); start it again and it goes on after the last line of its
# logs.   PYTHONPATH=. sh benchmarks/study_methods.sh LOGS FOLDER
set -eu
logs=$1
folder=$2
python=${PYTHON:-python}
mkdir -p "$logs"

methods="pacs benchmarks/study/dars_pacs.yaml"
for name in maxrl dgpo steer ucas vimpo; do
    methods="$methods examples/objectives/$name.yaml"
done
measure() {
    "$python" benchmarks/defaults.py "$@" --folder "$folder"
}

# Stage 1: two rates on a seed of its own.
measure $methods --seeds 5 --only '{"lr":1e-4}' '{"lr":2e-4}' --log "$logs/tuning.jsonl"
# Stage 2: the best rate of stage 1, and the control at the same rate.
measure $methods --seeds 0 1 2 3 4 --best-of "$logs/tuning.jsonl" --log "$logs/final.jsonl"
measure $methods --seeds 0 1 --best-of "$logs/tuning.jsonl" --shuffle --log "$logs/shuffled.jsonl"
# distill reads no label. Its teacher is the result of DGPO on the same seed.
for rate in 1e-4 2e-4; do
    measure examples/objectives/distill.yaml --seeds 0 1 2 3 4 --log "$logs/distill.jsonl" \
        --only "{\"lr\":$rate,\"teacher\":\"dgpo-lr0.0002\"}"
done
