"""A fake SGLang server for whole training runs: responses of long-tailed length, each after the
time of its sampling.

Length and tokens are a function of the seed of a request. It accepts weights by `sync.transport:
disk` unread.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from aiohttp import web

from tests.support.servers.fake_sglang import FakeSglang

FIRST = ord("a")
LAST = ord("z")
"""The bytes of responses; token ids of a tiny model are bytes."""


class ReplaySglang(FakeSglang):
    """`token_s` seconds a token; it processes any number of requests at a time."""

    def __init__(self, *, token_s: float, median_tokens: float, spread: float) -> None:
        """Lengths are log-normal:

        `median_tokens`, and `spread` the standard deviation of their logarithm.
        """
        self.token_s = token_s
        self._median = median_tokens
        self._spread = spread
        self.finished: set[str] = set()
        """request ids, without the try, whose response was sent"""
        self._cache: dict[str, list[int]] = {}
        """request id, without the try -> tokens of its last request and response"""
        super().__init__(latency_s=lambda body: self.token_s * len(self.tokens(body)))

    def tokens(self, body: dict[str, Any]) -> list[int]:
        """The token ids of the response."""
        params = body["sampling_params"]
        generator = np.random.default_rng(int(params["sampling_seed"]))
        length = round(generator.lognormal(np.log(self._median), self._spread))
        size = min(max(length, 1), int(params["max_new_tokens"]))
        ids: list[int] = generator.integers(FIRST, LAST + 1, size).tolist()
        return ids

    def _routes(self, app: web.Application) -> None:
        super()._routes(app)
        app.router.add_post("/update_weights_from_disk", self._empty)

    async def _answer(
        self, request: web.Request, body: dict[str, Any], rid: str
    ) -> web.StreamResponse:
        while self.paused:  # as `pause: in_place`: finished responses wait until the update ends
            await asyncio.sleep(0.002)
        ids = self.tokens(body)
        cached = self._cached_tokens(rid, body["input_ids"], ids)
        is_cut = len(ids) == int(body["sampling_params"]["max_new_tokens"])
        meta = {
            "id": rid,
            "finish_reason": {"type": "length", "length": len(ids)}
            if is_cut
            else {"type": "stop", "matched": 0},
            "weight_versions": [{"version": self.weight_version, "start": 0, "end": len(ids)}],
            "cached_tokens": cached,
            "output_token_logprobs": [[-3.0, token, None] for token in ids],
        }
        self.answered += 1
        self.finished.add(rid.rpartition("/")[0])
        return web.json_response({"text": "", "output_ids": ids, "meta_info": meta})

    def _cached_tokens(self, rid: str, prompt: list[int], response: list[int]) -> int:
        """Number of a prompt's first tokens that an earlier turn of the trajectory left here."""
        name = rid.rpartition("/")[0]
        before = self._cache.get(name, [])
        self._cache[name] = [*prompt, *response]
        return len(before) if prompt[: len(before)] == before else 0
