"""SIGKILL, and SIGSTOP then SIGTERM to the launcher, for every kind of process of a run on one
host.

docs/security.md has the table; servers, their guards and `serve` are in
tests/integration/sglang/test_server_lifecycle.py, test_fleet.py and
tests/unit/launch/test_serve.py.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from pacs_megatron.checkpoint.manifest import check_checkpoint
from pacs_megatron.checkpoint.names import newest_position
from pacs_megatron.checkpoint.run_checkpoint import latest_checkpoint
from tests.support.tiers import in_tiers
from tests.support.tiny_models import make_tiny_qwen3
from tests.support.tiny_run import write_tiny_run

LEAD_S = 120.0
WORDS = {
    "launch.agent": "torchrun",
    "training.main": "rank",
    "rollout.driver": "driver",
    "rewards.worker": "worker",
}


@dataclass(frozen=True)
class Row:
    """One line of the table in docs/security.md."""

    who: str
    fault: str
    code: int
    text: str
    """regular expression, in the output"""
    saves: bool = True


STOPPED = "stopped after step"
ROWS = [
    Row("launcher", "kill", -signal.SIGKILL, STOPPED),
    Row("torchrun", "kill", 75, rf"torchrun \(pid \d+\) was killed by SIGKILL(.|\n)*{STOPPED}"),
    Row(
        "rank0",
        "kill",
        128 + signal.SIGKILL,
        r"rank 0 \(pid \d+\) was killed by SIGKILL",
        saves=False,
    ),
    Row(
        "rank1",
        "kill",
        1,
        r"lost the connection to another rank(.|\n)*was killed by SIGKILL",
        saves=False,
    ),
    Row("driver", "kill", 1, "RolloutError: the rollout driver has ended unexpectedly"),
    Row("worker", "kill", 75, STOPPED),  # the run continues; then SIGTERM
    Row("launcher", "stop", 75, STOPPED),  # with SIGCONT, as Slurm and `timeout` send it
    Row("torchrun", "stop", 75, STOPPED),
    Row("rank0", "stop", 75, STOPPED),
    Row("rank1", "stop", 75, STOPPED),
    Row("driver", "stop", 75, STOPPED),
    Row("worker", "stop", 75, STOPPED),
]
CASES = {f"{row.who}-{row.fault}": row for row in ROWS}


def processes_of(launcher: int) -> dict[str, psutil.Process]:
    found = {"launcher": psutil.Process(launcher)}
    for child in found["launcher"].children(recursive=True):
        try:
            command = " ".join(child.cmdline())
            environ = child.environ()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        name = next((name for word, name in WORDS.items() if word in command), None)
        if name is not None:
            found[name + (environ["RANK"] if name == "rank" else "")] = child
    return found


@pytest.mark.parametrize("name", in_tiers(CASES, every=2))
def test_a_fault_of_one_process_ends_the_run_with_a_checkpoint(tmp_path: Path, name: str) -> None:
    row = CASES[name]
    config = write_tiny_run(
        tmp_path, make_tiny_qwen3(tmp_path / "model", num_hidden_layers=2, vocab_size=262)
    )
    run_dir = tmp_path / "runs" / "tiny"
    log = tmp_path / "log"
    command = [sys.executable, "-m", "pacs_megatron", "train", str(config), "run.steps=4000"]
    with log.open("wb") as file:
        run = subprocess.Popen(
            [*command, f"resources.signal_lead_s={LEAD_S:.0f}"], stdout=file, stderr=file
        )
    known: dict[str, psutil.Process] = {}
    try:
        while (newest_position(run_dir) or (0, 0)) < (2, 0):
            assert run.poll() is None, log.read_text()
            time.sleep(0.2)
        known = processes_of(run.pid)
        assert len(known) == 6
        before = newest_position(run_dir)
        started = time.monotonic()
        if row.fault == "kill":
            known[row.who].kill()
            if row.who == "worker":
                run.send_signal(signal.SIGTERM)
        else:
            known[row.who].suspend()
            run.send_signal(signal.SIGTERM)
            if row.who == "launcher":
                known[row.who].resume()
        code = run.wait(LEAD_S + 60)
        psutil.wait_procs(known.values(), 60)
        took_s = time.monotonic() - started
    finally:
        left = [
            process
            for process in known.values()
            if process.is_running() and process.status() != "zombie"
        ]
        for process in [*left, psutil.Process(run.pid)] if run.poll() is None else left:
            process.kill()
        run.wait()
    text = log.read_text()
    assert not left, [process.cmdline() for process in left]
    assert code == row.code and took_s < LEAD_S, text
    assert re.search(row.text, text), text
    assert "Traceback" not in text and "InternalError" not in text, text
    newest = latest_checkpoint(run_dir)
    assert newest is not None and before is not None
    assert check_checkpoint(newest).step is not None, "whole, with all digests"
    if row.saves:
        assert f"saved {newest}" in text or code == 1
    elif code > 128:
        assert "the newest checkpoint is step_0000" in text, text
