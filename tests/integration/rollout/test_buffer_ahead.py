"""Training ahead of its samples with a server that gives the same responses in every run: stopped
during generation, or left without servers, the run continues to the same weights, and no finished
sample is requested again.

The responses do not depend on the weights on purpose: given the same samples, a run has the same
bits for every staleness, every interruption and every order of arrival.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pacs_megatron.errors import ExitCode
from pacs_megatron.observability.metrics import read_metrics
from pacs_megatron.observability.rollout_log import read_rollouts, rollout_path
from tests.support.ahead import STOPPED_IN_STEP_3
from tests.support.servers.replay_sglang import ReplaySglang
from tests.support.tiny_models import make_tiny_qwen3
from tests.support.tiny_run import write_tiny_run

STEPS = 6
SAMPLES = 16
"""of a step"""
LIMIT_S = 800.0
_started: list[subprocess.Popen[str]] = []


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3(tmp_path_factory.mktemp("model"), num_hidden_layers=2, vocab_size=262)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    for process in _started:
        process.kill()
        process.wait()
    _started.clear()


@pytest.fixture
def server() -> Iterator[ReplaySglang]:
    with ReplaySglang(token_s=0.004, median_tokens=20.0, spread=0.7) as replay:
        yield replay


def start(
    folder: Path,
    model: Path,
    url: str,
    max_staleness: int,
    *overrides: str,
    program: str | None = None,
) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    config = write_tiny_run(folder, model)
    rollout = (
        f"{{engine: sglang, urls: ['{url}'], max_staleness: {max_staleness}, sampling: "
        "{max_response_tokens: 48}, probe_interval_s: 0.2, dead_after_s: 2.0, all_down_after_s: "
        "3.0, sync: {transport: disk, verify: 'off', pause: in_place, timeout_s: 5.0}}"
    )
    values = (
        f"run.steps={STEPS}",
        f"rollout={rollout}",
        "parallel.tp=1",
        "checkpoint.every=null",
        *overrides,
    )
    process = subprocess.Popen(
        [
            sys.executable,
            *(["-m", "pacs_megatron.training.main"] if program is None else ["-c", program]),
            str(config),
            *values,
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    _started.append(process)
    return process


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, err = process.communicate(timeout=LIMIT_S)
    return process.returncode, err


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert process.poll() is None, f"the run ended early: {process.communicate()[1]}"
        assert time.monotonic() < deadline
        time.sleep(0.02)


def num_rows(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def learned(run_dir: Path) -> tuple[bytes, list[dict[str, Any]]]:
    """The final weights, and all metrics but times and lags."""
    rows = [
        {
            name: value
            for name, value in row.items()
            if not name.startswith(("time/", "staleness/")) and "per_s" not in name
        }
        for row in read_metrics(run_dir)
    ]
    for row in rows:
        row.pop("admission/dropped_stale_groups", None)  # counted with a lag only
    return (run_dir / "hf" / "model.safetensors").read_bytes(), rows


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    folder = tmp_path_factory.mktemp("synchronous")
    with ReplaySglang(token_s=0.0, median_tokens=20.0, spread=0.7) as replay:
        code, err = finish(start(folder, model, replay.url, 0))
    assert code == ExitCode.OK, err
    return folder / "runs" / "tiny"


@pytest.mark.full
def test_a_stop_in_the_middle_of_generation_loses_no_finished_sample(
    synchronous: Path, tmp_path: Path, model: Path, server: ReplaySglang
) -> None:
    run_dir = tmp_path / "runs" / "tiny"
    process = start(tmp_path, model, server.url, 2)
    wait_until(lambda: num_rows(run_dir) >= 1, process)
    server.token_s = 0.3  # later requests take seconds, and siblings end far apart
    before = set(server.asked)
    wait_until(lambda: bool(server.finished - before), process)
    process.send_signal(signal.SIGTERM)
    code, err = finish(process)
    assert code == ExitCode.PREEMPTED, err
    [folder] = (run_dir / "checkpoints").iterdir()
    buffer = json.loads((folder / "buffer.json").read_text())
    kept = set(buffer["ids"])
    assert len(kept) == len(buffer["ids"]) == sum(saved["samples"] for saved in buffer["steps"]) > 0
    assert any(0 < saved["samples"] < SAMPLES for saved in buffer["steps"])
    server.token_s = 0.004
    server.asked.clear()
    code, err = finish(start(tmp_path, model, server.url, 2))
    assert code == ExitCode.OK, err
    assert not kept & set(server.asked), "a finished sample was requested again"
    assert max(server.asked.values()) == 1
    rows = read_metrics(run_dir)
    # Which step is how far behind depends on how fast the trainer is; not all are sampled from the
    # newest weights.
    assert {0.0} < {row["staleness/max"] for row in rows} <= {0.0, 1.0, 2.0}
    assert learned(run_dir) == learned(synchronous)


@pytest.mark.full
def test_evaluations_in_between_have_exactly_the_weights_of_their_step(
    tmp_path: Path, model: Path, server: ReplaySglang
) -> None:
    server.token_s = 0.01
    rows = [{"problem": f"{a} + 1 = ?", "answer": str(a + 1)} for a in range(6)]
    evaluation = tmp_path / "test.jsonl"
    evaluation.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = (
        f"evaluation.benchmarks=[{{path: {evaluation}, name: test, columns: {{problem: problem, "
        f"answer: answer}}}}]",
        *(
            "evaluation.sampling.max_response_tokens=48",
            "evaluation.every=1",
            "evaluation.samples_per_prompt=2",
        ),
        *("run.steps=3", "rollout.max_in_flight=8", "batch.updates_per_step=1"),
    )
    code, err = finish(start(tmp_path, model, server.url, 2, *options))
    assert code == ExitCode.OK, err
    run_dir = tmp_path / "runs" / "tiny"
    for step in range(4):
        samples = read_rollouts(rollout_path(run_dir, step, "eval"))
        assert len(samples) == 12
        spans = itertools.chain.from_iterable(sample["spans"] for sample in samples)
        assert {span["version"] for span in spans} == {step}
    # Eight at a time: the evaluation before the first step was requested while 48 training requests
    # waited, and has priority.
    arrived = [body["rid"] for body in server.bodies]
    first_eval = [at for at, rid in enumerate(arrived) if rid.startswith("eval0:")]
    assert max(first_eval) < 12 + 2 * 8


@pytest.mark.full
def test_without_servers_the_last_boundary_is_saved_with_the_reason(
    synchronous: Path, tmp_path: Path, model: Path, server: ReplaySglang
) -> None:
    run_dir = tmp_path / "runs" / "tiny"
    process = start(tmp_path, model, server.url, 1)
    wait_until(lambda: num_rows(run_dir) >= 2, process)
    server.refuse()
    code, err = finish(process)
    assert code == ExitCode.FAILED, err
    [line] = [line for line in err.splitlines() if line.startswith(("RolloutError:", "SyncError:"))]
    assert "server" in line and "Connect" in line, err
    [folder] = (run_dir / "checkpoints").iterdir()
    assert int(folder.name.split("_")[1]) >= 2 and (folder / "manifest.json").is_file()
    server.accept()
    code, err = finish(start(tmp_path, model, server.url, 1))
    assert code == ExitCode.OK, err
    assert learned(run_dir) == learned(synchronous)


@pytest.mark.full
def test_oversampling_requests_more_than_it_trains_and_cancels_the_rest(
    tmp_path: Path, model: Path, server: ReplaySglang
) -> None:
    server.token_s = 0.02
    options = (
        "admission={drop_one_class_groups: true, oversample: 2.0}",
        "objective={name: grpo}",
        "run.steps=4",
    )
    code, err = finish(start(tmp_path, model, server.url, 0, *options))
    assert code == ExitCode.OK, err
    run_dir = tmp_path / "runs" / "tiny"
    asked: dict[int, set[str]] = {step: set() for step in range(1, 5)}
    for sample_id in server.asked:
        step, rest = sample_id.split(":", 1)
        asked[int(step)].add(rest.partition("#")[0])
    ended_early = 0
    for row in read_metrics(run_dir):
        step = int(row["step"])
        assert row["admission/num_groups"] == 4 and len(asked[step]) == 8
        judged = {(s["prompt_id"], s["id"]) for s in read_rollouts(rollout_path(run_dir, step))}
        whole = {prompt for prompt, _ in judged if sum(p == prompt for p, _ in judged) == 4}
        cut = asked[step] - whole
        dropped = (
            row["admission/dropped_one_class_groups"] + row["admission/dropped_surplus_groups"]
        )
        assert dropped == 8 - 4 and row["admission/dropped_surplus_groups"] == len(cut)
        ended_early += len(cut)
        if step < 4:
            assert cut <= asked[step + 1], "prompts that were cut short come again"
    assert ended_early > 0 and server.aborted


@pytest.mark.full
@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_stop_between_two_updates_goes_on_with_the_next_one(
    synchronous: Path, tmp_path: Path, model: Path, server: ReplaySglang, max_staleness: int
) -> None:
    run_dir = tmp_path / "runs" / "tiny"
    code, err = finish(start(tmp_path, model, server.url, max_staleness, program=STOPPED_IN_STEP_3))
    assert code == ExitCode.PREEMPTED, err
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step_000002_plus_01"]
    kept = set(
        json.loads((run_dir / "checkpoints" / "step_000002_plus_01" / "buffer.json").read_text())[
            "ids"
        ]
    )
    server.asked.clear()
    code, err = finish(start(tmp_path, model, server.url, max_staleness))
    assert code == ExitCode.OK, err
    assert len(kept) >= SAMPLES and not kept & set(server.asked), (
        "a finished sample was requested again"
    )
    # Weights from the middle of a step sample nothing: versions count updates, two a step.
    versions = set()
    for step in range(3, STEPS + 1):
        for sample in read_rollouts(rollout_path(run_dir, step)):
            for span in sample["spans"]:
                versions.add(span["version"])
    assert versions and all(version % 2 == 0 for version in versions)
    assert learned(run_dir) == learned(synchronous)
