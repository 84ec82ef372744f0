"""A server with SGLang's API, configurable latency and faults.

tests/integration/sglang/test_client_generation.py compares it with the real one. It runs in a
thread of the test's process and samples nothing: token i of a response is `(seed + i) % 251`.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Self

from aiohttp import web

from pacs_megatron.sglang.api import WARM_UP_RID

Fault = Literal[
    "none", "http_500", "truncated", "nan", "short_logprobs", "other_id", "old_version", "hang"
]


class FakeSglang:
    """`fault` and `latency_s` may be changed at any time. Use as a context manager."""

    def __init__(
        self,
        *,
        latency_s: Callable[[dict[str, Any]], float] = lambda _: 0.0,
        api_key: str | None = None,
        address: tuple[str, int] = ("127.0.0.1", 0),
    ) -> None:
        self.fault: Fault = "none"
        self.latency_s = latency_s
        self.api_key = api_key
        self.weight_version = "default"
        self.paused = False
        self.asked: Counter[str] = Counter()
        """request id without the try -> number of requests"""
        self.bodies: list[dict[str, Any]] = []
        self.answered = 0
        self.aborted: list[str] = []
        self.most_in_flight = 0
        self.held_until = 0
        """so many requests must have been in flight at once before any is answered"""
        self.stops_early = False
        """responses end at various lengths, by the end token"""
        self.profile: dict[str, Any] | None = None
        """the request of the profile in progress"""
        self.profiles: list[dict[str, Any]] = []
        """all of them"""
        self.writes_profiles = True
        """False: to a disk that this host does not have"""
        self._passes_left = 0
        self.context = 1 << 30
        """tokens of the smaller of context and KV cache; see `_clip`"""
        self.raw: dict[str, bytes] = {}
        """path -> bytes to send as they are, without HTTP; then the connection is closed"""
        self._active: set[str] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.host, self.port = address
        self._run(self._open())

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def refuse(self) -> None:
        """Closes the port: connections are refused, open ones broken."""
        self._run(self._runner.cleanup())

    def accept(self) -> None:
        """Opens the same port again."""
        self._run(self._open())

    def close(self) -> None:
        self._run(self._runner.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(600)

    async def _open(self) -> None:
        app = web.Application(client_max_size=1 << 30, middlewares=[self._raw, self._authorize])
        self._routes(app)
        # handler_cancellation: a client that disconnects ends its request, as on the real server.
        self._runner = web.AppRunner(
            app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.host, self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    def _routes(self, app: web.Application) -> None:
        app.router.add_get("/ready", self._empty)
        app.router.add_get("/server_info", self._server_info)
        app.router.add_get("/model_info", self._model_info)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_post("/update_weight_version", self._set_version)
        app.router.add_post("/pause_generation", self._pause)
        app.router.add_post("/continue_generation", self._resume)
        app.router.add_post("/flush_cache", self._empty)
        app.router.add_post("/start_profile", self._start_profile)
        app.router.add_post("/stop_profile", self._stop_profile)

    @web.middleware
    async def _raw(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path not in self.raw:
            response: web.StreamResponse = await handler(request)
            return response
        await request.read()
        self.asked[request.path] += 1
        assert request.transport is not None
        request.transport.write(self.raw[request.path])
        request.transport.close()
        return web.Response()

    @web.middleware
    async def _authorize(self, request: web.Request, handler: Any) -> web.StreamResponse:
        expected = f"Bearer {self.api_key}"
        if (
            self.api_key is not None
            and request.path != "/ready"
            and request.headers.get("Authorization") != expected
        ):
            return web.json_response({"error": "Unauthorized"}, status=401)
        response: web.StreamResponse = await handler(request)
        return response

    async def _empty(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _server_info(self, request: web.Request) -> web.Response:
        if self.fault == "hang":
            await asyncio.sleep(3600)
        return web.json_response(
            {
                "version": "0.5.23",
                "tp_size": 1,
                "device": "cpu",
                "weight_version": "default",
                "max_req_input_len": self.context - 6,
            }
        )

    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": "fake", "weight_version": self.weight_version})

    async def _set_version(self, request: web.Request) -> web.Response:
        self.weight_version = (await request.json())["new_version"]
        return web.json_response(
            {"success": True, "message": "", "new_version": self.weight_version}
        )

    async def _pause(self, request: web.Request) -> web.Response:
        self.paused = True
        return web.json_response({"status": "ok"})

    async def _resume(self, request: web.Request) -> web.Response:
        self.paused = False
        return web.json_response({"status": "ok"})

    async def _start_profile(self, request: web.Request) -> web.Response:
        if self.profile is not None:
            return web.Response(status=500, text="Internal Server Error")
        self.profile = await request.json()
        self.profiles.append(self.profile)
        self._passes_left = int(self.profile["num_steps"])
        return web.Response(text="Start profiling.\n")

    async def _stop_profile(self, request: web.Request) -> web.Response:
        if self.profile is None:
            return web.Response(status=500, text="Internal Server Error")
        self._write_profile()
        return web.Response(text="Stop profiling. This will take some time.\n")

    def _write_profile(self) -> None:
        """The trace of the server's only rank."""
        assert self.profile is not None
        path = Path(self.profile["output_dir"]) / f"{self.profile['profile_id']}-TP-0.trace.json.gz"
        self.profile = None
        if self.writes_profiles:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(gzip.compress(json.dumps({"traceEvents": [{"name": "x"}]}).encode()))

    def _count_passes(self, num_tokens: int) -> None:
        """A profile ends by itself after its number of forward passes."""
        self._passes_left -= num_tokens
        if self.profile is not None and self._passes_left < 0:
            self._write_profile()

    async def _abort(self, request: web.Request) -> web.Response:
        self.aborted.append(str((await request.json()).get("rid")))
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        rid = str(body["rid"])
        if rid == WARM_UP_RID:
            return await self._warm_up(body)
        self.asked[rid.rpartition("/")[0]] += 1
        self.bodies.append(body)
        if rid in self._active:
            return web.json_response(
                {"error": {"message": f"Duplicate request ID detected: {rid}"}}, status=400
            )
        self._active.add(rid)
        self.most_in_flight = max(self.most_in_flight, len(self._active))
        try:
            while self.paused or self.fault == "hang":
                await asyncio.sleep(0.01)
            while self.most_in_flight < self.held_until:
                await asyncio.sleep(0.01)
            await asyncio.sleep(self.latency_s(body))
            return await self._answer(request, body, rid)
        finally:
            self._active.discard(rid)

    async def _warm_up(self, body: dict[str, Any]) -> web.Response:
        """The request of a start; it counts as no sample."""
        return web.json_response({"meta_info": {"finish_reason": {"type": "length"}}})

    def _clip(self, input_len: int, max_new_tokens: int) -> tuple[int, str]:
        """(response limit, reason of a rejection), by the limits of SGLang 0.5.23.

        managers/tp_worker.py:568, managers/utils.py:272 and managers/scheduler.py:2714;
        tests/integration/sglang/test_client_generation.py compares them with the real server.
        """
        max_req_len = self.context - 1
        if input_len >= max_req_len - 5:
            return 0, f"Input length ({input_len} tokens) exceeds the maximum allowed length"
        return min(max_new_tokens, max_req_len - input_len - 1), ""

    async def _answer(
        self, request: web.Request, body: dict[str, Any], rid: str
    ) -> web.StreamResponse:
        params = body["sampling_params"]
        num_tokens, problem = self._clip(len(body["input_ids"]), int(params["max_new_tokens"]))
        if problem:
            return web.json_response({"error": {"message": problem}}, status=400)
        seed = int(params["sampling_seed"])
        self._count_passes(num_tokens)
        finish = {"type": "length", "length": num_tokens}
        if self.stops_early and seed % num_tokens:
            num_tokens = seed % num_tokens
            finish = {"type": "stop", "matched": 258}
        if len(body["input_ids"]) > 4096:
            return web.json_response(
                {"error": {"message": "The input is longer than the context"}}, status=400
            )
        if self.fault == "http_500":
            return web.Response(status=500, text="Internal Server Error")
        ids = [(seed + i) % 251 for i in range(num_tokens)]
        logprobs: list[list[Any]] = [[-0.5, token, None] for token in ids]
        version = "0:old" if self.fault == "old_version" else self.weight_version
        if self.fault == "short_logprobs":
            logprobs.pop()
        if self.fault == "nan":
            logprobs[-1][0] = None  # as the real server encodes NaN and Inf
        meta = {
            "id": "somebody-else" if self.fault == "other_id" else rid,
            "finish_reason": finish,
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": num_tokens,
            "cached_tokens": 0,
            "num_retractions": 0,
            "weight_version": version,
            "weight_versions": [{"version": version, "start": 0, "end": num_tokens}],
            "output_token_logprobs": logprobs,
            "input_token_logprobs": [],
        }
        answer = {"text": "", "output_ids": ids, "meta_info": meta}
        if self.fault == "truncated":
            whole = web.json_response(answer).body
            assert isinstance(whole, bytes)
            return web.Response(body=whole[: len(whole) // 2], content_type="application/json")
        self.answered += 1
        return web.json_response(answer)
