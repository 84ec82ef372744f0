"""Which servers may be asked, and bringing back those that may not.

Runs on the client's event loop; nothing here is called from another thread. One task a server probes it:

    STALE    answers, but holds other weights than the current ones; asked nothing until a probe shows the current ones
    HEALTHY  answered its last probe with the current weights; the only state that is asked anything
    SUSPECT  failed a request or a probe; asked nothing new until a probe succeeds, what it works on may still come
    DEAD     silent for `dead_after_s`, gone, or failing again and again; its requests go elsewhere at once.
             Own servers are restarted (and come back STALE); others are probed on and come back when they answer.

Truth about weights is what a server says itself: `weight_version` is set to a version only after all weights arrived
and were verified, so a server that missed an update, was restarted or got half of it can never pass for current.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from pacs_megatron.errors import PacsError, RolloutError
from pacs_megatron.sglang.api import SglangApi, WeightVersion
from pacs_megatron.sglang.server import ManagedServer

logger = logging.getLogger(__name__)


STALE_PROBES = 2
"""Probe intervals without a usable server after which the weights are asked for again."""


class Health(StrEnum):
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    DEAD = "dead"
    STALE = "stale"


@dataclass(slots=True, eq=False)
class Server:
    """One server as the fleet sees it."""

    api: SglangApi
    own: ManagedServer | None = None
    health: Health = Health.STALE
    reason: str = "not probed yet"
    in_flight: int = 0
    failures: int = 0
    """times it went from HEALTHY to SUSPECT since its last good answer"""
    restarts: int = 0
    restarting: bool = False
    last_ok: float = field(default_factory=time.monotonic)
    """monotonic time of the last answered probe"""

    @property
    def url(self) -> str:
        return self.api.url


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetLimits:
    """Of the schema's options with the same names."""

    max_in_flight: int
    probe_s: float
    probe_timeout_s: float
    dead_after_s: float
    max_failures: int
    max_restarts: int
    start_timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """A snapshot for the driver, logs and metrics."""

    url: str
    health: Health
    reason: str
    in_flight: int
    restarts: int
    returning: bool
    """dead, but it is being started anew, or will be, or may be (servers of others)"""


Ask = Callable[[Server, float], Awaitable[str]]
"""The `weight_version` of a server whose scheduler answers, within so many seconds; raises RolloutError."""


class Fleet:
    """States of the servers. `on_change` is called when one may be asked again, `on_lost` when what one works on will
    not come: it died, or missed an update and holds no whole weights."""

    def __init__(
        self,
        servers: Iterable[Server],
        limits: FleetLimits,
        ask: Ask,
        on_change: Callable[[], None],
        on_lost: Callable[[Server], None],
    ) -> None:
        self.servers = tuple(servers)
        self.limits = limits
        self.current: WeightVersion | None = None
        self.known: set[str] = set()
        """every `weight_version` that was current at some time"""
        self.epoch = 0
        """counts updates: what was asked before an update is told from what came after"""
        self.broken: BaseException | None = None
        """what ended a watch, if anything did"""
        self._told = asyncio.Event()
        """set while there are current weights"""
        self._settling = False
        self._ask = ask
        self._on_change = on_change
        self._on_lost = on_lost
        self._wake = {server: asyncio.Event() for server in self.servers}
        self._tasks: list[asyncio.Task[None]] = []
        self._last_usable = time.monotonic()
        self._unprobed_since: float | None = time.monotonic()
        """begin of the time without current weights, in which no living server is probed"""

    # ------------------------------------------------------------------------------------------------------- lifetime
    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._watch(server)) for server in self.servers]
        for task in self._tasks:
            task.add_done_callback(self._watch_ended)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _watch_ended(self, task: asyncio.Task[None]) -> None:
        """A bug: without its watch a server would stay in its state for ever."""
        if not task.cancelled() and task.exception() is not None:
            self.broken = task.exception()

    # -------------------------------------------------------------------------------------------------------- weights
    def begin_update(self) -> None:
        """Nothing new is asked of any server until `set_current`."""
        self.epoch += 1
        if self.current is not None:
            self._unprobed_since = time.monotonic()
        self.current = None
        self._told.clear()
        for server in self.servers:
            self._notice_exit(server)
            if server.health in (Health.HEALTHY, Health.STALE):
                self._set(server, Health.STALE, "weight update under way")

    async def set_current(self, version: WeightVersion) -> None:
        """From now on this is what a server must hold. Returns when all were probed, or `probe_timeout_s` passed.

        Nothing is asked before that: the server that answers its probe first would get everything that waits.
        """
        self.epoch += 1
        self.current = version
        self.known.add(str(version))
        self._told.set()
        self._last_usable = now = time.monotonic()
        for server in self.servers:
            if server.health is Health.HEALTHY:
                self._set(server, Health.STALE, "to be probed for the new weights")
            if self._unprobed_since is not None:  # a server that was silent before the update stays so by its silence
                server.last_ok = min(now, server.last_ok + now - self._unprobed_since)
        self._unprobed_since = None
        self._settling = True
        try:
            await asyncio.gather(*(self._probe(server) for server in self.servers))
        finally:
            self._settling = False
        self._on_change()

    async def told(self, versions: Iterable[str], timeout_s: float) -> None:
        """Servers go on before the trainer has said that an update is over: whoever has an answer with weights that are
        not known yet waits here for that word. No wait for known weights, nor where no update is under way.

        Raises TimeoutError."""
        if not self.known.issuperset(versions):
            await asyncio.wait_for(self._told.wait(), timeout_s)

    # -------------------------------------------------------------------------------------------------------- routing
    def pick(self, prefer: Server | None, avoid: frozenset[str]) -> Server | None:
        """A HEALTHY server with room: `prefer`, else the least loaded. One whose url is in `avoid` only when no other is
        HEALTHY: to wait for room costs less than another of the few tries."""
        if self.current is None or self._settling:
            return None
        healthy = [s for s in self.servers if s.health is Health.HEALTHY]
        wanted = [s for s in healthy if s.url not in avoid] or healthy
        usable = [s for s in wanted if s.in_flight < self.limits.max_in_flight]
        if prefer is not None and prefer in usable:
            return prefer
        return min(usable, key=lambda s: s.in_flight, default=None)

    def has_room(self) -> bool:
        """Whether some server can be asked now."""
        return self.pick(None, frozenset()) is not None

    def answered(self, server: Server) -> None:
        """A good answer came from it."""
        server.failures = 0

    def failed(self, server: Server, reason: str) -> None:
        """A request to it failed in a way that may be the server's fault."""
        if server.health is not Health.HEALTHY:
            return
        server.failures += 1
        if server.failures >= self.limits.max_failures:
            self._die(server, f"{server.failures} failures in a row, last: {reason}")
        else:
            self._set(server, Health.SUSPECT, reason)

    # --------------------------------------------------------------------------------------------------------- status
    def down_s(self) -> float:
        """Seconds since a server was last usable; 0.0 while one is, or while an update is under way."""
        if self.current is None or any(s.health is Health.HEALTHY for s in self.servers):
            self._last_usable = time.monotonic()
        return time.monotonic() - self._last_usable

    def status(self) -> tuple[ServerStatus, ...]:
        return tuple(
            ServerStatus(
                url=s.url,
                health=s.health,
                reason=s.reason,
                in_flight=s.in_flight,
                restarts=s.restarts,
                returning=self._is_returning(s),
            )
            for s in self.servers
        )

    def needs_weights(self) -> bool:
        """Whether nothing can be asked, nothing will come back by itself, and new weights would help: all that answer
        are STALE, restarted while the trainer waits for them."""
        if self.current is None or self._settling or self.down_s() < STALE_PROBES * self.limits.probe_s:
            return False
        states = {server.health for server in self.servers}
        return Health.STALE in states and states <= {Health.STALE, Health.DEAD}

    def _is_returning(self, server: Server) -> bool:
        if server.health is not Health.DEAD:
            return False
        # A server of others may be started anew by those: `all_down_after_s` says how long that is waited for.
        return server.own is None or server.restarting or server.restarts < self.limits.max_restarts

    def why_down(self) -> str:
        """One line with the state of every server and its reason."""
        return "; ".join(f"{s.url} {s.health}: {s.reason}" for s in self.servers)

    # --------------------------------------------------------------------------------------------------------- probes
    async def _watch(self, server: Server) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake[server].wait(), self.limits.probe_s)
            self._wake[server].clear()
            self._notice_exit(server)
            if server.health is Health.DEAD and server.own is not None:
                await self._restart(server, server.own)
            if self.current is not None:
                await self._probe(server)
            elif server.health is Health.DEAD and server.own is None:
                await self._look_for(server)

    def _notice_exit(self, server: Server) -> None:
        if server.own is not None and server.own.exit_code() is not None and server.health is not Health.DEAD:
            self._die(server, f"exited with {server.own.exit_code()}")

    async def _probe(self, server: Server) -> None:
        epoch = self.epoch
        try:
            held = await self._ask(server, self.limits.probe_timeout_s)
        except RolloutError as error:
            self._probe_failed(server, str(error))
            return
        if epoch != self.epoch:
            return  # an update began or ended meanwhile; what it said may be of before
        server.last_ok = time.monotonic()
        if held != str(self.current):
            self._set(server, Health.STALE, f"holds weights {held!r}, current are {str(self.current)!r}")
            if server.in_flight and WeightVersion.parse(held) is None:
                # An update left it paused, or it was started anew: what it worked on will not come.
                self._on_lost(server)
        elif server.health is not Health.HEALTHY:
            if server.health is Health.DEAD:
                server.failures = 0
            self._set(server, Health.HEALTHY, "")
            self._on_change()

    async def _look_for(self, server: Server) -> None:
        """During an update, which takes the servers that are not DEAD: whether this one is back."""
        with contextlib.suppress(RolloutError):
            await self._ask(server, self.limits.probe_timeout_s)
            server.failures = 0
            server.last_ok = time.monotonic()
            if self.current is None:  # else the next probe says more
                self._set(server, Health.STALE, "answers again")

    def _probe_failed(self, server: Server, reason: str) -> None:
        silent_s = time.monotonic() - server.last_ok
        if server.health is Health.DEAD:
            return
        if silent_s > self.limits.dead_after_s:
            self._die(server, f"silent for {silent_s:.0f} s: {reason}")
        else:
            self._set(server, Health.SUSPECT, reason)

    def _die(self, server: Server, reason: str) -> None:
        self._set(server, Health.DEAD, reason)
        self._on_lost(server)
        self._wake[server].set()

    async def _restart(self, server: Server, own: ManagedServer) -> None:
        if server.restarts >= self.limits.max_restarts:
            if own.exit_code() is None:
                await asyncio.to_thread(own.stop)
            return
        server.restarts += 1
        server.restarting = True
        logger.warning(
            "restarting %s (%d of %d): %s", server.url, server.restarts, self.limits.max_restarts, server.reason
        )
        try:
            await asyncio.to_thread(own.start)
            await asyncio.to_thread(own.wait_ready, self.limits.start_timeout_s)
        except PacsError as error:
            server.reason = str(error)
            return
        finally:
            server.restarting = False
        server.api = own.api
        server.failures = 0
        server.last_ok = time.monotonic()
        self._set(server, Health.STALE, "restarted, holds the weights of its model path")

    def _set(self, server: Server, health: Health, reason: str) -> None:
        if health is not server.health:
            level = logging.INFO if health in (Health.HEALTHY, Health.STALE) else logging.WARNING
            logger.log(level, "rollout server %s: %s -> %s %s", server.url, server.health, health, reason)
        server.health, server.reason = health, reason
