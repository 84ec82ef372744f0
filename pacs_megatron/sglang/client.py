"""Samples from SGLang servers: every response is checked, no sample is lost or duplicated.

Thousands of requests are in flight. Callers, in any threads, submit requests to one thread with an
event loop: HTTP, routing, retries, fleet health. Another thread decodes and checks responses (3 ms
for 8k tokens). Each request has one result. A retry starts only after the previous attempt ended
and its connection was closed; the first valid response ends the request.
"""

import asyncio
import contextlib
import functools
import logging
import queue
import resource
import threading
import uuid
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp
import numpy as np
import orjson

from pacs_megatron.config.rollout_options import SglangRollout
from pacs_megatron.contracts.samples import Sample, SampleRequest, Span, Stop, check_request
from pacs_megatron.errors import RolloutError
from pacs_megatron.runtime.closing import Closing
from pacs_megatron.runtime.http import CONNECTION_ERRORS, exchange, open_session
from pacs_megatron.sglang.api import WeightVersion, excerpt, hint
from pacs_megatron.sglang.decode import (
    BadResponseError,
    Response,
    RoutesShape,
    decode,
    request_body,
)
from pacs_megatron.sglang.fleet import Fleet, Health, Server

logger = logging.getLogger(__name__)

KEEPALIVE_S = 2.0
"""Less than the server's 5 s, so that no request uses a connection that the server is closing."""
MONITOR_S = 0.5
ALIVE_S = 1.0
"""Interval in which blocked callers check that the loop still runs."""
RESPONSE_BYTES = 1 << 20
TOKEN_BYTES = 1024
"""The size limit of a response is RESPONSE_BYTES, plus TOKEN_BYTES per requested token.

A token needs about 30 bytes.
"""
OTHER_FILES = 256
"""Open files besides the connections: logs, workers, data."""
MAX_FILES = 1 << 20
"""The largest limit of open files that this process sets."""
T = TypeVar("T")


class RequestRejectedError(RolloutError):
    """HTTP 400: the request is invalid (length or parameters), so no server will accept it."""


class _ServerFaultError(RolloutError):
    """A failed attempt that may succeed on another server, or later on the same one."""


_Stream = queue.SimpleQueue["Sample | BaseException | None"]
"""Results of one `stream` call; None for a cancelled request."""


@dataclass(frozen=True, slots=True, eq=False)
class _Turn:
    """The stream of one turn of a trajectory: calls a function with its result, on the loop."""

    put: Callable[[Sample | BaseException | None], None]


@dataclass(slots=True, eq=False)
class _RequestState:
    """A request from `stream` to its one result, over all attempts."""

    request: SampleRequest
    stream: _Stream | _Turn
    tries: int = 0
    """number of failed attempts that count towards `retries`"""
    sent: int = 0
    """number of all attempts; makes request ids unique on the server"""
    avoid: frozenset[str] = frozenset()
    """urls of the servers where it failed"""
    errors: list[str] = field(default_factory=list)
    server: Server | None = None
    task: asyncio.Task[None] | None = None
    """the attempt in progress; None while the request is pending"""
    epoch: int = 0
    """`Fleet.epoch` at dispatch"""
    min_version: int = 0
    """weight version at dispatch: no token may come from an older one"""


class SglangEngine(Closing):
    """The rollout engine over a fleet of servers. `close` ends its threads and managed servers."""

    def __init__(
        self,
        servers: Sequence[Server],
        options: SglangRollout,
        *,
        vocab_size: int,
        routes: RoutesShape | None = None,
        stops: Sequence[int] = (),
    ) -> None:
        """Starts the event loop and the probes.

        Args:
            servers: external servers, and managed servers that are ready.
            options: limits, timeouts and retries.
            vocab_size: token ids of prompts and responses are smaller than this.
            routes: shape of the experts of training samples; None: samples have no experts.
            stops: tokens that end a response, in addition to those that the servers know.
        """
        self._stops = tuple(stops)
        self._routes = routes
        self._options = options
        self._vocab_size = vocab_size
        self._pending: deque[_RequestState] = deque()
        self._states: dict[str, _RequestState] = {}
        """id -> request without a result, pending or in flight"""
        self._home: dict[str, Server] = {}
        """prompt id -> server of the group's latest dispatch"""
        self._turns_at: dict[str, Server] = {}
        """id of a trajectory -> server of its latest turn"""
        self._background: set[asyncio.Task[None]] = set()
        self._tag = uuid.uuid4().hex[:8]
        self._closed = False
        self._decoder = ThreadPoolExecutor(1, "sglang-decode")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="sglang-client", daemon=True
        )
        self._thread.start()
        self._run(self._open(servers, options))

    def stream(
        self, requests: Sequence[SampleRequest], *, urgent: bool = False
    ) -> Generator[Sample, None, None]:
        """Yields samples as they finish, one per request that is not cancelled.

        Closing the generator cancels the requests that are left.

        Args:
            requests: with different ids, also from those of other streams in progress.
            urgent: dispatches these before all pending requests.

        Raises:
            RolloutError: a request is invalid (none is sent then) or failed permanently, or no
                server was usable for `all_down_after_s`.
        """
        for request in requests:
            check_request(request, self._vocab_size)
        ids = {request.id for request in requests}
        if len(ids) != len(requests):
            raise ValueError("two requests of one stream have the same id")

        stream: _Stream = queue.SimpleQueue()
        left = len(ids)
        if left:
            self._run(self._submit(stream, tuple(requests), urgent))
        try:
            while left:
                result = self._next(stream)
                if isinstance(result, BaseException):
                    raise result
                left -= 1
                if result is not None:
                    yield result
        finally:
            if left and not self._closed:
                self._run(self._cancel(tuple(ids)))

    def cancel(self, ids: Sequence[str]) -> None:
        """Cancels these requests; samples already yielded stay. Ignores unknown ids."""
        self._run(self._cancel(tuple(ids)))

    def submit_turn(
        self, request: SampleRequest, done: Callable[[Sample | BaseException | None], None]
    ) -> None:
        """Requests a turn of a trajectory and returns. The trajectory's turns, which have one id,
        go to one server until `end_turns`, unless that server is not usable.

        Args:
            request: not while another one with its id is in progress.
            done: called once on the loop, with the sample, an error, or None after `cancel`; it
                must not block.

        Raises:
            RolloutError: the request is invalid, or the engine was closed.
        """
        check_request(request, self._vocab_size)
        if not self._thread.is_alive():
            raise RolloutError("the rollout engine was closed")
        work = self._submit(_Turn(done), (request,), urgent=True)
        future = asyncio.run_coroutine_threadsafe(work, self._loop)

        def report(submitted: Future[None]) -> None:
            error = None if submitted.cancelled() else submitted.exception()
            if error is not None:
                done(error)

        future.add_done_callback(report)

    def end_turns(self, ids: Sequence[str]) -> None:
        """These trajectories are finished."""

        def end() -> None:
            for one in ids:
                self._turns_at.pop(one, None)

        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(end)

    def begin_update(self, *, is_release: bool = False) -> None:
        """Stops the dispatch of requests until `set_current`.

        Call before a push of weights or a release of memory.
        """
        self._call(lambda: self._fleet.begin_update(is_release=is_release))

    def set_current(self, version: int, digest: str) -> None:
        """Sets the weights that servers must report.

        Call after every push, also if it failed for some servers.
        """
        self._run(self._fleet.set_current(WeightVersion(version, digest)))

    def needs_weights(self) -> bool:
        """Whether no server is usable until the current weights are pushed again.

        Same as `Fleet.needs_weights`.
        """
        return self._call(lambda: self._fleet.needs_weights())

    def status(self) -> tuple[Server, ...]:
        """Copies of the servers' states."""
        return self._call(lambda: self._fleet.status())

    def close(self) -> None:
        """Ends everything; open streams raise RolloutError."""
        if self._closed:
            return
        self._closed = True
        self._run(self._shut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` on the loop and returns its result.

        Raises RolloutError if the loop has ended.
        """
        if not self._thread.is_alive():
            work.close()
            raise RolloutError("the rollout engine was closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        while not wait([future], ALIVE_S).done:
            if not self._thread.is_alive() and not future.done():
                raise RolloutError("the rollout engine was closed")
        return future.result()

    def _next(self, stream: _Stream) -> Sample | BaseException | None:
        while True:
            try:
                return stream.get(timeout=ALIVE_S)
            except queue.Empty:
                if not self._thread.is_alive():
                    return RolloutError("the rollout engine was closed")

    def _call(self, function: Callable[[], T]) -> T:
        """Calls `function` on the loop and returns its result."""

        async def call() -> T:
            return function()

        return self._run(call())

    # ----------------------------------------------------------------------------------------------
    # The methods below run on the loop.

    async def _open(self, servers: Sequence[Server], options: SglangRollout) -> None:
        allow_connections(options.max_in_flight * len(servers))
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
        self._http = open_session(connector=connector)
        self._fleet = Fleet(servers, options, self._query_version, self._dispatch, self._on_lost)
        self._monitor_task = asyncio.create_task(self._monitor())

    async def _shut(self) -> None:
        self._monitor_task.cancel()
        self._fail_all(RolloutError("the rollout engine was closed"))
        await self._fleet.stop()

        attempts = [state.task for state in self._states.values() if state.task is not None]
        tasks = [*self._background, *attempts]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._http.close()
        self._decoder.shutdown(cancel_futures=True)

        managed = [server.managed for server in self._fleet.servers if server.managed is not None]
        await asyncio.gather(*(asyncio.to_thread(server.close) for server in managed))

    async def _monitor(self) -> None:
        """Fails all requests when no server has been usable for `all_down_after_s`."""
        while True:
            await asyncio.sleep(MONITOR_S)
            self._dispatch()
            error = self._fleet.broken()
            if error is not None:
                self._fail_all(error)

            down_s = self._fleet.down_s()
            if self._states and down_s > self._options.all_down_after_s:
                servers = "; ".join(
                    f"{server.url} {server.health}: {server.reason}"
                    for server in self._fleet.servers
                )
                self._fail_all(
                    RolloutError(f"no rollout server was usable for {down_s:.0f} s: {servers}")
                )

    async def _submit(
        self, stream: _Stream | _Turn, requests: tuple[SampleRequest, ...], urgent: bool
    ) -> None:
        for request in requests:
            if request.id in self._states:
                raise RolloutError(f"request {request.id} is already in flight")
        states = [_RequestState(request, stream) for request in requests]
        self._states.update({state.request.id: state for state in states})
        if urgent:
            self._pending.extendleft(reversed(states))
        else:
            self._pending.extend(states)
        self._dispatch()

    def _dispatch(self) -> None:
        """Sends as many pending requests as the servers have capacity for.

        Called after every change of capacity.
        """
        waiting: list[_RequestState] = []
        while self._pending and self._fleet.pick(None, frozenset()) is not None:
            state = self._pending.popleft()
            if self._states.get(state.request.id) is not state:
                continue  # cancelled while pending
            server = self._server_for(state)
            if server is None:
                # Only the server where it failed has capacity, or another one than that of its
                # earlier turns; other requests may use it.
                waiting.append(state)
                continue
            self._send(state, server)
        self._pending.extendleft(reversed(waiting))
        if not self._pending:
            self._home.clear()

    def _server_for(self, state: _RequestState) -> Server | None:
        """The server of the next attempt; None: the request waits for capacity."""
        earlier = self._turns_at.get(state.request.id)
        is_healthy = earlier is not None and earlier.health is Health.HEALTHY
        if earlier is not None and is_healthy and earlier.url not in state.avoid:
            return self._fleet.pick_only(earlier)
        return self._fleet.pick(self._home.get(state.request.prompt_id), state.avoid)

    def _send(self, state: _RequestState, server: Server) -> None:
        """Starts the next attempt of a request."""
        assert self._fleet.current is not None, "`Fleet.pick` returns no server without weights"
        # Samples of a group share a server, so the prompt is computed once. If the server dies, all
        # move to another.
        self._home[state.request.prompt_id] = server
        if isinstance(state.stream, _Turn):
            self._turns_at[state.request.id] = server
        server.in_flight += 1
        state.server = server
        state.epoch = self._fleet.epoch
        state.min_version = self._fleet.current.version
        state.sent += 1
        state.task = asyncio.create_task(self._try(state, server, self._rid(state)))
        state.task.add_done_callback(functools.partial(self._check, state))

    def _rid(self, state: _RequestState) -> str:
        """The id of a request's latest attempt.

        A server rejects an id in progress, even after its client was killed.
        """
        return f"{state.request.id}/{state.sent}-{self._tag}"

    async def _try(self, state: _RequestState, server: Server, rid: str) -> None:
        """One attempt: passes the sample to the stream, or handles the failure."""
        failure: RolloutError
        try:
            sample = await self._generate(state, server, rid)
        except (RequestRejectedError, _ServerFaultError, BadResponseError) as error:
            failure = error
        else:
            server.failures = 0
            if self._states.get(state.request.id) is state:
                del self._states[state.request.id]
                state.stream.put(sample)
            return
        finally:
            server.in_flight -= 1
            self._loop.call_soon(self._dispatch)
        self._retry_or_fail(state, server, failure)

    def _retry_or_fail(self, state: _RequestState, server: Server, failure: RolloutError) -> None:
        """Makes the request pending again, or ends its stream after the last retry.

        Args:
            state: the request, whose attempt has ended.
            server: the server of the attempt.
            failure: RequestRejectedError ends the stream at once: no server accepts the request.
        """
        # First: `Fleet.failed` may end the server, and `_on_lost` must not retry this request as
        # well.
        state.task = None
        state.server = None
        state.errors.append(f"{server.url}: {failure}")
        is_rejected = isinstance(failure, RequestRejectedError)
        # An update may abort requests. That is not a fault of the server.
        if state.epoch == self._fleet.epoch:
            if not is_rejected:
                self._fleet.failed(server, str(failure))
            state.tries += 1
            state.avoid |= {server.url}

        if is_rejected or state.tries > self._options.retries:
            # The first error is often the cause of the later ones.
            reasons = "; ".join([*state.errors[:1], *state.errors[1:][-2:]])
            text = f"request {state.request.id} failed {len(state.errors)} times: {reasons}"
            self._fail_stream(state.stream, RolloutError(text))
        else:
            self._pending.appendleft(state)

    def _check(self, state: _RequestState, task: asyncio.Task[None]) -> None:
        """Passes an unexpected error of an attempt to the caller, so that it gets a result."""
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            self._fail_stream(state.stream, error)

    async def _generate(self, state: _RequestState, server: Server, rid: str) -> Sample:
        """The sample of one attempt.

        Raises RequestRejectedError, _ServerFaultError or BadResponseError.
        """
        routes = None
        max_tokens = state.request.params.max_response_tokens
        limit = RESPONSE_BYTES + TOKEN_BYTES * max_tokens
        if self._routes is not None and state.request.is_for_training:
            routes = self._routes._replace(prompt_len=len(state.request.token_ids))
            limit += routes.num_bytes(max_tokens)
        body = request_body(state.request, rid, with_routes=routes is not None, stops=self._stops)
        data = await self._post_generate(server, body, limit)
        response = await self._loop.run_in_executor(
            self._decoder, decode, data, rid, max_tokens, routes
        )

        timeout_s = self._options.request_timeout_s
        versions = [version for version, _, _ in response.spans]
        try:
            await self._fleet.wait_for_versions(versions, timeout_s)
        except TimeoutError as error:
            raise BadResponseError(
                f"weights of an update that did not end within {timeout_s:g} s"
            ) from error
        return self._sample(state, response)

    async def _post_generate(self, server: Server, body: bytes, limit: int) -> bytes:
        """The response of status 200, at most `limit` bytes."""
        timeout_s = self._options.request_timeout_s
        try:
            status, data = await self._exchange(server, "/generate", timeout_s, body, limit)
        except TimeoutError as error:
            raise _ServerFaultError(f"no response within {timeout_s:g} s") from error
        except CONNECTION_ERRORS as error:
            raise _ServerFaultError(f"{type(error).__name__}: {error}") from error
        if status == 400:
            raise RequestRejectedError(f"HTTP 400: {excerpt(data)}")
        if status != 200:
            raise _ServerFaultError(f"HTTP {status}: {excerpt(data)}{hint(status)}")
        return data

    async def _exchange(
        self,
        server: Server,
        path: str,
        timeout_s: float,
        body: bytes | None,
        limit: int = RESPONSE_BYTES,
    ) -> tuple[int, bytes]:
        url = server.url + path
        headers = server.api.headers()
        return await exchange(self._http, url, body, headers, timeout_s=timeout_s, limit=limit)

    def _sample(self, state: _RequestState, response: Response) -> Sample:
        """The sample of a response; checks token ids and weight versions against the engine's."""
        if response.stop is Stop.ABORTED:
            raise _ServerFaultError("the server aborted the request")
        if response.token_ids.max() >= self._vocab_size:
            raise BadResponseError(
                f"token id {response.token_ids.max()}, expected 0 to {self._vocab_size - 1}"
            )
        spans = tuple(
            self._span(state, version, start, end)
            for version, start, end in response.spans
            if end > start
        )
        request = state.request
        prompt_ids = request.token_ids.astype(np.int32, copy=False)
        return Sample(
            id=request.id,
            prompt_id=request.prompt_id,
            token_ids=np.concatenate([prompt_ids, response.token_ids]),
            prompt_len=len(request.token_ids),
            sampler_logprobs=response.logprobs,
            spans=spans,
            stop=response.stop,
            routes=response.routes,
            cached_tokens=(response.cached_tokens,),
        )

    def _span(self, state: _RequestState, version: str, start: int, end: int) -> Span:
        """The weights of tokens `start` to `end`: known, and not older than those at dispatch."""
        weights = WeightVersion.parse(version)
        if weights is None or version not in self._fleet.known:
            raise BadResponseError(f"tokens {start} to {end} come from unknown weights {version!r}")
        if weights.version < state.min_version:
            problem = f"weights {version!r}, older than those at the request's dispatch"
            raise BadResponseError(f"tokens {start} to {end} come from {problem}")
        return Span(version=weights.version, digest=weights.digest, start=start, end=end)

    def _drop(self, state: _RequestState) -> None:
        """Ends a request without a result and aborts it on the server."""
        self._states.pop(state.request.id, None)
        self._turns_at.pop(state.request.id, None)
        if state.task is not None:
            state.task.cancel()
            if state.server is not None:
                self._in_background(self._abort(state.server, self._rid(state)))

    async def _cancel(self, ids: tuple[str, ...]) -> None:
        """Ends these requests; their streams get None for each."""
        states = [self._states[request_id] for request_id in ids if request_id in self._states]
        for state in states:
            self._drop(state)
            state.stream.put(None)

    def _fail_stream(self, stream: _Stream | _Turn, error: BaseException) -> None:
        """Ends all requests of a stream, which gets the error."""
        states = [state for state in self._states.values() if state.stream is stream]
        for state in states:
            self._drop(state)
        stream.put(error)

    def _fail_all(self, error: BaseException) -> None:
        for stream in {state.stream for state in self._states.values()}:
            self._fail_stream(stream, error)

    def _on_lost(self, server: Server) -> None:
        """Retries a server's requests on other servers: it died or has no complete weights."""
        orphans = [
            state
            for state in self._states.values()
            if state.server is server and state.task is not None
        ]
        if orphans:
            logger.warning(
                "%d requests of %s are retried on other servers", len(orphans), server.url
            )
        for state in orphans:
            assert state.task is not None
            state.task.cancel()
            # A server that is not DEAD was left paused by a failed update, but it accepts requests.
            if server.health is not Health.DEAD:
                self._in_background(self._abort(server, self._rid(state)))
            state.task = None
            state.server = None
            self._pending.appendleft(state)
        self._loop.call_soon(self._dispatch)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _abort(self, server: Server, rid: str) -> None:
        # Errors are ignored: the server also aborts when the connection closes.
        with contextlib.suppress(*CONNECTION_ERRORS):
            await self._exchange(server, "/abort_request", 5.0, orjson.dumps({"rid": rid}))

    async def _query_version(self, server: Server, timeout_s: float) -> str:
        """A server's current weight version.

        `/server_info` needs a working scheduler; `/model_info` returns the current version
        (`/server_info` returns the one of the start).
        """
        data = b""
        try:
            for path in ("/server_info", "/model_info"):
                status, data = await self._exchange(server, path, timeout_s, None)
                if status != 200:
                    raise RolloutError(f"probe: {path} returned HTTP {status}{hint(status)}")
            return str(orjson.loads(data)["weight_version"])
        except TimeoutError as error:
            raise RolloutError(f"probe: no response within {timeout_s:g} s") from error
        except (*CONNECTION_ERRORS, ValueError, KeyError, TypeError) as error:
            raise RolloutError(f"probe: {type(error).__name__}: {error}; is it SGLang?") from error


def allow_connections(num: int) -> None:
    """Raises this process's limit of open files.

    Warns if the limit is too low for `num` connections, because failed connections look like server
    faults.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    highest = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft < highest:
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest, hard))
    if num + OTHER_FILES > max(soft, highest):
        text = (
            "%d requests in flight need more files than the %d that this host allows a process "
            "(ulimit -n); %s"
        )
        logger.warning(text, num, highest, "lower rollout.max_in_flight")
