"""`data preview`: statistics of a data set as the model and the verifier will see it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pacs_megatron.config.schema import DataOptions, DatasetOptions
from pacs_megatron.contracts import Prompt
from pacs_megatron.data.prompts import load_prompts
from pacs_megatron.rewards.code import NO_PROGRAM
from pacs_megatron.rewards.pool import RewardPool
from pacs_megatron.rewards.registry import AnyReward

GOLD_RESPONSE = "The answer is \\boxed{{{answer}}}."


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStats:
    """Prompt lengths of the kept prompts, in tokens."""

    min: int
    mean: float
    p50: int
    p95: int
    max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Unverified:
    """A gold answer that the reward rejects for its own problem."""

    prompt_id: str
    answer: str
    reason: str
    failed: bool
    """No verdict: the verifier raised, returned no number, or exceeded its time limit"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviewReport:
    """num_rows == num_kept + num_too_long; the reward accepts num_verified of num_checked gold answers."""

    name: str
    path: str
    num_rows: int
    num_kept: int
    num_too_long: int
    num_duplicates: int
    tokens: TokenStats
    examples: tuple[Prompt, ...]
    num_checked: int
    num_verified: int
    unverified: tuple[Unverified, ...]


def preview(
    dataset: DatasetOptions, data: DataOptions, tokenizer: Any, reward: AnyReward | None, num_examples: int = 3
) -> PreviewReport:
    """Loads the data set as a run does. The reward's workers judge every gold answer, unless `reward` is None.

    Raises DataError for bad data, ConfigError for a reward that cannot be built.
    """
    found = load_prompts(dataset, data, tokenizer)
    lens = np.asarray([len(prompt.token_ids) for prompt in found.prompts])
    unverified = () if reward is None else _check_gold(found.prompts, reward)
    num_checked = 0 if reward is None else len(found.prompts)
    return PreviewReport(
        name=found.name,
        path=dataset.path,
        num_rows=found.num_rows,
        num_kept=len(found.prompts),
        num_too_long=found.num_too_long,
        num_duplicates=found.num_duplicates,
        tokens=TokenStats(
            min=int(lens.min()),
            mean=float(lens.mean()),
            p50=int(np.percentile(lens, 50)),
            p95=int(np.percentile(lens, 95)),
            max=int(lens.max()),
        ),
        examples=found.prompts[:num_examples],
        num_checked=num_checked,
        num_verified=num_checked - len(unverified),
        unverified=unverified,
    )


def _check_gold(prompts: Sequence[Prompt], reward: AnyReward) -> tuple[Unverified, ...]:
    """Gold answers without a reward of 1, in the order of `prompts`."""
    with RewardPool(reward) as pool:
        for prompt in prompts:
            pool.submit(prompt.id, prompt, GOLD_RESPONSE.format(answer=prompt.answer))
        verdicts = {verdict.key: verdict for verdict in pool.results()}
    return tuple(
        Unverified(
            prompt_id=prompt.id,
            answer=prompt.answer,
            reason=verdict.failure or f"reward {verdict.reward}",
            failed=verdict.failure is not None,
        )
        for prompt in prompts
        # The answers of `code` are tests: valid ones lack a program only.
        if (verdict := verdicts[prompt.id]).reward != 1.0 and (verdict.details or {}).get("reason") != NO_PROGRAM
    )
