"""`data preview`: a data set with the reward that will judge it."""

from collections.abc import Iterator, Sequence
from typing import Any

from pacs_megatron.config.schema import DataOptions, DatasetOptions
from pacs_megatron.contracts import Prompt
from pacs_megatron.data.preview import PreviewReport, preview
from pacs_megatron.rewards.pool import RewardPool
from pacs_megatron.rewards.registry import AnyReward


def preview_with_reward(
    dataset: DatasetOptions, data: DataOptions, tokenizer: Any, reward: AnyReward | None, num_examples: int = 3
) -> PreviewReport:
    """The preview. The reward's worker processes judge every gold answer, unless `reward` is None.

    Raises DataError for bad data, ConfigError for a reward that cannot be built.
    """
    if reward is None:
        return preview(dataset, data, tokenizer, None, num_examples)
    with RewardPool(reward) as pool:

        def judge(pairs: Sequence[tuple[Prompt, str]]) -> Iterator[tuple[str, float | None, str | None]]:
            for prompt, response in pairs:
                pool.submit(prompt.id, prompt, response)
            yield from pool.results()

        return preview(dataset, data, tokenizer, judge, num_examples)
