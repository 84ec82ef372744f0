"""Samplers of `pacs-megatron eval`: the embedded engine, or SGLang servers that take one model
after the other.
"""

import contextlib
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import xxhash

from pacs_megatron.agents.files import agent_digests
from pacs_megatron.checkpoint.hf_folder import HfFolder
from pacs_megatron.checkpoint.safetensors_file import tensor_bytes
from pacs_megatron.config.agent_options import AgentOptions
from pacs_megatron.config.rollout_options import EmbeddedRollout, SglangRollout
from pacs_megatron.config.schema import RunConfig
from pacs_megatron.contracts import Prompt, Sample, SampleRequest, WeightReceiver
from pacs_megatron.convert.certificate import CERTIFICATE_NAME
from pacs_megatron.data import stop_token_ids
from pacs_megatron.embedded.engine import EmbeddedEngine, Vocabulary
from pacs_megatron.errors import CheckpointError, SyncError
from pacs_megatron.models import load_spec
from pacs_megatron.rollout.agent_rounds import AgentRounds, build_encoder
from pacs_megatron.rollout.server_agents import ServerAgents
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

    Args:
        folder: the weights.
        receiver: None computes the digest only.
        version: of the weights.
        certified: tensor name -> xxh3-128 that the tensor must have.

    Raises:
        SyncError: the receiver failed.
        CheckpointError: a tensor differs from its digest.
    """
    receivers = [] if receiver is None else [receiver]
    return push(version, _tensors(folder, certified), receivers)


def _tensors(folder: HfFolder, certified: Mapping[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of a folder. Raises CheckpointError for one that differs from its digest."""
    for name in folder.names:
        tensor = folder.get(name)
        if name in certified:
            digest = xxhash.xxh3_128_hexdigest(tensor_bytes(tensor))
            if digest != certified[name]:
                raise CheckpointError(
                    f"{folder.path}: {name} was altered since the export (its digest is not that "
                    f"of {CERTIFICATE_NAME}); export again, or pass --no-verify"
                )
        yield name, tensor


class EmbeddedSampler(Closing):
    """The embedded engine of the configuration, with its agent if there is one, or an engine with
    default options if the configuration has another one.
    """

    def __init__(self, config: RunConfig) -> None:
        assert config.evaluation.sampling is not None
        default = EmbeddedRollout(engine="embedded", sampling=config.evaluation.sampling)
        self._options = config.rollout.embedded or default
        self._data = config.data
        self._agents: AgentRounds | None = None
        self.chunk = 1 if self._options.agent else self._options.batch_sequences
        """Requests decoded as one batch of fixed shape; a resumed evaluation repeats whole batches.
        A round of agents has no fixed shape.
        """
        self._engine: EmbeddedEngine

    def describe(self) -> dict[str, Any]:
        """The settings that change a response."""
        settings: dict[str, Any] = {
            "engine": "embedded",
            "dtype": self._options.dtype,
            "batch_sequences": self._options.batch_sequences,
        }
        return settings | _agent_settings(self._options.agent)

    @report_wait("for the model to load")
    def load(self, folder: HfFolder, tokenizer: Any) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        vocabulary = Vocabulary.from_tokenizer(tokenizer, str(folder.path))
        self._engine = EmbeddedEngine(folder.path, self._options, vocabulary, device=device)
        push_folder(folder, self._engine, version=0)
        if self._options.agent is None:
            return

        def decode(ids: np.ndarray) -> str:
            return str(tokenizer.decode(ids, skip_special_tokens=True))

        self.close()
        encoder = build_encoder(self._options.agent, self._data, tokenizer, datetime.now())
        stops = stop_token_ids(tokenizer, str(folder.path))
        self._agents = AgentRounds(self._options.agent, encoder, stops, decode)

    def stream(
        self, requests: Sequence[SampleRequest], prompts: Mapping[str, Prompt]
    ) -> Iterable[Sample]:
        if self._agents is None:
            return self._engine.stream(requests)
        return self._agents.play(requests, prompts, self._engine.stream)

    def close(self) -> None:
        """Ends the agents' processes; the engine has none."""
        if self._agents is not None:
            self._agents.close()
            self._agents = None


class ServerSampler(Closing):
    """SGLang servers, managed or external, with the weights of one folder at a time.

    Every update compares checksums.

    Managed servers restart for a model of another architecture. A thread sends the weights to a
    restarted server.
    """

    chunk = 1

    def __init__(self, config: RunConfig, folder: Path) -> None:
        """Starts no server yet.

        Args:
            config: of the run, with servers; `load` replaces the model's path.
            folder: of the servers' logs, and of the weights unless `sync.folder` is set.
        """
        options = config.rollout.sglang
        assert options is not None
        sync = options.sync.model_copy(update={"transport": "disk", "verify": "full"})
        self._options = options.model_copy(update={"sync": sync, "servers": _all_gpus(options)})
        self._model_options = config.model
        self._data = config.data
        self._folder = folder
        self._version = -1
        self._identity: Any = None
        """Architecture and stop tokens of the model that the servers were started for"""
        self._model: HfFolder
        self._sync: ServerSync
        self._engine: SglangEngine | None = None
        self._agents: ServerAgents | None = None
        self._prompts: Mapping[str, Prompt] = {}
        """of the requests of `stream`"""
        self._lock = threading.Lock()
        """One weight update at a time"""
        self._ended = threading.Event()
        """`close` was called"""
        self._thread = threading.Thread(target=self._watch, name="eval weights", daemon=True)
        self._thread.start()

    def describe(self) -> dict[str, Any]:
        """The settings that change a response."""
        return {
            "engine": "sglang",
            "dtype": self._options.dtype,
            "quantize": self._options.sync.quantize,
            **_agent_settings(self._options.agent),
        }

    def load(self, folder: HfFolder, tokenizer: Any) -> None:
        """Gives all servers the weights of `folder`; starts or restarts managed ones if needed.

        Raises:
            RolloutError: a server does not start.
            SyncError: no server has the weights.
        """
        spec = load_spec(folder.path)
        stops = stop_token_ids(tokenizer, str(folder.path))
        identity = (spec, stops)
        with self._lock:
            if self._engine is None or identity != self._identity:
                self._end_servers()
                self._sync = server_sync(self._options, spec, self._folder / "weights")
                model = self._model_options.model_copy(update={"path": str(folder.path)})
                self._engine = open_engine(self._options, model, self._folder, stops=stops)

            self._identity = identity
            self._model = folder
            self._version = self._version + 1
            self._engine.begin_update()
            status = self._engine.status()
            urls = [server.url for server in status if server.health is not Health.DEAD]
            # If all are dead, the update to all of them reports why.
            digest = self._push(urls or [server.url for server in status])
            self._engine.set_current(self._version, digest)
            self._start_agents(tokenizer, stops)

    def stream(
        self, requests: Sequence[SampleRequest], prompts: Mapping[str, Prompt]
    ) -> Iterable[Sample]:
        assert self._engine is not None
        if self._agents is None:
            return self._engine.stream(requests)
        self._prompts = prompts
        return self._agents.stream(requests)

    def _start_agents(self, tokenizer: Any, stops: Sequence[int]) -> None:
        """Starts the agents of the configuration, for a model's tokenizer."""
        options = self._options.agent
        if options is None:
            return
        assert self._engine is not None
        self._end_agents()

        def decode(ids: np.ndarray) -> str:
            return str(tokenizer.decode(ids, skip_special_tokens=True))

        encoder = build_encoder(options, self._data, tokenizer, datetime.now())
        self._agents = ServerAgents(
            self._engine,
            options,
            encoder,
            stops,
            decode,
            lambda request: self._prompts[request.prompt_id],
        )

    def _end_agents(self) -> None:
        if self._agents is not None:
            self._agents.close()
            self._agents = None

    def _push(self, urls: Sequence[str]) -> str:
        """Sends the weights to these servers and returns their digest."""
        self._sync.set_targets(server_apis(self._options, tuple(urls)))
        return push_folder(self._model, self._sync, self._version)

    def _watch(self) -> None:
        """Sends the weights to restarted servers until `close`."""
        while not self._ended.wait(self._options.probe_interval_s):
            with self._lock:
                urls = self._stale_urls()
                if not urls:
                    continue
                logger.info("sending the weights to %s, which restarted", ", ".join(urls))
                # The update logs an error; the next round tries again.
                with contextlib.suppress(SyncError):
                    self._push(urls)

    def _stale_urls(self) -> list[str]:
        """Servers that respond and have other weights."""
        if self._engine is None:
            return []
        urls = []
        for server in self._engine.status():
            if server.health is Health.STALE and not server.restarting:
                urls.append(server.url)
        return urls

    def _end_servers(self) -> None:
        self._end_agents()
        if self._engine is not None:
            self._engine.close()
            self._sync.close()
            self._engine = None

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self._end_servers()


def _agent_settings(options: AgentOptions | None) -> dict[str, Any]:
    """The settings of an agent that change a response."""
    if options is None:
        return {}
    return {"agent": options.model_dump(mode="json"), "agent files": agent_digests(options)}


def _all_gpus(options: SglangRollout) -> Any:
    """The managed servers without a trainer: one for each `tp` GPUs of this host; colocated ones
    with SGLang's default share.
    """
    servers = options.servers
    if servers is None or servers.device == "cpu" or servers.visible_devices:
        return servers
    count = torch.cuda.device_count() // servers.tp or servers.count
    mem_fraction = None if servers.colocated else servers.mem_fraction
    changes = {"count": count, "colocated": False, "mem_fraction": mem_fraction}
    return servers.model_copy(update=changes)
