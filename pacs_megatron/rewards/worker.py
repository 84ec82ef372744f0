"""One reward worker process:

`main()` with the pool's process id and a socket's descriptor as arguments.

Both directions use JSON lines, no pickle. The worker receives the options and sends `{"ready":
true}` or `{"error"}`. Then it receives lists of jobs and sends `{"verdicts": [...]}` of
`judge_all`. It ends when the socket closes.
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
from pacs_megatron.rewards.judging import Job, build_reward, judge_all
from pacs_megatron.runtime.processes import die_with_parent, ignore_job_signals, limit_memory


def encode_jobs(jobs: Sequence[Job]) -> bytes:
    """The jobs of one call as a JSON line."""
    rows = [
        (asdict(prompt) | {"token_ids": prompt.token_ids.tolist()}, response)
        for prompt, response in jobs
    ]
    return json.dumps(rows).encode() + b"\n"


def decode_jobs(line: str) -> list[Job]:
    """The inverse of `encode_jobs`."""
    rows = json.loads(line)
    return [
        (
            Prompt(**fields | {"token_ids": np.asarray(fields["token_ids"], dtype=np.int32)}),
            response,
        )
        for fields, response in rows
    ]


def main() -> None:
    """Serves jobs until the pool closes the socket."""
    parent_pid, descriptor = map(int, sys.argv[1:])
    die_with_parent(parent_pid=parent_pid)
    ignore_job_signals()
    os.set_inheritable(descriptor, False)
    connection = socket.socket(fileno=descriptor)
    jobs = connection.makefile("r", encoding="utf-8")
    replies = connection.makefile("w", encoding="utf-8")
    setup = json.loads(jobs.readline())
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
        for line in jobs:
            _send(replies, {"verdicts": judge_all(reward, decode_jobs(line))})


def _send(replies: TextIO, message: dict[str, Any]) -> None:
    with suppress(
        OSError, ValueError, AttributeError
    ):  # the reward function has closed or replaced it
        sys.stdout.flush()
    try:
        replies.write(json.dumps(message) + "\n")
        replies.flush()
    except (
        BrokenPipeError,
        ConnectionResetError,
    ):  # the pool closed the socket after an unexpected text
        os._exit(1)
