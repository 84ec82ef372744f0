"""The trajectories of a step with the embedded engine: agents, the ranks and the rollout buffer.

The driver's main thread uses it. The ranks sample one round of turns after the other; a finished
trajectory goes to the buffer at once, and so to its verifier.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress

from pacs_megatron.contracts import Sample, SampleRequest
from pacs_megatron.errors import PacsError
from pacs_megatron.rollout.agent_rounds import AgentRounds
from pacs_megatron.rollout.step_rollouts import StepRollouts
from pacs_megatron.runtime.closing import Closing


class StepAgents(Closing):
    """Plays one step, or one evaluation, at a time. It must be closed."""

    def __init__(
        self, rounds: AgentRounds, arrived: Callable[[StepRollouts, Sequence[Sample]], None]
    ) -> None:
        """Plays nothing.

        Args:
            rounds: of the agents; `close` closes them.
            arrived: takes finished trajectories of a step, with or without `failure`.
        """
        self._rounds = rounds
        self._arrived = arrived
        self._rollouts: StepRollouts | None = None

    def begin(self, rollouts: StepRollouts) -> None:
        """Starts a trajectory for each missing sample."""
        self._rollouts = rollouts
        self._rounds.begin(rollouts.missing, rollouts.by_id)

    def advance(self) -> list[SampleRequest] | None:
        """Passes finished trajectories on; returns the turns that the ranks sample next.

        Returns:
            Empty while an agent or a tool works. None: every trajectory is finished.

        Raises:
            PacsError: the error that ended the agents, or of `arrived`.
        """
        turns = self._pass_on()
        if self._rounds.is_done:
            self._rollouts = None
            return None
        return turns

    def deliver(self, turns: Sequence[Sample]) -> None:
        """The turns that the ranks have sampled."""
        self._rounds.deliver(turns)

    def abandon(self) -> None:
        """Ends the open trajectories, which start again from their problems later. The finished
        ones stay.
        """
        if self._rollouts is not None:
            with suppress(PacsError):  # the next request raises it
                self._pass_on()
            self._rollouts = None
        self._rounds.abandon()

    def close(self) -> None:
        self._rounds.close()

    def _pass_on(self) -> list[SampleRequest]:
        """Passes finished trajectories on; returns the turns of the next round."""
        finished, turns = self._rounds.take()
        assert self._rollouts is not None
        self._arrived(self._rollouts, finished)
        return turns
