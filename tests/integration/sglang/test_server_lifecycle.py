"""Servers of a run end with the run: failure, Ctrl-C, `kill -9`, success. With an API key."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from pacs_megatron.errors import ExitCode
from pacs_megatron.runtime.processes import start_ticks
from pacs_megatron.sglang import guard as sglang_guard
from pacs_megatron.sglang.api import ServerRejectedError, SglangApi
from tests.integration.sglang.conftest import START_S
from tests.support.needs import SGLANG_PYTHON, require_sglang
from tests.support.servers.fleet_run import FleetRun
from tests.support.tiny_models import make_tiny_qwen3

pytestmark = [pytest.mark.sglang, pytest.mark.full, pytest.mark.timeout(3000)]
KEY = "sesame-of-the-test"


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if start_ticks(pid) is not None]


def gone(pids: list[int], within_s: float = 600.0) -> bool:
    deadline = time.monotonic() + within_s
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive(pids)


def servers(run: FleetRun) -> tuple[list[int], str, Path]:
    """Guard, launcher, scheduler and detokenizer of the run's server; its address; its rendezvous
    file in /dev/shm.
    """
    record = json.loads((run.run_dir / "servers" / "server0.pid").read_text())
    pids = [record["guard"], *sglang_guard.members(record["server"])]
    assert len(pids) >= 4
    url = re.findall(r"starting rollout server server0 at (http://\S+),", run.driver_log())[-1]
    return pids, url, Path(record["store"])


def is_free(url: str) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", urlsplit(url).port or 0))
        except OSError:
            return False
        return True


@pytest.mark.campaign
def test_no_server_outlives_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run, four attempts; each takes up where the one before ended."""
    require_sglang()
    monkeypatch.setenv("ROLLOUT_KEY", KEY)
    own = {"python": [str(SGLANG_PYTHON)], "device": "cpu", "max_total_tokens": 16384}
    rollout = {
        "engine": "sglang",
        "servers": own,
        "sync": {"transport": "broadcast"},
        "api_key_env": "ROLLOUT_KEY",
    }
    run = FleetRun(tmp_path, make_tiny_qwen3(tmp_path / "model"), rollout, steps=30, delay_s=0.05)

    # Failure: the circuit breaker ends the run after its first step.
    run.start("mismatch.max_abs_mean=1e-9")
    run.until(lambda: "weights 0:" in _rank_log(run), "first weights", START_S)
    pids, url, store = servers(run)
    _check_running(pids, url)
    code, err = run.finish()
    assert code == ExitCode.FAILED and "mismatch.max_abs_mean" in err, (code, err)
    assert gone(pids) and is_free(url) and not store.exists()

    # Ctrl-C, as a terminal sends it.
    run.start()
    run.until_step(3, START_S)
    pids, url, store = servers(run)
    run.process.send_signal(signal.SIGINT)
    code, err = run.finish()
    assert code == ExitCode.PREEMPTED, err
    assert gone(pids) and is_free(url) and not store.exists()

    # kill -9 of everything that could still clean up, the guard too. What is left of the server
    # then, if anything (the children of SGLang 0.5.23 mostly notice), the next start ends.
    run.start()
    run.until_step(run.last_step() + 2, START_S)
    pids, _, of_killed = servers(run)
    os.kill(pids[0], signal.SIGKILL)
    run.kill()
    assert gone(pids[:1])
    left = alive(pids)

    # Success.
    run.steps = run.last_step() + 2
    run.start(f"run.steps={run.steps}")
    assert gone(left, START_S)
    run.until(lambda: len(server_children(run)) >= 3, "server's children", START_S)
    pids, url, store = servers(run)
    code, err = run.finish(START_S)
    assert code == ExitCode.OK, err
    assert gone(pids) and is_free(url) and not store.exists()
    assert not of_killed.exists()
    run.assert_whole()
    files = [path for path in run.run_dir.rglob("*") if path.is_file()]
    assert any(path.name == "server0.log" for path in files)
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []


def server_children(run: FleetRun) -> list[int]:
    """Of the server that runs now.

    None while there is only an earlier attempt's pid file, or none.
    """
    try:
        record = json.loads((run.run_dir / "servers" / "server0.pid").read_text())
    except FileNotFoundError:
        return []
    return sglang_guard.members(record["server"]) if alive([record["guard"]]) else []


def _rank_log(run: FleetRun) -> str:
    path = run.run_dir / "logs" / "rank0.log"
    return path.read_text() if path.is_file() else ""


def _check_running(pids: list[int], url: str) -> None:
    """Loopback only; the key is required, and is on no command line and in no log."""
    listening = set()
    for pid in pids:
        for connection in psutil.Process(pid).net_connections(kind="inet"):
            if connection.status == psutil.CONN_LISTEN:
                listening.add(connection.laddr.ip)
    assert listening == {"127.0.0.1"}
    for key in (None, "another"):
        with pytest.raises(ServerRejectedError, match="HTTP 401"):
            SglangApi(url=url, api_key=key).call("/generate", {"input_ids": [1]})
    assert SglangApi(url=url, api_key=KEY).placement() == (1, "cpu")
    for pid in pids:
        assert KEY not in Path(f"/proc/{pid}/cmdline").read_bytes().decode()
