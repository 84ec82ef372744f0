"""Training over two real servers that fail in every way we know: it goes on, loses nothing and
samples nothing stale.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from pacs_megatron.config.schema import ModelOptions
from pacs_megatron.errors import ExitCode
from pacs_megatron.observability.metrics import read_metrics
from pacs_megatron.runtime.processes import start_ticks
from pacs_megatron.sglang import build as sglang
from pacs_megatron.sglang import guard as sglang_guard
from pacs_megatron.sglang.api import SglangApi
from pacs_megatron.sglang.server import ManagedServer
from tests.integration.sglang.conftest import START_S, num_running, own_options
from tests.support.needs import SGLANG_PYTHON, require_sglang
from tests.support.servers.fault_proxy import FaultProxy
from tests.support.servers.fleet_run import MOVED, RESTARTED, SENT_AGAIN, FleetRun
from tests.support.tiny_models import make_tiny_qwen3

pytestmark = [pytest.mark.sglang, pytest.mark.full, pytest.mark.timeout(1800)]
SYNC = {"transport": "broadcast", "verify": "full", "bucket_mib": 1, "timeout_s": 60.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five buckets of 1 MiB in bf16, so that a sync can die between two."""
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 64}
    return make_tiny_qwen3(tmp_path_factory.mktemp("model"), **shape)


@pytest.mark.campaign
def test_a_server_of_the_run_is_killed_while_it_generates(model: Path, tmp_path: Path) -> None:
    """kill -9; its requests restart on the other server; it is restarted, gets the weights with the
    next sync, and works.
    """
    require_sglang()
    servers = {
        "python": [str(SGLANG_PYTHON)],
        "device": "cpu",
        "max_total_tokens": 16384,
        "count": 2,
    }
    rollout = {"engine": "sglang", "servers": servers, "sync": SYNC}
    long = {"sampling": {"max_response_tokens": 200, "stop": ["a", "b"]}}
    run = FleetRun(tmp_path, model, rollout | long, steps=100, delay_s=0.05)
    run.start("run.nproc=2")  # each rank sends the weights to one server
    run.until_step(1, START_S)
    pids = kill_server1(run)
    run.until(lambda: RESTARTED in run.driver_log(), "restart", START_S)
    at = run.last_step()
    run.until_step(at + 3)
    log = run.driver_log().partition(RESTARTED)[2]
    assert ": stale -> healthy" in log
    run.process.send_signal(signal.SIGTERM)
    code, err = run.finish()
    assert code == ExitCode.PREEMPTED, err
    run.steps = run.last_step()
    run.assert_whole()
    logs = [(run.run_dir / "logs" / f"rank{rank}.log").read_text() for rank in range(2)]
    assert all("bytes to 1 servers" in log and "bytes to 2 servers" not in log for log in logs)
    assert not any(start_ticks(pid) for pid in pids)


@pytest.mark.campaign
@pytest.mark.parametrize("pause", ["abort", "retract"])
def test_a_server_is_killed_while_steps_are_sampled_ahead(
    model: Path, tmp_path: Path, pause: str
) -> None:
    """kill -9 with requests of two steps in flight: no sample is lost or repeated, none exceeds
    max_staleness, and the restarted server is used again.
    """
    require_sglang()
    servers = {
        "python": [str(SGLANG_PYTHON)],
        "device": "cpu",
        "max_total_tokens": 16384,
        "count": 2,
    }
    rollout = {
        "engine": "sglang",
        "servers": servers,
        "sync": SYNC | {"pause": pause},
        "max_staleness": 1,
    }
    long = {"sampling": {"max_response_tokens": 200, "stop": ["a", "b"]}}
    run = FleetRun(tmp_path, model, rollout | long, steps=200, delay_s=0.05)
    run.start()
    run.until_step(2, START_S)
    pids = kill_server1(run)
    run.until(lambda: RESTARTED in run.driver_log(), "restart", START_S)
    at = run.last_step()
    run.until_step(at + 3)
    assert ": stale -> healthy" in run.driver_log().partition(RESTARTED)[2]
    run.process.send_signal(signal.SIGTERM)
    code, err = run.finish()
    assert code == ExitCode.PREEMPTED, err
    run.steps = run.last_step()
    rows = read_metrics(run.run_dir)
    assert {row["staleness/max"] for row in rows} <= {0.0, 1.0} and any(
        row["staleness/mean"] for row in rows
    )
    assert all(row["admission/dropped_stale_groups"] == 0 for row in rows)
    trained = run.assert_whole(max_staleness=1)
    newest = sorted((run.run_dir / "checkpoints").iterdir())[-1]
    kept = json.loads((newest / "buffer.json").read_text())["ids"]
    assert len(set(kept)) == len(kept) and not trained & set(kept)
    assert not any(start_ticks(pid) for pid in pids)


def kill_server1(run: FleetRun) -> list[int]:
    """kill -9 while it generates.

    Returns its processes after they have ended and the run has noticed.
    """
    record = json.loads((run.run_dir / "servers" / "server1.pid").read_text())
    pids = sglang_guard.members(record["server"])
    [url] = re.findall(r"starting rollout server server1 at (http://\S+),", run.driver_log())
    run.until(lambda: num_running(SglangApi(url=url)) >= 4, "request in work")
    os.kill(record["server"], signal.SIGKILL)
    run.until(lambda: "exited with 137" in run.driver_log(), "notice of its end")
    assert re.search(f"{MOVED}|Server disconnected|Connection reset", run.driver_log())
    run.until(
        lambda: not any(start_ticks(pid) for pid in pids), "end of the killed server's children"
    )
    return [*pids, record["server"]]


@pytest.mark.campaign
def test_the_only_server_of_the_run_is_killed_while_it_generates(
    model: Path, tmp_path: Path
) -> None:
    """kill -9: it is restarted, the trainer sends the weights of the step again, and the step's
    samples arrive.
    """
    require_sglang()
    servers = {
        "python": [str(SGLANG_PYTHON)],
        "device": "cpu",
        "max_total_tokens": 16384,
        "start_timeout_s": START_S,
    }
    rollout = {"engine": "sglang", "servers": servers, "sync": SYNC, "all_down_after_s": START_S}
    long = {"sampling": {"max_response_tokens": 200, "stop": ["a", "b"]}}
    run = FleetRun(tmp_path, model, rollout | long, steps=4)
    run.start()
    run.until_step(1, START_S)
    record = json.loads((run.run_dir / "servers" / "server0.pid").read_text())
    [url] = re.findall(r"starting rollout server server0 at (http://\S+),", run.driver_log())
    run.until(lambda: num_running(SglangApi(url=url)) >= 4, "request in work")
    os.kill(record["server"], signal.SIGKILL)
    code, err = run.finish(2 * START_S)
    assert code == ExitCode.OK, err
    assert re.search(f"{MOVED}|Server disconnected|Connection reset", run.driver_log())
    assert SENT_AGAIN in run.driver_log()
    run.assert_whole()


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ManagedServer]]:
    require_sglang()
    options = own_options(servers={"count": 2})
    assert options.servers is not None
    folder = tmp_path_factory.mktemp("pair")
    specs = sglang.server_specs(options, ModelOptions(path=str(model)), folder)
    servers = sglang.start_servers(specs, START_S)
    try:
        yield servers
    finally:
        for server in servers:
            server.close()


def attached(folder: Path, model: Path, *urls: str, steps: int = 6, **changes: Any) -> FleetRun:
    rollout = {"engine": "sglang", "urls": list(urls), "sync": SYNC, "retries": 8} | changes
    return FleetRun(folder, model, rollout, steps=steps)


def nan(body: bytes) -> bytes:
    answer = json.loads(body)
    answer["meta_info"]["output_token_logprobs"][0][0] = (
        None  # what the real server's JSON makes of NaN
    )
    return json.dumps(answer).encode()


Fault = Callable[[FaultProxy], None]
FAULTS: dict[str, Fault] = {
    "http_500": lambda proxy: setattr(proxy, "spoil", lambda _: 500),
    "slow": lambda proxy: setattr(proxy, "delay_s", 4.0),
    "truncated": lambda proxy: setattr(proxy, "spoil", lambda body: body[: len(body) // 2]),
    "nan": lambda proxy: setattr(proxy, "spoil", nan),
}


@pytest.mark.parametrize(
    "name",
    [
        "slow",
        *(
            pytest.param(name, marks=pytest.mark.campaign)
            for name in ("http_500", "truncated", "nan")
        ),
    ],
)
def test_one_of_two_servers_responds_wrongly_or_slowly(
    pair: list[ManagedServer], model: Path, tmp_path: Path, name: str
) -> None:
    with FaultProxy(pair[1].url) as proxy:
        run = attached(tmp_path, model, pair[0].url, proxy.url)
        run.start()
        run.until_step(1)
        FAULTS[name](proxy)
        run.until_step(3)
        during = proxy.spoiled
        proxy.spoil = None
        proxy.delay_s = 0.0
        run.until_step(4)
        before = proxy.counts["/generate"]
        code, err = run.finish()
        assert code == ExitCode.OK, err
        run.assert_whole()
        assert during > 0 or name == "slow"
        assert proxy.counts["/generate"] > before  # it is used again


@pytest.mark.campaign
def test_connections_are_rejected_for_20_s(
    pair: list[ManagedServer], model: Path, tmp_path: Path
) -> None:
    with FaultProxy(pair[1].url) as proxy:
        run = attached(tmp_path, model, pair[0].url, proxy.url, steps=8)
        run.start()
        run.until_step(1)
        run.until(lambda: proxy.in_flight > 0, "request in flight")
        proxy.refuse()
        began = time.monotonic()
        run.until_step(3)  # goes on without it, through at least two weight updates
        time.sleep(max(0.0, began + 20.0 - time.monotonic()))
        proxy.accept()
        run.until(lambda: run.last_step() < 7 or run.process.poll() is not None, "time left")
        before = proxy.counts["/generate"]
        code, err = run.finish()
        assert code == ExitCode.OK, err
        run.assert_whole()
        assert proxy.counts["/generate"] > before


@pytest.mark.campaign
def test_a_server_is_stopped_and_continued(
    pair: list[ManagedServer], model: Path, tmp_path: Path
) -> None:
    """SIGSTOP to all its processes while it generates, SIGCONT three steps later."""
    with FaultProxy(pair[1].url) as proxy:  # only to count
        run = attached(tmp_path, model, pair[0].url, proxy.url, steps=8)
        run.start()
        run.until_step(1)
        run.until(lambda: proxy.in_flight > 2, "request in flight")
        pids = sglang_guard.members(json.loads(pair[1].pid_file.read_text())["server"])
        assert len(pids) >= 3
        try:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            run.until_step(4)
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        before = proxy.counts["/generate"]
        code, err = run.finish()
        assert code == ExitCode.OK, err
        run.assert_whole()
        assert MOVED in run.driver_log()
        assert proxy.counts["/generate"] > before


def test_a_sync_that_dies_half_way(pair: list[ManagedServer], model: Path, tmp_path: Path) -> None:
    """One server's connection breaks at the third bucket: the other server samples the next step
    alone, and the next sync repairs it.
    """
    with FaultProxy(pair[1].url) as proxy:
        run = attached(tmp_path, model, pair[0].url, proxy.url)
        run.start()
        run.until_step(2)
        broken: list[tuple[int, int]] = []

        def third(_: int) -> str | None:
            calls.append(1)
            if len(calls) != 3:
                return None
            broken.append((proxy.counts["/generate"], run.last_step()))
            return "break"

        calls: list[int] = []
        proxy.sync_fault = third
        code, err = run.finish()
        assert code == ExitCode.OK, err
        assert len(broken) == 1
        run.assert_whole()
        assert f"did not reach {proxy.url}" in (run.run_dir / "logs" / "rank0.log").read_text()
        assert proxy.counts["/generate"] > broken[0][0]


def test_the_trainer_is_killed_in_the_middle_of_a_sync(
    pair: list[ManagedServer], model: Path, tmp_path: Path
) -> None:
    """kill -9 while both servers hold half of the new weights; the same command goes on, and
    nothing stale is sampled.
    """
    with ExitStack() as stack:
        proxies = [stack.enter_context(FaultProxy(server.url)) for server in pair]
        run = attached(tmp_path, model, *(proxy.url for proxy in proxies))
        run.start()
        run.until_step(2)
        starts = [proxy.weight_calls for proxy in proxies]
        for proxy, start in zip(proxies, starts, strict=True):
            proxy.sync_fault = lambda number, start=start: "hang" if number == start + 3 else None  # type: ignore[misc]
        run.until(
            lambda: all(p.weight_calls == s + 3 for p, s in zip(proxies, starts, strict=True)),
            "half a weight update",
        )
        run.kill()
        for server in pair:
            assert SglangApi(url=server.url).weight_version().endswith(":updating")
        for proxy in proxies:
            proxy.sync_fault = lambda _: None
        run.start()
        code, err = run.finish()
        assert code == ExitCode.OK, err
        run.assert_whole()
