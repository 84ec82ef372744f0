"""Samplers of `pacs-megatron eval`: the embedded engine, or SGLang servers that take one model
after the other.
"""

import contextlib
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import xxhash

from pacs_megatron.checkpoint.hf_folder import HfFolder
from pacs_megatron.checkpoint.safetensors_file import tensor_bytes
from pacs_megatron.config.rollout_options import EmbeddedRollout, SglangRollout
from pacs_megatron.config.schema import ModelOptions, RunConfig
from pacs_megatron.contracts import Sample, SampleRequest, WeightReceiver
from pacs_megatron.convert.certificate import CERTIFICATE_NAME
from pacs_megatron.data import stop_token_ids
from pacs_megatron.embedded.engine import EmbeddedEngine, Vocabulary
from pacs_megatron.errors import CheckpointError, SyncError
from pacs_megatron.models import load_spec
from pacs_megatron.runtime.closing import Closing
from pacs_megatron.runtime.waiting import report_wait
from pacs_megatron.sglang.build import open_engine, server_apis
from pacs_megatron.sglang.client import SglangEngine
from pacs_megatron.sglang.fleet import Health
from pacs_megatron.sglang.weights.server_sync import ServerSync, server_sync
from pacs_megatron.training.push import push

logger = logging.getLogger(__name__)


@report_wait("for the weights to be read")
def push_folder(
    folder: HfFolder,
    receiver: WeightReceiver | None,
    version: int,
    certified: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Sends a folder's weights to `receiver`, if there is one, and returns their digest.

    Raises SyncError; CheckpointError for a tensor that differs from `certified`, its digest by
    name.
    """

    def checked() -> Iterator[tuple[str, torch.Tensor]]:
        for name in folder.names:
            tensor = folder.get(name)
            if (
                name in certified
                and xxhash.xxh3_128_hexdigest(tensor_bytes(tensor)) != certified[name]
            ):
                raise CheckpointError(
                    f"{folder.path}: {name} was altered since the export (its digest is not that "
                    f"of {CERTIFICATE_NAME}); export again, or pass --no-verify"
                )
            yield name, tensor

    return push(version, checked(), [] if receiver is None else [receiver])


class EmbeddedSampler(Closing):
    """The embedded engine of the configuration, or one with default options if the configuration
    has another engine.
    """

    def __init__(self, config: RunConfig) -> None:
        assert config.evaluation.sampling is not None
        default = EmbeddedRollout(engine="embedded", sampling=config.evaluation.sampling)
        self._options = config.rollout.embedded or default
        self.chunk = self._options.batch_sequences
        """Requests decoded as one batch of fixed shape; a resumed evaluation repeats whole batches.
        """
        self._engine: EmbeddedEngine

    def describe(self) -> dict[str, Any]:
        return {"engine": "embedded", "dtype": self._options.dtype, "batch_sequences": self.chunk}

    @report_wait("for the model to load")
    def load(self, folder: HfFolder, tokenizer: Any) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        vocabulary = Vocabulary.from_tokenizer(tokenizer, str(folder.path))
        self._engine = EmbeddedEngine(folder.path, self._options, vocabulary, device=device)
        push_folder(folder, self._engine, version=0)

    def stream(self, requests: Sequence[SampleRequest]) -> Iterable[Sample]:
        return self._engine.stream(requests)

    def close(self) -> None:
        """Does nothing: the engine has no processes."""


class ServerSampler(Closing):
    """SGLang servers, managed or external, with the weights of one folder at a time.

    Every update compares checksums.

    Managed servers restart for a model of another architecture. A thread sends the weights to a
    restarted server.
    """

    chunk = 1

    def __init__(self, options: SglangRollout, model: ModelOptions, folder: Path) -> None:
        """`folder` contains the servers' logs, and the weights unless `sync.folder` is set."""
        sync = options.sync.model_copy(update={"transport": "disk", "verify": "full"})
        self._options = options.model_copy(update={"sync": sync, "servers": _all_gpus(options)})
        self._model_options = model
        self._folder = folder
        self._version = -1
        self._shape: Any = None
        self._model: HfFolder
        self._sync: ServerSync
        self._engine: SglangEngine | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        """the lock: one weight update at a time; the event: `close` was called"""
        self._thread = threading.Thread(target=self._watch, name="eval weights", daemon=True)
        self._thread.start()

    def describe(self) -> dict[str, Any]:
        return {
            "engine": "sglang",
            "dtype": self._options.dtype,
            "quantize": self._options.sync.quantize,
        }

    def load(self, folder: HfFolder, tokenizer: Any) -> None:
        """Raises RolloutError if a server does not start, SyncError if no server has the weights."""
        shape = load_spec(folder.path), stop_token_ids(tokenizer, str(folder.path))
        with self._lock:
            if self._engine is None or shape != self._shape:
                self._end_servers()
                self._sync = server_sync(self._options, shape[0], self._folder / "weights")
                model = self._model_options.model_copy(update={"path": str(folder.path)})
                self._engine = open_engine(self._options, model, self._folder)
            self._shape = shape
            self._model = folder
            self._version = self._version + 1
            self._engine.begin_update()
            status = self._engine.status()
            digest = self._push(
                [s.url for s in status if s.health is not Health.DEAD] or [s.url for s in status]
            )
            self._engine.set_current(self._version, digest)

    def stream(self, requests: Sequence[SampleRequest]) -> Iterable[Sample]:
        assert self._engine is not None
        return self._engine.stream(requests)

    def _push(self, urls: Sequence[str]) -> str:
        self._sync.set_targets(server_apis(self._options, tuple(urls)))
        return push_folder(self._model, self._sync, self._version)

    def _watch(self) -> None:
        while not self._ended.wait(self._options.probe_interval_s):
            with self._lock:
                status = [] if self._engine is None else self._engine.status()
                behind = [s.url for s in status if s.health is Health.STALE and not s.restarting]
                if behind:
                    logger.info("sending the weights to %s, which restarted", ", ".join(behind))
                    with contextlib.suppress(
                        SyncError
                    ):  # logged by the update; the next round tries again
                        self._push(behind)

    def _end_servers(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._sync.close()
            self._engine = None

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self._end_servers()


def _all_gpus(options: SglangRollout) -> Any:
    """The managed servers without a trainer: one for each `tp` GPUs of this host; colocated ones
    with SGLang's default share.
    """
    servers = options.servers
    if servers is None or servers.device == "cpu" or servers.visible_devices:
        return servers
    count = torch.cuda.device_count() // servers.tp or servers.count
    memory = None if servers.colocated else servers.mem_fraction
    return servers.model_copy(update={"count": count, "colocated": False, "mem_fraction": memory})
