"""A forward-only pass that a stop request ends early, on every rank at the same micro-batch."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from pacs_megatron.contracts import Interrupted
from pacs_megatron.policy.microbatch import MicroBatch

StopTest = Callable[[], bool]


@dataclass(kw_only=True, eq=False)
class StoppablePass:
    """The micro-batches of one forward-only pass.

    After a stop request on any rank, every rank replaces its remaining micro-batches by padding.

    Collective: every rank iterates, then calls `finish`. A rank must not leave Megatron's schedule
    early, because its peers wait for its output. So the schedule continues with padding
    micro-batches, which cost almost nothing.

    Concurrency: at micro-batch i every rank starts an asynchronous maximum of its flag over all
    ranks (gloo) and reads the result of micro-batch i - lag. The last pipeline stage is at most
    pp - 1 micro-batches behind, so no rank blocks.
    """

    batches: Sequence[MicroBatch]
    padding: MicroBatch
    should_stop: StopTest
    num_polls: int
    """the smallest number of micro-batches of a rank"""
    lag: int
    """number of micro-batches between a poll and the use of its result, at least pp"""
    group: dist.ProcessGroup
    """gloo group of all ranks"""
    _polls: list[tuple[Tensor, dist.Work]] = field(default_factory=list, init=False)
    """the reduced flag, int64 [1], and the reduction that fills it, of each poll so far"""
    _first_skipped: float = field(default=math.inf, init=False)
    """index of the first micro-batch that is replaced by padding"""

    def iterate(self, *, polls: bool) -> Iterator[MicroBatch]:
        """Yields the micro-batches of a chunk.

        Args:
            polls: True for the first chunk; the others run later and use its decision.
        """
        for index, batch in enumerate(self.batches):
            if polls:
                if index < self.num_polls:
                    self._start_poll()
                if index < self._first_skipped and self._is_stopped(index - self.lag):
                    self._first_skipped = index
            yield self.padding if index >= self._first_skipped else batch

    def _start_poll(self) -> None:
        flag = torch.tensor([int(self.should_stop())])
        work = dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.group, async_op=True)
        self._polls.append((flag, work))

    def _is_stopped(self, poll: int) -> bool:
        """Whether poll number `poll` exists and reports a stop request. Waits for its reduction."""
        if not 0 <= poll < self.num_polls:
            return False
        flag, work = self._polls[poll]
        work.wait()
        return bool(flag)

    def finish(self) -> None:
        """Waits for all polls, after the schedule.

        Raises:
            Interrupted: on every rank, if any rank had a stop request during the pass.
        """
        # A list, not a generator: `any` stops early, but every reduction must complete.
        stops = [self._is_stopped(poll) for poll in range(len(self._polls))]
        if any(stops):
            raise Interrupted
