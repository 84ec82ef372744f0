"""A training run with SGLang servers as a user starts it, for tests that disturb it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import psutil
import yaml

from pacs_megatron.observability.metrics import read_metrics
from pacs_megatron.observability.rollout_log import read_rollouts, rollout_path
from tests.support.tiny_run import write_tiny_run

PROMPTS = 8
SAMPLES = 4
RESTARTED = "restarted with the weights of its model path"
MOVED = "are retried on other servers"
SENT_AGAIN = "requesting them from the trainer once more"
"""The driver's log lines that tests wait for; tests/unit/sglang/test_server.py looks for them in
the package.
"""
STOP = list("abcdefgh")
"""Ends most responses of a random model early and keeps some long."""


class FleetRun:
    """One run folder; `start` may be called again after the run ended.

    `end_all` ends the processes of a failed test.
    """

    _started: ClassVar[list[FleetRun]] = []

    def __init__(
        self,
        folder: Path,
        model: Path,
        rollout: dict[str, Any],
        *,
        steps: int,
        delay_s: float = 0.02,
    ) -> None:
        self.config = write_tiny_run(folder, model, delay_s)
        self.run_dir = folder / "runs" / "tiny"
        self.steps = steps
        sampling = {"max_response_tokens": 96, "stop": STOP}
        quick = {
            "probe_interval_s": 0.3,
            "probe_timeout_s": 3.0,
            "dead_after_s": 5.0,
            "all_down_after_s": 200.0,
        }
        self._overrides = (
            f"run.steps={steps}",
            f"batch.prompts_per_step={PROMPTS}",
            f"batch.samples_per_prompt={SAMPLES}",
            "parallel.tp=1",
            "run.nproc=1",
            "rollout=null",
            "rollout="
            + yaml.safe_dump(
                {"sampling": sampling, **quick, **rollout}, default_flow_style=True, width=10**6
            ),
        )
        self.process: subprocess.Popen[str]

    @classmethod
    def end_all(cls) -> None:
        for run in cls._started:
            if run.process.poll() is None:
                run.kill()
        cls._started.clear()

    def start(self, *overrides: str) -> None:
        self._started.append(self)
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "pacs_megatron",
                "train",
                str(self.config),
                *self._overrides,
                *overrides,
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def finish(self, timeout_s: float = 600.0) -> tuple[int, str]:
        """Exit code and standard error; kills the run at the timeout."""
        try:
            _, err = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        return self.process.returncode, err

    def kill(self) -> list[int]:
        """`kill -9` of the launcher and everything it started, but for servers, whose guards have
        their own sessions.
        """
        family = [
            psutil.Process(self.process.pid),
            *psutil.Process(self.process.pid).children(recursive=True),
        ]
        family = [member for member in family if not _is_server(member)]
        for member in family:
            member.kill()
        psutil.wait_procs(family, timeout=20)
        self.process.communicate(timeout=600)
        return [member.pid for member in family]

    def until_step(self, step: int, timeout_s: float = 600.0) -> None:
        """Returns when the row of this step is written."""
        self.until(lambda: self.last_step() >= step, f"step {step}", timeout_s)

    def until(self, condition: Callable[[], bool], what: str, timeout_s: float = 600.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, (
                f"the run ended before {what}: {self.process.communicate()[1][-3000:]}"
            )
            assert time.monotonic() < deadline, (
                f"no {what} within {timeout_s:g} s: {self.driver_log()[-3000:]}"
            )
            time.sleep(0.02)

    def last_step(self) -> int:
        path = self.run_dir / "metrics.jsonl"
        return (
            int(read_metrics(self.run_dir)[-1]["step"] or 0)
            if path.is_file() and path.stat().st_size
            else 0
        )

    def driver_log(self) -> str:
        path = self.run_dir / "logs" / "driver.log"
        return path.read_text() if path.is_file() else ""

    def assert_whole(self, max_staleness: int = 0) -> set[str]:
        """Checks that every step has each sample once and no token exceeds `max_staleness`.

        Returns the sample ids.
        """
        assert [row["step"] for row in read_metrics(self.run_dir)] == list(range(1, self.steps + 1))
        digest_of: dict[int, str] = {}
        seen: set[str] = set()
        for step in range(1, self.steps + 1):
            samples = read_rollouts(rollout_path(self.run_dir, step))
            ids = {sample["id"] for sample in samples}
            assert len(ids) == len(samples) == PROMPTS * SAMPLES and not ids & seen
            seen |= ids
            numbers = {prompt: set[str]() for prompt in {sample["prompt_id"] for sample in samples}}
            allowed = {
                2 * trained for trained in range(max(0, step - 1 - max_staleness), step)
            }  # two updates a step
            for sample in samples:
                numbers[sample["prompt_id"]].add(sample["id"].rpartition("#")[2])
                at = 0
                for span in sample["spans"]:
                    assert span["start"] == at and span["version"] in allowed
                    assert digest_of.setdefault(span["version"], span["digest"]) == span["digest"]
                    at = span["end"]
                assert at == sample["response_tokens"] > 0
            assert len(numbers) == PROMPTS and all(
                found == set("0123") for found in numbers.values()
            )
        if not max_staleness:
            assert len(digest_of) == self.steps
        assert len(set(digest_of.values())) == len(digest_of)
        return seen


def _is_server(process: psutil.Process) -> bool:
    """A guard or one of its children."""
    try:
        words = [str(word) for word in process.cmdline()]
    except psutil.NoSuchProcess:
        return False
    return any(
        word.endswith("sglang/guard.py") or word.startswith(("sglang.launch", "sglang::"))
        for word in words
    )
