"""One process that judges responses, for the reward pool.

`main()` gets the pool's process id and a socket's descriptor as arguments. Both directions use JSON
lines, no pickle. The worker receives the options and sends `{"ready": true}` or `{"error"}`. Then
it receives lists of inputs and sends `{"verdicts": [...]}` of `judge_all`. It ends when the socket
closes. Only a user's function receives the token ids of a prompt: no other reward reads them.
"""

import base64
import json
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from typing import Any, TextIO

import numpy as np
from pydantic import TypeAdapter

from pacs_megatron.config.reward_options import RewardOptions
from pacs_megatron.contracts import Prompt
from pacs_megatron.errors import ConfigError
from pacs_megatron.rewards.judging import JudgeInput, build_reward, judge_all
from pacs_megatron.runtime.processes import die_with_parent, ignore_job_signals, limit_memory

_OTHER_FIELDS = [field.name for field in fields(Prompt) if field.name != "token_ids"]
"""fields of a prompt that every reward receives"""
_NO_TOKEN_IDS = np.empty(0, np.int32)


def main() -> None:
    """Serves calls until the pool closes the socket."""
    parent_pid, descriptor = map(int, sys.argv[1:])
    die_with_parent(parent_pid=parent_pid)
    ignore_job_signals()
    os.set_inheritable(descriptor, False)
    connection = socket.socket(fileno=descriptor)
    lines = connection.makefile("r", encoding="utf-8")
    replies = connection.makefile("w", encoding="utf-8")

    setup = json.loads(lines.readline())
    sys.path[:] = setup["sys_path"]
    limit_memory(setup["memory_limit_bytes"])
    options = TypeAdapter(RewardOptions).validate_json(setup["options"])
    try:
        reward = build_reward(options)
    except ConfigError as error:
        _send(replies, {"error": str(error)})
        return
    _send(replies, {"ready": True})
    with suppress(ConnectionResetError):  # the pool closed the socket before it read all data
        for line in lines:
            _send(replies, {"verdicts": judge_all(reward, decode_inputs(line))})


def encode_inputs(inputs: Sequence[JudgeInput], *, with_token_ids: bool) -> bytes:
    """The inputs of one call as a JSON line.

    Args:
        inputs: prompt and response of each sample.
        with_token_ids: whether the reward reads the token ids of the prompts.
    """
    rows = []
    for prompt, response in inputs:
        token_ids = prompt.token_ids if with_token_ids else _NO_TOKEN_IDS
        values = {name: getattr(prompt, name) for name in _OTHER_FIELDS}
        values["extra"] = dict(prompt.extra)
        values["token_ids"] = base64.b64encode(token_ids.astype("<i4").tobytes()).decode()
        rows.append((values, response))
    return json.dumps(rows).encode() + b"\n"


def decode_inputs(line: str) -> list[JudgeInput]:
    """Inverse of `encode_inputs`; a prompt has no token ids if none were sent."""
    inputs = []
    for values, response in json.loads(line):
        token_ids = np.frombuffer(base64.b64decode(values["token_ids"]), "<i4")
        prompt = Prompt(**values | {"token_ids": token_ids})
        inputs.append((prompt, response))
    return inputs


def _send(replies: TextIO, message: dict[str, Any]) -> None:
    # The reward function may have closed or replaced it.
    with suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
    try:
        replies.write(json.dumps(message) + "\n")
        replies.flush()
    except (BrokenPipeError, ConnectionResetError):
        os._exit(1)  # the pool closed the socket after an unexpected text
