"""A reverse proxy that spoils the answers of the real server behind it, in a thread of the test's process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import aiohttp
from aiohttp import web

Spoil = Callable[[bytes], bytes | int]
"""Gets the real answer to `/generate`; returns other bytes, or an HTTP status to answer instead."""


class FaultProxy:
    """`spoil` and `delay_s` concern `/generate` only and may be changed at any time. Use as a context manager."""

    def __init__(self, target: str) -> None:
        self.spoil: Spoil | None = None
        self.delay_s = 0.0
        self.spoiled = 0
        self._target = target
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(20)

    async def _open(self) -> None:
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2))
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._forward)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _forward(self, request: web.Request) -> web.Response:
        data = await request.read()
        headers = {"Content-Type": "application/json"}
        url = self._target + request.path
        async with self._http.request(request.method, url, data=data or None, headers=headers) as answer:
            body, status = await answer.read(), answer.status
        if request.path == "/generate":
            await asyncio.sleep(self.delay_s)
            if self.spoil is not None and status == 200:
                self.spoiled += 1
                changed: Any = self.spoil(body)
                if isinstance(changed, int):
                    return web.Response(status=changed)
                body = changed
        return web.Response(body=body, status=status, content_type="application/json")

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(self, *_: object) -> None:
        async def end() -> None:
            await self._runner.cleanup()
            await self._http.close()

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(20)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
