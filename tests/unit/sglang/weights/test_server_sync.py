"""An update into servers that fail, restart or lie at any of its steps: none of them may pass for
current.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pacs_megatron.config.rollout_options import SglangRollout, SglangSync
from pacs_megatron.contracts import SamplingOptions
from pacs_megatron.errors import SyncError
from pacs_megatron.models import load_spec
from pacs_megatron.sglang.api import SglangApi, WeightVersion
from pacs_megatron.sglang.weights import transports
from pacs_megatron.sglang.weights.bucket import Bucket
from pacs_megatron.sglang.weights.server_sync import server_sync
from pacs_megatron.sglang.weights.transports import (
    BroadcastTransport,
    DiskTransport,
    IpcTransport,
)
from pacs_megatron.training.push import push
from tests.support.servers.synced import bf16, made, weights
from tests.support.servers.weight_server import InMemory, WeightServer


@pytest.fixture
def server() -> Iterator[WeightServer]:
    with WeightServer(bf16(weights(0))) as one:
        yield one


@pytest.fixture
def second() -> Iterator[WeightServer]:
    with WeightServer(bf16(weights(0))) as one:
        yield one


def holds(server: WeightServer, seed: int) -> bool:
    expected = bf16(weights(seed))
    return server.held.keys() == expected.keys() and all(
        torch.equal(server.held[n], t) for n, t in expected.items()
    )


def is_current(server: WeightServer) -> bool:
    """True if a client would send requests to it."""
    return WeightVersion.parse(server.weight_version) is not None


def test_an_update_in_its_order(server: WeightServer, second: WeightServer) -> None:
    sync = made([server, second])
    pushed = push(1, weights(1).items(), [sync])
    for one in (server, second):
        assert holds(one, 1) and one.weight_version == f"1:{pushed}" and not one.paused
        steps = [
            path for path in one.calls if path not in ("/server_info", "/model_info", "/in_memory")
        ]
        assert steps == [
            "/pause_generation",
            "/update_weight_version",
            "/begin_weight_update",
            "/end_weight_update",
            "/weights_checker",
            "/flush_cache",
            "/update_weight_version",
            "/continue_generation",
        ]
        assert one.calls.count("/in_memory") == 3  # eight norms, four norms, the embedding
    assert sync.report.verified == 2 * 13


EVERY_STEP = [
    "/server_info",
    "/model_info",
    "/pause_generation",
    "/update_weight_version",
    "/begin_weight_update",
    "/in_memory",
    "/end_weight_update",
    "/weights_checker",
    "/continue_generation",
]


@pytest.mark.parametrize("path", EVERY_STEP)
def test_a_server_that_fails_at_any_step_gets_no_requests_until_the_next_update(
    server: WeightServer, second: WeightServer, path: str
) -> None:
    sync = made([server, second])
    push(1, weights(1).items(), [sync])
    server.fail[path] = 1
    pushed = push(2, weights(2).items(), [sync])
    assert sync.report.updated == (second.url,)
    assert f"{path}: HTTP 500" in sync.report.failed[server.url]
    assert server.weight_version != f"2:{pushed}"
    # Either it is unchanged, or it has the mark of an update.
    assert not is_current(server) or holds(server, 1)
    assert holds(second, 2) and second.weight_version == f"2:{pushed}"
    push(3, weights(3).items(), [sync])
    assert (
        holds(server, 3) and is_current(server) and not server.paused and sync.report.failed == {}
    )


def test_a_cache_that_is_not_flushed_is_no_current_server(
    server: WeightServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pacs_megatron.sglang.weights.server_sync.FLUSH_WAIT_S", 0.0)
    sync = made([server])
    server.fail["/flush_cache"] = 20
    with pytest.raises(SyncError, match="kept KV cache of the old weights"):
        push(1, weights(1).items(), [sync])
    assert not is_current(server)
    server.fail["/flush_cache"] = 19
    push(2, weights(2).items(), [sync])
    assert is_current(server)


@pytest.mark.parametrize("verify", ["off", "full"])
@pytest.mark.parametrize(
    ("path", "sessions"),
    [
        ("/in_memory", True),
        ("/end_weight_update", True),
        ("/flush_cache", True),
        ("/in_memory", False),
        ("/flush_cache", False),
    ],
)
def test_a_server_restarted_during_an_update_is_not_current(
    server: WeightServer, second: WeightServer, path: str, sessions: bool, verify: str
) -> None:
    """Without sessions (SGLang <= 0.5.20) and checksums nothing else detects it: half of its
    weights are from its folder.
    """
    server.sessions = sessions
    sync = made([server, second], verify=verify)
    push(1, weights(1).items(), [sync])
    server.before[path] = server.restart
    push(2, weights(2).items(), [sync])
    assert sync.report.updated == (second.url,)
    assert server.weight_version == "default"
    push(3, weights(3).items(), [sync])
    assert holds(server, 3) and is_current(server)


def test_another_run_on_the_same_server_is_noticed(server: WeightServer) -> None:
    sync = made([server], verify="off")
    server.before["/flush_cache"] = lambda: setattr(server, "weight_version", "7:updating")
    with pytest.raises(SyncError, match=r"reports weights '7:updating' .* another run updates it"):
        push(1, weights(1).items(), [sync])


@pytest.mark.parametrize("verify", ["sample", "full"])
def test_one_flipped_bit_on_the_server_is_found(server: WeightServer, verify: str) -> None:
    """Of what the server holds, not of what was sent."""
    sync = made([server], verify=verify)

    def flip() -> None:
        name = "model.layers.3.norm.weight"
        server.held[name] = server.held[name].clone()
        server.held[name].view(torch.int16)[2, 5] ^= 1

    server.before["/weights_checker"] = flip
    with pytest.raises(
        SyncError, match=r"1 of 13 parameters differ .*model\.layers\.3\.norm\.weight \(rank 0"
    ):
        push(1, weights(1).items(), [sync])
    assert not is_current(server)


def test_samples_rotate_and_a_fresh_server_is_verified_completely(
    server: WeightServer, second: WeightServer
) -> None:
    sync = made([server, second], verify="sample")
    counts = []
    for version in range(1, 6):
        if version == 4:
            second.restart()
        push(version, weights(version).items(), [sync])
        counts.append(sync.report.verified)
    assert counts == [26, 16, 16, 26, 16]


@pytest.mark.parametrize(
    ("spoiled", "reason"),
    [
        (lambda a: {"ranks": []}, "checksums of 0 ranks, expected"),
        (lambda a: {"ranks": a["ranks"] * 2}, "checksums of 2 ranks, expected"),
        (
            lambda a: {"ranks": [{"checksums": {}}]},
            r"13 of 13 parameters differ.*\(not on the server\)",
        ),
        (
            lambda a: {"ranks": [{"checksums": a["ranks"][0]["checksums"] | {"extra": "0"}}]},
            r"extra \(never sent\)",
        ),
        (lambda a: {"ranks": [{"checksums": None}]}, "unexpected response"),
        (lambda a: {"success": True}, "unexpected response"),
        (lambda a: [], "unexpected response"),
    ],
)
def test_useless_checksums_fail_the_verification(
    server: WeightServer, spoiled: Any, reason: str
) -> None:
    server.spoil = spoiled
    with pytest.raises(SyncError, match=reason):
        push(1, weights(1).items(), [made([server])])
    assert not is_current(server)


def test_the_key_goes_with_every_call() -> None:
    with WeightServer(bf16(weights(0)), api_key="sesame") as server:
        sync = made([server])
        push(1, weights(1).items(), [sync])
        sync.release_memory()
        push(2, weights(2).items(), [sync])
        assert server.keys == {"Bearer sesame"}
        assert "sesame" not in repr(sync.report) + repr(SglangApi(url=server.url, api_key="sesame"))


def test_a_server_that_answers_nothing_costs_its_limit_once(
    server: WeightServer, second: WeightServer
) -> None:
    sync = made([server, second], dead_after_s=3.0)
    server.fault = "hang"
    push(1, weights(1).items(), [sync])
    assert is_current(second)
    assert "no response within 3 s" in sync.report.failed[server.url]


def test_memory_is_released_by_an_idle_server_only(
    server: WeightServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that was cancelled a moment ago may still be in work; SGLang's scheduler ends when
    released under one.
    """
    monkeypatch.setattr("pacs_megatron.sglang.weights.server_sync.FLUSH_WAIT_S", 0.0)
    sync = made([server], pause="abort")
    push(1, weights(1).items(), [sync])
    server.calls.clear()
    server.fail["/flush_cache"] = 2
    server.fail_status = 400
    sync.release_memory()
    steps = [
        "/pause_generation",
        "/update_weight_version",
        *["/flush_cache"] * 3,
        "/release_memory_occupation",
    ]
    assert server.calls == steps and not is_current(server)
    server.calls.clear()
    push(2, weights(2).items(), [sync])
    order = [
        path
        for path in server.calls
        if path in ("/resume_memory_occupation", "/in_memory", "/flush_cache")
    ]
    # Weights have memory before they come, the cache only after them.
    assert order == [
        "/resume_memory_occupation",
        *["/in_memory"] * 3,
        "/resume_memory_occupation",
        "/flush_cache",
    ]
    assert is_current(server)


# --------------------------------------------------------------------------------------------------
# disk
def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_disk_keeps_nothing_but_the_newest(server: WeightServer, tmp_path: Path) -> None:
    """Also not of an attempt that had come further before it was killed."""
    for left in ("v41", "v40.partial", "v3.partial"):
        (tmp_path / left).mkdir()
        (tmp_path / left / "model-00001.safetensors").write_bytes(b"x")
    (tmp_path / "views").mkdir()  # of somebody else
    sync = made([server], DiskTransport(tmp_path, 5.0))
    for version in (2, 4, 6):  # two updates a step
        push(version, weights(version).items(), [sync])
        assert names(tmp_path) == [f"v{version}", "views"]
        assert holds(server, version)
    assert len(list((tmp_path / "v6").glob("*.safetensors"))) == 3
    sync.close()
    assert names(tmp_path) == ["views"]


def test_a_rejection_with_a_status_of_200_is_one(server: WeightServer, tmp_path: Path) -> None:
    sync = made([server], DiskTransport(tmp_path, 5.0), verify="off")
    server.refuse_kindly = True
    with pytest.raises(
        SyncError,
        match=r"update_weights_from_disk: HTTP 200, but no success: .*not a model "
        r"folder",
    ):
        push(1, weights(1).items(), [sync])
    assert not is_current(server)


def test_a_full_disk_keeps_no_partial_version(
    server: WeightServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint that is saved after this error needs it.

    The server has the old weights and gets no request.
    """
    sync = made([server], DiskTransport(tmp_path / "w", 5.0))
    push(1, weights(1).items(), [sync])
    saved: list[Path] = []

    def full(tensors: dict[str, torch.Tensor], path: Path) -> None:
        saved.append(path)
        if len(saved) == 2:
            Path(path).write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save_file(tensors, path)

    monkeypatch.setattr(transports, "save_file", full)
    with pytest.raises(
        SyncError, match=r"sync.transport=disk: cannot write .*v2.partial: .*No space left"
    ):
        push(2, weights(2).items(), [sync])
    assert names(tmp_path / "w") == ["v1"]
    assert holds(server, 1) and not is_current(server)
    push(2, weights(2).items(), [sync])
    assert holds(server, 2) and is_current(server)


def test_runs_that_share_a_folder_do_not_share_versions(tmp_path: Path, tiny_qwen3: Path) -> None:
    def folder(run: Path) -> Path:
        options = SglangRollout(
            engine="sglang",
            sampling=SamplingOptions(max_response_tokens=1),
            sync=SglangSync(transport="disk", folder=str(tmp_path / "shared")),
            urls=("http://127.0.0.1:1",),
        )
        transport = server_sync(options, load_spec(tiny_qwen3), run / "weights")._transport
        assert isinstance(transport, DiskTransport)
        return transport.path.parent

    one = folder(tmp_path / "a" / "run")
    two = folder(tmp_path / "b" / "run")
    assert one != two and one.parent == two.parent == tmp_path / "shared"
    assert folder(tmp_path / "a" / "run") == one


# --------------------------------------------------------------------------------------------------
# ipc
def test_shared_memory_that_is_full_is_named_and_the_export_goes_on(
    server: WeightServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks take part in the export: an error that is no SyncError would leave them
    waiting.
    """

    def full(_: object) -> str:
        raise RuntimeError(
            "unable to allocate shared memory(shm) for file </torch_1>: No space left on device "
            "(28)"
        )

    monkeypatch.setattr(transports, "shared_memory_payload", full)
    exported = []

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights(1).items():
            exported.append(name)
            yield name, tensor

    with pytest.raises(
        SyncError, match=r"transport=ipc: cannot share a bucket of \d+ bytes: .*enlarge /dev/shm"
    ):
        push(1, export(), [made([server], IpcTransport(5.0))])
    assert len(exported) == 13 and not is_current(server)


# --------------------------------------------------------------------------------------------------
# broadcast
def test_a_rejected_group_fails_at_once(server: WeightServer) -> None:
    sync = made([server], BroadcastTransport("127.0.0.1", 60.0), timeout_s=60.0)
    with pytest.raises(
        SyncError, match=r"init_weights_update_group: HTTP 400, expected 200: .*no such backend"
    ):
        push(1, weights(1).items(), [sync])
    sync.close()


def test_the_process_ends_although_a_group_waits(tmp_path: Path) -> None:
    """The meeting's limit is ten minutes by default; a run that stops because of it must not stay
    for them.
    """
    script = """
from pacs_megatron.errors import SyncError
from pacs_megatron.sglang.weights.transports import BroadcastTransport
from pacs_megatron.training.push import push
from tests.support.servers.synced import bf16, made, weights
from tests.support.servers.weight_server import InMemory, WeightServer

with WeightServer(bf16(weights(0))) as server:
    sync = made([server], BroadcastTransport("127.0.0.1", 600.0))
    try:
        push(1, weights(1).items(), [sync])
    except SyncError as error:
        print("rejected")
    sync.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "rejected\n"), done.stderr


def test_a_host_that_is_not_ours_names_the_option(server: WeightServer) -> None:
    sync = made([server], BroadcastTransport("192.0.2.1", 5.0))
    with pytest.raises(
        SyncError, match=r"rollout\.sync\.host=192\.0\.2\.1: not an address of this host"
    ):
        push(1, weights(1).items(), [sync])


def test_memory_of_the_sender_is_bounded_by_buckets_and_largest_tensor_and_freed(
    server: WeightServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = made([server])
    buckets = (sync._bucket, sync._sent_bucket)
    sizes = []
    add = Bucket.add

    def watch(bucket: Bucket, name: str, tensor: torch.Tensor) -> None:
        add(bucket, name, tensor)
        sizes.append([each._buffer.numel() for each in buckets])

    monkeypatch.setattr(Bucket, "add", watch)
    push(1, weights(1, num=200).items(), [sync])

    # All weights together have 30 kB. The embedding is twice as large as a bucket.
    largest = [max(pair) for pair in zip(*sizes, strict=True)]
    assert sorted(largest) == [1024, 64 * 32 * 2]
    # A colocated server needs the memory.
    assert [each._buffer.numel() for each in buckets] == [0, 0]
    assert threading.active_count() < 40


# --------------------------------------------------------------------------------------------------
# two buckets
class Slow(InMemory):
    """Sends nothing before `may_send` is set, or 5 s."""

    def __init__(self, server: WeightServer) -> None:
        super().__init__({server.url: server})
        self.may_send = threading.Event()
        self.was_set: list[bool] = []
        """at the end of each wait"""

    def send(self, api: SglangApi, bucket: Bucket) -> None:
        self.was_set.append(self.may_send.wait(5.0))
        super().send(api, bucket)


def test_the_next_bucket_is_filled_while_servers_load_the_one_before(server: WeightServer) -> None:
    """A bucket has eight norms. The first one is sent when the ninth comes."""
    transport = Slow(server)

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        for number, weight in enumerate(weights(1).items(), start=1):
            # The second bucket has three norms and gets the fourth.
            if number == 12:
                transport.may_send.set()
            yield weight

    push(1, export(), [made([server], transport)])
    assert transport.was_set == [True, True, True]
    assert holds(server, 1)


def test_an_update_that_is_given_up_ends_its_send_before_the_next_one(server: WeightServer) -> None:
    transport = Slow(server)
    sync = made([server], transport)
    sync.begin_update(1)
    for name, tensor in list(weights(1).items())[:9]:
        sync.put(name, tensor)
    later = threading.Timer(0.2, transport.may_send.set)
    later.start()

    sync.begin_update(2)
    assert transport.was_set == [True]
    for name, tensor in weights(2).items():
        sync.put(name, tensor)
    sync.end_update("digest")
    assert holds(server, 2)


def test_a_failed_send_ends_the_update_at_the_next_bucket(server: WeightServer) -> None:
    server.fail["/in_memory"] = 10
    sync = made([server])
    sync.begin_update(1)
    sent = []
    with pytest.raises(SyncError, match=r"weights 1 reached no rollout server: .*/in_memory"):
        for name, tensor in weights(1, num=30).items():
            sync.put(name, tensor)
            sent.append(name)
    # Two buckets of eight fit before the update waits for the first one.
    assert len(sent) == 16
