"""Prompts, requests, samples and groups."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import Field, PositiveInt, field_validator

from pacs_megatron.contracts.options import Options
from pacs_megatron.errors import RolloutError

_MIN_TEMPERATURE = 1e-5
"""SGLang takes a temperature below 1e-6 for 0 (sampling_params.py, `_SAMPLING_EPS`)."""


AGENT_FAILURE = "agent: "
"""Start of `Sample.failure` of a trajectory whose agent failed; a verifier's has no such start."""


class Stop(StrEnum):
    """The reason for the end of a response."""

    EOS = "eos"
    LENGTH = "length"
    ABORTED = "aborted"


class Writer(IntEnum):
    """Who wrote a token.

    Tokens of the environment, such as a tool's output, are context: they have no log-prob, no loss,
    no score, no KL and no entropy, and do not count in a length.
    """

    PROMPT = 0
    POLICY = 1
    ENVIRONMENT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One problem, rendered and tokenized."""

    id: str
    """`<dataset name>/<row index>`, the same in every run"""
    text: str
    """Output of the chat template: the input of the model."""
    token_ids: np.ndarray
    """int32 [prompt]"""
    answer: str
    """The reference answer, in the form that the reward function reads."""
    problem: str
    solution: str | None = None
    """A demonstration (used by `sft`)."""
    source: str = ""
    """Data set name."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further columns of the row for the reward function: column -> JSON value."""


class Judgement(NamedTuple):
    """A reward and the verifier's record of it: JSON values."""

    reward: float
    details: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Response tokens [start, end) were sampled from weights `version` whose digest is `digest`."""

    version: int
    digest: str
    start: int
    end: int


class SamplingOptions(Options):
    """How the rollout engine draws a response."""

    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Probability mass of nucleus sampling; 1 disables it.

    A token must pass top_p and top_k, each applied to the distribution at the temperature.
    """
    top_k: int = Field(default=0, ge=0)
    """Number of most likely tokens to sample from; 0 disables it."""
    max_response_tokens: PositiveInt
    """Maximum response length, in tokens. A longer response is truncated."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field(default=(), strict=False)
    """Strings that end a response, in addition to the end-of-sequence tokens; the response includes
    them.
    """

    @property
    def has_filter(self) -> bool:
        """Whether tokens of the model's distribution are excluded."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)

    @field_validator("temperature")
    @classmethod
    def _check_temperature(cls, value: float) -> float:
        if 0 < value < _MIN_TEMPERATURE:
            raise ValueError(
                f"temperature={value:g} is below {_MIN_TEMPERATURE:g}, where SGLang samples "
                "greedily; use 0 or a higher temperature"
            )
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """A request for one response.

    `seed` depends only on run seed, step, prompt id and sample index.
    """

    id: str
    """`<step>:<prompt id>#<sample index>`, for evaluation `eval<step>:<prompt id>#<index>`."""
    prompt_id: str
    token_ids: np.ndarray
    """int32 [prompt]"""
    seed: int
    """63 bits"""
    params: SamplingOptions

    @property
    def is_for_training(self) -> bool:
        return not self.id.startswith("eval")


def check_request(request: SampleRequest, vocab_size: int) -> None:
    """Checks the tokens of a prompt before a server receives them.

    Raises:
        RolloutError: no tokens, or a token outside the vocabulary (it crashes a server).
    """
    ids = request.token_ids
    if not len(ids):
        raise RolloutError(f"request {request.id}: the prompt has no tokens")

    largest = int(ids.max())
    worst = largest if largest >= vocab_size else int(ids.min())
    if not 0 <= worst < vocab_size:
        raise RolloutError(
            f"request {request.id}: prompt token id {worst}, expected 0 to {vocab_size - 1}: "
            "tokenizer and model do not belong together; check model.path"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call of an agent's tool."""

    tool: str
    arguments: str
    """as JSON, cut if it is long"""
    failure: str | None
    """why it has no result"""
    seconds: float
    """from the call to its result, the wait for a free worker included"""
    turn: int
    """number of the policy's turns before it; turns without a message between them count as one"""
    timed_out: bool = False
    """whether a limit of time ended it"""
    cut: bool = False
    """whether its text was longer than `call_chars`"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One response and the weights that sampled it.

    The driver sets `reward`, `label` and `failure`.
    """

    id: str
    prompt_id: str
    token_ids: np.ndarray
    """int32 [prompt + response]"""
    prompt_len: int
    sampler_logprobs: np.ndarray
    """float32 [response], nats, of the model's distribution at the sampling temperature, before
    top_k and top_p.
    """
    spans: tuple[Span, ...]
    stop: Stop
    routes: np.ndarray | None = None
    """int16 [prompt + response - 1, layers, top k], the sampler's experts; None: not recorded"""
    reward: float | None = None
    label: int | None = None
    reward_details: Mapping[str, Any] | None = None
    failure: str | None = None
    """Error of the verifier or of the agent; the sample is dropped and counted."""
    environment: tuple[tuple[int, int], ...] = ()
    """Response tokens [start, end) that the environment wrote, e.g. a tool, in order. They have no
    loss; their `sampler_logprobs` are 0 and mean nothing. The last token is the policy's.
    """
    calls: tuple[ToolCall, ...] = ()
    """Calls of tools, in order"""
    own_reward: float | None = None
    """the number that the agent's `solve` returned; None: it returned nothing"""
    cached_tokens: tuple[int, ...] = ()
    """of each turn, tokens of its request that the server's cache had; empty: not measured"""
    read_tokens: tuple[int, ...] = ()
    """of each turn of an agent, tokens of its request"""
    text: str | None = None
    """the response as text, decoded once: for the verifier and for the rollout file; None: not
    decoded yet
    """

    @property
    def response_ids(self) -> np.ndarray:
        """int32 [response], also tokens of the environment"""
        return self.token_ids[self.prompt_len :]

    @property
    def response_len(self) -> int:
        """Number of response tokens that the policy wrote."""
        return len(self.token_ids) - self.prompt_len - self.environment_len

    @property
    def num_turns(self) -> int:
        """Number of turns of the policy; turns without a message between them count as one."""
        return len(self.environment) + (self.response_len > 0)

    @property
    def environment_len(self) -> int:
        """Number of response tokens that the environment wrote."""
        return sum(end - start for start, end in self.environment)

    @property
    def writers(self) -> np.ndarray:
        """uint8 [prompt + response], the `Writer` of each token."""
        writers = np.full(len(self.token_ids), Writer.POLICY, dtype=np.uint8)
        writers[: self.prompt_len] = Writer.PROMPT
        for start, end in self.environment:
            writers[self.prompt_len + start : self.prompt_len + end] = Writer.ENVIRONMENT
        return writers

    @property
    def policy_logprobs(self) -> np.ndarray:
        """float32 [response_len], `sampler_logprobs` of the policy's tokens."""
        if not self.environment:
            return self.sampler_logprobs
        is_of_policy = self.writers[self.prompt_len :] == Writer.POLICY
        logprobs: np.ndarray = self.sampler_logprobs[is_of_policy]
        return logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All samples of one prompt in one step."""

    prompt_id: str
    samples: tuple[Sample, ...]
