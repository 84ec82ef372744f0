"""Health states of the servers, routing, and restarts, on the client's event loop only.

One task per server probes it:

    STALE    It responds, but with other weights than the current ones. It gets no requests until a
             probe shows the current ones.
    HEALTHY  It responded to its last probe with the current weights. Only HEALTHY servers get
             requests.
    SUSPECT  It failed a request or a probe. It gets no new requests until a probe succeeds; running
             ones may still finish.
    DEAD     No response for `dead_after_s`, an exit, or repeated failures. Its requests are retried
             on other servers. Managed servers are restarted (and become STALE); external servers
             are probed until they respond.

A server reports a `weight_version` only after all of its weights arrived and were verified.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from pacs_megatron.config.rollout_options import SglangRollout
from pacs_megatron.errors import PacsError, RolloutError
from pacs_megatron.sglang.api import SglangApi, WeightVersion
from pacs_megatron.sglang.server import ManagedServer

logger = logging.getLogger(__name__)
STALE_PROBES = 2
"""Probe intervals without a usable server after which `needs_weights` becomes true."""


class Health(StrEnum):
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    DEAD = "dead"
    STALE = "stale"


@dataclass(slots=True, eq=False)
class Server:
    """State of one server in the fleet."""

    api: SglangApi
    managed: ManagedServer | None = None
    """None: an external server"""
    trainer_rank: int = 0
    """trainer rank that sends weights to the server: with `sync.transport: ipc` the rank on its
    first GPU, with `broadcast` modulo the ranks that send
    """
    health: Health = Health.STALE
    reason: str = "not probed yet"
    in_flight: int = 0
    failures: int = 0
    """transitions from HEALTHY to SUSPECT since its last valid response"""
    restarts: int = 0
    restarting: bool = False
    returning: bool = False
    """set in copies (`status`): DEAD, but a restart is running or still possible; the owner of an
    external server may always restart it
    """
    last_ok: float = field(default_factory=time.monotonic)
    """monotonic time of the last successful probe"""

    @property
    def url(self) -> str:
        return self.api.url


class Fleet:
    """States of the servers, and the choice of a server for a request."""

    def __init__(
        self,
        servers: Iterable[Server],
        options: SglangRollout,
        query_version: Callable[[Server, float], Awaitable[str]],
        on_change: Callable[[], None],
        on_lost: Callable[[Server], None],
    ) -> None:
        """Starts one task per server.

        Args:
            servers: all servers of the run.
            options: intervals and limits.
            query_version: (server, timeout in seconds) -> the `weight_version` of a server whose
                scheduler responds; raises RolloutError.
            on_change: called when a server becomes usable.
            on_lost: called when a server's running requests are lost: it died, or it missed an
                update and has no complete weights.
        """
        self.servers = tuple(servers)
        self._options = options
        self.current: WeightVersion | None = None
        self.known: set[str] = set()
        """every `weight_version` that was current at some time"""
        self.epoch = 0
        """increases with every update: separates requests sent before it from later ones"""
        self._has_current = asyncio.Event()
        self._settling = False
        self._holds_restarts = False
        self._query_version = query_version
        self._on_change = on_change
        self._on_lost = on_lost
        self._wake = {server: asyncio.Event() for server in self.servers}
        self._last_usable = time.monotonic()
        self._unprobed_since: float | None = time.monotonic()
        """start of the period without current weights, in which only DEAD servers are probed"""
        self._tasks = [asyncio.create_task(self._watch(server)) for server in self.servers]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def broken(self) -> BaseException | None:
        """The error that ended a watch task, if any: its server would keep its state."""
        for task in self._tasks:
            if task.done() and not task.cancelled():
                return task.exception()
        return None

    def begin_update(self, *, is_release: bool = False) -> None:
        """Stops the dispatch of requests until `set_current`.

        With `is_release` no server is restarted until the next call: the GPU memory of colocated
        servers belongs to the training step.
        """
        self._holds_restarts = is_release
        self.epoch += 1
        if self.current is not None:
            self._unprobed_since = time.monotonic()
        self.current = None
        self._has_current.clear()
        for server in self.servers:
            self._check_exit(server)
            if server.health is Health.DEAD:
                self._wake[server].set()  # its restart may have been held
            if server.health in (Health.HEALTHY, Health.STALE):
                self._set(server, Health.STALE, "weight update in progress")

    async def set_current(self, version: WeightVersion) -> None:
        """Sets the weights that servers must report.

        Returns when all were probed, or after `probe_timeout_s`. No request is dispatched earlier:
        the server with the fastest probe would get all pending ones.
        """
        self.epoch += 1
        self.current = version
        self.known.add(str(version))
        self._has_current.set()
        now = time.monotonic()
        self._last_usable = now
        for server in self.servers:
            if server.health is Health.HEALTHY:
                self._set(server, Health.STALE, "not probed since the update")
            # The update's duration does not count towards `dead_after_s`.
            if self._unprobed_since is not None:
                server.last_ok = min(now, server.last_ok + now - self._unprobed_since)
        self._unprobed_since = None

        self._settling = True
        try:
            await asyncio.gather(*(self._probe(server) for server in self.servers))
        finally:
            self._settling = False
        self._on_change()

    async def wait_for_versions(self, versions: Iterable[str], timeout_s: float) -> None:
        """Blocks a response with an unknown weight version until `set_current` is called.

        Servers resume before that call. Returns at once when no update is in progress.

        Raises:
            TimeoutError: the update did not end within `timeout_s`.
        """
        if not self.known.issuperset(versions):
            await asyncio.wait_for(self._has_current.wait(), timeout_s)

    def pick(self, prefer: Server | None, avoid: frozenset[str]) -> Server | None:
        """A HEALTHY server with capacity (`prefer`, else the least loaded), or None.

        Uses a server in `avoid` only if no other is HEALTHY, because a wait for capacity costs less
        than one of the few retries.
        """
        if self.current is None or self._settling:
            return None
        healthy = [server for server in self.servers if server.health is Health.HEALTHY]
        candidates = [server for server in healthy if server.url not in avoid]
        if not candidates:
            candidates = healthy

        limit = self._options.max_in_flight
        usable = [server for server in candidates if server.in_flight < limit]
        if prefer is not None and prefer in usable:
            return prefer
        return min(usable, key=lambda server: server.in_flight, default=None)

    def pick_only(self, server: Server) -> Server | None:
        """This HEALTHY server, or None until it has capacity."""
        if self.current is None or self._settling or server.health is not Health.HEALTHY:
            return None
        return server if server.in_flight < self._options.max_in_flight else None

    def failed(self, server: Server, reason: str) -> None:
        """Records a failed request that may be the server's fault."""
        if server.health is not Health.HEALTHY:
            return
        server.failures += 1
        if server.failures >= self._options.max_failures:
            self._die(server, f"{server.failures} failures in a row, last: {reason}")
        else:
            self._set(server, Health.SUSPECT, reason)

    def down_s(self) -> float:
        """Seconds since a server was last usable; 0.0 while one is, and during an update."""
        has_healthy = any(server.health is Health.HEALTHY for server in self.servers)
        if self.current is None or has_healthy:
            self._last_usable = time.monotonic()
        return time.monotonic() - self._last_usable

    def status(self) -> tuple[Server, ...]:
        """Copies for the driver, logs and metrics."""
        options = self._options.servers
        copies = [replace(server) for server in self.servers]
        for server in copies:
            # The owner of an external server may restart it; `all_down_after_s` limits the wait.
            may_return = (
                options is None or server.restarting or server.restarts < options.max_restarts
            )
            server.returning = server.health is Health.DEAD and may_return
        return tuple(copies)

    def needs_weights(self) -> bool:
        """Whether only a new push makes a server usable.

        True if none is HEALTHY or SUSPECT, and some are STALE (restarted).
        """
        if self.current is None or self._settling:
            return False
        if self.down_s() < STALE_PROBES * self._options.probe_interval_s:
            return False
        states = {server.health for server in self.servers}
        return Health.STALE in states and states <= {Health.STALE, Health.DEAD}

    async def _watch(self, server: Server) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake[server].wait(), self._options.probe_interval_s)
            self._wake[server].clear()

            self._check_exit(server)
            managed = server.managed
            if server.health is Health.DEAD and managed is not None and not self._holds_restarts:
                await self._restart(server, managed)
            # An update skips DEAD servers. An external server that responds again receives the next
            # update.
            if self.current is not None or (server.health is Health.DEAD and managed is None):
                await self._probe(server)

    def _check_exit(self, server: Server) -> None:
        """Sets a managed server that exited to DEAD."""
        if server.managed is None:
            return
        exit_code = server.managed.exit_code()
        if exit_code is not None and server.health is not Health.DEAD:
            self._die(server, f"exited with {exit_code}")

    async def _probe(self, server: Server) -> None:
        epoch = self.epoch
        try:
            reported = await self._query_version(server, self._options.probe_timeout_s)
        except RolloutError as error:
            self._probe_failed(server, error)
            return
        if epoch != self.epoch:
            return  # an update started or ended meanwhile, so the response may be outdated

        server.last_ok = time.monotonic()
        if server.health is Health.DEAD:
            server.failures = 0
        if reported != str(self.current):
            reason = f"has weights {reported!r}, current are {str(self.current)!r}"
            if self.current is None:
                reason = "responds again"
            self._set(server, Health.STALE, reason)
            # The server is paused after an update, or was restarted, so its running requests are
            # lost.
            if server.in_flight and WeightVersion.parse(reported) is None:
                self._on_lost(server)
        elif server.health is not Health.HEALTHY:
            self._set(server, Health.HEALTHY, "")
            self._on_change()

    def _probe_failed(self, server: Server, error: RolloutError) -> None:
        if server.health is Health.DEAD:
            return
        silent_s = time.monotonic() - server.last_ok
        if silent_s > self._options.dead_after_s:
            self._die(server, f"no response for {silent_s:.0f} s: {error}")
        else:
            self._set(server, Health.SUSPECT, str(error))

    def _die(self, server: Server, reason: str) -> None:
        self._set(server, Health.DEAD, reason)
        self._on_lost(server)
        self._wake[server].set()

    async def _restart(self, server: Server, managed: ManagedServer) -> None:
        options = self._options.servers
        if options is None or server.restarts >= options.max_restarts:
            await asyncio.to_thread(managed.stop)
            return

        server.restarts += 1
        server.restarting = True
        logger.warning(
            "restarting %s (%d of %d): %s",
            server.url,
            server.restarts,
            options.max_restarts,
            server.reason,
        )
        try:
            await asyncio.to_thread(managed.start)
            await asyncio.to_thread(managed.wait_ready, options.start_timeout_s)
        except PacsError as error:
            server.reason = str(error)
            return
        finally:
            server.restarting = False

        server.api = managed.api  # a restart may have another port
        server.failures = 0
        server.last_ok = time.monotonic()
        self._set(server, Health.STALE, "restarted with the weights of its model path")

    def _set(self, server: Server, health: Health, reason: str) -> None:
        if health is not server.health:
            level = logging.INFO if health in (Health.HEALTHY, Health.STALE) else logging.WARNING
            logger.log(
                level, "rollout server %s: %s -> %s %s", server.url, server.health, health, reason
            )
        server.health = health
        server.reason = reason
