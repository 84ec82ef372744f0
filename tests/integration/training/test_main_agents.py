"""Training with agents as a user starts it: whole, stopped, killed and resumed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file

from pacs_megatron.errors import ExitCode
from pacs_megatron.observability.rollout_log import read_rollouts, rollout_path
from tests.support.metrics import reproducible_bytes
from tests.support.rollout import read_record
from tests.support.tiny_models import make_tiny_qwen3
from tests.support.tiny_run import with_agent, write_tiny_run

OVERRIDES = ("reward.max_failure_frac=1", "logging.save_tokens=true")
SLOW = """
import time

def hang():
    time.sleep(600)

async def solve(problem, session):
    number = int(problem.id.rpartition("/")[2])
    await session.generate(max_tokens=3)
    if number % 4 == 1:
        raise ValueError("no luck")
    if number % 4 == 3:
        return
    {wait}
    session.append(await session.call("calculate", expression=f"{{number}} * 3"))
    await session.generate(max_tokens=4)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3(tmp_path_factory.mktemp("model"), tied=True, vocab_size=262)


def start(config: Path, *overrides: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "pacs_megatron", "train", str(config), *OVERRIDES, *overrides],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, err = process.communicate(timeout=600)
    return process.returncode, err


def rows(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def wait_for(condition: Any, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 600
    while not condition():
        assert process.poll() is None, f"the run ended early: {process.communicate()[1]}"
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_two_ranks_train_on_trajectories(tmp_path: Path, model: Path) -> None:
    config = with_agent(write_tiny_run(tmp_path, model))
    code, err = finish(start(config))
    assert code == ExitCode.OK, err
    run_dir = tmp_path / "runs" / "tiny"
    metrics = rows(run_dir)
    assert [row["step"] for row in metrics] == [1, 2]
    for row in metrics:
        assert row["agent/turns_max"] == 2 and row["tool/calculate/calls"] > 0
        assert row["agent/failed"] == row["admission/dropped_unjudged"]
        assert np.isfinite(row["objective/loss"]) and row["optimizer/grad_norm"] > 0
        # Same model and weights: every token of the policy is scored in its exact context.
        assert row["mismatch/logprob_abs_max"] < 1e-4
        records = read_rollouts(rollout_path(run_dir, row["step"]))
        used = [record for record in records if record.get("turns")]
        assert row["tool/calculate/calls"] == len(used)
        assert all(len(record["turns"][0]["calls"]) == 1 for record in used)
        assert row["response/tokens"] == sum(record["response_tokens"] for record in records)


@pytest.mark.full
def test_a_stop_keeps_finished_trajectories_and_a_kill_changes_no_bit(
    tmp_path: Path, model: Path
) -> None:
    whole = tmp_path / "whole"
    cut = tmp_path / "cut"
    for folder in (whole, cut):
        folder.mkdir()
        with_agent(write_tiny_run(folder, model), SLOW.format(wait=""))
    code, err = finish(start(whole / "run.yaml", "run.steps=4"))
    assert code == ExitCode.OK, err

    run_dir = cut / "runs" / "tiny"
    process = start(cut / "run.yaml", "run.steps=4")
    wait_for(lambda: len(rows(run_dir)) >= 1, process)
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(family, timeout=600)
    process.communicate()
    code, err = finish(start(cut / "run.yaml", "run.steps=4"))
    assert code == ExitCode.OK, err
    for step in range(1, 5):
        records = []
        for folder in (cut, whole):
            path = rollout_path(folder / "runs" / "tiny", step).with_suffix(".safetensors")
            records.append(path.read_bytes())
        assert records[0] == records[1]
    assert (run_dir / "hf" / "model.safetensors").read_bytes() == (
        whole / "runs" / "tiny" / "hf" / "model.safetensors"
    ).read_bytes()
    assert [row["step"] for row in rows(run_dir)] == [1, 2, 3, 4]
    assert reproducible_bytes(run_dir) == reproducible_bytes(whole / "runs" / "tiny")


@pytest.mark.full
@pytest.mark.parametrize("wait", ["hang()", 'await session.call("hang")'], ids=["solve", "tool"])
def test_a_stop_ends_in_time_and_keeps_what_is_finished(
    tmp_path: Path, model: Path, wait: str
) -> None:
    """While `solve` or a tool hangs."""
    tools = {
        "calculate": {"kind": "calculator"},
        "hang": {"kind": "custom", "function": f"{tmp_path / 'my_agent.py'}:hang"},
    }
    config = with_agent(
        write_tiny_run(tmp_path, model),
        SLOW.format(wait=wait),
        timeout_s=900,
        call_timeout_s=900,
        tools=tools,
    )
    run_dir = tmp_path / "runs" / "tiny"
    log = run_dir / "logs" / "driver.log"
    process = start(config)
    # Of step 2 one prompt in four fails, one has one turn, and two hang.
    wait_for(lambda: log.is_file() and log.read_text().count("no luck") == 8, process)
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    code, err = finish(process)
    assert code == ExitCode.PREEMPTED, err
    [saved] = (run_dir / "checkpoints").glob("step_000001*")
    before = json.loads((saved / "buffer.json").read_text())
    kept = load_file(saved / "buffer.safetensors")
    assert before["ids"]

    (tmp_path / "my_agent.py").write_text(SLOW.format(wait=""))
    code, err = finish(start(config))
    assert code == ExitCode.OK, err
    assert "the agent changed since the checkpoint" in err
    record = rollout_path(run_dir, 2).with_suffix(".safetensors")
    after = {sample.id: sample for sample in read_record(record)}
    for place, sample_id in enumerate(before["ids"]):
        start_at, end = kept["offsets"][place : place + 2]
        assert after[sample_id].token_ids.tolist() == kept["token_ids"][start_at:end].tolist()
