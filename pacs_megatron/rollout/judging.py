"""Judges samples while sampling continues: the verdict of the reward pool becomes the reward and
the label of a sample.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pacs_megatron.config.reward_options import AnyReward
from pacs_megatron.config.schema import Truncated
from pacs_megatron.contracts import Prompt, Sample, Stop
from pacs_megatron.contracts.conversation import Turn, response_text, turns_of
from pacs_megatron.contracts.samples import AGENT_FAILURE
from pacs_megatron.errors import RewardError
from pacs_megatron.rewards.labels import check_failures, label_of
from pacs_megatron.rewards.pool import RewardPool, Verdict
from pacs_megatron.runtime.closing import Closing

Judged = Callable[[Sample | RewardError], None]
"""Called in a thread of the pool with the judged sample, or with the error that prevented a
verdict.
"""


class Judge(Closing):
    """A reward pool for samples; with `reward.name: agent` the agents have judged them."""

    def __init__(
        self, options: AnyReward, decode: Callable[[np.ndarray], str], *, truncated: Truncated
    ) -> None:
        """Starts the pool. Raises ConfigError or RewardError.

        Args:
            options: the reward.
            decode: turns response ids into the verifier's text; must be thread-safe.
            truncated: `admission.truncated`; with "judge" the verdict is the label of a truncated
                response, otherwise 0.
        """
        self._is_agents = options.name == "agent"
        self._pool = None if self._is_agents else RewardPool(options)
        self._options = options
        self._decode = decode
        self._truncated = truncated

    def submit(
        self, sample: Sample, prompt: Prompt, done: Judged, turns: Sequence[Turn] = ()
    ) -> None:
        """Submits `sample` and returns; `done` is called later, with the sample and its text. With
        the agent's own reward it is called at once.

        Args:
            sample: to judge.
            prompt: of the sample.
            done: called in a thread of the pool, or in this one.
            turns: of an agent whose sample has no tokens; empty: those of its tokens.

        Raises:
            RewardError: the pool has ended.
        """
        text = response_text(sample, self._decode)
        if not turns and (sample.environment or sample.calls):
            turns = turns_of(sample, self._decode)
        decoded = replace(sample, text=text)

        def deliver(verdict: Verdict | RewardError) -> None:
            done(self._apply(decoded, verdict))

        own = self._own_verdict(sample)
        if own is not None:
            deliver(own)
        elif self._pool is not None:
            self._pool.submit(sample.id, prompt, text, deliver, turns)

    def check(self, judged: list[Sample]) -> None:
        """Raises RewardError if more than the configured share of these samples could not be
        judged.
        """
        failures = [sample.failure for sample in judged if sample.failure is not None]
        check_failures(failures, len(judged), self._options.max_failure_frac)

    def close(self) -> None:
        """Ends the pool.

        Delivers the verdicts that exist and a RewardError for every pending sample before it
        returns.
        """
        if self._pool is not None:
            self._pool.close()

    def _own_verdict(self, sample: Sample) -> Verdict | None:
        """The verdict of the sample's agent; None if the reward pool judges.

        A truncated trajectory, whose agent has returned nothing, has reward 0.
        """
        reward = sample.own_reward
        if self._is_agents and reward is None and sample.stop is Stop.LENGTH:
            reward = 0.0
        if self._is_agents and reward is None:
            reason = "solve returned None, expected a number: reward.name=agent"
            return Verdict(sample.id, None, f"{AGENT_FAILURE}{reason}")
        if not self._is_agents and reward is not None:
            reason = f"solve returned a number, but reward.name={self._options.name} judges; return"
            return Verdict(sample.id, None, f"{AGENT_FAILURE}{reason} None, or use `agent`")
        return Verdict(sample.id, reward, None) if self._is_agents else None

    def _apply(self, sample: Sample, verdict: Verdict | RewardError) -> Sample | RewardError:
        if isinstance(verdict, RewardError):
            return verdict
        if verdict.reward is None:
            return replace(sample, failure=verdict.failure)
        try:
            label = label_of(verdict.reward, self._options.label_threshold)
        except RewardError as error:
            return RewardError(f"sample {sample.id}: {error}")
        return label_sample(
            sample,
            verdict.reward,
            label,
            judge_truncated=self._truncated == "judge",
            details=verdict.details,
        )


def label_sample(
    sample: Sample, reward: float, label: int, *, judge_truncated: bool = False, details: Any = None
) -> Sample:
    """`sample` with its verdict.

    A truncated response has label 0 for any reward, unless `judge_truncated`.
    """
    if sample.stop is Stop.LENGTH and not judge_truncated:
        label = 0
    return replace(sample, reward=reward, label=label, reward_details=details)
