"""Profiles of servers: what is sent, what is written, and failures that do not end the run.

`tests/integration/sglang/test_profile.py` sends the same to the real server.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pacs_megatron.config.schema import ProfileOptions
from pacs_megatron.errors import RolloutError
from pacs_megatron.sglang.api import ServerRejectedError, SglangApi
from pacs_megatron.sglang.profile import ServerProfiler
from tests.support.servers.fake_sglang import FakeSglang


@pytest.fixture
def server() -> Iterator[FakeSglang]:
    with FakeSglang() as running:
        yield running


def profiler(server: FakeSglang, folder: Path, **options: Any) -> ServerProfiler:
    made = ProfileOptions(steps=(2,), servers=True, **options)
    return ServerProfiler(made, folder, lambda: [SglangApi(url=server.url)])


def generate(server: FakeSglang, num_tokens: int) -> None:
    sampling = {"max_new_tokens": num_tokens, "sampling_seed": 0}
    body = {"rid": "a/0", "input_ids": [1], "sampling_params": sampling, "return_logprob": True}
    SglangApi(url=server.url).call("/generate", body)


@pytest.mark.parametrize("num_tokens", [5, 50])
def test_the_file_of_a_listed_step(server: FakeSglang, tmp_path: Path, num_tokens: int) -> None:
    """With 5 passes the step's end ends the profile, with 50 the server has ended it before."""
    made = profiler(server, tmp_path / "profile", server_forwards=20)
    for step in (1, 2, 3):
        with made.step(step):
            generate(server, num_tokens)
    assert server.profile is None and len(server.profiles) == 1
    body = server.profiles[0]
    assert (body["activities"], body["num_steps"]) == (["CPU"], 20)
    [file] = (tmp_path / "profile").iterdir()
    assert file.name == f"server-127.0.0.1-{server.port}.2-TP-0.trace.json.gz"
    assert json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]


def test_a_step_that_raises_ends_the_profile(server: FakeSglang, tmp_path: Path) -> None:
    with pytest.raises(KeyError), profiler(server, tmp_path).step(2):
        raise KeyError
    assert server.profile is None and len(server.profiles) == 1


def test_a_profile_that_a_killed_run_left_is_ended_first(
    server: FakeSglang, tmp_path: Path
) -> None:
    SglangApi(url=server.url).start_profile(str(tmp_path / "old"), "old", ["CPU"], 9)
    with profiler(server, tmp_path / "new").step(2):
        pass
    assert len(list((tmp_path / "old").iterdir())) == len(list((tmp_path / "new").iterdir())) == 1


@pytest.mark.parametrize("kind", ["nsys", "memory"])
def test_a_server_on_the_cpu_has_traces_only(
    server: FakeSglang, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang's `MEM` calls CUDA's allocator, which ends a scheduler without CUDA."""
    with profiler(server, tmp_path, kind=kind).step(2):
        pass
    assert not server.profiles
    assert f"{server.url} has no profile of kind {kind} on the CPU" in caplog.text


def test_failures_are_warnings(
    server: FakeSglang, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.writes_profiles = False
    with profiler(server, tmp_path).step(2):
        pass
    assert "does its host share this folder?" in caplog.text

    caplog.clear()
    server.refuse()
    with profiler(server, tmp_path).step(2):
        pass
    assert f"step 2 has no profile of {server.url}" in caplog.text
    server.accept()

    def find() -> list[SglangApi]:
        raise RolloutError("the driver died")

    caplog.clear()
    with ServerProfiler(ProfileOptions(steps=(2,), servers=True), tmp_path, find).step(2):
        pass
    assert "step 2 has no profile of the servers: the driver died" in caplog.text


def test_two_starts_and_two_stops(server: FakeSglang, tmp_path: Path) -> None:
    api = SglangApi(url=server.url)
    assert not api.stop_profile(5.0)
    api.start_profile(str(tmp_path), "one", ["CPU"], 5)
    with pytest.raises(ServerRejectedError):
        api.start_profile(str(tmp_path), "two", ["CPU"], 5)
    assert api.stop_profile(5.0) and not api.stop_profile(5.0)
