"""The trainer's own step and weight update on fake CUDA, with all ranks of a small world."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pacs_megatron.contracts import Interrupted, SampleFacts, TokenBuffers
from pacs_megatron.objectives.shared.base import Objective
from pacs_megatron.observability.spans import Timer
from pacs_megatron.parallel.control import ControlChannel
from pacs_megatron.parallel.groups import Rank
from pacs_megatron.policy.critic import Critic
from pacs_megatron.policy.engine import MegatronPolicy
from pacs_megatron.rollout.collect import StepSamples
from pacs_megatron.training.context import RunContext
from pacs_megatron.training.progress import RunProgress
from pacs_megatron.training.step import train_step
from pacs_megatron.training.sync import sync
from pacs_megatron.workbench.trace.mode import FakeCuda
from pacs_megatron.workbench.trace.rank import TraceRequest


class _Rollouts:
    """Samples that exist already."""

    def __init__(self, samples: StepSamples) -> None:
        self._samples = samples

    def collect(self, _step: int) -> StepSamples:
        return self._samples


class _Stop:
    """A stop request that one rank has from its n-th poll on."""

    def __init__(self, first_poll: int | None) -> None:
        self._first_poll = first_poll
        self._polls = 0

    def is_set(self) -> bool:
        self._polls += 1
        return self._first_poll is not None and self._polls > self._first_poll


class _Driver:
    """Has no servers, so no server gets the weights of a sync."""

    def call(self, _request: dict[str, Any]) -> tuple[dict[str, Any], None]:
        return {"servers": []}, None


def run_whole_step(  # noqa: PLR0913  (keyword-only)
    *,
    request: TraceRequest,
    config: Any,
    rank: Rank,
    models: Sequence[MegatronPolicy],
    objective: Objective,
    samples: tuple[SampleFacts, TokenBuffers],
    mode: FakeCuda,
) -> str:
    """Runs `train_step` and `sync`. Collective over the ranks of the world.

    Args:
        request: which rank gets a stop request, and when.
        config: of the run.
        rank: this rank.
        models: the policy, and the critic if there is one.
        objective: of the run.
        samples: of the step.
        mode: gets the phases of the step.

    Returns:
        `stopped` after a stop request, otherwise `trained`.
    """
    facts, tokens = samples
    timer = Timer()
    timer.on_change(lambda names: mode.start_phase("/".join(("step", *names))))
    unused: Any = None
    driver: Any = _Driver() if rank.rank == 0 else None
    rollouts: Any = _Rollouts(StepSamples(facts, tokens if rank.rank == 0 else None, {}))
    stop: Any = _Stop(request.stop_at_poll if rank.rank == request.stop_rank else None)
    critic = models[1] if len(models) > 1 else None
    assert critic is None or isinstance(critic, Critic)
    run = RunContext(
        config=config,
        run_dir=Path(),
        model_dir=Path(),
        rank=rank,
        channel=ControlChannel(rank),
        policy=models[0],
        objective=objective,
        rollouts=rollouts,
        driver=driver,
        engine=None,
        server_sync=None,
        timer=timer,
        saver=unused,
        stop=stop,
        critic=critic,
    )
    if run.has_reference and run.policy.reference is None:
        run.policy.take_reference(reset_optimizer=False, is_start=True)
    try:
        train_step(run, RunProgress())
    except Interrupted:
        return "stopped"
    sync(run, 1)
    return "trained"
