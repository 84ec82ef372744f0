"""One reward worker process: `main()` with the pool's process id and a socket's descriptor as arguments.

JSON lines in both directions; nothing is unpickled. First `{"options", "sys_path", ...}`, answered by `{"ready": true}` or
`{"error"}`; then one job per line, answered by one `{"reward"}` or `{"failure"}`. The process ends when the socket closes.
"""

import json
import os
import resource
import socket
import sys
from typing import Any, TextIO

import numpy as np
from pydantic import TypeAdapter

from pacs_megatron.config.reward_options import RewardOptions
from pacs_megatron.contracts import Prompt, RewardFn
from pacs_megatron.errors import ConfigError, RewardError
from pacs_megatron.rewards.custom import describe
from pacs_megatron.rewards.labels import as_reward
from pacs_megatron.rewards.registry import build_reward
from pacs_megatron.runtime.processes import die_with_parent, ignore_job_signals

_MAX_FAILURE_CHARS = 500


def encode_job(prompt: Prompt, response: str) -> bytes:
    """One job as a JSON line."""
    fields: dict[str, Any] = {name: getattr(prompt, name) for name in ("id", "text", "answer", "problem")}
    fields |= {"solution": prompt.solution, "source": prompt.source, "token_ids": prompt.token_ids.tolist()}
    return json.dumps({"prompt": fields, "response": response}).encode() + b"\n"


def decode_job(line: str) -> tuple[Prompt, str]:
    """The inverse of `encode_job`."""
    job = json.loads(line)
    fields = job["prompt"]
    fields["token_ids"] = np.asarray(fields["token_ids"], dtype=np.int32)
    return Prompt(**fields), job["response"]


def judge(reward: RewardFn, prompt: Prompt, response: str) -> dict[str, Any]:
    """`{"reward": float}`, or `{"failure": reason}` if the verifier gives no verdict."""
    try:
        return {"reward": as_reward(reward(prompt, response))}
    except RewardError as error:
        return {"failure": describe(error, named=False)[:_MAX_FAILURE_CHARS]}
    except MemoryError:
        return {"failure": "the verifier ran out of memory (reward.memory_limit_gib)"}
    except Exception as error:  # noqa: BLE001  # only this sample fails
        return {"failure": f"the verifier raised {describe(error)}"[:_MAX_FAILURE_CHARS]}


def main() -> None:
    """Serves jobs until the pool closes the socket."""
    parent_pid, descriptor = map(int, sys.argv[1:])
    die_with_parent(parent_pid=parent_pid)
    ignore_job_signals()
    os.set_inheritable(descriptor, False)
    connection = socket.socket(fileno=descriptor)
    jobs, verdicts = connection.makefile("r", encoding="utf-8"), connection.makefile("w", encoding="utf-8")
    setup = json.loads(jobs.readline())
    sys.path[:] = setup["sys_path"]
    _limit_memory(setup["memory_limit_bytes"])
    options = TypeAdapter(RewardOptions).validate_json(setup["options"])
    try:
        reward = build_reward(options)
    except ConfigError as error:
        _send(verdicts, {"error": str(error)})
        return
    _send(verdicts, {"ready": True})
    for line in jobs:
        _send(verdicts, judge(reward, *decode_job(line)))


def _limit_memory(limit_bytes: int) -> None:
    """A larger allocation raises MemoryError in this process; the host's out-of-memory killer stays out of it."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = limit_bytes if hard == resource.RLIM_INFINITY else min(limit_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _send(verdicts: TextIO, message: dict[str, Any]) -> None:
    verdicts.write(json.dumps(message) + "\n")
    verdicts.flush()
