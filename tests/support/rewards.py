"""A reward pool that keeps its verdicts until a test takes them."""

import queue
from collections.abc import Iterator

from pacs_megatron.config.reward_options import AnyReward
from pacs_megatron.contracts import Prompt
from pacs_megatron.errors import RewardError
from pacs_megatron.rewards.pool import RewardPool, Verdict, received


class CollectingPool(RewardPool):
    def __init__(self, options: AnyReward) -> None:
        self._answers: queue.SimpleQueue[Verdict | RewardError] = queue.SimpleQueue()
        self.num_pending = 0
        super().__init__(options)

    def submit(self, key: str, prompt: Prompt, response: str) -> None:  # type: ignore[override]
        super().submit(key, prompt, response, self._answers.put)
        self.num_pending += 1

    def next_finished(self) -> Verdict:
        self.num_pending -= 1
        [verdict] = received(self._answers, 1)
        return verdict

    def results(self) -> Iterator[Verdict]:
        while self.num_pending:
            yield self.next_finished()
