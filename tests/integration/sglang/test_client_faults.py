"""Servers that are killed and stopped while they generate, beside one that goes on."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pacs_megatron.config.schema import ModelOptions
from pacs_megatron.contracts import Sample
from pacs_megatron.errors import ExitCode
from pacs_megatron.runtime.processes import start_ticks
from pacs_megatron.sglang import build as sglang
from pacs_megatron.sglang import guard as sglang_guard
from pacs_megatron.sglang.api import SglangApi
from pacs_megatron.sglang.fleet import Health
from tests.integration.sglang.conftest import (
    START_S,
    Lab,
    num_running,
    own_options,
    sample_requests,
    server_pids,
)
from tests.support.servers.fake_sglang import FakeSglang
from tests.support.servers.fleet_run import SENT_AGAIN, FleetRun

pytestmark = [pytest.mark.sglang]


def until(condition: Callable[[], bool], within_s: float = 600.0) -> bool:
    deadline = time.monotonic() + within_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def test_a_stopped_server_loses_its_work_to_another_and_comes_back(lab: Lab) -> None:
    """SIGSTOP, then SIGCONT.

    The other server is the fake one: what is tested is the real one's silence and return.
    """
    with FakeSglang() as other, lab.opened(weights=0, max_in_flight=8):
        version = lab.version
        digest = lab.sync.report.digest
        other.weight_version = f"{version}:{digest}"
        options = lab.options(
            lab.url, other.url, dead_after_s=2.0, probe_timeout_s=1.0, max_in_flight=8
        )
        pids = server_pids(lab.url.rpartition(":")[2])
        with sglang.open_engine(options, ModelOptions(path=str(lab.folders[0])), lab.tmp) as engine:
            engine.set_current(version, digest)
            assert [s.health for s in engine.status()] == [Health.HEALTHY] * 2
            asked = sample_requests(32, tag="stop", tokens=64)
            done: list[Sample] = []
            reader = threading.Thread(target=lambda: done.extend(engine.stream(asked)))
            other.latency_s = lambda _: 0.2
            reader.start()
            assert until(lambda: engine.status()[0].in_flight == 8)
            try:
                for pid in pids:
                    os.kill(pid, signal.SIGSTOP)
                reader.join(600)
                assert sorted(s.id for s in done) == sorted(r.id for r in asked)
                assert engine.status()[0].health is Health.DEAD
            finally:
                for pid in pids:
                    os.kill(pid, signal.SIGCONT)
            assert until(lambda: engine.status()[0].health is Health.HEALTHY)
            again = sample_requests(8, tag="cont", tokens=8)
            assert sorted(s.id for s in engine.stream(again)) == sorted(r.id for r in again)


@pytest.mark.full
def test_a_training_run_sends_its_weights_again_when_its_only_server_has_lost_them(
    lab: Lab, tmp_path: Path
) -> None:
    """During generation the server reports the version of a fresh start: it gets no request until
    the trainer, which waits for these samples, has sent the weights again.
    """
    rollout = {
        "engine": "sglang",
        "urls": [lab.url],
        "sync": {"transport": "broadcast", "verify": "full"},
        "retries": 8,
    }
    run = FleetRun(tmp_path, lab.folders[0], rollout, steps=3)
    run.start("parallel.tp=2", "run.nproc=2")
    run.until_step(1)
    api = SglangApi(url=lab.url)
    run.until(lambda: num_running(api) > 0, "request in work")
    api.set_weight_version("default")
    code, err = run.finish()
    assert code == ExitCode.OK, err
    assert SENT_AGAIN in run.driver_log()
    run.assert_whole()


@pytest.mark.full
def test_an_owned_server_killed_while_it_generates_is_replaced(
    lab_folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 of the real launcher process: no process remains, it is restarted, is STALE, receives
    weights, serves. All with an API key.
    """
    monkeypatch.setenv("ROLLOUT_KEY", "sesame")
    options = own_options(api_key_env="ROLLOUT_KEY", probe_interval_s=0.2, all_down_after_s=300.0)
    with sglang.open_engine(options, ModelOptions(path=str(lab_folders[0])), tmp_path) as engine:
        [api] = sglang.server_apis(options, (engine.status()[0].url,))
        api.set_weight_version("1:aa")
        engine.set_current(1, "aa")
        asked = sample_requests(64, tag="kill", tokens=200)
        done: list[Sample] = []
        reader = threading.Thread(target=lambda: done.extend(engine.stream(asked)))
        reader.start()
        assert until(lambda: len(done) > 0)
        record = json.loads((tmp_path / "server0.pid").read_text())
        pids = sglang_guard.members(record["server"])
        assert len(pids) >= 3  # launcher, scheduler, detokenizer
        os.kill(record["server"], signal.SIGKILL)
        assert until(lambda: not any(start_ticks(pid) for pid in pids))
        assert until(lambda: engine.status()[0].restarts == 1)
        assert until(lambda: engine.status()[0].health is Health.STALE, START_S)
        assert (
            "has weights 'default'" in engine.status()[0].reason
            or "restarted" in engine.status()[0].reason
        )
        num_before = len(done)
        time.sleep(1.0)
        assert len(done) == num_before  # nothing is sampled from the restarted server's own weights
        [api] = sglang.server_apis(options, (engine.status()[0].url,))
        api.set_weight_version("1:aa")
        reader.join(600)
        assert sorted(s.id for s in done) == sorted(r.id for r in asked)
        left = sglang_guard.members(json.loads((tmp_path / "server0.pid").read_text())["server"])
    assert not any(start_ticks(pid) for pid in left)
    assert not api.ready(timeout_s=1.0)
