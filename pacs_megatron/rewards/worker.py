"""One reward worker process: `main()` with the pool's process id as the only argument, started by the pool.

JSON lines come in on stdin and go out on stdout; nothing is unpickled. First `{"options", "sys_path", ...}`, answered by
`{"ready": true}` or `{"error"}`; then one job a line, answered by one `{"reward"}` or `{"failure"}`. End of input ends it.
"""

import json
import math
import os
import resource
import sys
from typing import Any, TextIO

import numpy as np
from pydantic import TypeAdapter

from pacs_megatron.config.schema import RewardOptions
from pacs_megatron.contracts import Prompt, RewardFn
from pacs_megatron.errors import ConfigError, RewardError
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
    """`{"reward": float}`, or `{"failure": why}` when the answer cannot be judged."""
    try:
        value = reward(prompt, response)
    except RewardError as error:
        return {"failure": str(error)[:_MAX_FAILURE_CHARS]}
    except MemoryError:
        return {"failure": "the verifier ran out of memory (reward.memory_limit_gib)"}
    if not math.isfinite(value):
        return {"failure": f"the reward is {value}, expected a finite number"}
    return {"reward": value}


def main() -> None:
    """Serves jobs until the pool closes the pipe."""
    die_with_parent(parent_pid=int(sys.argv[1]))
    ignore_job_signals()
    jobs, verdicts = _claim_pipes()
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
    """An answer that asks for more raises MemoryError here instead of waking the host's out-of-memory killer."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = limit_bytes if hard == resource.RLIM_INFINITY else min(limit_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _claim_pipes() -> tuple[TextIO, TextIO]:
    """The pipes under private descriptors, so that what a user's function prints cannot mix with the verdicts."""
    jobs = os.fdopen(os.dup(0), encoding="utf-8")
    verdicts = os.fdopen(os.dup(1), "w", encoding="utf-8")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return jobs, verdicts


def _send(verdicts: TextIO, message: dict[str, Any]) -> None:
    verdicts.write(json.dumps(message) + "\n")
    verdicts.flush()
