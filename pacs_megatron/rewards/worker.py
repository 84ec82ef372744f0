"""One process that judges responses, for the reward pool.

Both directions use JSON lines, no pickle (`runtime/worker_process.py`). The setup has the reward's
`options`. Then the worker receives lists of inputs and sends `{"verdicts": [...]}` of `judge_all`.
Only a user's function receives the token ids of a prompt: no other reward reads them.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from pacs_megatron.config.reward_options import RewardOptions
from pacs_megatron.contracts import Prompt
from pacs_megatron.contracts.conversation import turn_from_json
from pacs_megatron.rewards.judging import JudgeInput, build_reward, judge_all
from pacs_megatron.runtime.worker_process import Connection, Handler, serve

_OTHER_FIELDS = [field.name for field in fields(Prompt) if field.name != "token_ids"]
"""fields of a prompt that every reward receives"""
_NO_TOKEN_IDS = np.empty(0, np.int32)


def main() -> None:
    """Serves calls until the pool closes the socket."""
    serve(_judge)


def _judge(setup: Mapping[str, Any]) -> Handler:
    """Raises ConfigError if the reward cannot be built."""
    options = TypeAdapter(RewardOptions).validate_json(setup["options"])
    reward = build_reward(options)

    def verdicts(line: str, _: Connection) -> dict[str, Any]:
        return {"verdicts": judge_all(reward, decode_inputs(line))}

    return verdicts


def encode_inputs(inputs: Sequence[JudgeInput], *, with_token_ids: bool) -> bytes:
    """The inputs of one call as a JSON line.

    Args:
        inputs: of each sample.
        with_token_ids: whether the reward reads the token ids of the prompts.
    """
    rows = []
    for prompt, response, turns in inputs:
        token_ids = prompt.token_ids if with_token_ids else _NO_TOKEN_IDS
        values = {name: getattr(prompt, name) for name in _OTHER_FIELDS}
        values["extra"] = dict(prompt.extra)
        values["token_ids"] = base64.b64encode(token_ids.astype("<i4").tobytes()).decode()
        rows.append((values, response, [asdict(turn) for turn in turns]))
    return json.dumps(rows).encode() + b"\n"


def decode_inputs(line: str) -> list[JudgeInput]:
    """Inverse of `encode_inputs`; a prompt has no token ids if none were sent."""
    inputs = []
    for values, response, turns in json.loads(line):
        token_ids = np.frombuffer(base64.b64decode(values["token_ids"]), "<i4")
        prompt = Prompt(**values | {"token_ids": token_ids})
        inputs.append(JudgeInput(prompt, response, tuple(map(turn_from_json, turns))))
    return inputs
