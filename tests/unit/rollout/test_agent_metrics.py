"""Counts of a step's trajectories, from samples written here."""

from __future__ import annotations

import numpy as np

from pacs_megatron.contracts import Sample, Stop, ToolCall
from pacs_megatron.rollout.agent_metrics import agent_metrics


def call(tool: str, seconds: float, failure: str | None = None, **flags: bool) -> ToolCall:
    return ToolCall(tool=tool, arguments="{}", failure=failure, seconds=seconds, turn=1, **flags)


def sample(number: int, length: int, **fields: object) -> Sample:
    return Sample(
        id=f"1:d/0#{number}",
        prompt_id="d/0",
        token_ids=np.zeros(2 + length, dtype=np.int32),
        prompt_len=2,
        sampler_logprobs=np.zeros(length, dtype=np.float32),
        spans=(),
        stop=Stop.EOS,
        **fields,  # type: ignore[arg-type]
    )


def test_counts_of_turns_and_calls() -> None:
    calls = (
        call("sum", 0.5),
        call("sum", 1.5, cut=True),
        call("find", 2.0, "no result within 2 s", timed_out=True),
    )
    samples = [
        sample(0, 9, environment=((1, 3), (4, 8)), calls=calls),
        sample(1, 3),
        sample(2, 0, failure="agent: it raised ValueError: no luck"),
        sample(3, 4, calls=(call("sum", 1.0, "division by zero"),), failure="verifier"),
    ]
    assert agent_metrics(samples, ["sum", "find", "unused"]) == {
        "agent/failed": 1.0,
        "agent/turns_mean": (3 + 1 + 0 + 1) / 4,
        "agent/turns_max": 3.0,
        "agent/environment_tokens_mean": 6 / 4,
        "agent/calls_mean": 4 / 4,
        "agent/tool_use_frac": 2 / 4,
        "tool/sum/calls": 3.0,
        "tool/sum/failures": 1.0,
        "tool/sum/timeouts": 0.0,
        "tool/sum/cut": 1.0,
        "tool/sum/seconds_mean": 1.0,
        "tool/sum/seconds_max": 1.5,
        "tool/find/calls": 1.0,
        "tool/find/failures": 1.0,
        "tool/find/timeouts": 1.0,
        "tool/find/cut": 0.0,
        "tool/find/seconds_mean": 2.0,
        "tool/find/seconds_max": 2.0,
        "tool/unused/calls": 0.0,
        "tool/unused/failures": 0.0,
        "tool/unused/timeouts": 0.0,
        "tool/unused/cut": 0.0,
    }
