"""Gets rewards from a server over HTTP.

Request, as JSON: `{"samples": [{"prompt_id", "problem", "prompt", "answer", "response", "extra"},
...]}`. Response: `{"rewards": [number, ...]}` in the same order, and optionally `model` and
`version` as text, which the rollout file records.
"""

import asyncio
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pacs_megatron.config.reward_options import HttpReward
from pacs_megatron.errors import ConfigError, RewardError, shown
from pacs_megatron.rewards.judging import JudgeInput
from pacs_megatron.rewards.labels import as_reward
from pacs_megatron.runtime.environment import check_secret
from pacs_megatron.runtime.http import (
    CONNECTION_ERRORS,
    ResponseTooLongError,
    exchange,
    open_session,
)
from pacs_megatron.runtime.json_reader import as_object, parse_json

_MAX_BYTES = 4 << 20
_FIRST_PAUSE_S = 0.2
_LABEL_CHARS = 200


class Http:
    """Judges each batch with one request, with retries.

    Checks a response completely before it returns a reward.
    """

    def __init__(self, options: HttpReward) -> None:
        """Raises ConfigError if the key's environment variable is not set, or has a line end."""
        self._options = options
        self._where = f"reward server {options.url}"
        self._headers: dict[str, str] = {}
        if options.api_key_env is not None:
            key = os.environ.get(options.api_key_env)
            if not key:
                raise ConfigError(
                    f"reward.api_key_env={options.api_key_env} is not set; export the server's "
                    "key in it"
                )
            check_secret(options.api_key_env, key="reward.api_key_env")
            self._headers["Authorization"] = f"Bearer {key}"

    def judge_batch(self, inputs: Sequence[JudgeInput]) -> list[dict[str, Any]]:
        """Same as `judge_all`.

        Raises RewardError with server and attempts if no valid response arrives in time.
        """
        samples = []
        for prompt, response, turns in inputs:
            sample: dict[str, Any] = {
                "prompt_id": prompt.id,
                "problem": prompt.problem,
                "prompt": prompt.text,
                "answer": prompt.answer,
                "response": response,
                "extra": prompt.extra,
            }
            if turns:
                sample["turns"] = [asdict(turn) for turn in turns]
            samples.append(sample)
        payload = json.dumps({"samples": samples}).encode()
        data, attempts = asyncio.run(self._request(payload))
        rewards, labels = self._read(data, len(samples))
        return [{"reward": reward, "details": attempts | labels} for reward in rewards]

    async def _request(self, payload: bytes) -> tuple[bytes, dict[str, Any]]:
        """Sends a request until a response has status 200.

        Returns:
            The response.
            A record of the attempts, for the details.

        Raises:
            RewardError: after the last attempt, or at once for an error that a retry cannot fix.
        """
        url = self._options.url
        attempts = self._options.attempts
        share_s = self._options.timeout_s / attempts
        reason = ""
        async with open_session() as session:
            for attempt in range(1, attempts + 1):
                start = time.monotonic()
                try:
                    status, data = await exchange(
                        session, url, payload, self._headers, timeout_s=share_s, limit=_MAX_BYTES
                    )
                except ResponseTooLongError as error:
                    raise RewardError(f"{self._where}: {error}; correct the server") from error
                except TimeoutError:
                    reason = f"no response within {share_s:g} s"
                except CONNECTION_ERRORS as error:
                    reason = " ".join(f"{type(error).__name__}: {error}".split())
                else:
                    if status == 200:
                        latency_s = time.monotonic() - start
                        return data, {"server": url, "attempts": attempt, "latency_s": latency_s}
                    reason = f"status {status}"
                    if status != 429 and status < 500:
                        raise RewardError(
                            f"{self._where}: {reason}, expected 200; check reward.url and the "
                            "server's log"
                        )

                # A failed attempt does not use more than its share of the time.
                left_s = share_s - (time.monotonic() - start)
                if attempt < attempts and left_s > 0:
                    await asyncio.sleep(min(left_s, _FIRST_PAUSE_S * 2**attempt))
        raise RewardError(f"{self._where}: {attempts} attempts failed; the last one: {reason}")

    def _read(self, data: bytes, count: int) -> tuple[list[float], dict[str, str]]:
        """The rewards, and the texts `model` and `version`. Raises RewardError."""
        value = parse_json(data, self._where, error=RewardError)
        content = as_object(value, self._where, error=RewardError)
        rewards = content.get("rewards")
        if not isinstance(rewards, list) or len(rewards) != count:
            got = f"rewards of type {type(rewards).__name__}"
            if isinstance(rewards, list):
                got = f"{len(rewards)} rewards"
            raise RewardError(
                f"{self._where}: {got}, expected a list of {count} numbers; correct the server"
            )

        labels: dict[str, str] = {}
        for name in ("model", "version"):
            text = content.get(name)
            if isinstance(text, str):
                labels[name] = text[:_LABEL_CHARS]
            elif text is not None:
                raise RewardError(
                    f"{self._where}: {name} is {shown(text)}, expected text; correct the server"
                )
        try:
            return [as_reward(reward) for reward in rewards], labels
        except RewardError as error:
            raise RewardError(f"{self._where}: {error}") from error


build = Http
