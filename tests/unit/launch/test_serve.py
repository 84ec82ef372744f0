"""The process on a rollout node: when it ends, and servers that end on their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pacs_megatron.config.rollout_options import SglangServers
from pacs_megatron.errors import ConfigError, RolloutError
from pacs_megatron.launch import serve
from pacs_megatron.launch.serve import Ending, main, wait_for_urls
from pacs_megatron.sglang.api import SglangApi

PROBE = """
import sys, time
from pathlib import Path
from pacs_megatron.launch.serve import Ending
ending = Ending(Path(sys.argv[1]) / "servers", Path(sys.argv[1]) / "run")
ending.install()
Path(sys.argv[1], "ready").touch()
while not ending.is_due():
    time.sleep(0.02)
"""


@pytest.fixture
def process(tmp_path: Path) -> subprocess.Popen[bytes]:
    (tmp_path / "servers").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "exit_code").write_text(
        "75\n"
    )  # of an earlier attempt: not this trainer's word
    os.utime(tmp_path / "run" / "exit_code", (1, 1))
    started = subprocess.Popen([sys.executable, "-c", PROBE, str(tmp_path)])
    deadline = time.monotonic() + 600
    while not (tmp_path / "ready").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return started


def still_runs(process: subprocess.Popen[bytes]) -> bool:
    time.sleep(0.3)
    return process.poll() is None


def test_the_signal_before_the_time_limit_is_the_trainers(
    process: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    process.send_signal(signal.SIGUSR1)
    assert still_runs(process)
    (tmp_path / "servers" / "stop").touch()
    assert process.wait(600) == 0


def test_sigterm_waits_for_the_trainers_last_word(
    process: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    process.send_signal(signal.SIGTERM)
    assert still_runs(process)
    (tmp_path / "run" / "exit_code").write_text("75\n")
    assert process.wait(600) == 0


@pytest.mark.parametrize("numbers", [[signal.SIGINT], [signal.SIGTERM, signal.SIGTERM]])
def test_impatience_ends_it_at_once(process: subprocess.Popen[bytes], numbers: list[int]) -> None:
    for number in numbers:
        process.send_signal(number)
        time.sleep(0.1)
    assert process.wait(600) == 0


class FlakyServer:
    """Ends `ends` times, `silent` of them before it is ready; keeps its address by default."""

    def __init__(
        self, ends: int, urls: tuple[str, ...] = ("http://n1:1",), *, silent: int = 0
    ) -> None:
        self.ends = ends
        self.silent = silent
        self.urls = list(urls)
        self.starts = 0
        self.first_requests: list[int] = []
        """starts after which it answered a first request"""
        self.log_path = Path("server.log")

    @property
    def url(self) -> str:
        return self.urls[min(self.starts, len(self.urls) - 1)]

    def exit_code(self) -> int | None:
        return 137 if self.starts < self.ends else None

    def start(self) -> None:
        self.starts += 1

    def wait_ready(self, timeout_s: float) -> None:
        assert timeout_s == 7
        if self.starts <= self.silent:
            raise RolloutError("rollout server server0 was not ready")
        self.first_requests.append(self.starts)


def watch(
    server: FlakyServer, max_restarts: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> int:
    monkeypatch.setattr(serve, "POLL_S", 0.01)
    threading.Timer(0.3, (folder / "stop").touch).start()
    options = SglangServers(python=("python",), max_restarts=max_restarts, start_timeout_s=7)
    servers: Any = [server]
    with ThreadPoolExecutor() as pool:
        return serve._watch(servers, options, Ending(folder, folder), pool)


def test_a_server_that_ends_is_restarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time it answers a first request before the trainer's, which would wait for kernels to be
    compiled.
    """
    server = FlakyServer(ends=2)
    assert watch(server, 2, tmp_path, monkeypatch) == 0
    assert server.starts == 2
    assert server.first_requests == [1, 2]


def test_a_restart_that_fails_is_one_of_the_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = FlakyServer(ends=1, silent=1)
    assert watch(server, 2, tmp_path, monkeypatch) == 0
    assert (server.starts, server.first_requests) == (2, [2])
    other = tmp_path / "other"
    other.mkdir()
    assert watch(FlakyServer(ends=1, silent=2), 1, other, monkeypatch) == 1


def test_a_restart_does_not_delay_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    server = FlakyServer(ends=1)
    monkeypatch.setattr(server, "wait_ready", lambda timeout_s: release.wait(600))
    monkeypatch.setattr(serve, "POLL_S", 0.01)
    (tmp_path / "run").mkdir()
    ending = Ending(tmp_path, tmp_path / "run")
    threading.Timer(0.3, (tmp_path / "stop").touch).start()
    options = SglangServers(python=("python",), max_restarts=1)
    servers: Any = [server]
    with ThreadPoolExecutor() as pool:
        assert serve._watch(servers, options, ending, pool) == 0
        assert not release.is_set()
        release.set()


def test_too_many_ends_or_another_address_end_it_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert watch(FlakyServer(ends=3), 2, tmp_path, monkeypatch) == 1
    assert (
        watch(FlakyServer(ends=1, urls=("http://n1:1", "http://n1:2")), 2, tmp_path, monkeypatch)
        == 1
    )


def test_an_error_is_stored_for_the_waiting_caller(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "servers"), str(tmp_path / "nothere.yaml")]) == 2
    assert "nothere.yaml" in capsys.readouterr().err
    [left] = (tmp_path / "servers").glob("*.error")
    assert '"code": 2' in left.read_text()


def test_a_process_that_ends_without_a_message_is_detected(tmp_path: Path) -> None:
    """For example killed by the kernel for memory:
    fifteen minutes of `start_timeout_s` would pass.
    """
    began = time.monotonic()
    with pytest.raises(
        RolloutError, match=r"server process exited with code -9 and wrote no error"
    ):
        wait_for_urls(tmp_path, 1, 900.0, lambda: -9)
    assert time.monotonic() - began < 5
    (tmp_path / "n1.error").write_text('{"code": 2, "message": "no such model"}')
    with pytest.raises(ConfigError, match="node n1: no such model"):
        wait_for_urls(tmp_path, 1, 900.0, lambda: 2)
    (tmp_path / "n1.urls").write_text("http://n1:1 8\n")  # colocated, with its trainer rank
    (tmp_path / "n0.urls").write_text("http://n0:1\nhttp://n0:2\n")
    urls = ["http://n0:1", "http://n0:2", "http://n1:1"]
    assert wait_for_urls(tmp_path, 2, 900.0, lambda: 0) == urls


def test_a_signal_while_servers_start_ends_them(tmp_path: Path) -> None:
    """The trainer died while its node's servers were starting: their GPUs must not stay taken for
    minutes.
    """
    script = """
import sys
from pathlib import Path
from pacs_megatron.errors import RolloutError
from pacs_megatron.launch.serve import Ending
from pacs_megatron.sglang.build import start_servers
from tests.support.servers.managed import spec
folder = Path(sys.argv[1])
ending = Ending(folder, folder)
ending.install()
try:
    start_servers([spec(folder, "--dummy-never-ready")], 300.0, ending.is_due)
except RolloutError as error:
    print(error)
"""
    started = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 600
    while not list(tmp_path.glob("*.pid")) and time.monotonic() < deadline:
        time.sleep(0.05)
    started.send_signal(signal.SIGINT)
    out, _ = started.communicate(timeout=600)
    assert out == "stop request while the rollout servers were starting\n"
    assert list(tmp_path.glob("*.pid")) == []


def test_servers_continue_while_it_is_stopped_and_end_with_it(tmp_path: Path) -> None:
    """docs/security.md#faults-of-processes-and-of-the-disk"""
    script = """
import sys
from pathlib import Path
from pacs_megatron.launch.serve import Ending, _watch
from concurrent.futures import ThreadPoolExecutor
from pacs_megatron.sglang.build import start_servers
from tests.support.servers.managed import spec
folder = Path(sys.argv[1])
ending = Ending(folder, folder)
ending.install()
made = spec(folder)
[server] = start_servers([made], 600.0, ending.is_due)
print(server.url, flush=True)
_watch([server], made.servers, ending, ThreadPoolExecutor())
server.close()
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        api = SglangApi(url=started.stdout.readline().strip())
        started.send_signal(signal.SIGSTOP)
        started.send_signal(signal.SIGINT)  # takes effect when it continues
        assert api.ready(60.0) and api.ready(60.0)
        started.send_signal(signal.SIGCONT)
        assert started.wait(600) == 0
    assert not api.ready(60.0) and list(tmp_path.glob("*.pid")) == []
