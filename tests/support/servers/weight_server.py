"""The fake server with weights: SGLang's calls of a weight update, in memory, with faults.

Its model has no fused parameters: a tensor keeps the name under which it is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from safetensors.torch import load_file

from pacs_megatron.sglang.api import SglangApi
from pacs_megatron.sglang.weights.bucket import Bucket
from pacs_megatron.sglang.weights.checksums import sha_hash
from pacs_megatron.sglang.weights.transports import Transport
from tests.support.servers.fake_sglang import FakeSglang


class WeightServer(FakeSglang):
    """`held` are its weights, `calls` the requested paths in order. Use as a context manager."""

    def __init__(
        self, weights: Mapping[str, torch.Tensor], *, sessions: bool = True, **server: Any
    ) -> None:
        self.initial = dict(weights)
        self.held = dict(weights)
        self.sessions = sessions
        self.session_open = False
        self.calls: list[str] = []
        self.keys: set[str | None] = set()
        """received Authorization headers"""
        self.fail: dict[str, int] = {}
        """path -> number of responses with `fail_status`"""
        self.fail_status = 500
        self.refuse_kindly = False
        """`/update_weights_from_disk` responds with `success: false` with a status of 200"""
        self.before: dict[str, Callable[[], None]] = {}
        """path -> function that runs before its next call"""
        self.spoil: Callable[[Any], Any] = lambda answer: answer
        """changes the response of `/weights_checker`"""
        super().__init__(**server)

    def restart(self) -> None:
        """As after a crash: the update is lost."""
        self.held = dict(self.initial)
        self.session_open = False
        self.weight_version = "default"
        self.paused = False

    def load(self, name: str, tensor: torch.Tensor) -> None:
        self.held[name] = tensor.clone()

    def _routes(self, app: web.Application) -> None:
        super()._routes(app)
        app.middlewares.append(self._note)
        app.router.add_post("/begin_weight_update", self._begin)
        app.router.add_post("/end_weight_update", self._end)
        app.router.add_post("/update_weights_from_disk", self._from_disk)
        app.router.add_post("/weights_checker", self._checksums)
        app.router.add_post("/release_memory_occupation", self._release_memory)
        app.router.add_post("/resume_memory_occupation", self._resume_memory)
        app.router.add_post("/init_weights_update_group", self._refuse)
        app.router.add_post("/in_memory", self._in_memory)

    @web.middleware
    async def _note(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.calls.append(request.path)
        self.keys.add(request.headers.get("Authorization"))
        self.before.pop(request.path, lambda: None)()
        if self.fail.get(request.path, 0) > 0:
            self.fail[request.path] -= 1
            return web.Response(status=self.fail_status, text="fails by request")
        response: web.StreamResponse = await handler(request)
        return response

    async def _begin(self, request: web.Request) -> web.Response:
        if not self.sessions:
            return web.json_response({"detail": "Not Found"}, status=404)
        if self.session_open:
            return web.json_response({"error": "a weight update is already open"}, status=400)
        self.session_open = True
        return web.json_response({"success": True})

    async def _end(self, request: web.Request) -> web.Response:
        if not self.session_open:
            return web.json_response({"error": "no weight update is open"}, status=400)
        self.session_open = False
        return web.json_response({"success": True})

    async def _in_memory(self, request: web.Request) -> web.Response:
        """Not SGLang's: stores a bucket that did not arrive by HTTP."""
        if self.sessions and not self.session_open:
            return web.json_response({"error": "no weight update is open"}, status=400)
        return web.json_response({"success": True})

    async def _release_memory(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _resume_memory(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _refuse(self, request: web.Request) -> web.Response:
        return web.json_response({"success": False, "message": "no such backend"}, status=400)

    async def _from_disk(self, request: web.Request) -> web.Response:
        if self.refuse_kindly:
            return web.json_response({"success": False, "message": "not a model folder"})
        body = await request.json()
        if (
            body.get("load_format") != "auto"
        ):  # the real one uses its own format, which may be `dummy`, and fails
            return web.json_response(
                {"success": False, "message": "Failed to get model loader"}, status=400
            )
        folder = Path(body["model_path"])
        for file in sorted(folder.glob("*.safetensors")):
            for name, tensor in load_file(file).items():
                self.load(name, tensor)
        return web.json_response({"success": True})

    async def _checksums(self, request: web.Request) -> web.Response:
        skip = set((await request.json())["skip_tensor_list"])
        held = {name: sha_hash(tensor) for name, tensor in self.held.items() if name not in skip}
        return web.json_response(self.spoil({"ranks": [{"checksums": held}]}))


class InMemory(Transport):
    """A transport that passes buckets to `WeightServer`s of this process,
    inside SGLang's sessions.
    """

    def __init__(self, servers: Mapping[str, WeightServer]) -> None:
        self._servers = servers
        self._sessions: dict[str, bool] = {}

    def join(self, api: SglangApi) -> None:
        self._sessions[api.url] = api.begin_weight_update()

    def send(self, api: SglangApi, bucket: Bucket) -> None:
        api.call("/in_memory", {})
        for name, tensor in bucket.tensors:
            self._servers[api.url].load(name, tensor)

    def finish(self, api: SglangApi) -> None:
        if self._sessions[api.url]:
            api.end_weight_update()
