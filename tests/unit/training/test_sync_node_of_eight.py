"""Weight updates on a modelled node of eight GPUs: every colocated server gets handles of its own
GPU.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch

from pacs_megatron.config import load_config
from pacs_megatron.config.rollout_options import SglangRollout, SglangServers, SglangSync
from pacs_megatron.config.schema import ModelOptions
from pacs_megatron.contracts import Layout, SamplingOptions
from pacs_megatron.errors import SyncError
from pacs_megatron.rollout import driver as driver_module
from pacs_megatron.rollout import driver_client
from pacs_megatron.sglang.api import SglangApi
from pacs_megatron.sglang.build import _sending_rank, devices_of, server_specs, trainer_rank_of
from pacs_megatron.sglang.weights import transports
from pacs_megatron.sglang.weights.checksums import ModelDims
from pacs_megatron.sglang.weights.server_sync import ServerSync
from pacs_megatron.sglang.weights.transports import BroadcastTransport, IpcTransport
from pacs_megatron.training import context as training_context
from pacs_megatron.training import sync as training_sync
from tests.support.node.servers import (
    NUM_GPUS,
    GpuServer,
    Node,
    SharedRanks,
    ThreadChannel,
    ipc_payload,
    mismatch,
)
from tests.support.tiny_models import make_tiny_qwen3
from tests.support.tiny_run import write_tiny_run

ROOT = Path(__file__).parents[3]
WEIGHTS = {
    f"model.layers.{i}.norm.weight": torch.full((64,), float(i), dtype=torch.bfloat16)
    for i in range(20)
}


class Run:
    """Eight ranks and the servers that a configuration starts, up to the weight update."""

    def __init__(
        self,
        count: int,
        tp: int,
        stack: ExitStack,
        transport: Literal["ipc", "broadcast"] = "ipc",
        **server: Any,
    ) -> None:
        options = SglangServers(
            python=("python",), count=count, tp=tp, colocated=transport == "ipc"
        )
        self.rollout = SglangRollout(
            engine="sglang",
            sampling=SamplingOptions(max_response_tokens=8),
            sync=SglangSync(transport=transport, verify="off", timeout_s=10.0),
            dead_after_s=5.0,
            servers=options,
        )
        devices = [devices_of(options, index, []) for index in range(count)]
        old = {name: torch.zeros_like(tensor) for name, tensor in WEIGHTS.items()}
        self.node = Node(1 << 20, count * tp)
        self.servers = [
            stack.enter_context(GpuServer(self.node, old, visible, **server)) for visible in devices
        ]
        # As in the driver, for managed servers and for the ones of rollout nodes.
        ranks = [
            trainer_rank_of(visible, [])
            if transport == "ipc"
            else _sending_rank(self.rollout, index)
            for index, visible in enumerate(devices)
        ]
        alive = [(server.url, rank) for server, rank in zip(self.servers, ranks, strict=True)]
        self.shared = SharedRanks(NUM_GPUS)
        self.contexts = [self._context(rank, alive) for rank in range(NUM_GPUS)]
        for context in self.contexts:
            stack.callback(context.server_sync.close)

    def _context(self, rank: int, alive: list[tuple[str, int]]) -> Any:
        return SimpleNamespace(
            config=SimpleNamespace(rollout=self.rollout),
            channel=ThreadChannel(rank, self.shared),
            rank=SimpleNamespace(
                rank=rank, device=torch.device("cpu"), layout=Layout(world_size=NUM_GPUS)
            ),
            policy=SimpleNamespace(
                version=1, export_weights=lambda: iter(WEIGHTS.items()), offload=NO_OFFLOAD
            ),
            models=[SimpleNamespace(offload=NO_OFFLOAD)],
            engine=None,
            driver=SimpleNamespace(call=lambda _request: ({"servers": alive}, {}))
            if rank == 0
            else None,
            server_sync=ServerSync(
                self.rollout,
                ModelDims(num_kv_heads=2),
                IpcTransport(10.0)
                if self.rollout.sync.transport == "ipc"
                else BroadcastTransport("127.0.0.1", 10.0),
                1024,
            ),
        )

    def on_all_ranks(self, action: Any) -> list[Any]:
        def on_rank(rank: int) -> Any:
            LOCAL.rank = rank
            return action(self.contexts[rank])

        return self.shared.run(on_rank)

    def has_new_weights(self, server: GpuServer) -> bool:
        return all(torch.equal(server.held[name], tensor) for name, tensor in WEIGHTS.items())


LOCAL = threading.local()
NO_OFFLOAD = SimpleNamespace(to_host=lambda: None, to_device=lambda: None)


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    monkeypatch.setattr(
        transports, "shared_memory_payload", lambda tensors: ipc_payload(tensors, LOCAL.rank)
    )
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize(("count", "tp"), [(8, 1), (4, 2), (1, 8)])
def test_every_colocated_server_gets_the_weights_from_its_own_gpu(
    count: int, tp: int, stack: ExitStack
) -> None:
    run = Run(count, tp, stack)
    digests = run.on_all_ranks(training_sync._push)
    assert [server.ended for server in run.servers] == [""] * count
    assert all(run.has_new_weights(server) for server in run.servers)
    assert len(set(digests)) == 1


def test_a_server_that_ends_during_the_update_costs_no_other_its_weights(stack: ExitStack) -> None:
    run = Run(8, 1, stack)
    dead = run.servers[3]
    dead.before["/update_weights_from_tensor"] = lambda: dead._end_scheduler("killed")
    run.on_all_ranks(training_sync._push)
    others = [server for server in run.servers if server is not dead]
    assert dead.ended == "killed"
    assert all(run.has_new_weights(server) and not server.paused for server in others)
    assert not run.has_new_weights(dead)


@pytest.mark.parametrize(
    ("count", "tp", "ranks_here", "node", "senders"),
    [
        (8, 1, 8, None, 8),
        (8, 2, 8, None, 8),
        (8, 1, 4, None, 4),
        (8, 1, 4, "node0", 8),
        (6, 1, 2, "node0", 8),
    ],
)
def test_ranks_divide_the_servers_of_a_broadcast(
    count: int,
    tp: int,
    ranks_here: int,
    node: str | None,
    senders: int,
    stack: ExitStack,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 would send every copy through one network link. In a Slurm job, where servers can
    reach every host, the ranks of all hosts send.
    """
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    monkeypatch.delenv("PACS_NODE_ADDR", raising=False)
    if node is not None:
        monkeypatch.setenv("SLURMD_NODENAME", node)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks_here))
    run = Run(count, tp, stack, "broadcast")
    for _ in range(2):  # the second update uses the groups of the first
        run.on_all_ranks(training_sync._push)
        shares = [context.server_sync.report.updated for context in run.contexts]
        urls = [server.url for server in run.servers]
        assert shares == [
            tuple(urls[rank::senders]) if rank < senders else () for rank in range(NUM_GPUS)
        ]
        assert all(run.has_new_weights(server) for server in run.servers)
        for server in run.servers:
            server.held = dict(server.initial)
    assert all(server.calls.count("/init_weights_update_group") == 1 for server in run.servers)


@pytest.mark.parametrize(
    ("rank", "node", "address", "host"),
    [
        (0, "node0", "", "10.0.0.1"),
        (3, "node0", "", "10.0.0.1"),
        (4, "node1", "", "node1"),
        (4, "node1", "10.0.0.2", "10.0.0.2"),
        (4, "", "", "10.0.0.1"),
    ],
)
def test_servers_join_the_groups_of_a_rank_at_its_own_host(
    rank: int, node: str, address: str, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("SLURMD_NODENAME", node)
    monkeypatch.setenv("PACS_NODE_ADDR", address)
    rollout = SglangRollout(
        engine="sglang",
        sampling=SamplingOptions(max_response_tokens=8),
        sync=SglangSync(transport="broadcast", host="10.0.0.1"),
        urls=("http://server:1",),
    )
    assert training_context.sending_options(rollout, rank).sync.host == host
    disk = rollout.model_copy(update={"sync": SglangSync(transport="disk")})
    assert training_context.sending_options(disk, rank) is disk


def test_a_server_that_ends_in_a_broadcast_costs_no_other_its_weights(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    run = Run(8, 1, stack, "broadcast")
    dead = run.servers[3]
    dead.before["/update_weights_from_distributed"] = lambda: dead._end_scheduler("killed")
    began = time.monotonic()
    run.on_all_ranks(training_sync._push)
    others = [server for server in run.servers if server is not dead]
    assert all(run.has_new_weights(server) and not server.paused for server in others)
    assert time.monotonic() - began < 9.0  # below the timeout of a broadcast
    run.on_all_ranks(training_sync._push)
    assert all(run.has_new_weights(server) for server in others)


def test_an_update_that_reaches_no_server_raises_on_every_rank(stack: ExitStack) -> None:
    run = Run(8, 1, stack)
    for server in run.servers:
        server.refuse()

    def failed(context: Any) -> bool:
        with pytest.raises(SyncError, match="reached no rollout server"):
            training_sync._push(context)
        return True

    assert run.on_all_ranks(failed) == [True] * NUM_GPUS


def test_each_rank_releases_the_memory_of_its_servers_and_the_update_takes_it_back(
    stack: ExitStack,
) -> None:
    run = Run(4, 2, stack)
    resident = run.node.free(5)
    run.on_all_ranks(training_sync.release_memory)
    assert all(run.node.free(gpu) == run.node.gpu_bytes for gpu in range(NUM_GPUS))
    run.on_all_ranks(training_sync._push)
    assert all(run.node.free(gpu) == resident for gpu in range(NUM_GPUS))
    assert all(run.has_new_weights(server) for server in run.servers)


def test_the_model_ends_a_server_that_gets_a_handle_of_another_gpu(stack: ExitStack) -> None:
    """The contract that tests/integration/sglang/test_api_node_contract.py shows on the real
    server.
    """
    run = Run(8, 1, stack)
    api = SglangApi(url=run.servers[2].url, timeout_s=5.0)
    api.begin_weight_update()
    body = {"serialized_named_tensors": [ipc_payload(list(WEIGHTS.items()), gpu=0)]}
    with pytest.raises(Exception, match="no response"):
        api.post("/update_weights_from_tensor", body)
    assert "Invalid device_uuid=GPU-00000000" in run.servers[2].ended


def test_the_first_meeting_of_two_nccl_versions_names_both_and_the_fallback(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL rejects the group inside the first broadcast, on both sides; the update must not wait
    for its timeout.
    """

    class Backend:
        def broadcast(self, *_: Any) -> Any:
            raise RuntimeError(
                mismatch("2.29.7", "2.30.7").removeprefix("Failed to receive weights: ")
            )

        def abort(self) -> None:
            """Nothing to abort."""

    monkeypatch.setattr(BroadcastTransport, "_new_backend", lambda *_: Backend())
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
    run = Run(1, 1, stack, "broadcast", nccl=("2.30.7", "2.29.7"))

    def failed(context: Any) -> str:
        with pytest.raises(SyncError) as caught:
            training_sync._push(context)
        return str(caught.value)

    [message] = set(run.on_all_ranks(failed))
    assert (
        "the trainer has NCCL 2.29.7 (torch " in message
        and "the server has NCCL 2.30.7;" in message
    )
    assert message.endswith("or rollout.sync.transport=disk")


@pytest.mark.parametrize(
    ("visible", "expected"), [("4,5,6,7", ["4,5", "6,7"]), (None, ["0,1", "2,3"])]
)
def test_servers_use_the_trainers_gpus_although_their_driver_sees_none(
    visible: str | None, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    environment: dict[str, str] = {}
    monkeypatch.setattr(
        driver_client.subprocess, "Popen", lambda *_, env, **__: environment.update(env)
    )
    driver_client.DriverClient(tmp_path, tmp_path, timeout_s=1.0)
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    servers = SglangServers(python=("python",), count=2, tp=2, colocated=True)
    sampling = SamplingOptions(max_response_tokens=8)
    sync = SglangSync(transport="ipc")
    options = SglangRollout(engine="sglang", sampling=sampling, sync=sync, servers=servers)
    specs = server_specs(options, ModelOptions(path="model"), tmp_path)
    assert [spec.visible_devices for spec in specs] == expected


@pytest.mark.parametrize("transport", ["broadcast", "disk"])
def test_a_trainer_that_broadcasts_has_sglangs_setting_of_nccl(
    transport: Literal["broadcast", "disk"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang sets it to 0 (entrypoints/engine.py:1905),
    and the members of a group need one value.
    """
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)

    def initialize(*_: Any, **__: Any) -> None:
        raise ConnectionError(os.environ.get("NCCL_CUMEM_ENABLE"))

    monkeypatch.setattr(training_context.groups, "initialize", initialize)
    monkeypatch.setattr(training_context, "_check_gpus", lambda _config: None)  # this host has none
    config = load_config(ROOT / "configs" / "runs" / "pacs-qwen3-14b-2n8g-tp4.yaml").config
    assert config.rollout.sglang is not None
    rollout = config.rollout.sglang.model_copy(update={"sync": SglangSync(transport=transport)})
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(ConnectionError, match="0" if transport == "broadcast" else "None"):
        training_context.join(config.model_copy(update={"rollout": rollout}))
    os.environ.pop("NCCL_CUMEM_ENABLE", None)


def test_the_trainer_has_its_memory_before_its_servers_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that starts earlier measures memory that the model takes before the server does."""
    events: list[str] = []
    model = SimpleNamespace(offload=SimpleNamespace(to_host=lambda: events.append("off-loaded")))
    rank = SimpleNamespace(device=torch.device("cpu"))
    config = load_config(ROOT / "configs" / "runs" / "pacs-qwen3-8b-1n8g-tp2.yaml").config

    def build(*_: Any) -> Any:
        events.append("built")
        return SimpleNamespace(config=config, models=[model], rank=rank)

    channel = SimpleNamespace(run_together=lambda action, only=None: action())
    monkeypatch.setattr(training_context, "join", lambda _: channel)
    monkeypatch.setattr(training_context, "build", build)
    monkeypatch.setattr(training_context, "is_megatron_checkpoint", lambda _: False)

    def receive() -> Any:
        events.append("received")
        return {"notices": ["a line"], "stop_token_ids": [7]}, {}

    driver: Any = SimpleNamespace(
        reply=lambda message: events.append(message["op"]), receive=receive
    )
    stop: Any = SimpleNamespace()
    run = training_context.build_on_all_ranks(config, tmp_path, tmp_path, driver, stop)
    assert (driver.notices, run.stop_token_ids) == (["a line"], (7,))
    assert events == ["built", "off-loaded", "start_servers", "received"]


def test_the_driver_waits_for_the_trainer_before_it_starts_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny_qwen3(tmp_path / "model", num_hidden_layers=1, vocab_size=262)
    servers = SglangServers(python=("python",), colocated=True)
    sampling = SamplingOptions(max_response_tokens=8)
    sync = SglangSync(transport="ipc")
    rollout = SglangRollout(engine="sglang", sampling=sampling, sync=sync, servers=servers)
    config = load_config(write_tiny_run(tmp_path, model)).config.model_copy(
        update={"rollout": rollout, "reward": None}
    )
    events: list[str] = []

    def receive() -> Any:
        events.append("received")
        return {"op": "start_servers"}, {}

    def open_engine(*_: Any, **__: Any) -> None:
        events.append("started")
        raise ConnectionError

    monkeypatch.setattr(driver_module, "open_engine", open_engine)
    connection: Any = SimpleNamespace(receive=receive)
    with pytest.raises(ConnectionError):
        driver_module.Driver(config, tmp_path, model, connection)
    assert events == ["received", "started"]


def test_every_rank_empties_its_cache_before_servers_take_their_memory_back(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(8, 1, stack)
    run.on_all_ranks(training_sync.release_memory)
    emptied: list[int] = []
    seen: list[int] = []

    def empty(context: Any) -> None:
        emptied.append(context.rank.rank)
        context.channel.any_rank(False)

    monkeypatch.setattr(training_sync, "_empty_caches", empty)
    for server in run.servers:
        server.before["/resume_memory_occupation"] = lambda: seen.append(len(emptied))
    run.on_all_ranks(training_sync._push)
    assert len(seen) == len(run.servers) and min(seen) >= NUM_GPUS
    assert (
        len(emptied) == 2 * NUM_GPUS
    )  # before the weights, and between the last weight and the KV cache
