"""Shortens a forward-only pass after a stop request on any rank, on every rank from the same micro-batch on.

A rank must not leave Megatron's schedule in the middle: the next stage needs its output, tensor-parallel and expert peers
its collectives. So the schedule runs to its end, with micro-batches of padding, which cost almost nothing.

Concurrency: at the start of micro-batch i every rank starts an asynchronous maximum of its flag over all ranks (gloo) and
reads the result of micro-batch i - lag. The last pipeline stage runs at most pp - 1 micro-batches behind the first, so it
has started that reduction as well and no rank blocks; all ranks read the same value at the same micro-batch.
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
        """`num_polls`: the smallest number of micro-batches of a rank. `lag`: at least the pipeline's size."""
        self._batches = batches
        self._padding = padding
        self._should_stop = should_stop
        self._num_polls = num_polls
        self._lag = lag
        self._group = group
        self._polls: list[tuple[torch.Tensor, dist.Work]] = []
        self._first_skipped: int | None = None

    def iterators(self, num_chunks: int) -> list[Iterator[MicroBatch]]:
        """One iterator per model chunk. The first polls; the others run after it and use its decision."""
        return [self._polling(), *(self._following() for _ in range(num_chunks - 1))]

    def _polling(self) -> Iterator[MicroBatch]:
        for index, batch in enumerate(self._batches):
            if index < self._num_polls:
                self._start_poll()
            polled = index - self._lag
            if self._first_skipped is None and 0 <= polled < self._num_polls and self._is_stop(polled):
                self._first_skipped = index
            yield self._pick(index, batch)

    def _following(self) -> Iterator[MicroBatch]:
        for index, batch in enumerate(self._batches):
            yield self._pick(index, batch)

    def _pick(self, index: int, batch: MicroBatch) -> MicroBatch:
        is_skipped = self._first_skipped is not None and index >= self._first_skipped
        return self._padding if is_skipped else batch

    def _start_poll(self) -> None:
        flag = torch.tensor([int(self._should_stop())])
        work = dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._polls.append((flag, work))

    def _is_stop(self, index: int) -> bool:
        flag, work = self._polls[index]
        work.wait()
        return bool(flag)

    def finish(self) -> None:
        """Call after the schedule. Raises Interrupted on every rank if any rank had a stop request during the pass."""
        stops = [self._is_stop(index) for index in range(len(self._polls))]  # a list: every reduction must complete
        if any(stops):
            raise Interrupted
