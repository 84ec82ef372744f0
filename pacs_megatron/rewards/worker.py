"""One process that judges responses, for the reward pool.

`main()` gets the pool's process id and a socket's descriptor as arguments. Both directions use JSON
lines, no pickle. The worker receives the options and sends `{"ready": true}` or `{"error"}`. Then
it receives lists of inputs and sends `{"verdicts": [...]}` of `judge_all`. It ends when the socket
closes.
"""

import json
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, TextIO

import numpy as np
from pydantic import TypeAdapter

from pacs_megatron.config.reward_options import RewardOptions
from pacs_megatron.contracts import Prompt
from pacs_megatron.errors import ConfigError
from pacs_megatron.rewards.judging import JudgeInput, build_reward, judge_all
from pacs_megatron.runtime.processes import die_with_parent, ignore_job_signals, limit_memory


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


def encode_inputs(inputs: Sequence[JudgeInput]) -> bytes:
    """The inputs of one call as a JSON line."""
    rows = [
        (asdict(prompt) | {"token_ids": prompt.token_ids.tolist()}, response)
        for prompt, response in inputs
    ]
    return json.dumps(rows).encode() + b"\n"


def decode_inputs(line: str) -> list[JudgeInput]:
    """Inverse of `encode_inputs`."""
    inputs = []
    for fields, response in json.loads(line):
        token_ids = np.asarray(fields["token_ids"], dtype=np.int32)
        prompt = Prompt(**fields | {"token_ids": token_ids})
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
