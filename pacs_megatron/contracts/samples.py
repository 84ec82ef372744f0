"""Prompts and what was sampled for them."""

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np


class Stop(StrEnum):
    """Why a response ended."""

    EOS = "eos"
    LENGTH = "length"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One problem, rendered and tokenized. `id` is stable over runs: `<dataset name>/<row index>`."""

    id: str
    text: str
    """The chat template's output, what the model sees."""
    token_ids: np.ndarray
    """int32 [prompt]"""
    answer: str
    """The gold answer, as the reward reads it."""
    problem: str
    """The raw problem text."""
    solution: str | None = None
    """A demonstration (used by `sft`)."""
    source: str = ""
    """Data set name, for metrics by source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Response tokens [start, end) were sampled from weights `version` whose digest is `digest`."""

    version: int
    digest: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample. `top_k = 0` and `top_p = 1.0` switch the filters off; `temperature = 0` is greedy."""

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    stop: tuple[str, ...] = ()
    """Strings that end a response (kept in it), besides the tokenizer's end-of-sequence tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """Ask for one response. `seed` is a function of (run seed, step, prompt id, sample index) only."""

    id: str
    """Sample id: `<step>:<prompt id>#<sample index>`, for evaluation `eval<step>:<prompt id>#<index>`."""
    prompt_id: str
    token_ids: np.ndarray
    """int32 [prompt]"""
    seed: int
    """63-bit seed of this sample's generator."""
    params: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One response with its provenance. `reward`, `label` and `failure` are filled in by the driver."""

    id: str
    prompt_id: str
    token_ids: np.ndarray
    """int32 [prompt + response]"""
    prompt_len: int
    sampler_logprobs: np.ndarray
    """float32 [response], nats, under the distribution sampled from (after temperature and filters off)."""
    spans: tuple[Span, ...]
    stop: Stop
    reward: float | None = None
    label: int | None = None
    failure: str | None = None
    """Why the verifier could not judge this sample; such a sample is dropped and counted."""

    @property
    def response_ids(self) -> np.ndarray:
        """int32 [response]"""
        return self.token_ids[self.prompt_len :]

    @property
    def response_len(self) -> int:
        return len(self.token_ids) - self.prompt_len


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All samples of one prompt in one step."""

    prompt_id: str
    samples: tuple[Sample, ...]
    meta: dict[str, str] = field(default_factory=dict)
