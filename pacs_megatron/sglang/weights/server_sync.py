"""Updates the weights of SGLang servers without samples of mixed or unverified weights.

The order of the calls to one server:

    pause        the server samples no more tokens
    mark         `weight_version` becomes a text that no client accepts
    load         the server loads the weights, bucket by bucket
    verify       compares the server's checksums with the export
    version      the server reports the new version, so the fleet's probes find it current
    resume       the server samples again

A server that fails in any step stays paused and marked, so the fleet sets it to STALE, until the
next update or a restart. The update continues with the other servers and raises SyncError if none
is left.

There are two buckets: while servers load one, the trainer gathers the next weights into the other.
"""

import hashlib
import logging
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from pacs_megatron.config.rollout_options import SglangRollout
from pacs_megatron.errors import PacsError, RolloutError, SyncError
from pacs_megatron.models import ModelSpec
from pacs_megatron.sglang.api import (
    FRESH_VERSION,
    RELEASED_VERSION,
    ServerRejectedError,
    SglangApi,
    WeightVersion,
    updating_version,
)
from pacs_megatron.sglang.weights.bucket import Bucket, is_quantized, quantize_blockwise, scale_name
from pacs_megatron.sglang.weights.checksums import ExpectedChecksums, ModelDims, compare, hash_for
from pacs_megatron.sglang.weights.transports import (
    BroadcastTransport,
    DiskTransport,
    IpcTransport,
    Transport,
    in_thread,
)

logger = logging.getLogger(__name__)

SAMPLE_SIZE = 8
"""Number of parameters that `verify: sample` compares in an update.

A server's first update compares all.
"""
_RELEASED_TAGS = ("kv_cache", "weights")
FLUSH_TRIES = 20
FLUSH_WAIT_S = 0.25


@dataclass(slots=True, kw_only=True)
class SyncReport:
    """Result of one update."""

    version: int
    digest: str = ""
    num_bytes: int = 0
    """bytes sent to each server"""
    seconds: float = 0.0
    """wall-clock seconds"""
    verified: int = 0
    """checksums compared over all servers"""
    updated: tuple[str, ...] = ()
    """urls of the servers with the new weights"""
    failed: dict[str, str] = field(default_factory=dict)
    """url -> reason, of the other servers"""


@dataclass(slots=True)
class _Target:
    """A server that receives updates."""

    api: SglangApi
    expected: ExpectedChecksums | None = None
    num_equal: int = 0
    is_verified: bool = False
    """whether all parameters were compared since the server's start"""


class ServerSync:
    """A `WeightReceiver` that updates every server of `set_targets`.

    `report` is the result of the last update.
    """

    def __init__(
        self, options: SglangRollout, dims: ModelDims, transport: Transport, bucket_bytes: int
    ) -> None:
        """Nothing is sent before the first update.

        Args:
            options: floating-point tensors are cast to `dtype` before they are sent. With
                `sync.quantize`, FP8 blocks are not verified.
            dims: of the model, for the servers' checksums.
            transport: sends buckets to servers.
            bucket_bytes: size of the weights of one send, of which there are two copies.
        """
        self._sync = options.sync
        self._probe_timeout_s = min(options.dead_after_s, options.sync.timeout_s)
        """seconds after which an update skips a server whose scheduler does not respond"""
        self._dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[options.dtype]
        self._quantizes = options.sync.quantize == "fp8_blockwise"
        self._dims = dims
        self._transport = transport
        self._bucket = Bucket(bucket_bytes)
        """that `put` fills"""
        self._sent_bucket = Bucket(bucket_bytes)
        self._sending: Future[None] | None = None
        """result of the send of `_sent_bucket`, whose thread alone changes the servers meanwhile"""
        self._targets: dict[str, _Target] = {}
        """url -> server"""
        self._live: dict[str, _Target] = {}
        """url -> server that did not fail in this update"""
        self._names: tuple[str, ...] = ()
        """servers' parameter names, empty before the first verified update"""
        self._sample: frozenset[str] | None = None
        """names that this update compares; None: all"""
        self._expected: dict[tuple[int, str], ExpectedChecksums] = {}
        """by (tensor-parallel size, device), because equal servers have equal hashes"""
        self._released: dict[str, set[str]] = {}
        """url -> memory that the server has released to the trainer"""
        self._began = 0.0
        self.report = SyncReport(version=-1)

    def set_targets(self, apis: Sequence[SglangApi]) -> None:
        """Sets the servers of the next update.

        All servers that are not DEAD, or only those that missed an update.
        """
        self._targets = {api.url: self._targets.get(api.url, _Target(api)) for api in apis}

    def begin_update(self, version: int) -> None:
        """Pauses and marks all targets. Raises SyncError if no server is left."""
        self._drop_send()
        self._began = time.monotonic()
        self.report = SyncReport(version=version)
        self._bucket.clear()
        self._live = dict(self._targets)
        self._expected = {}
        self._transport.start(version)
        self._each(lambda target: self._open(target, version))
        self._sample = self._choose_sample(version)

    def _choose_sample(self, version: int) -> frozenset[str] | None:
        """Names of the parameters that this update compares; None: all."""
        if self._sync.verify != "sample" or not self._names:
            return None
        if not all(target.is_verified for target in self._live.values()):
            return None
        size = min(SAMPLE_SIZE, len(self._names))
        generator = random.Random(version)  # noqa: S311  # not a secret
        return frozenset(generator.sample(self._names, size))

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Adds one weight under its Hugging Face name; starts to send the bucket when full.

        Raises SyncError if no server is left after the bucket before.
        """
        if self._quantizes and is_quantized(name):
            values, scale_inv = quantize_blockwise(tensor)
            self._pack(name, values)
            self._pack(scale_name(name), scale_inv)
            return
        if tensor.is_floating_point():
            tensor = tensor.to(self._dtype)
        for expected in self._expected.values():
            expected.add(name, tensor, self._sample)
        self._pack(name, tensor)

    def _pack(self, name: str, tensor: torch.Tensor) -> None:
        if not self._bucket.fits(tensor):
            self._flush()
        self._bucket.add(name, tensor)
        self.report.num_bytes += tensor.nbytes

    def end_update(self, digest: str) -> None:
        """Verifies and resumes the servers. Raises SyncError if none has the new weights."""
        self._flush()
        self._await_send()
        self._transport.commit()
        # Colocated servers allocate their KV cache next.
        self._bucket.free()
        self._sent_bucket.free()
        self._each(lambda target: self._close(target, digest))
        if self._sample is None and self._sync.verify != "off":
            self._names = tuple(next(iter(self._expected.values())).by_name)

        report = self.report
        report.verified = sum(
            target.num_equal for target in self._live.values() if target.expected is not None
        )
        report.digest = digest
        report.updated = tuple(self._live)
        report.seconds = time.monotonic() - self._began
        logger.info(
            "weights %d: %d bytes to %d servers in %.2f s, %d checksums equal",
            report.version,
            report.num_bytes,
            len(self._live),
            report.seconds,
            report.verified,
        )

    def close(self) -> None:
        self._drop_send()
        self._transport.close()

    def release_memory(self) -> None:
        """Makes colocated servers release weights and KV cache before a training step.

        Marks them as during an update. The next update restores both.
        """
        self._drop_send()
        self._live = dict(self._targets)
        self._each(self._release)

    def _release(self, target: _Target) -> None:
        release(target.api, self._sync.timeout_s, updating_version(self.report.version))
        self._released[target.api.url] = set(_RELEASED_TAGS)

    def _take_back(self, api: SglangApi, tag: Literal["kv_cache", "weights"]) -> None:
        """Gives memory that the server has released back to it."""
        if tag in self._released.get(api.url, ()):
            api.post("/resume_memory_occupation", {"tags": [tag]})
            self._released[api.url].discard(tag)

    def _open(self, target: _Target, version: int) -> None:
        """Pauses, marks and connects one server."""
        api = target.api
        sync = self._sync
        placement = api.placement(self._probe_timeout_s)
        found = api.weight_version()
        if found in (FRESH_VERSION, RELEASED_VERSION):
            # A (re)started server has its memory allocated or released as it reports, and its
            # earlier process groups no longer exist.
            tags = _RELEASED_TAGS if found == RELEASED_VERSION else ()
            self._released[api.url] = set(tags)
            self._transport.forget(api)
            target.is_verified = False
        api.post("/pause_generation", {"mode": sync.pause}, sync.timeout_s)
        api.set_weight_version(updating_version(version))
        self._take_back(api, "weights")

        target.expected = None
        if sync.verify != "off":
            tp, device = placement
            made = ExpectedChecksums(self._dims, tp, hash_for(device))
            # `setdefault`, because several threads open servers at once.
            target.expected = self._expected.setdefault(placement, made)
        self._transport.join(api)

    def _close(self, target: _Target, digest: str) -> None:
        """Verifies and resumes one server, in the order of this module's docstring."""
        api = target.api
        self._transport.finish(api)
        if target.expected is not None:
            self._verify(target, target.expected)
        self._take_back(api, "kv_cache")
        _flush_cache(api, required=self._sync.pause != "in_place")

        version = self.report.version
        mark = updating_version(version)
        reported = api.weight_version()
        if reported != mark:
            raise RolloutError(
                f"{api.url} reports weights {reported!r} at the end of the update to {version}: "
                "it was restarted meanwhile, or another run updates it"
            )
        api.set_weight_version(str(WeightVersion(version, digest)))
        try:
            api.post("/continue_generation", {})
        except RolloutError:
            # Otherwise the fleet treats it as current, although it is paused.
            api.set_weight_version(mark)
            raise

    def _verify(self, target: _Target, expected: ExpectedChecksums) -> None:
        expected.check_complete()
        skip: list[str] = []
        if self._sample is not None:
            skip = [name for name in self._names if name not in self._sample]
        got = target.api.checksums(skip, self._sync.timeout_s)
        is_complete = self._sample is None and not self._quantizes
        target.num_equal = compare(target.api.url, expected.by_name, got, is_complete)
        if self._sample is None:
            target.is_verified = True

    def _flush(self) -> None:
        """Starts to send the bucket to all live servers, after the one before has arrived."""
        if not self._bucket.tensors:
            return
        self._await_send()
        if self._bucket.data.is_cuda:
            # Completes the bucket before other threads read it.
            torch.cuda.current_stream().synchronize()
        full = self._bucket
        self._bucket = self._sent_bucket
        self._sent_bucket = full
        self._transport.prepare(full)
        self._sending = in_thread(
            lambda: self._each(lambda target: self._transport.send(target.api, full))
        )

    def _await_send(self) -> None:
        """Returns when the servers have loaded the bucket before. Raises SyncError if none is
        left.
        """
        sending = self._sending
        self._sending = None
        if sending is not None:
            sending.result()
        self._sent_bucket.clear()

    def _drop_send(self) -> None:
        """Waits for the send of an update that was given up, within the transport's limits."""
        with suppress(PacsError):
            self._await_send()

    def _each(self, action: Callable[[_Target], None]) -> None:
        """Runs `action` for all live servers concurrently; servers that fail leave this update."""
        if self._live:
            with ThreadPoolExecutor(len(self._live), "weight-sync") as pool:
                results = {url: pool.submit(action, target) for url, target in self._live.items()}
            for url, result in results.items():
                try:
                    result.result()
                except PacsError as error:
                    self.report.failed[url] = str(error)
                    logger.warning(
                        "weights %d did not reach %s: %s", self.report.version, url, error
                    )
                    self._transport.forget(self._live.pop(url).api)
        if not self._live:
            reasons = "; ".join(self.report.failed.values()) or "no server to update"
            raise SyncError(f"weights {self.report.version} reached no rollout server: {reasons}")


def server_sync(options: SglangRollout, spec: ModelSpec, folder: Path) -> ServerSync:
    """A `WeightReceiver` for the run's servers.

    `transport: disk` writes to `folder`, which belongs to this run, or to a subfolder of
    `sync.folder` with a hash of the run's path, so that two runs never read each other's versions.
    """
    sync = options.sync
    if sync.folder is not None:
        run = folder.absolute().parent
        run_hash = hashlib.sha256(str(run).encode()).hexdigest()[:8]
        folder = Path(sync.folder) / f"{run.name}-{run_hash}"

    transport: Transport
    match sync.transport:
        case "disk":
            transport = DiskTransport(folder, sync.timeout_s)
        case "broadcast":
            transport = BroadcastTransport(sync.host, sync.timeout_s)
        case "ipc":
            transport = IpcTransport(sync.timeout_s)
    dims = ModelDims.of(spec)
    return ServerSync(options, dims, transport, sync.bucket_mib << 20)


def release(api: SglangApi, timeout_s: float, version: str) -> None:
    """Makes a colocated server release weights and KV cache, paused and marked as during an update.

    Args:
        api: of the server.
        timeout_s: for running requests to end.
        version: the `weight_version` that it reports then.
    """
    api.post("/pause_generation", {"mode": "abort"}, timeout_s)
    api.set_weight_version(version)
    # The server rejects this while a cancelled request still runs: a release of memory would crash
    # it.
    _flush_cache(api, required=True)
    api.post("/release_memory_occupation", {"tags": list(_RELEASED_TAGS)})


def _flush_cache(api: SglangApi, required: bool) -> None:
    """Drops the KV cache of the old weights; a request that is about to end may delay this.

    If not `required`, the server may keep the cache for requests that are paused in place.
    """
    for attempt in range(FLUSH_TRIES):
        try:
            api.post("/flush_cache", {})
            return
        except ServerRejectedError as error:
            if not required:
                return
            if attempt == FLUSH_TRIES - 1:
                raise RolloutError(
                    f"{api.url} kept KV cache of the old weights: {error}"
                ) from error
            time.sleep(FLUSH_WAIT_S)
