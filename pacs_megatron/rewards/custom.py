"""A user's own reward function, named in the configuration."""

import hashlib
import importlib.util
import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from pacs_megatron.config.reward_options import AnyReward, CustomReward, WeightedReward
from pacs_megatron.contracts import Judgement, Prompt, RewardSample, Turn
from pacs_megatron.contracts.reward_sample import MissingColumnError, reward_sample
from pacs_megatron.errors import ConfigError, RewardError
from pacs_megatron.rewards.imports import imported_beside
from pacs_megatron.rewards.labels import as_reward
from pacs_megatron.runtime.user_code import describe, find_file, import_function

KEY = "reward.function"
_ASYNC = (
    "it is an async function, and the workers call plain functions in parallel; call asyncio.run "
    "inside it, or use reward.name: http"
)


_FIELDS = ", ".join(field.name for field in fields(RewardSample))


class Custom:
    """Calls `function(sample)`, or `function(prompt, response)` of earlier releases; the reward is
    the returned number.
    """

    def __init__(self, function: str) -> None:
        """`module:function` or `path/to/file.py:function`.

        Raises ConfigError if it cannot be called.
        """
        self._name = function
        self._function = _load(function)
        self._takes_prompt = _takes_prompt_and_response(self._function, function)

    def __call__(self, prompt: Prompt, response: str) -> float | Judgement:
        """Same as `judge_turns` of one turn."""
        return self.judge_turns(prompt, response, ())

    def judge_turns(
        self, prompt: Prompt, response: str, turns: Sequence[Turn]
    ) -> float | Judgement:
        """The reward of a response.

        Args:
            prompt: of the response.
            response: its text.
            turns: of an agent; empty: the response is one turn.

        Raises:
            RewardError: the function raises, exits or returns no finite number.
        """
        sample = reward_sample(prompt, response, turns)
        try:
            if self._takes_prompt:
                return _checked(self._function(prompt, response))
            return _checked(self._function(sample))
        except RewardError as error:
            raise RewardError(f"{KEY}={self._name}: {describe(error, named=False)}") from error
        except BaseException as error:  # a plug-in may raise anything: only this sample fails
            text = describe(error) + _names(error, prompt, sample)
            raise RewardError(f"{KEY}={self._name} raised {text}") from error


def _names(error: BaseException, prompt: Prompt, sample: RewardSample) -> str:
    """The names that exist, where the function used another name or a wrong type."""
    if isinstance(error, MissingColumnError):
        columns = ", ".join(map(repr, sample.extra)) or "no column"
        return f"; sample.extra has {columns}; add it to extra_columns of the data set"
    if isinstance(error, AttributeError) and error.obj is prompt:
        return f"; a prompt has {', '.join(field.name for field in fields(prompt))}"

    is_sample = isinstance(error, AttributeError) and isinstance(error.obj, RewardSample)
    # `sample["answer"]`, `for completion in sample` and the like.
    is_type = isinstance(error, TypeError) and RewardSample.__name__ in str(error)
    if is_sample or is_type:
        return f"; a sample has the attributes {_FIELDS}"
    return ""


def _checked(reward: Any) -> float | Judgement:
    """The returned reward. Raises RewardError if it is neither a number nor a Judgement."""
    if inspect.iscoroutine(reward):
        reward.close()  # Python would warn that it was not awaited
        raise RewardError(_ASYNC)
    return reward if isinstance(reward, Judgement) else as_reward(reward)


def _load(function: str) -> Callable[..., Any]:
    """Imports a function. Raises ConfigError if it is none, or async."""
    loaded = import_function(function, KEY)
    if inspect.iscoroutinefunction(loaded):
        raise ConfigError(f"{KEY}={function!r}: {_ASYNC}")
    return loaded


def _takes_prompt_and_response(function: Callable[..., Any], name: str) -> bool:
    """Whether to call f(prompt, response), not f(sample). Raises ConfigError if neither works."""
    try:
        signature = inspect.signature(function)
    except ValueError as error:
        raise ConfigError(
            f"{KEY}={name!r}: {describe(error, named=False)}; define a function f(sample)"
        ) from error
    takes_two = _can_bind(signature, 2)
    if not takes_two and not _can_bind(signature, 1):
        raise ConfigError(
            f"{KEY}={name!r}{signature} cannot be called as f(sample); it takes one "
            f"argument, which has the attributes {_FIELDS}"
        )
    parameters = list(signature.parameters.values())
    # An optional second parameter is an option of f(sample), unless its name is `response`.
    is_option = _can_bind(signature, 1) and len(parameters) > 1 and parameters[1].name != "response"
    is_option = is_option and parameters[0].default is inspect.Parameter.empty
    return takes_two and not is_option


def _can_bind(signature: inspect.Signature, count: int) -> bool:
    """Whether a function can be called with `count` arguments by position."""
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


def file_digests(reward: AnyReward | None) -> dict[str, str]:
    """`reward.function` -> digest of its code, of every custom reward.

    The code is the file that defines the function, and the modules beside it or in its package that
    it imports by `import` or `from`, directly or through each other.

    Two attempts of a run compare them: a changed file gives other rewards. A module that is not
    found has none. Raises ConfigError for a file that does not exist.
    """
    rewards: list[Any] = [reward]
    if isinstance(reward, WeightedReward):
        rewards = [component.reward for component in reward.components]

    digests = {}
    for one in rewards:
        if not isinstance(one, CustomReward):
            continue
        file = find_file(one.function, KEY) or _module_file(one.function)
        if file is not None:
            content = file.read_bytes()
            modules = imported_beside(file)
            for module in sorted(modules):
                content += b"\0" + modules[module].read_bytes()
            digests[one.function] = hashlib.blake2b(content, digest_size=16).hexdigest()
    return digests


def _module_file(function: str) -> Path | None:
    """The source file of `module:function`; None if it is not found."""
    try:
        spec = importlib.util.find_spec(function.rpartition(":")[0])
    except Exception:  # noqa: BLE001  the packages around the module run here
        return None
    if spec is None or spec.origin is None or not os.path.isfile(spec.origin):
        return None
    return Path(spec.origin)


def build(options: CustomReward) -> Custom:
    return Custom(options.function)
