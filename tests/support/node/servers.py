"""A modelled node of eight GPUs: stand-in SGLang servers and trainer ranks without CUDA.

Each behaviour cites its source.

Lines are of SGLang 0.5.23 (`sglang/srt`). tests/integration/sglang/test_api_node_contract.py holds
the real server to those that a CPU can show.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import os
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from aiohttp import web
from safetensors.torch import load_file, save_file
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from pacs_megatron.errors import PacsError
from pacs_megatron.sglang.api import WARM_UP_RID
from pacs_megatron.sglang.weights.checksums import ExpectedChecksums, ModelDims, sha_hash
from tests.support.servers.weight_server import WeightServer

T = TypeVar("T")
NUM_GPUS = 8


def gpu_uuid(number: int) -> str:
    """The UUID of GPU `number` of the node."""
    return f"GPU-{number:08d}"


def ipc_payload(tensors: Sequence[tuple[str, torch.Tensor]], gpu: int) -> str:
    """The handle that a trainer rank on `gpu` sends: the device's UUID and the place of the data,
    with one name per reader.
    """
    handle, path = tempfile.mkstemp(suffix=".safetensors", prefix="node-of-eight-")
    os.close(handle)
    save_file({name: tensor.contiguous() for name, tensor in tensors}, path)
    return base64.b64encode(json.dumps({"device": gpu_uuid(gpu), "path": path}).encode()).decode()


def mismatch(own: str, other: str) -> str:
    """torch's message for NCCL's rejection (torch/csrc/distributed/c10d/NCCLUtils.hpp), as SGLang
    passes it on.
    """
    code, other_code = (
        int(a) * 10000 + int(b) * 100 + int(c) for a, b, c in (v.split(".") for v in (own, other))
    )
    return (
        "Failed to receive weights: NCCL error in: "
        "/pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, invalid usage (run with "
        f"NCCL_DEBUG=WARN for details), NCCL version {own}\nncclInvalidUsage: This usually "
        "reflects invalid usage of NCCL library.\nLast error:\nMismatched NCCL version detected : "
        f"rank 0 version {other_code} rank 1 version {code}"
    )


class OutOfMemoryError(RuntimeError):
    """An allocation beyond a GPU's memory."""


class Node:
    """Memory of a host's GPUs: owner -> bytes, per GPU."""

    def __init__(self, gpu_bytes: int, num_gpus: int = NUM_GPUS) -> None:
        self.gpu_bytes = gpu_bytes
        self._used: list[dict[str, int]] = [{} for _ in range(num_gpus)]
        self._lock = threading.Lock()
        self.peak = [0] * num_gpus

    def free(self, gpu: int) -> int:
        return self.gpu_bytes - sum(self._used[gpu].values())

    def set(self, gpu: int, owner: str, num_bytes: int) -> None:
        """Raises OutOfMemoryError."""
        with self._lock:
            before = self._used[gpu].pop(owner, 0)
            if num_bytes > self.free(gpu):
                free = self.free(gpu)
                self._used[gpu][owner] = before
                raise OutOfMemoryError(
                    f"GPU {gpu}: {owner} needs {num_bytes} bytes, {free} are free: "
                    f"{self._used[gpu]}"
                )
            self._used[gpu][owner] = num_bytes
            self.peak[gpu] = max(self.peak[gpu], self.gpu_bytes - self.free(gpu))

    def clear(self, owner: str) -> None:
        with self._lock:
            for used in self._used:
                for name in [name for name in used if name.startswith(owner)]:
                    del used[name]


class GpuServer(WeightServer):
    """A server on some of the node's GPUs.

    - It sees the GPUs in `visible` only, and looks up a handle's UUID among them
      (utils/patch_torch.py:84-92). For another UUID the scheduler raises, logs and ends the server
      (managers/scheduler.py, run_scheduler_process: SIGQUIT to the parent).
    - Each tensor-parallel rank reads its own entry of `serialized_named_tensors`; reading another
      rank's breaks the producer's count of readers (managers/tp_worker.py:194).
    - Each tensor-parallel rank joins a broadcast group at `rank_offset` plus its own rank and
      receives every whole bucket (model_executor/model_runner_components/weight_updater.py:100-143
      and 248-258).
    - NCCL compares the versions of all ranks when a group connects, in its first broadcast (its
      src/init.cc, initTransportsRank: "Mismatched NCCL version detected"); the scheduler catches
      torch's error and responds with it (managers/scheduler_components/weight_updater.py:200-211).
    - KV cache = free after loading - free before loading * (1 - mem_fraction)
      (mem_cache/kv_cache_configurator.py:3007).
      Nothing left: ValueError at the start (the same file, 3051).
    - The first request with `top_p` below 1 compiles the kernels of flashinfer's sampling
      (layers/sampler.py:444, flashinfer 0.7.2 jit/sampling.py); `late_compiles` counts those that a
      sample had to wait for.
    - CUDA graphs of the prefill are captured unless an argument turns them off
      (model_executor/cuda_graph_config.py:119), and are not released.
    - Release and resume change what it occupies, and released weights are lost; a failed resume
      ends it (torch_memory_saver).
    - Checksums are of fused parameters, per tensor-parallel rank (utils/weight_checker.py), by the
      rules that the real server is tested against (tests/integration/sglang/test_sync.py).
    """

    def __init__(
        self,
        node: Node,
        weights: Mapping[str, torch.Tensor],
        visible: str,
        *,
        mem_fraction: float = 0.5,
        dims: ModelDims | None = None,
        scale: float = 1.0,
        nccl: tuple[str, str] | None = None,
        graph_bytes: int = 0,
        **server: Any,
    ) -> None:
        """
        Args:
            nccl: the version of this server and the other one in its groups; None: gloo.
            graph_bytes: of the prefill's CUDA graphs.
        """
        self.node = node
        self.gpus = [int(number) for number in visible.split(",")]
        self.owner = f"server[{visible}]"
        self.ended = ""
        """why its scheduler ended; empty while it runs"""
        self.dims = dims
        self.nccl = nccl
        self._readers: set[str] = set()
        self._groups: dict[str, list[dist.ProcessGroupGloo]] = {}
        self.weight_bytes = int(scale * sum(tensor.nbytes for tensor in weights.values())) // len(
            self.gpus
        )
        self.kv_bytes = self._size_cache(mem_fraction)
        self._occupy("graphs", graph_bytes)
        self.late_compiles = 0
        self.cores: list[int] = []
        """of its process"""
        self._is_compiled = False
        self.once_started: dict[str, Callable[[], None]] = {}
        """path -> function that runs before its first call after that of the start"""
        super().__init__(weights, **server)

    def _size_cache(self, mem_fraction: float) -> int:
        before = min(self.node.free(gpu) for gpu in self.gpus)
        self._occupy("weights", self.weight_bytes)
        cache = int(min(self.node.free(gpu) for gpu in self.gpus) - before * (1 - mem_fraction))
        if cache <= 0:
            raise ValueError("Loaded weights leave no GPU memory for the KV cache")
        self._occupy("kv_cache", cache)
        return cache

    def _occupy(self, tag: str, num_bytes: int) -> None:
        for gpu in self.gpus:
            self.node.set(gpu, f"{self.owner} {tag}", num_bytes)

    def _routes(self, app: web.Application) -> None:
        super()._routes(app)
        app.router.add_post("/update_weights_from_tensor", self._from_tensor)
        app.router.add_post("/update_weights_from_distributed", self._from_distributed)

    async def _server_info(self, request: web.Request) -> web.Response:
        info = {
            "version": "0.5.23",
            "tp_size": len(self.gpus),
            "device": "cuda" if self.nccl else "cpu",
            "max_req_input_len": self.context - 6,
        }
        return web.json_response(info)

    async def _warm_up(self, body: dict[str, Any]) -> web.Response:
        self._is_compiled |= body["sampling_params"]["top_p"] < 1 and body["return_logprob"]
        self.before |= self.once_started
        return await super()._warm_up(body)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body["sampling_params"].get("top_p", 1) < 1 and body["rid"] != WARM_UP_RID:
            self.late_compiles += not self._is_compiled
            self._is_compiled = True
        return await super()._generate(request)

    def _end_scheduler(self, reason: str) -> web.Response:
        """The scheduler raised: the whole server ends, connections break."""
        self.ended = self.ended or reason
        self.node.clear(self.owner)
        threading.Thread(target=self._end_process, daemon=True).start()
        raise asyncio.CancelledError(reason)

    def _end_process(self) -> None:
        self.refuse()
        self._groups.clear()  # closes their connections, as the end of a process does

    def close(self) -> None:
        super().close()
        self._groups.clear()

    async def _from_tensor(self, request: web.Request) -> web.Response:
        if not self.session_open:
            return web.json_response(
                {"success": False, "message": "must run between begin and end"}, status=400
            )
        body = await request.json()
        payloads = body["serialized_named_tensors"]
        for rank in range(len(self.gpus)):
            handle = json.loads(base64.b64decode(payloads[rank]))
            if handle["device"] not in [gpu_uuid(gpu) for gpu in self.gpus]:
                return self._end_scheduler(f"Invalid device_uuid={handle['device']}")
            if handle["path"] in self._readers:
                return self._end_scheduler(
                    f"{handle['path']} was read twice: the producer's count of readers is wrong"
                )
            self._readers.add(handle["path"])
            if rank == 0:
                for name, tensor in load_file(handle["path"]).items():
                    self.load(name, tensor)
            Path(handle["path"]).unlink()
        return web.json_response({"success": True})

    async def _refuse(self, request: web.Request) -> web.Response:
        """`/init_weights_update_group`"""
        body = await request.json()
        if self.nccl is not None:  # NCCL connects at the first broadcast
            return web.json_response({"success": True, "message": ""})

        def join(tp_rank: int) -> dist.ProcessGroupGloo:
            limit = timedelta(seconds=60)
            size = body["world_size"]
            name = body["group_name"]
            store = TCPStore(body["master_address"], body["master_port"], size, False, limit)
            prefixed = PrefixStore("cpu/", PrefixStore(f"{name}/", PrefixStore(name, store)))
            return dist.ProcessGroupGloo(prefixed, body["rank_offset"] + tp_rank, size, limit)

        ranks = range(len(self.gpus))
        self._groups[body["group_name"]] = await asyncio.gather(
            *(asyncio.to_thread(join, rank) for rank in ranks)
        )
        return web.json_response({"success": True, "message": ""})

    async def _from_distributed(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.nccl is not None and self.nccl[0] != self.nccl[1]:
            return web.json_response(
                {"success": False, "message": mismatch(*self.nccl)}, status=400
            )
        kinds = [getattr(torch, name) for name in body["dtypes"]]
        sizes = [
            math.prod(shape) * torch.empty(0, dtype=kind).element_size()
            for shape, kind in zip(body["shapes"], kinds, strict=True)
        ]

        def receive(group: Any) -> torch.Tensor:
            data = torch.empty(sum(sizes), dtype=torch.uint8)
            group.broadcast([data], dist.BroadcastOptions()).wait()
            return data

        groups = self._groups[body["group_name"]]
        received = await asyncio.gather(*(asyncio.to_thread(receive, group) for group in groups))
        pieces = torch.split(received[0], sizes)
        for name, kind, shape, piece in zip(
            body["names"], kinds, body["shapes"], pieces, strict=True
        ):
            self.load(name, piece.clone().view(kind).reshape(shape))
        return web.json_response({"success": True})

    async def _checksums(self, request: web.Request) -> web.Response:
        assert self.dims is not None, "sync.verify needs ModelDims"
        skip = set((await request.json())["skip_tensor_list"])
        fused = ExpectedChecksums(self.dims, len(self.gpus), sha_hash)
        for name, tensor in self.held.items():
            fused.add(name, tensor)
        ranks = [
            {
                "checksums": {
                    name: hashes[rank] for name, hashes in fused.by_name.items() if name not in skip
                }
            }
            for rank in range(len(self.gpus))
        ]
        return web.json_response({"ranks": ranks})

    async def _release_memory(self, request: web.Request) -> web.Response:
        if "weights" in (await request.json())["tags"]:
            self.held = {
                name: torch.full_like(tensor, float("nan")) for name, tensor in self.held.items()
            }
        return await self._set_memory(request, {"weights": 0, "kv_cache": 0})

    async def _resume_memory(self, request: web.Request) -> web.Response:
        return await self._set_memory(
            request, {"weights": self.weight_bytes, "kv_cache": self.kv_bytes}
        )

    async def _set_memory(self, request: web.Request, sizes: Mapping[str, int]) -> web.Response:
        try:
            for tag in (await request.json())["tags"]:
                self._occupy(tag, sizes[tag])
        except OutOfMemoryError as error:
            return self._end_scheduler(str(error))
        return web.Response()


class ThreadChannel:
    """The control channel of ranks that are threads of one process
    (`parallel.control.ControlChannel`).
    """

    def __init__(self, rank: int, shared: SharedRanks) -> None:
        self.rank = rank
        self._shared = shared

    def broadcast_json(self, value: Any) -> Any:
        return json.loads(json.dumps(self._shared.gather(self.rank, value)[0]))

    def any_rank(self, flag: bool) -> bool:
        return any(self._shared.gather(self.rank, flag))

    def run_together(self, action: Callable[[], T], *, only: int | None = None) -> T | None:
        result = None
        error = None
        if only is None or only == self.rank:
            try:
                result = action()
            except PacsError as caught:
                error = caught
        for found in self._shared.gather(self.rank, error):
            if found is not None:
                raise found
        return result


class SharedRanks:
    """Collectives of `num_ranks` threads."""

    def __init__(self, num_ranks: int) -> None:
        self._barrier = threading.Barrier(num_ranks, timeout=60)
        self._slots: list[Any] = [None] * num_ranks

    def gather(self, rank: int, value: Any) -> list[Any]:
        self._slots[rank] = value
        self._barrier.wait()
        found = list(self._slots)
        self._barrier.wait()
        return found

    def run(self, action: Callable[[int], T]) -> list[T]:
        """`action(rank)` in a thread per rank. Raises the error of the lowest one."""
        with ThreadPoolExecutor(len(self._slots)) as pool:
            return list(pool.map(action, range(len(self._slots))))
