"""`data preview`: prompts, lengths and verified answers of the data sets, as the model and the
verifier receive them.
"""

import importlib
import queue
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pacs_megatron.config import load_config
from pacs_megatron.config.reward_options import AnyReward
from pacs_megatron.config.schema import DataOptions
from pacs_megatron.config.text import local_path
from pacs_megatron.contracts import Prompt
from pacs_megatron.data import PromptSet, load_tokenizer
from pacs_megatron.data.notices import check_dropped, notices, shared_notices
from pacs_megatron.data.sources import find_source
from pacs_megatron.errors import ConversionError, DataError, RewardError, shown
from pacs_megatron.models import load_spec
from pacs_megatron.models.hub import config_folder
from pacs_megatron.rewards.code import NO_PROGRAM
from pacs_megatron.rewards.pool import RewardPool, Verdict, received
from pacs_megatron.rollout.run_prompts import load_benchmarks
from pacs_megatron.rollout.train_data import load_train

_MAX_UNVERIFIED = 10
_NO_LIMIT = 2**31 - 1
"""Context of a model whose config.json is not here, tokens"""


class Unverified(NamedTuple):
    """A gold answer that the reward rejects for its own problem.

    `failed`: the verifier gave no verdict.
    """

    prompt_id: str
    answer: str
    reason: str
    failed: bool


def check_gold(prompts: Sequence[Prompt], reward: AnyReward) -> list[Unverified]:
    """Gold answers that do not verify, in the order of `prompts`: their reward is not 1.

    With `math` also those whose natural spelling (`5` for `The answer is 5`) has no reward of 1,
    and those of which the rules are in doubt.
    """
    natural = {}
    doubts = {}
    if reward.name == "math":
        # Imported here: it needs sympy (0.4 s).
        gold = importlib.import_module("pacs_megatron.rewards.mathematics.gold")
        for prompt in prompts:
            natural[prompt.id] = gold.natural_answer(prompt.answer)
            doubts[prompt.id] = gold.doubt(prompt.answer)

    answers: queue.SimpleQueue[Verdict | RewardError] = queue.SimpleQueue()
    num_submitted = 0
    with RewardPool(reward) as pool:
        for prompt in prompts:
            for kind, text in (("gold", prompt.answer), ("natural", natural.get(prompt.id))):
                if text is None:
                    continue
                response = f"The answer is \\boxed{{{text}}}."
                pool.submit(f"{kind} {prompt.id}", prompt, response, answers.put)
                num_submitted += 1
        verdicts = {verdict.key: verdict for verdict in received(answers, num_submitted)}

    unverified = []
    for prompt in prompts:
        verdict = verdicts[f"gold {prompt.id}"]
        reason = _reason(verdict)
        spelling = natural.get(prompt.id)
        rejects = spelling is not None and verdicts[f"natural {prompt.id}"].reward != 1.0
        if reason is None and rejects:
            reason = f"rejects the natural answer {spelling}"
        reason = reason or doubts.get(prompt.id)
        if reason is not None:
            failed = verdict.failure is not None
            unverified.append(Unverified(prompt.id, prompt.answer, reason, failed))
    return unverified


def _reason(verdict: Verdict) -> str | None:
    """Why the reward of a gold answer is not 1; None if it is, or need not be."""
    if verdict.reward == 1.0:
        return None
    # The answers of `code` are tests: valid ones lack a program only.
    if isinstance(verdict.details, dict) and verdict.details.get("reason") == NO_PROGRAM:
        return None
    return verdict.failure or f"reward {verdict.reward}"


def preview_text(config_path: Path, overrides: Sequence[str], rows: int) -> str:
    """Counts, lengths, rendered prompts and verified gold answers of the training set and each
    benchmark.

    Args:
        config_path: of the run.
        overrides: `key=value` each.
        rows: number of prompts to print for each data set.
    """
    config = load_config(config_path, overrides).config
    datasets = (*config.data.train_sets, *config.evaluation.benchmarks)
    # A missing file is an error before transformers loads.
    for dataset in datasets:
        for path in dataset.paths:
            find_source(path)

    now = datetime.now()
    folder = config_folder(local_path(config.model.path))
    tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
    train = [load_train(config, each, folder, tokenizer, now) for each in config.data.train_sets]
    prompt_sets = [*train, *load_benchmarks(config, _max_context(folder), tokenizer, now)]

    texts = []
    for number, (dataset, prompt_set) in enumerate(zip(datasets, prompt_sets, strict=True)):
        unverified = None
        if config.reward is not None and config.reward.name != "agent":
            unverified = check_gold(prompt_set.prompts, config.reward)
        is_train = number < len(train)
        lines = notices(prompt_set, now, train=() if is_train else train)
        if is_train:
            lines += shared_notices(prompt_set, train[:number])
            lines += _share(config.data, number)
        lines += _error_of_a_run(prompt_set, config.data)
        shown_rows = [_row_lines(prompt_set, each, tokenizer) for each in prompt_set.prompts[:rows]]
        texts.append("\n".join([render(prompt_set, dataset.path, unverified, lines), *shown_rows]))
    return "\n\n".join(texts)


def _share(data: DataOptions, number: int) -> list[str]:
    """The share of a training set in the prompts of a run; empty without a mixture."""
    weights = [dataset.weight for dataset in data.train_sets]
    if len(weights) == 1:
        return []
    return [f"share of the training prompts: {weights[number] / sum(weights):.1%}"]


def _max_context(folder: Path) -> int:
    """The context of the model, tokens."""
    with suppress(ConversionError):  # a preview needs the tokenizer only
        return load_spec(folder).max_context
    return _NO_LIMIT


def _error_of_a_run(prompt_set: PromptSet, data: DataOptions) -> list[str]:
    try:
        check_dropped(prompt_set, data)
    except DataError as error:
        return [f"a run ends with this error: {error}"]
    return []


def render(
    prompt_set: PromptSet,
    path: str,
    unverified: Sequence[Unverified] | None,
    notice_lines: Sequence[str] = (),
) -> str:
    """The properties of one data set as text.

    Args:
        prompt_set: the data set.
        path: as configured.
        unverified: None without a reward.
        notice_lines: properties of the data set.
    """
    lengths = np.array([len(prompt.token_ids) for prompt in prompt_set.prompts])
    demonstrations = prompt_set.demonstrations
    num_too_long = f"{prompt_set.num_too_long} too long"
    if demonstrations is not None:
        num_too_long = (
            f"{prompt_set.num_too_long} prompts and {demonstrations.num_too_long} demonstrations "
            "too long"
        )
    filtered = ""
    if prompt_set.num_filtered:
        filtered = f"; {prompt_set.num_filtered} more are outside `where`"
    lines = [
        f"{prompt_set.name} ({path}): {prompt_set.num_rows} rows, {len(lengths)} kept, "
        f"{num_too_long}{filtered}",
        f"  prompt tokens: {_lengths(lengths)}",
    ]
    if prompt_set.num_too_long:
        lines.append(f"  prompt tokens of all rows: {_lengths(prompt_set.prompt_lens)}")
    if demonstrations is not None:
        lines.append(
            f"  demonstration tokens: {_lengths(demonstrations.lens)}, limit "
            f"{demonstrations.max_tokens}"
        )
    lines.extend(f"  {line}" for line in notice_lines)
    if unverified is not None:
        lines.extend(_unverified_lines(unverified, len(lengths)))
    return "\n".join(lines)


def _row_lines(prompt_set: PromptSet, prompt: Prompt, tokenizer: Any) -> str:
    """A prompt, and the demonstration that is trained after it, as the model reads them."""
    extra = f", extra {shown(prompt.extra, 300)}" if prompt.extra else ""
    lines = [f"  --- {prompt.id}, answer {prompt.answer!r}{extra}"]
    lines.extend(f"  | {line}" for line in prompt.text.splitlines())
    if prompt_set.demonstrations is not None:
        text = tokenizer.decode(prompt_set.demonstrations.token_ids[prompt.id])
        lines.append("  --- its demonstration, which is trained")
        lines.extend(f"  | {line}" for line in text.splitlines())
    return "\n".join(lines)


def _lengths(lengths: np.ndarray) -> str:
    """Minimum, mean, percentiles and maximum of lengths [n], tokens."""
    median = int(np.percentile(lengths, 50))
    percentile_95 = int(np.percentile(lengths, 95))
    return (
        f"min {lengths.min()}, mean {lengths.mean():.1f}, median {median}, 95 % {percentile_95}, "
        f"max {lengths.max()}"
    )


def _unverified_lines(unverified: Sequence[Unverified], num_prompts: int) -> list[str]:
    """The number of verified answers, and the first ones that are not."""
    num_verified = num_prompts - len(unverified)
    lines = [f"  gold answers that verify against themselves: {num_verified} of {num_prompts}"]
    for row in unverified[:_MAX_UNVERIFIED]:
        lines.append(f"    not verified: {row.prompt_id} answer {row.answer!r}: {row.reason}")
    num_more = len(unverified) - _MAX_UNVERIFIED
    if num_more > 0:
        lines.append(f"    and {num_more} more")
    return lines
