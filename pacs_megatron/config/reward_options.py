"""The options of each reward function: a part of the schema (config/schema.py)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from pacs_megatron.config.text import EnvironmentName, Line, Pattern, Url
from pacs_megatron.contracts.options import Options


class RewardWorkerOptions(Options):
    """Options of all reward functions."""

    workers: int = Field(default=1, ge=1, le=1024)
    """Number of reward worker processes."""

    timeout_s: float = Field(default=10.0, gt=0)
    """Timeout of one judgement, in seconds. The worker is killed and restarted."""

    memory_limit_gib: float = Field(default=4.0, ge=0.1, le=2**20)
    """Memory limit of a worker, in GiB. A response that needs more is not judged."""

    label_threshold: float | None = None
    """`label = 1 if reward >= label_threshold`. If null, a reward outside {0, 1} is an error."""

    max_failure_frac: float = Field(default=0.05, ge=0, le=1)
    """Maximum fraction of a step's samples that fail to be judged. Above it the run stops."""

    @property
    def num_per_call(self) -> int:
        """Maximum number of samples that a worker judges with one call."""
        return self.batch_size if isinstance(self, HttpReward) else 1

    @property
    def ends_itself(self) -> bool:
        """Whether the reward itself enforces `timeout_s`."""
        return isinstance(self, CodeReward | HttpReward)

    @property
    def call_limit_s(self) -> float:
        """Seconds of one call after which the worker is killed.

        A reward that enforces `timeout_s` itself has ten seconds more for its response.
        """
        return self.timeout_s + 10.0 * self.ends_itself

    @property
    def reads_token_ids(self) -> bool:
        """Whether the reward may read `Prompt.token_ids`: only a user's function may."""
        return isinstance(self, CustomReward)

    @property
    def waits_for(self) -> str:
        """A progress message of a long judgement; empty for verifiers on this host, whose calls are
        short.
        """
        return f"for the reward server {self.url}" if isinstance(self, HttpReward) else ""


class MathReward(RewardWorkerOptions):
    """Compares the final answer with the reference by math-verify."""

    name: Literal["math"]
    """Reward function: `math`, `arithmetic`, `format`, `code`, `http`, `custom`, `weighted` for
    several of them, or `agent`.
    """

    label_rule: Literal["last_box", "authors"] = "last_box"
    r"""Answer of a response.

    `last_box`: its last `\\boxed{}`. `authors`: math-verify's final expression anywhere in the
    text, as in the PACS authors' code; `admission.truncated: judge` belongs to it
    (docs/rewards.md#label-rules).
    """


class ArithmeticReward(RewardWorkerOptions):
    """Compares numbers exactly."""

    name: Literal["arithmetic"]
    """Reward function: see `math`."""


class FormatReward(RewardWorkerOptions):
    """Matches the response with a regular expression."""

    name: Literal["format"]
    """Reward function: see `math`."""

    pattern: Pattern
    """Regular expression that must match the whole response (re.DOTALL)."""


class CodeReward(RewardWorkerOptions):
    """Runs the program of a response on the tests of the data set's answer (schema of APPS or
    LiveCodeBench).
    """

    name: Literal["code"]
    """Reward function: see `math`."""

    timeout_s: float = Field(default=60.0, gt=0)
    """Time limit of a program on all its tests, in seconds. A program that needs more has reward 0.
    """

    sandbox: Literal["bubblewrap", "none"] = "bubblewrap"
    """`bubblewrap`: no network, no files but Python's own, limits (docs/rewards.md#sandbox).

    `none`: limits only.
    """

    test_timeout_s: float = Field(default=6.0, gt=0)
    """Limit of wall-clock and CPU time of one test, in seconds. The default is LiveCodeBench's."""

    test_memory_gib: float = Field(default=1.0, gt=0, le=2**20)
    """Memory limit of a program with all its processes, in GiB."""

    @model_validator(mode="after")
    def _check_memory(self) -> CodeReward:
        if self.test_memory_gib >= self.memory_limit_gib:
            raise ValueError(
                f"reward.test_memory_gib={self.test_memory_gib:g} must be below "
                "reward.memory_limit_gib="
                f"{self.memory_limit_gib:g}, which counts the program too; raise the latter"
            )
        return self


class HttpReward(RewardWorkerOptions):
    """Sends responses to your reward server, which returns the rewards (docs/rewards.md#http)."""

    name: Literal["http"]
    """Reward function: see `math`."""

    url: Url
    """Address of the server's POST endpoint."""

    timeout_s: float = Field(default=120.0, gt=0)
    """Time limit of a request with all its attempts, in seconds.

    One attempt takes at most its equal share.
    """

    attempts: PositiveInt = 3
    """Attempts of a request, with increasing pauses."""

    batch_size: PositiveInt = 16
    """Maximum number of samples in a request."""

    api_key_env: EnvironmentName | None = None
    """Environment variable with the key for `Authorization: Bearer`; null sends none."""


class CustomReward(RewardWorkerOptions):
    """Calls a Python function."""

    name: Literal["custom"]
    """Reward function: see `math`."""

    function: Line
    """`module:function` or `path/to/file.py:function`, called as f(sample) -> float
    (docs/rewards.md#custom).
    """


class AgentReward(RewardWorkerOptions):
    """The number that `rollout.agent` returns for its trajectory."""

    name: Literal["agent"]
    """Reward function: see `math`."""


SingleReward = MathReward | ArithmeticReward | FormatReward | CodeReward | HttpReward | CustomReward

UNIT_REWARDS = ("math", "arithmetic", "format", "code")
"""Rewards of 0 or 1."""


class RewardComponent(Options):
    """One reward of several."""

    weight: float = Field(ge=-1e9, le=1e9)
    """Factor of its value in the sum."""

    reward: Annotated[SingleReward, Field(discriminator="name")]
    """Reward function. Set options of all rewards on the weighted one, except `timeout_s` of `code`
    and `http`.
    """

    def check(self, where: str) -> None:
        """Raises ValueError for an option that has no effect in a component, with its key."""
        if self.weight == 0:
            raise ValueError(f"{where}.weight=0 has no effect; remove the component")

        fields = type(self.reward).model_fields
        for name in sorted(RewardWorkerOptions.model_fields):
            if name == "timeout_s" and self.reward.ends_itself:
                continue
            if getattr(self.reward, name) != fields[name].default:
                raise ValueError(
                    f"{where}.reward.{name} is not used by a component; set reward.{name}"
                )


class WeightedReward(RewardWorkerOptions):
    """Sums several rewards; the label compares the sum with `label_threshold`, the objective may
    use the sum itself.
    """

    name: Literal["weighted"]
    """Reward function: see `math`."""

    components: tuple[RewardComponent, ...] = Field(strict=False, min_length=2)
    """Rewards and their weights."""

    @property
    def num_per_call(self) -> int:
        return max(component.reward.num_per_call for component in self.components)

    @property
    def reads_token_ids(self) -> bool:
        return any(component.reward.reads_token_ids for component in self.components)

    @property
    def call_limit_s(self) -> float:
        limits_s = []
        for component in self.components:
            reward = component.reward
            if reward.ends_itself:
                # `http` judges the samples of a call together, `code` one after the other.
                num_calls = self.num_per_call if reward.name == "code" else 1
                limits_s.append(reward.call_limit_s * num_calls)
        return self.timeout_s + sum(limits_s)

    @property
    def waits_for(self) -> str:
        texts = [component.reward.waits_for for component in self.components]
        return "; ".join(text for text in texts if text)

    @model_validator(mode="after")
    def _check_components(self) -> WeightedReward:
        for number, component in enumerate(self.components):
            component.check(f"reward.components.{number}")

        if self.label_threshold is None:
            raise ValueError(
                "reward.name=weighted needs reward.label_threshold: the least sum with label 1; "
                "set it"
            )
        if all(component.reward.name in UNIT_REWARDS for component in self.components):
            weights = [component.weight for component in self.components]
            low = sum(weight for weight in weights if weight < 0)
            high = sum(weight for weight in weights if weight > 0)
            if not low < self.label_threshold <= high:
                raise ValueError(
                    f"reward.label_threshold={self.label_threshold:g} gives every sample the same "
                    f"label: the sum of these components lies between {low:g} and {high:g}; choose "
                    "a value in between"
                )
        return self


AnyReward = SingleReward | WeightedReward | AgentReward
RewardOptions = Annotated[AnyReward, Field(discriminator="name")]
