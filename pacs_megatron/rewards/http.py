"""Rewards of a server over HTTP.

Request, as JSON: `{"samples": [{"prompt_id", "problem", "prompt", "answer", "response"}, ...]}`. Response: `{"rewards":
[number, ...]}` in the same order, and optionally `model` and `version` as text, which the rollout file records.
"""

import asyncio
import os
import time
from collections.abc import Sequence
from typing import Any

import aiohttp

from pacs_megatron.config.reward_options import HttpReward
from pacs_megatron.errors import ConfigError, RewardError, shown
from pacs_megatron.rewards.judging import Job
from pacs_megatron.rewards.labels import as_reward
from pacs_megatron.runtime.json_reader import as_object, parse_json

_MAX_BYTES = 4 << 20
_FIRST_PAUSE_S = 0.2
_LABEL_CHARS = 200


class _Again(Exception):  # noqa: N818  (no error of the package: `judge_batch` retries)
    """An attempt that failed for a reason that may pass."""


class Http:
    """Judges batches with one request each, and retries it. Every response is checked before one of its rewards counts."""

    def __init__(self, options: HttpReward) -> None:
        """Raises ConfigError if the key's environment variable is not set."""
        self._options = options
        self._headers: dict[str, str] = {}
        if options.api_key_env is not None:
            key = os.environ.get(options.api_key_env)
            if not key:
                raise ConfigError(f"reward.api_key_env={options.api_key_env} is not set; export the server's key in it")
            self._headers["Authorization"] = f"Bearer {key}"

    def judge_batch(self, jobs: Sequence[Job]) -> list[dict[str, Any]]:
        """As `judge_all`. Raises RewardError with server and attempts if no valid response arrives in time."""
        samples = [
            {"prompt_id": p.id, "problem": p.problem, "prompt": p.text, "answer": p.answer, "response": response}
            for p, response in jobs
        ]
        return asyncio.run(self._judge({"samples": samples}))

    async def _judge(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        attempts = self._options.attempts
        share_s = self._options.timeout_s / attempts
        timeout = aiohttp.ClientTimeout(total=share_s)
        reasons: list[str] = []
        async with aiohttp.ClientSession(headers=self._headers, timeout=timeout) as session:
            for attempt in range(1, attempts + 1):
                started = time.monotonic()
                try:
                    rewards, labels = await self._attempt(session, body)
                except _Again as error:
                    reasons.append(str(error))
                except TimeoutError:
                    reasons.append(f"no response within {share_s:g} s")
                except (aiohttp.ClientError, OSError) as error:
                    reasons.append(" ".join(f"{type(error).__name__}: {error}".split()))
                else:
                    facts = {"server": self._options.url, "attempts": attempt, "latency_s": time.monotonic() - started}
                    return [{"reward": reward, "details": facts | labels} for reward in rewards]
                left_s = share_s - (time.monotonic() - started)
                if attempt < attempts and left_s > 0:
                    await asyncio.sleep(min(left_s, _FIRST_PAUSE_S * 2**attempt))
        raise RewardError(f"reward server {self._options.url}: {attempts} attempts failed; the last one: {reasons[-1]}")

    async def _attempt(
        self, session: aiohttp.ClientSession, body: dict[str, Any]
    ) -> tuple[list[float], dict[str, str]]:
        where = f"reward server {self._options.url}"
        # A redirect would take the key to another server.
        async with session.post(self._options.url, json=body, allow_redirects=False) as reply:
            if reply.status == 429 or reply.status >= 500:
                raise _Again(f"status {reply.status}")
            if reply.status != 200:
                raise RewardError(
                    f"{where}: status {reply.status}, expected 200; check reward.url and the server's log"
                )
            data = bytearray()
            async for piece in reply.content.iter_any():
                data += piece
                if len(data) > _MAX_BYTES:
                    raise RewardError(f"{where}: a response of more than {_MAX_BYTES >> 20} MiB; correct the server")
        found = as_object(parse_json(bytes(data), where, error=RewardError), where, error=RewardError)
        rewards = found.get("rewards")
        if not isinstance(rewards, list) or len(rewards) != len(body["samples"]):
            got = (
                f"{len(rewards)} rewards" if isinstance(rewards, list) else f"rewards of type {type(rewards).__name__}"
            )
            raise RewardError(f"{where}: {got}, expected a list of {len(body['samples'])} numbers; correct the server")
        named = {name: found[name] for name in ("model", "version") if found.get(name) is not None}
        for name, value in named.items():
            if not isinstance(value, str):
                raise RewardError(f"{where}: {name} is {shown(value)}, expected text; correct the server")
        labels = {name: text[:_LABEL_CHARS] for name, text in named.items()}
        try:
            return [as_reward(reward) for reward in rewards], labels
        except RewardError as error:
            raise RewardError(f"{where}: {error}") from error
