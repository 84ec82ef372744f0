"""A reverse proxy that injects faults in front of a real server,
in a thread of the test's process.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import aiohttp
from aiohttp import web

Spoil = Callable[[bytes], bytes | int]
"""Maps the real response of `/generate` to other bytes, or to an HTTP status."""
UPDATE_PATHS = (
    "/update_weights_from_distributed",
    "/update_weights_from_tensor",
    "/update_weights_from_disk",
)


class FaultProxy:
    """`spoil` and `delay_s` affect `/generate` only, `sync_fault` weight updates; all may change at
    any time.

    Use as a context manager.
    """

    def __init__(self, target: str) -> None:
        self.spoil: Spoil | None = None
        self.delay_s = 0.0
        self.spoiled = 0
        self.sync_fault: Callable[[int], str | None] = lambda _: None
        """number of the weight call since the start, from 1 -> None, `break` (not forwarded,
        connection closed) or `hang` (not forwarded, no response)
        """
        self.counts: Counter[str] = Counter()
        """path -> number of requests"""
        self.in_flight = 0
        """requests to `/generate` without a response yet"""
        self.port = 0
        self._target = target
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._run(self._open())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def weight_calls(self) -> int:
        return sum(self.counts[path] for path in UPDATE_PATHS)

    def refuse(self) -> None:
        """Closes the port: connections are refused, open ones broken."""
        self._run(self._close())

    def accept(self) -> None:
        """Opens the same port again."""
        self._run(self._open())

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(600)

    async def _open(self) -> None:
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
        )
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._forward)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()
        self.port = self._runner.addresses[0][1]

    async def _close(self) -> None:
        await self._runner.cleanup()
        await self._http.close()

    async def _forward(self, request: web.Request) -> web.Response:
        path = request.path
        self.counts[path] += 1
        if path in UPDATE_PATHS:
            fault = self.sync_fault(self.weight_calls)
            if fault == "hang":
                await asyncio.sleep(3600)
            if fault == "break":
                assert request.transport is not None
                request.transport.close()
                return web.Response()
        if path != "/generate":
            body, status = await self._pass_on(request)
            return web.Response(body=body, status=status, content_type="application/json")
        self.in_flight += 1
        try:
            return await self._generate(request)
        finally:
            self.in_flight -= 1

    async def _generate(self, request: web.Request) -> web.Response:
        body, status = await self._pass_on(request)
        await asyncio.sleep(self.delay_s)
        if self.spoil is not None and status == 200:
            self.spoiled += 1
            changed: Any = self.spoil(body)
            if isinstance(changed, int):
                return web.Response(status=changed)
            body = changed
        return web.Response(body=body, status=status, content_type="application/json")

    async def _pass_on(self, request: web.Request) -> tuple[bytes, int]:
        data = await request.read()
        names = ("Content-Type", "Authorization")
        headers = {name: request.headers[name] for name in names if name in request.headers}
        url = self._target + request.path
        async with self._http.request(
            request.method, url, data=data or None, headers=headers
        ) as answer:
            return await answer.read(), answer.status

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
