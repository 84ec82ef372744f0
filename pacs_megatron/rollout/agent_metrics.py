"""Metrics of trajectories with several turns, and of their tools."""

from collections.abc import Iterable, Sequence

import numpy as np

from pacs_megatron.contracts import Sample, ToolCall
from pacs_megatron.rollout.step_rollouts import is_agent_failure


def agent_metrics(samples: Sequence[Sample], tools: Iterable[str]) -> dict[str, float]:
    """Metrics of a step's trajectories, before admission.

    Args:
        samples: at least one.
        tools: names of the configured tools.
    """
    turns = np.array([sample.num_turns for sample in samples], dtype=np.float64)
    environment = np.array([sample.environment_len for sample in samples], dtype=np.float64)
    num_calls = np.array([len(sample.calls) for sample in samples], dtype=np.float64)
    metrics = {
        "agent/failed": float(sum(is_agent_failure(sample) for sample in samples)),
        "agent/turns_mean": float(turns.mean()),
        "agent/turns_max": float(turns.max()),
        "agent/environment_tokens_mean": float(environment.mean()),
        "agent/calls_mean": float(num_calls.mean()),
        "agent/tool_use_frac": float(np.mean(num_calls > 0)),
    }
    metrics |= _cache_metrics(samples)
    calls_of: dict[str, list[ToolCall]] = {tool: [] for tool in tools}
    for sample in samples:
        for call in sample.calls:
            calls_of[call.tool].append(call)
    for tool, calls in calls_of.items():
        metrics |= _tool_metrics(tool, calls)
    return metrics


def _cache_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Share of the tokens of later turns' requests that the servers' caches had."""
    num_cached = 0
    num_read = 0
    for sample in samples:
        if sample.cached_tokens:
            num_cached += sum(sample.cached_tokens[1:])
            num_read += sum(sample.read_tokens[1:])
    return {"agent/cached_frac": num_cached / num_read} if num_read else {}


def _tool_metrics(tool: str, calls: Sequence[ToolCall]) -> dict[str, float]:
    """Counts of a tool's calls, and their seconds if there are any."""
    metrics = {
        f"tool/{tool}/calls": float(len(calls)),
        f"tool/{tool}/failures": float(sum(call.failure is not None for call in calls)),
        f"tool/{tool}/timeouts": float(sum(call.timed_out for call in calls)),
        f"tool/{tool}/cut": float(sum(call.cut for call in calls)),
    }
    if calls:
        seconds = [call.seconds for call in calls]
        metrics[f"tool/{tool}/seconds_mean"] = float(np.mean(seconds))
        metrics[f"tool/{tool}/seconds_max"] = max(seconds)
    return metrics
