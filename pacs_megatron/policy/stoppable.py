"""Ends a forward-only pass early when any rank was asked to stop, on every rank after the same micro-batch.

A rank must not leave Megatron's schedule in the middle: the next stage waits for its output, tensor-parallel and expert
peers for its collectives. So the pass goes on to its end, but with micro-batches of padding, which cost next to nothing.

Concurrency: at the start of micro-batch i every rank begins a sum of its flag over all ranks (gloo, not waited for) and
reads the sum of micro-batch i - lag. By then the last pipeline stage has begun its sum too, since it runs at most pp - 1
micro-batches behind the first, so nobody waits; and all ranks read the same number at the same micro-batch.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from pacs_megatron.contracts import Interrupted
from pacs_megatron.policy.microbatch import MicroBatch

StopTest = Callable[[], bool]


class StoppablePass:
    """The micro-batches of one forward-only pass. Collective: every rank iterates, then calls `finish`."""

    def __init__(
        self,
        batches: Sequence[MicroBatch],
        padding: MicroBatch,
        should_stop: StopTest,
        *,
        num_polls: int,
        lag: int,
        group: dist.ProcessGroup,
    ) -> None:
        """`num_polls`: micro-batches that every rank has at least. `lag`: at least the pipeline's size."""
        self._batches = batches
        self._padding = padding
        self._should_stop = should_stop
        self._num_polls = num_polls
        self._lag = lag
        self._group = group
        self._polls: list[tuple[torch.Tensor, dist.Work]] = []
        self._first_skipped: int | None = None

    def iterators(self, num_chunks: int) -> list[Iterator[MicroBatch]]:
        """One a model chunk; the first chunk's asks, the others see each micro-batch after it and follow."""
        return [self._asking(), *(self._following() for _ in range(num_chunks - 1))]

    def _asking(self) -> Iterator[MicroBatch]:
        for index, batch in enumerate(self._batches):
            if index < self._num_polls:
                self._begin_poll()
            asked = index - self._lag
            if self._first_skipped is None and 0 <= asked < self._num_polls and self._is_stop(asked):
                self._first_skipped = index
            yield self._pick(index, batch)

    def _following(self) -> Iterator[MicroBatch]:
        for index, batch in enumerate(self._batches):
            yield self._pick(index, batch)

    def _pick(self, index: int, batch: MicroBatch) -> MicroBatch:
        is_skipped = self._first_skipped is not None and index >= self._first_skipped
        return self._padding if is_skipped else batch

    def _begin_poll(self) -> None:
        flag = torch.tensor([int(self._should_stop())])
        work = dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._polls.append((flag, work))

    def _is_stop(self, index: int) -> bool:
        flag, work = self._polls[index]
        work.wait()
        return bool(flag)

    def finish(self) -> None:
        """After the schedule. Raises Interrupted on every rank if any rank was asked to stop during the pass."""
        answers = [self._is_stop(index) for index in range(len(self._polls))]
        if any(answers):
            raise Interrupted
