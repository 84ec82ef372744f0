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
        is_cut = len(ids) == int(body["sampling_params"]["max_new_tokens"])
        meta = {
            "id": rid,
            "finish_reason": {"type": "length", "length": len(ids)}
            if is_cut
            else {"type": "stop", "matched": 0},
            "weight_versions": [{"version": self.weight_version, "start": 0, "end": len(ids)}],
            "output_token_logprobs": [[-3.0, token, None] for token in ids],
        }
        self.answered += 1
        self.finished.add(rid.rpartition("/")[0])
        return web.json_response({"text": "", "output_ids": ids, "meta_info": meta})
