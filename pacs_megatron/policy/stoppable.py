"""A forward-only pass that a stop request on any rank ends early, on every rank at the same
micro-batch.
"""

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

    A stop request on any rank replaces the rest by padding on every rank.

    Collective: every rank iterates, then calls `finish`. A rank must not leave Megatron's schedule
    early, because its peers wait for its output. So the schedule continues with padding
    micro-batches, which cost almost nothing.

    Concurrency: at micro-batch i every rank starts an asynchronous maximum of its flag over all
    ranks (gloo) and reads the result of micro-batch i - lag. The last pipeline stage is at most pp
    - 1 micro-batches behind, so no rank blocks.
    """

    batches: Sequence[MicroBatch]
    padding: MicroBatch
    should_stop: StopTest
    num_polls: int  # the smallest number of micro-batches of a rank
    lag: int  # at least pp
    group: dist.ProcessGroup
    _polls: list[tuple[Tensor, dist.Work]] = field(default_factory=list, init=False)
    _first_skipped: float = field(default=math.inf, init=False)

    def iterate(self, *, polls: bool) -> Iterator[MicroBatch]:
        """Yields the micro-batches of a chunk.

        The first chunk polls; the others run later and use its decision.
        """
        for index, batch in enumerate(self.batches):
            if polls and index < self.num_polls:
                flag = torch.tensor([int(self.should_stop())])
                work = dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.group, async_op=True)
                self._polls.append((flag, work))
            polled = index - self.lag
            if (
                polls
                and index < self._first_skipped
                and 0 <= polled < self.num_polls
                and self._is_stop(polled)
            ):
                self._first_skipped = index
            yield self.padding if index >= self._first_skipped else batch

    def _is_stop(self, index: int) -> bool:
        flag, work = self._polls[index]
        work.wait()
        return bool(flag)

    def finish(self) -> None:
        """Raises Interrupted on every rank if any rank had a stop request during the pass.

        Call after the schedule.
        """
        stops = [
            self._is_stop(index) for index in range(len(self._polls))
        ]  # a list: every reduction must complete
        if any(stops):
            raise Interrupted
