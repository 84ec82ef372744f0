"""Weight updates of a server of which only the responses exist."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from pacs_megatron.config.schema import RunConfig
from pacs_megatron.models import ModelSpec
from pacs_megatron.policy.engine import MegatronPolicy
from pacs_megatron.sglang.api import FRESH_VERSION
from pacs_megatron.sglang.weights import server_sync, transports
from pacs_megatron.training.push import stream

_URL = "http://traced"


class _Api:
    """Accepts every request; has the methods of SglangApi that a weight update calls."""

    def __init__(self) -> None:
        self.url = _URL
        self._version = FRESH_VERSION

    def post(self, path: str, body: Any, timeout_s: float | None = None) -> None: ...

    def placement(self, timeout_s: float | None = None) -> tuple[int, str]:
        return 1, "cuda"

    def weight_version(self, timeout_s: float | None = None) -> str:
        return self._version

    def set_weight_version(self, text: str) -> None:
        self._version = text

    def begin_weight_update(self) -> bool:
        return True

    def end_weight_update(self, timeout_s: float | None = None) -> None: ...


class _Backend:
    """Of a broadcast to a server."""

    def broadcast(self, tensors: list[torch.Tensor], _options: object) -> _Backend:
        for tensor in tensors:
            _check_on_gpu(tensor)
        return self

    def wait(self, _timeout: object) -> None: ...

    def abort(self) -> None: ...


def send_weights(config: RunConfig, spec: ModelSpec, policy: MegatronPolicy) -> None:
    """Exports the policy's weights through the run's transport, bucket by bucket. Collective.

    Checksums are not compared: no server computes them.
    """
    options = config.rollout.sglang
    if options is None:
        for _ in policy.export_weights():
            pass
        return

    verify_off = options.sync.model_copy(update={"verify": "off"})
    options = options.model_copy(update={"sync": verify_off})
    with tempfile.TemporaryDirectory(prefix="pacs-trace-") as folder:
        receiver = _receiver(options, spec, Path(folder))
        server: Any = _Api()
        receiver.set_targets([server])
        _, error = stream(policy.version, policy.export_weights(), [receiver])
        receiver.close()
    if error is not None:
        raise error


def _receiver(options: Any, spec: ModelSpec, folder: Path) -> server_sync.ServerSync:
    """The run's own receiver, whose last call to another process is replaced."""
    replaced: Any = transports
    replaced.save_file = lambda _tensors, path: Path(path).touch()
    replaced.shared_memory_payload = _payload
    replaced.BroadcastTransport._connect = lambda _self, _api: transports._Group(
        "traced", "nccl", _Backend(), None
    )
    # torch's dispatch mode belongs to this thread.
    for module in (transports, server_sync):
        module.in_thread = _in_this_thread  # type: ignore[attr-defined]
    return server_sync.server_sync(options, spec, folder)


def _payload(tensors: list[tuple[str, torch.Tensor]]) -> str:
    for _, tensor in tensors:
        _check_on_gpu(tensor)
    return ""


def _in_this_thread(action: Any) -> Any:
    from concurrent.futures import Future

    future: Future[Any] = Future()
    future.set_result(action())
    return future


def _check_on_gpu(tensor: torch.Tensor) -> None:
    if not tensor.is_cuda:
        raise RuntimeError(f"a CPU tensor {list(tensor.shape)} in a transport between GPUs")
