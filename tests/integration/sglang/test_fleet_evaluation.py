"""`pacs-megatron eval` over two real servers: a killed server and a killed client lose and repeat
no sample.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from tests.integration.sglang.conftest import START_S
from tests.support.needs import SGLANG_PYTHON, require_sglang
from tests.support.tiny_models import make_tiny_qwen3
from tests.support.tiny_run import write_tiny_run

pytestmark = [pytest.mark.sglang, pytest.mark.full, pytest.mark.timeout(2400)]
DRAWS = 40


class Client:
    """One evaluation as a user starts it; its log is read while it runs."""

    def __init__(self, folder: Path, config: Path, model: Path, *words: str) -> None:
        servers = {
            "python": [str(SGLANG_PYTHON)],
            "device": "cpu",
            "max_total_tokens": 16384,
            "count": 2,
        }
        quick = {
            "probe_interval_s": 0.3,
            "probe_timeout_s": 30.0,
            "dead_after_s": 90.0,
            "max_in_flight": 8,
        }
        rollout = {
            "engine": "sglang",
            "servers": servers | {"start_timeout_s": START_S},
            "sync": {"transport": "disk"},
        }
        rollout |= quick | {"sampling": {"max_response_tokens": 8}}
        columns = {"problem": "problem", "answer": "answer"}
        benchmarks = [
            {"path": f"{folder}/train.jsonl", "columns": columns, "name": "sums"},
            {
                "path": f"{folder}/train.jsonl",
                "columns": columns,
                "name": "few",
                "limit": 4,
                "samples_per_prompt": 6,
            }
            | {"k": [1, 3]},
        ]
        evaluation = {"benchmarks": benchmarks, "samples_per_prompt": DRAWS, "k": [1, 4, DRAWS]}
        evaluation |= {"sampling": {"max_response_tokens": 160, "stop": ["a", "b"]}}
        overrides = [
            f"evaluation={json.dumps(evaluation)}",
            f"rollout={json.dumps(rollout)}",
            "parallel.tp=1",
        ]
        command = [
            "eval",
            str(config),
            "rollout=null",
            *overrides,
            "--out",
            str(folder / "out"),
            *words,
        ]
        self.log = folder / f"client{len(list(folder.glob('client*')))}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pacs_megatron", *command, "--model", str(model)],
                stdout=log,
                stderr=log,
            )
        self.out = folder / "out"

    def lines(self) -> list[bytes]:
        """Whole lines of the samples' file."""
        files = list(self.out.glob("samples-*.jsonl"))
        assert len(files) <= 1
        return files[0].read_bytes().splitlines(keepends=True) if files else []

    def until(
        self, condition: Callable[[], bool], what: str, timeout_s: float = 2 * START_S
    ) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, f"{what}: {self.log.read_text()}"
            time.sleep(0.2)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)


def server_pid(out: Path, name: str) -> int:
    pid: int = json.loads((out / "servers" / f"{name}.pid").read_text())["server"]
    return pid


def direct_pass_at_k(labels: list[int], k: int) -> float:
    """The share of k-subsets of the responses with a right one, counted one by one."""
    subsets = list(itertools.combinations(labels, k))
    return sum(any(subset) for subset in subsets) / len(subsets)


def test_killed_server_and_killed_client_lose_and_repeat_nothing(tmp_path: Path) -> None:
    require_sglang()
    model = make_tiny_qwen3(tmp_path / "model")
    config = write_tiny_run(tmp_path, make_tiny_qwen3(tmp_path / "start"))
    client = Client(tmp_path, config, model)
    try:
        client.until(lambda: len(client.lines()) > 40, "first samples")
        os.kill(server_pid(client.out, "server1"), signal.SIGKILL)
        client.until(
            lambda: "restarting http" in client.log.read_text(), "restart of the killed server"
        )
        at = len(client.lines())
        client.until(lambda: len(client.lines()) > at + 40, "samples from the other server")
        owned = [server_pid(client.out, "server0")]
        client.kill()
        before = client.lines()
        psutil.wait_procs(
            [psutil.Process(pid) for pid in owned if psutil.pid_exists(pid)], timeout=600
        )
        assert not any(psutil.pid_exists(pid) for pid in owned)  # no server outlives its client

        client = Client(tmp_path, config, model)
        assert client.process.wait(3 * START_S) == 0, client.log.read_text()
    finally:
        client.kill()
    lines = client.lines()
    whole = [line for line in before if line.endswith(b"\n")]
    assert lines[: len(whole)] == whole and len(lines) > len(whole)
    header, *records = [json.loads(line) for line in lines]
    ids = [record["id"] for record in records]
    expected = set()
    for row in range(16):
        for index in range(DRAWS):
            expected.add(f"eval0:sums/{row}#{index}")
    for row in range(4):
        expected |= {f"eval0:few/{row}#{index}" for index in range(6)}
    assert len(ids) == len(set(ids)) and set(ids) == expected
    spans = itertools.chain.from_iterable(record["spans"] for record in records)
    assert {span["digest"] for span in spans} == {header["produced_by"]["weights"]}
    check_statistics(client.out, records)


def check_statistics(out: Path, records: list[dict[str, Any]]) -> None:
    results = json.loads((out / "results.json").read_text())
    harness = json.loads((out / "lm_eval_results.json").read_text())["results"]
    for name, problems, ks in (("sums", 16, (1, 4)), ("few", 4, (1, 3))):
        mine = [record for record in records if record["source"] == name]
        labels = [
            [r["label"] for r in mine if r["prompt_id"] == f"{name}/{row}"]
            for row in range(problems)
        ]
        assert set(itertools.chain.from_iterable(labels)) == {0, 1}
        for k in ks:
            direct = sum(direct_pass_at_k(row, k) for row in labels) / problems
            found = results["metrics"][f"eval/{name}/pass@{k}"]
            assert found == pytest.approx(direct, abs=1e-12)
            assert harness[name][f"pass@{k},none"] == found
            assert results["metrics"][f"eval/{name}/pass@{k}_low"] <= found
        cut = sum(record["stop"] == "length" for record in mine) / len(mine)
        assert results["metrics"][f"eval/{name}/truncated_frac"] == pytest.approx(cut)
