"""Builds one or several rewards and calls them. A failed verifier affects its own samples only."""

import importlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from pacs_megatron.config.reward_options import (
    AgentReward,
    AnyReward,
    RewardComponent,
    WeightedReward,
)
from pacs_megatron.contracts import Judgement, Prompt, RewardFn, Turn
from pacs_megatron.errors import ConfigError, RewardError
from pacs_megatron.rewards.labels import as_reward
from pacs_megatron.runtime.json_reader import parse_json
from pacs_megatron.runtime.user_code import describe

_MAX_FAILURE_CHARS = 500
_MAX_DETAILS = 1 << 20


class JudgeInput(NamedTuple):
    """A response to judge."""

    prompt: Prompt
    response: str
    turns: tuple[Turn, ...] = ()
    """of an agent; empty: the response is one turn"""


@runtime_checkable
class BatchRewardFn(Protocol):
    """A reward that judges several samples in one call."""

    def judge_batch(self, inputs: Sequence[JudgeInput]) -> list[dict[str, Any]]:
        """The results of `judge_all`. A RewardError fails all samples."""
        ...


def build_reward(options: AnyReward) -> RewardFn | BatchRewardFn:
    """The reward of `options`, in this process and without time limit.

    Calls `build` of the module with the reward's name. Raises ConfigError (pattern, function,
    sandbox, key of a server).
    """
    if isinstance(options, AgentReward):
        raise ConfigError("reward.name=agent judges in the agent only; use another reward here")
    if isinstance(options, WeightedReward):
        return Weighted([_component(component) for component in options.components])
    # Imported here: only `math` needs sympy (0.4 s).
    module = importlib.import_module(f"pacs_megatron.rewards.{options.name}")
    reward: RewardFn | BatchRewardFn = module.build(options)
    return reward


def judge_all(
    reward: RewardFn | BatchRewardFn, inputs: Sequence[JudgeInput]
) -> list[dict[str, Any]]:
    """Judges several samples.

    Args:
        reward: of `build_reward`.
        inputs: of each sample.

    Returns:
        By sample: `{"reward": float}`, with the verifier's `details` if any, or `{"failure":
        reason}`.
    """
    if not isinstance(reward, BatchRewardFn):
        return [_judge(reward, item) for item in inputs]
    try:
        return reward.judge_batch(inputs)
    except Exception as error:  # noqa: BLE001  only these samples fail
        return [_failure(error)] * len(inputs)


class Weighted:
    """sum_k weight_k reward_k. Fails if a component fails. The details have every component."""

    def __init__(self, parts: Sequence[tuple[str, float, RewardFn | BatchRewardFn]]) -> None:
        """`parts`: name, weight and reward of each component."""
        self._parts = parts

    def judge_batch(self, inputs: Sequence[JudgeInput]) -> list[dict[str, Any]]:
        """Same as `judge_all`."""
        columns = [judge_all(reward, inputs) for _, _, reward in self._parts]
        return [self._sum(results) for results in zip(*columns, strict=True)]

    def _sum(self, results: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The result of one sample from those of its components."""
        total = 0.0
        components = []
        for (name, weight, _), result in zip(self._parts, results, strict=True):
            if "failure" in result:
                return {"failure": f"component {name}: {result['failure']}"}
            total += weight * result["reward"]
            components.append({"name": name, "weight": weight, **result})
        return {"reward": as_reward(total), "details": {"components": components}}


def _component(options: RewardComponent) -> tuple[str, float, RewardFn | BatchRewardFn]:
    return options.reward.name, options.weight, build_reward(options.reward)


def _judge(reward: RewardFn, item: JudgeInput) -> dict[str, Any]:
    """The result of one sample, in the form of `judge_all`."""
    try:
        # Only a user's function reads turns.
        judge_turns = getattr(reward, "judge_turns", None)
        if judge_turns is None:
            judged = reward(item.prompt, item.response)
        else:
            judged = judge_turns(item.prompt, item.response, item.turns)
        if not isinstance(judged, Judgement):
            return {"reward": as_reward(judged)}

        # Through JSON, same as the pool receives them.
        text = json.dumps(dict(judged.details))
        if len(text) > _MAX_DETAILS:
            return _failure(
                RewardError(f"details of {len(text)} characters, expected at most {_MAX_DETAILS}")
            )
        details = parse_json(text, "details", error=RewardError, any_text=True)
        return {"reward": as_reward(judged.reward), "details": details}
    except Exception as error:  # noqa: BLE001  only this sample fails
        return _failure(error)


def _failure(error: Exception) -> dict[str, Any]:
    """The result of a sample whose verifier raised `error`."""
    if isinstance(error, MemoryError):
        return {"failure": "the verifier ran out of memory (reward.memory_limit_gib)"}
    if isinstance(error, RewardError):
        text = describe(error, named=False)
    else:
        text = f"the verifier raised {describe(error)}"
    return {"failure": text[:_MAX_FAILURE_CHARS]}
