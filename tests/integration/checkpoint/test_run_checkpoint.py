"""A run that commit 7295b8e stopped inside a step resumes to the result of that commit.

`tests/golden/make_run_7295b8e.py` made the recording. Two groups of results are compared:

- Equal on every host: steps, counts, rewards, learning rates, prompts and sampled tokens. The data,
  the seeds and the checkpoint determine them. The seed of the recording keeps every random number
  7e-5 or more away from the border between two tokens, and hosts differ by about 1e-6.
- Equal up to rounding: weights and metrics of log-probs. The order of sums in a matrix product
  depends on the processor. With four other instruction sets, metrics differ by at most 4e-6 and
  weights by at most 3e-5 of the distance that they move.

The row of step 1 is equal with its times: a run that started again would write other times.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

RECORDING = Path(__file__).parents[2] / "golden" / "run_7295b8e.tar.xz"
STEPS_BEFORE_STOP = 1
FINAL_STEP = 4
EXACT_METRICS = (
    "step",
    "admission/",
    "batch/",
    "data/",
    "eval/",
    "optimizer/lr",
    "passes/",
    "response/",
    "reward/",
    "staleness/",
)
"""Metrics without this prefix depend on log-probs or gradients."""
SAMPLED_AFTER_RESUME = ("step_000004.jsonl", "eval_000004.jsonl")
"""The checkpoint contains the samples of step 3."""
MAX_WEIGHT_ERROR = 1e-2
"""Of a tensor, as a fraction of the distance (L2) that training moved it."""


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    with tarfile.open(RECORDING) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def test_a_run_stopped_by_7295b8e_resumes_to_its_result(recording: Path) -> None:
    resume(recording / "stopped")

    run_dir = recording / "stopped" / "runs" / "tiny"
    expected = recording / "resumed"
    compare_metrics(run_dir / "metrics.jsonl", expected / "metrics.jsonl")
    compare_rollouts(run_dir / "rollouts", expected / "rollouts")
    compare_weights(
        load_file(run_dir / "hf" / "model.safetensors"),
        load_file(expected / "model.safetensors"),
        load_file(recording / "stopped" / "model" / "model.safetensors"),
    )


def resume(folder: Path) -> None:
    command = [sys.executable, "-m", "pacs_megatron", "train", "run.yaml"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]


def compare_metrics(actual: Path, expected: Path) -> None:
    mine = actual.read_text().splitlines()
    theirs = expected.read_text().splitlines()
    assert mine[: 1 + STEPS_BEFORE_STOP] == theirs[: 1 + STEPS_BEFORE_STOP]
    assert len(mine) == len(theirs) == 1 + FINAL_STEP

    for my_line, their_line in zip(mine, theirs, strict=True):
        my_row = without_times(json.loads(my_line))
        their_row = without_times(json.loads(their_line))
        assert their_row.keys() <= my_row.keys()
        for name, value in their_row.items():
            if not name.startswith(EXACT_METRICS):
                value = pytest.approx(value, rel=1e-4, abs=2e-5)
            assert my_row[name] == value, (their_row["step"], name)


def without_times(row: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in row.items()
        if not name.startswith("time/") and not name.endswith("_per_s")
    }


def compare_rollouts(actual: Path, expected: Path) -> None:
    names = sorted(path.name for path in expected.iterdir())
    # The recording has no offsets of lines.
    written = [path.name for path in actual.iterdir() if path.suffix != ".offsets"]
    assert sorted(written) == names
    for name in names:
        if name in SAMPLED_AFTER_RESUME:
            compare_new_samples(actual / name, expected / name)
        elif f"{Path(name).stem}.jsonl" not in SAMPLED_AFTER_RESUME:
            assert (actual / name).read_bytes() == (expected / name).read_bytes(), name


def compare_new_samples(actual: Path, expected: Path) -> None:
    """Compares texts and arrays of samples. Log-probs and digests of weights depend on the host."""
    mine = [json.loads(line) for line in actual.read_text().splitlines()]
    theirs = [json.loads(line) for line in expected.read_text().splitlines()]
    for sample in (*mine, *theirs):
        for span in sample["spans"]:
            del span["digest"]
    for sample in theirs:
        mean = sample["sampler_logprob_mean"]
        sample["sampler_logprob_mean"] = pytest.approx(mean, rel=1e-4)
    assert mine == theirs, actual.name

    my_arrays = load_file(actual.with_suffix(".safetensors"))
    their_arrays = load_file(expected.with_suffix(".safetensors"))
    assert my_arrays.keys() == their_arrays.keys()
    for name, array in their_arrays.items():
        tolerance = 1e-4 if name == "logprobs" else 0
        np.testing.assert_allclose(my_arrays[name], array, rtol=tolerance, err_msg=name)


def compare_weights(
    actual: dict[str, np.ndarray], expected: dict[str, np.ndarray], start: dict[str, np.ndarray]
) -> None:
    assert actual.keys() == expected.keys() == start.keys()
    for name, weight in expected.items():
        moved = np.linalg.norm(weight - start[name])
        error = np.linalg.norm(actual[name] - weight)
        assert error <= MAX_WEIGHT_ERROR * moved, (name, error / moved)
