"""A state machine for the request that rank 0 waits for.

    SAMPLE --`generate` is sent--> IN_RANKS --the ranks' samples arrive--> SAMPLE, for the next step
    ahead
    SAMPLE --the ranks have nothing left to sample--> WAIT --every sample is judged--> closed, with
    the response

With SGLang and with demonstrations the ranks sample nothing.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence

from pacs_megatron.rollout.sample_arrays import Message, requests_to_message
from pacs_megatron.rollout.step_rollouts import StepRollouts

PROGRESS_INTERVAL_S = 1.0


class OpenRequest:
    """A `rollout` or `evaluate` request, from its arrival to its response."""

    def __init__(
        self,
        number: int,
        rollouts: StepRollouts,
        respond: Callable[[StepRollouts], Message],
        for_ranks: Sequence[StepRollouts] = (),
        refill: Callable[[StepRollouts], Sequence[StepRollouts] | None] = lambda _rollouts: None,
    ) -> None:
        """`respond` returns the response after all of `rollouts` are judged.

        The ranks sample `for_ranks` before.

        `refill` may add prompts to the judged rollouts. It returns the rollouts that the ranks
        sample next, or None.
        """
        self.number = number
        self.rollouts = rollouts
        self.is_closed = False
        self._respond = respond
        self._refill = refill
        self._for_ranks = deque(for_ranks)
        self._in_ranks: StepRollouts | None = None
        self._reported = (0, 0, False)
        self._reported_at = 0.0

    def advance(self) -> Message | None:
        """The next message to rank 0, or None. Raises the error of the rollouts."""
        if self._in_ranks is not None:
            return None
        if self._for_ranks:
            self._in_ranks = self._for_ranks.popleft()
            header, arrays = requests_to_message(self._in_ranks.prompts, self._in_ranks.missing)
            return {"kind": "generate", "step": self._in_ranks.step, **header}, arrays
        if self.rollouts.is_done:
            if (more := self._refill(self.rollouts)) is not None:
                self._for_ranks.extend(more)
                return self.advance()
            self.is_closed = True
            return self._respond(self.rollouts)
        return self._progress()

    def take_in_ranks(self) -> StepRollouts:
        assert self._in_ranks is not None
        rollouts = self._in_ranks
        self._in_ranks = None
        return rollouts

    def _progress(self) -> Message | None:
        """A progress message, at most one per second and only after a change, because each restarts
        rank 0's timeout.
        """
        if time.monotonic() - self._reported_at < PROGRESS_INTERVAL_S:
            return None
        report = (len(self.rollouts.judged), self.rollouts.num_wanted, not self.rollouts.missing)
        if report == self._reported:
            return None
        self._reported = report
        self._reported_at = time.monotonic()
        return {
            "kind": "progress",
            **dict(zip(("done", "total", "waits_for_rewards"), report, strict=True)),
        }, {}
