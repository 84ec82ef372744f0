"""Builds one or several rewards and calls them. A failed verifier affects its own samples only."""

import importlib
import json
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from pacs_megatron.config.reward_options import AnyReward, RewardComponent, WeightedReward
from pacs_megatron.contracts import Judgement, Prompt, RewardFn
from pacs_megatron.errors import RewardError
from pacs_megatron.rewards.custom import describe
from pacs_megatron.rewards.labels import as_reward
from pacs_megatron.runtime.json_reader import parse_json

Job = tuple[Prompt, str]
"""Prompt and response"""
_MAX_FAILURE_CHARS = 500
_MAX_DETAILS = 1 << 20


@runtime_checkable
class BatchRewardFn(Protocol):
    """A reward that judges several samples in one call, with the results of `judge_all`.

    A RewardError fails all.
    """

    def judge_batch(self, jobs: Sequence[Job]) -> list[dict[str, Any]]: ...


def judge_all(reward: RewardFn | BatchRewardFn, jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """For each job `{"reward": float}`, with the verifier's `details` if any, or `{"failure":
    reason}`.
    """
    if not isinstance(reward, BatchRewardFn):
        return [_judge(reward, *job) for job in jobs]
    try:
        return reward.judge_batch(jobs)
    except Exception as error:  # only these samples fail
        return [_failure(error)] * len(jobs)


def _judge(reward: RewardFn, prompt: Prompt, response: str) -> dict[str, Any]:
    try:
        found = reward(prompt, response)
        if not isinstance(found, Judgement):
            return {"reward": as_reward(found)}
        text = json.dumps(dict(found.details))  # as the pool receives them
        if len(text) > _MAX_DETAILS:
            return _failure(
                RewardError(f"details of {len(text)} characters, expected at most {_MAX_DETAILS}")
            )
        details = parse_json(text, "details", error=RewardError, any_text=True)
        return {"reward": as_reward(found.reward), "details": details}
    except Exception as error:  # only this sample fails
        return _failure(error)


def _failure(error: Exception) -> dict[str, Any]:
    if isinstance(error, MemoryError):
        return {"failure": "the verifier ran out of memory (reward.memory_limit_gib)"}
    text = (
        describe(error, named=False)
        if isinstance(error, RewardError)
        else f"the verifier raised {describe(error)}"
    )
    return {"failure": text[:_MAX_FAILURE_CHARS]}


def build_reward(options: AnyReward) -> RewardFn | BatchRewardFn:
    """The reward of `options`, in this process and without time limit, by `build` of the module
    with the reward's name.

    Raises ConfigError (pattern, function, sandbox, key of a server).
    """
    if isinstance(options, WeightedReward):
        return Weighted([_component(part) for part in options.components])
    # Imported here: only `math` needs sympy (0.4 s).
    reward: RewardFn | BatchRewardFn = importlib.import_module(
        f"pacs_megatron.rewards.{options.name}"
    ).build(options)
    return reward


def _component(options: RewardComponent) -> tuple[str, float, RewardFn | BatchRewardFn]:
    return options.reward.name, options.weight, build_reward(options.reward)


class Weighted:
    """sum_k weight_k reward_k. Fails if a component fails. The details have every component."""

    def __init__(self, parts: Sequence[tuple[str, float, RewardFn | BatchRewardFn]]) -> None:
        """`parts`: name, weight and reward of each component."""
        self._parts = parts

    def judge_batch(self, jobs: Sequence[Job]) -> list[dict[str, Any]]:
        columns = [judge_all(reward, jobs) for _, _, reward in self._parts]
        return [self._sum(row) for row in zip(*columns, strict=True)]

    def _sum(self, results: Sequence[dict[str, Any]]) -> dict[str, Any]:
        total = 0.0
        components = []
        for (name, weight, _), result in zip(self._parts, results, strict=True):
            if "failure" in result:
                return {"failure": f"component {name}: {result['failure']}"}
            total += weight * result["reward"]
            components.append({"name": name, "weight": weight, **result})
        return {"reward": as_reward(total), "details": {"components": components}}
