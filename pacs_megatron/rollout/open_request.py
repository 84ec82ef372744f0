"""A state machine for the request that rank 0 waits for.

    SAMPLE --`generate` is sent--> IN_RANKS --the ranks' samples arrive--> SAMPLE, for the next step
    SAMPLE --with agents: a round of turns is sent--> IN_RANKS --the turns arrive--> SAMPLE, for the
    next round, and after the last trajectory for the next step
    SAMPLE --the ranks have nothing left to sample--> WAIT
    WAIT --every sample is judged, `refill` adds prompts--> SAMPLE
    WAIT --every sample is judged--> closed, with the response

With SGLang and with demonstrations the ranks sample nothing.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence

from pacs_megatron.rollout.sample_arrays import Reply, requests_to_message, turns_to_message
from pacs_megatron.rollout.step_agents import StepAgents
from pacs_megatron.rollout.step_rollouts import StepRollouts

PROGRESS_INTERVAL_S = 1.0


class OpenRequest:
    """A `rollout` or `evaluate` request, from its arrival to its response."""

    def __init__(
        self,
        number: int,
        rollouts: StepRollouts,
        respond: Callable[[StepRollouts], Reply],
        for_ranks: Sequence[StepRollouts] = (),
        refill: Callable[[StepRollouts], Sequence[StepRollouts] | None] = lambda _rollouts: None,
        agents: StepAgents | None = None,
    ) -> None:
        """Sends nothing; `advance` returns the messages.

        Args:
            number: of the request; its messages repeat it.
            rollouts: the samples that the response needs.
            respond: returns the response after all of `rollouts` are judged.
            for_ranks: what the ranks sample before.
            refill: may add prompts to the judged rollouts; returns the rollouts that the ranks
                sample next, or None.
            agents: run trajectories, whose turns the ranks sample; None: a response is one turn.
        """
        self.number = number
        self.rollouts = rollouts
        self.is_closed = False
        self._respond = respond
        self._refill = refill
        self._agents = agents
        self._playing: StepRollouts | None = None
        """the rollouts whose trajectories are open"""
        self._for_ranks = deque(for_ranks)
        self._in_ranks: StepRollouts | None = None
        self._reported = (0, 0, False)
        self._reported_at = 0.0

    def advance(self) -> Reply | None:
        """The next message to rank 0, or None. Raises the error of the rollouts."""
        if self._in_ranks is not None:
            return None
        if self._agents is not None and (self._playing or self._for_ranks):
            return self._next_turns(self._agents)
        if self._for_ranks:
            self._in_ranks = self._for_ranks.popleft()
            header, arrays = requests_to_message(self._in_ranks.prompts, self._in_ranks.missing)
            return {"kind": "generate", "step": self._in_ranks.step, **header}, arrays
        if not self.rollouts.is_done:
            return self._progress()

        refilled = self._refill(self.rollouts)
        if refilled is not None:
            self._for_ranks.extend(refilled)
            return self.advance()
        self.is_closed = True
        return self._respond(self.rollouts)

    def _next_turns(self, agents: StepAgents) -> Reply | None:
        """The turns of the next round; after the last trajectory continues with the next step."""
        if self._playing is None:
            self._playing = self._for_ranks.popleft()
            agents.begin(self._playing)
        turns = agents.advance()
        if turns is None:
            self._playing = None
            return self.advance()
        if not turns:
            return self._progress()

        self._in_ranks = self._playing
        header, arrays = turns_to_message(turns)
        return {"kind": "generate", "step": self._playing.step, **header}, arrays

    def take_in_ranks(self) -> StepRollouts:
        """The rollouts that the ranks have sampled; `advance` continues after it."""
        assert self._in_ranks is not None
        rollouts = self._in_ranks
        self._in_ranks = None
        return rollouts

    def _progress(self) -> Reply | None:
        """A progress message, at most one per second and only after a change, because each restarts
        rank 0's timeout.
        """
        if time.monotonic() - self._reported_at < PROGRESS_INTERVAL_S:
            return None
        done = len(self.rollouts.judged)
        total = self.rollouts.num_required
        waits_for_rewards = not self.rollouts.missing
        report = (done, total, waits_for_rewards)
        if report == self._reported:
            return None

        self._reported = report
        self._reported_at = time.monotonic()
        header = {
            "kind": "progress",
            "done": done,
            "total": total,
            "waits_for_rewards": waits_for_rewards,
        }
        return header, {}
