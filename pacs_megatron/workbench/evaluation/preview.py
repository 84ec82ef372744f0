"""`data preview`: prompts, lengths and verified answers of the data sets, as the model and the
verifier receive them.
"""

import queue
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pacs_megatron.config import load_config
from pacs_megatron.config.reward_options import AnyReward
from pacs_megatron.contracts import Prompt
from pacs_megatron.data import PromptSet, load_prompts, load_tokenizer
from pacs_megatron.data.sources import find_source
from pacs_megatron.errors import RewardError
from pacs_megatron.rewards.code import NO_PROGRAM
from pacs_megatron.rewards.pool import RewardPool, Verdict, received

_MAX_UNVERIFIED = 10


class Unverified(NamedTuple):
    """A gold answer that the reward rejects for its own problem.

    `failed`: the verifier gave no verdict.
    """

    prompt_id: str
    answer: str
    reason: str
    failed: bool


def check_gold(prompts: Sequence[Prompt], reward: AnyReward) -> list[Unverified]:
    """Gold answers whose reward is not 1, in the order of `prompts`."""
    answers: queue.SimpleQueue[Verdict | RewardError] = queue.SimpleQueue()
    with RewardPool(reward) as pool:
        for prompt in prompts:
            pool.submit(
                prompt.id, prompt, f"The answer is \\boxed{{{prompt.answer}}}.", answers.put
            )
        verdicts = {verdict.key: verdict for verdict in received(answers, len(prompts))}
    return [
        Unverified(
            prompt.id,
            prompt.answer,
            verdict.failure or f"reward {verdict.reward}",
            verdict.failure is not None,
        )
        for prompt in prompts
        # The answers of `code` are tests: valid ones lack a program only.
        if (verdict := verdicts[prompt.id]).reward != 1.0
        and (verdict.details or {}).get("reason") != NO_PROGRAM
    ]


def preview_text(config_path: Path, overrides: Sequence[str], rows: int) -> str:
    """Counts, lengths, rendered prompts and verified gold answers of the training set and each
    benchmark.
    """
    config = load_config(config_path, overrides).config
    datasets = (config.data.train, *config.evaluation.benchmarks)
    for dataset in datasets:
        find_source(dataset)  # before transformers loads
    tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
    texts = []
    for dataset in datasets:
        found = load_prompts(dataset, config.data, tokenizer)
        unverified = None if config.reward is None else check_gold(found.prompts, config.reward)
        texts.append(render(found, dataset.path, unverified, rows))
    return "\n\n".join(texts)


def render(found: PromptSet, path: str, unverified: Sequence[Unverified] | None, rows: int) -> str:
    """One data set as text, with its first `rows` prompts; `unverified` is None without a reward."""
    lens = np.array([len(prompt.token_ids) for prompt in found.prompts])
    median, most = (int(np.percentile(lens, share)) for share in (50, 95))
    lines = [
        f"{found.name} ({path}): {found.num_rows} rows, {len(lens)} kept, {found.num_too_long} "
        "too long",
        f"  prompt tokens: min {lens.min()}, mean {lens.mean():.1f}, median {median}, 95 % "
        f"{most}, max {lens.max()}",
    ]
    if unverified is not None:
        lines.append(
            f"  gold answers that verify against themselves: {len(lens) - len(unverified)} of "
            f"{len(lens)}"
        )
        for row in unverified[:_MAX_UNVERIFIED]:
            lines.append(f"    not verified: {row.prompt_id} answer {row.answer!r}: {row.reason}")
        if (more := len(unverified) - _MAX_UNVERIFIED) > 0:
            lines.append(f"    and {more} more")
    for prompt in found.prompts[:rows]:
        lines.append(f"  --- {prompt.id}, answer {prompt.answer!r}")
        lines.extend(f"  | {line}" for line in prompt.text.splitlines())
    return "\n".join(lines)
