"""Statistics of a data set as the model and the verifier will see it.

The caller passes the verifier, because `rewards` is a sibling layer; `evaluation/preview.py` joins the two.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pacs_megatron.config.schema import DataOptions, DatasetOptions
from pacs_megatron.contracts import Prompt
from pacs_megatron.data.prompts import load_prompts

Judge = Callable[[Sequence[tuple[Prompt, str]]], Iterable[tuple[str, float | None, str | None]]]
"""Maps (prompt, response) pairs to (prompt id, reward, failure), in any order."""

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
    dataset: DatasetOptions, data: DataOptions, tokenizer: Any, judge: Judge | None, num_examples: int = 3
) -> PreviewReport:
    """Loads the data set as a run does and judges every gold answer, unless `judge` is None. Raises DataError."""
    found = load_prompts(dataset, data, tokenizer)
    lens = np.asarray([len(prompt.token_ids) for prompt in found.prompts])
    unverified = () if judge is None else _check_gold(found.prompts, judge)
    num_checked = 0 if judge is None else len(found.prompts)
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


def _check_gold(prompts: Sequence[Prompt], judge: Judge) -> tuple[Unverified, ...]:
    """Gold answers without a reward of 1, in the order of `prompts`."""
    pairs = [(prompt, GOLD_RESPONSE.format(answer=prompt.answer)) for prompt in prompts]
    reasons: dict[str, tuple[str, bool]] = {}
    for prompt_id, reward, failure in judge(pairs):
        if reward != 1.0:
            reasons[prompt_id] = (failure, True) if failure is not None else (f"reward {reward}", False)
    return tuple(
        Unverified(prompt_id=prompt.id, answer=prompt.answer, reason=reason, failed=failed)
        for prompt in prompts
        if prompt.id in reasons
        for reason, failed in [reasons[prompt.id]]
    )
