"""Transports of weights to SGLang servers: disk, broadcast, IPC.

`server_sync.ServerSync` decides the order of calls.

Methods that take `api` run concurrently for several servers, in threads; their exceptions concern
that one server only. Every wait has a timeout.
"""

import base64
import io
import json
import os
import re
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as torch_mp
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.multiprocessing import reductions

from pacs_megatron.errors import SyncError
from pacs_megatron.sglang.api import ServerRejectedError, SglangApi
from pacs_megatron.sglang.weights.bucket import Bucket

T = TypeVar("T")
Kind = Literal["nccl", "gloo"]
KEEP = {"flush_cache": False, "abort_all_requests": False}
CUDA_ARG_DEVICE = 6
"""Position of the device in the arguments of torch's `rebuild_cuda_tensor`.

SGLang expects a GPU's UUID there.
"""
GROUP_SETTINGS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""Environment that the constructor of an NCCL group reads.

2 is CleanUpOnly (ProcessGroupNCCL.hpp:167-170): if a server dies inside a broadcast, the group's
watchdog aborts the group only. The default would end the whole process, rank 0.
"""
CLOSE_S = 5.0
"""Seconds to wait for the destructors of groups; a broken group takes longer."""
_environment_lock = threading.Lock()


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Sets environment variables for the block; one thread at a time."""
    with _environment_lock:
        before = {name: os.environ[name] for name in values if name in os.environ}
        os.environ.update(values)
        try:
            yield
        finally:
            for name in values:
                del os.environ[name]
            os.environ.update(before)


class Transport:
    """One method of sending buckets to servers, by default in a session of each server."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._sessions: dict[str, bool] = {}

    def start(self, version: int) -> None:
        """Called first in an update."""

    def join(self, api: SglangApi) -> None:
        """Prepares one server to receive."""
        self._sessions[api.url] = api.begin_weight_update()

    def prepare(self, bucket: Bucket) -> None:
        """Called once per bucket, before the first `send`."""

    def send(self, api: SglangApi, bucket: Bucket) -> None:
        """Returns when the server has loaded the bucket."""

    def commit(self) -> None:
        """Called once, after the last bucket."""

    def finish(self, api: SglangApi) -> None:
        """Returns when the server has all weights."""
        if self._sessions[api.url]:
            api.end_weight_update(self._timeout_s)

    def forget(self, api: SglangApi) -> None:
        """Drops the state of a server that failed."""

    def close(self) -> None:
        """Ends the transport."""


class DiskTransport(Transport):
    """Writes a safetensors folder `v<version>` that every server can read.

    Renames it when it is complete, then removes the previous version. Only this transport writes to
    `folder`; it also removes leftovers of an earlier attempt.
    """

    def __init__(self, folder: Path, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self._folder = folder.absolute()
        self.path = self._folder / "v-1"
        """folder of the current version, also during the write"""
        self._partial = self.path
        self._shards: dict[str, str] = {}
        """tensor -> file"""

    def start(self, version: int) -> None:
        self._remove_all_but({self.path.name, f"v{version}"})
        self.path = self._folder / f"v{version}"
        self._partial = self._folder / f"v{version}.partial"
        self._shards = {}
        with _disk_errors(self._partial):
            self._partial.mkdir(parents=True)

    def prepare(self, bucket: Bucket) -> None:
        num_files = len(set(self._shards.values()))
        file_name = f"model-{num_files + 1:05d}.safetensors"
        with _disk_errors(self._partial):
            tensors = {name: tensor.cpu() for name, tensor in bucket.tensors}
            save_file(tensors, self._partial / file_name)
        self._shards |= {name: file_name for name, _ in bucket.tensors}

    def commit(self) -> None:
        with _disk_errors(self._partial):
            index = json.dumps({"metadata": {}, "weight_map": self._shards})
            (self._partial / "model.safetensors.index.json").write_text(index)
            shutil.rmtree(self.path, ignore_errors=True)
            self._partial.replace(self.path)
        self._remove_all_but({self.path.name})

    def _remove_all_but(self, names: set[str]) -> None:
        """Removes all other versions, also partial and later ones of a killed attempt."""
        for folder in self._folder.glob("v*"):
            if re.fullmatch(r"v\d+(\.partial)?", folder.name) and folder.name not in names:
                shutil.rmtree(folder, ignore_errors=True)

    def join(self, api: SglangApi) -> None:
        """Opens no session, because the server loads the folder itself."""

    def finish(self, api: SglangApi) -> None:
        # `auto`, because the server's start may have set `dummy`.
        body = {"model_path": str(self.path), "load_format": "auto", **KEEP}
        api.post("/update_weights_from_disk", body, self._timeout_s)

    def close(self) -> None:
        """Removes all versions.

        The servers have loaded them, and a restarted server loads its model path.
        """
        self._remove_all_but(set())


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """Converts errors of a full or missing disk to a SyncError that names the folder.

    Removes the partial version.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        shutil.rmtree(path, ignore_errors=True)
        raise SyncError(f"sync.transport=disk: cannot write {path}: {error}") from error


def in_thread(action: Callable[[], T]) -> Future[T]:
    """Runs `action` in a daemon thread: a blocked call does not delay the end of the process."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(action())
        except BaseException as error:  # noqa: BLE001  # `result` raises it
            future.set_exception(error)

    threading.Thread(target=run, name="weight-sync", daemon=True).start()
    return future


@dataclass(slots=True)
class _Group:
    """A process group (gloo or NCCL) of this process and the tensor-parallel ranks of one server.

    This process is rank 0.
    """

    name: str
    kind: Kind
    backend: Any
    store: TCPStore | None

    def end(self) -> threading.Thread:
        """Aborts the group in a thread, which it returns.

        A gloo group's destructor blocks until its broken broadcast times out.
        """
        held = [self.backend, self.store]
        self.backend = None
        self.store = None

        def give_up() -> None:
            held[0].abort()
            held.clear()

        thread = threading.Thread(target=give_up, name="weight-sync-end", daemon=True)
        thread.start()
        return thread


class BroadcastTransport(Transport):
    """One broadcast per bucket in a separate process group for each server: NCCL, or gloo on CPU.

    If a server dies, the other servers keep their groups and complete the update. The trainer's
    default process group is not used: the backends use a store that listens on `host` only (torch's
    default store listens on all interfaces).
    """

    def __init__(self, host: str, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self._host = host
        self._groups: dict[str, _Group] = {}
        self._ending: list[threading.Thread] = []

    def join(self, api: SglangApi) -> None:
        if api.url not in self._groups:
            self._groups[api.url] = self._connect(api)
        super().join(api)

    def send(self, api: SglangApi, bucket: Bucket) -> None:
        group = self._groups[api.url]
        body = {
            "names": [name for name, _ in bucket.tensors],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket.tensors],
            "shapes": [list(tensor.shape) for _, tensor in bucket.tensors],
            "group_name": group.name,
            "load_format": "flattened_bucket",
            **KEEP,
        }
        request = in_thread(
            lambda: api.post("/update_weights_from_distributed", body, self._timeout_s)
        )
        broadcast = in_thread(lambda: self._broadcast(group.backend, bucket.data))
        try:
            request.result()  # first: a server that rejects the request never joins the broadcast
            broadcast.result(self._timeout_s)
        except (ServerRejectedError, RuntimeError, TimeoutError) as error:
            advice = self._advice(str(error)) if group.kind == "nccl" else ""
            raise SyncError(
                f"{api.url}: broadcast failed: {str(error) or 'timeout'}{advice}"
            ) from error

    @staticmethod
    def _advice(error: str) -> str:
        """Advice about different NCCL versions, as the end of a message.

        NCCL compares versions at the first broadcast of a group (its init.cc). The server's error
        has its version, from torch (`NCCL version 2.30.7`) or NCCL (`rank 1 version 23007`).
        """
        ours = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        versions = set(re.findall(r"NCCL version (\d+\.\d+\.\d+)", error))
        for text in re.findall(r"rank \d+ version (\d+)", error):
            code = int(text)
            versions.add(f"{code // 10000}.{code // 100 % 100}.{code % 100}")

        theirs = " and ".join(sorted(versions - {ours}))
        servers = "the server needs the same (`pacs-megatron preflight`)"
        if theirs:
            servers = f"the server has NCCL {theirs}"
        return (
            f"; the trainer has NCCL {ours} (torch {torch.__version__}), {servers}; use one torch "
            "on both sides, or rollout.sync.transport=disk"
        )

    def _broadcast(self, backend: Any, data: torch.Tensor) -> None:
        """Sends the bucket to the server's ranks.

        Call it in a daemon thread: NCCL connects to its peers inside the first call, without a
        timeout.
        """
        backend.broadcast([data], dist.BroadcastOptions()).wait(timedelta(seconds=self._timeout_s))

    def forget(self, api: SglangApi) -> None:
        group = self._groups.pop(api.url, None)
        if group is not None:
            self._ending.append(group.end())

    def close(self) -> None:
        """Ends the groups, and waits for them.

        The end of the process stops daemon threads. One that is in a group's destructor then calls
        std::terminate: the process ends by SIGABRT.
        """
        for group in self._groups.values():
            self._ending.append(group.end())
        self._groups.clear()
        deadline = time.monotonic() + CLOSE_S
        for thread in self._ending:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._ending.clear()

    def _connect(self, api: SglangApi) -> _Group:
        """A new group with the ranks of one server, which joins at the same time."""
        tp, device = api.placement()
        num_ranks = 1 + tp
        kind: Kind = "gloo" if device == "cpu" else "nccl"
        name = f"pacs-{uuid.uuid4().hex[:12]}"  # unique: the server may still have a broken group
        port, store = self._listen(num_ranks)
        body = {
            "master_address": self._host,
            "master_port": port,
            "rank_offset": 1,
            "world_size": num_ranks,
            "group_name": name,
            "backend": kind,
        }
        request = in_thread(lambda: api.post("/init_weights_update_group", body, self._timeout_s))
        backend = in_thread(lambda: self._new_backend(kind, name, num_ranks, store))
        request.result()  # first: a server that rejects the request never joins the rendezvous
        try:
            return _Group(name, kind, backend.result(self._timeout_s), store)
        except (RuntimeError, TimeoutError) as error:
            raise SyncError(
                f"{api.url}: no {kind} group within {self._timeout_s:g} s: {error}"
            ) from error

    def _listen(self, num_ranks: int) -> tuple[int, TCPStore]:
        """(port, store of a group) that listens on `host` only."""
        try:
            listener = socket.create_server((self._host, 0))
            port = listener.getsockname()[1]
            store = TCPStore(
                self._host,
                port,
                num_ranks,
                True,
                timedelta(seconds=self._timeout_s),
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
        except (OSError, RuntimeError) as error:
            raise SyncError(
                f"rollout.sync.host={self._host}: not an address of this host that can listen "
                f"({error}); set one that servers can reach"
            ) from error
        return port, store

    def _new_backend(self, kind: Kind, name: str, num_ranks: int, store: TCPStore) -> Any:
        """Rank 0 of the group.

        Key prefixes are those that `torch.distributed` forms on the server's side.
        """
        limit = timedelta(seconds=self._timeout_s)
        device = "cuda" if kind == "nccl" else "cpu"
        prefixed = PrefixStore(f"{device}/", PrefixStore(f"{name}/", PrefixStore(name, store)))
        if kind == "nccl":
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = limit
            with _environment(GROUP_SETTINGS):
                return dist.ProcessGroupNCCL(prefixed, 0, num_ranks, nccl)
        gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        gloo._timeout = limit
        gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=self._host)]
        return dist.ProcessGroupGloo(prefixed, 0, num_ranks, gloo)


class IpcTransport(Transport):
    """Shared memory of this host: CUDA IPC handles, or shared-memory files of CPU tensors.

    Servers copy from the bucket, which exists until every server has responded.
    """

    def __init__(self, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self._tp: dict[str, int] = {}
        self._payloads: dict[str, list[str]] = {}
        """url -> payload of each tensor-parallel rank"""

    def join(self, api: SglangApi) -> None:
        self._tp[api.url] = api.placement()[0]
        super().join(api)

    def prepare(self, bucket: Bucket) -> None:
        # A CUDA handle counts its readers, so each rank needs its own (SGLang 0.5.23,
        # managers/tp_worker.py:194).
        try:
            self._payloads = {
                url: [shared_memory_payload(bucket.tensors) for _ in range(tp)]
                for url, tp in self._tp.items()
            }
        except RuntimeError as error:
            raise SyncError(
                f"rollout.sync.transport=ipc: cannot share a bucket of {bucket.num_bytes} bytes: "
                f"{error}; enlarge /dev/shm (containers often have 64 MB), or lower "
                "rollout.sync.bucket_mib"
            ) from error

    def send(self, api: SglangApi, bucket: Bucket) -> None:
        body = {"serialized_named_tensors": self._payloads[api.url], **KEEP}
        api.post("/update_weights_from_tensor", body, self._timeout_s)

    def forget(self, api: SglangApi) -> None:
        self._tp.pop(api.url, None)


def shared_memory_payload(tensors: list[tuple[str, torch.Tensor]]) -> str:
    """Base64 payload of `/update_weights_from_tensor`: memory handles, pickled.

    The server reads them with a restricted unpickler. The trainer unpickles nothing.
    """
    buffer = io.BytesIO()
    with _shared_files():
        _HandlePickler(buffer).dump(tensors)
    return base64.b64encode(buffer.getvalue()).decode()


class _HandlePickler(ForkingPickler):
    """torch's own reductions, with a GPU's UUID instead of its number.

    The number differs between processes.
    """

    def reducer_override(self, obj: Any) -> Any:
        if not (isinstance(obj, torch.Tensor) and obj.is_cuda):
            return NotImplemented
        function, arguments = reductions.reduce_tensor(obj)  # type: ignore[no-untyped-call]
        uuid_text = str(torch.cuda.get_device_properties(obj.device).uuid)
        before = arguments[:CUDA_ARG_DEVICE]
        after = arguments[CUDA_ARG_DEVICE + 1 :]
        return function, (*before, uuid_text, *after)


@contextmanager
def _shared_files() -> Iterator[None]:
    """Shares CPU memory by file name.

    File descriptors can be passed to child processes only.
    """
    before = torch_mp.get_sharing_strategy()  # type: ignore[no-untyped-call]
    torch_mp.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        torch_mp.set_sharing_strategy(before)  # type: ignore[no-untyped-call]
