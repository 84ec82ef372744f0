"""Errors in a resume: moments, schedule, reference, and a step that is continued."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from pacs_megatron.observability.metrics import MetricSums
from tests.support.policies.injected_errors.injection import (
    DECAY,
    DISTILL,
    FROZEN,
    PPO,
    TRAINING,
    InjectedError,
    after_resume,
    after_resume_of,
)


def _states(run: Any) -> list[Any]:
    """Adam's state of each parameter."""
    states: list[Any] = []
    for part in run.policy.optimizer.optimizers():
        states.extend(part.optimizer.state.values())
    return states


def _reset_moments(run: Any) -> None:
    run.policy.optimizer.reset_moments()


def _reset_moments_of_critic(run: Any) -> None:
    run.critic.optimizer.reset_moments()


def _forget_second_moments(run: Any) -> None:
    for state in _states(run):
        state["exp_avg_sq"].zero_()


def _roll_first_moments(run: Any) -> None:
    for state in _states(run):
        state["exp_avg"].copy_(state["exp_avg"].roll(1, 0))


def _restart_bias_correction(run: Any) -> None:
    run.policy.optimizer.set_adam_step(0)


def _restart_schedule(run: Any) -> None:
    run.policy.optimizer.schedule.num_steps = 0


def _take_reference(run: Any) -> None:
    run.policy.take_reference(reset_optimizer=False)


def _replace_reference(run: Any) -> None:
    if run.policy.reference is not None:
        run.policy.take_reference(reset_optimizer=False)


def _round_weights(run: Any) -> None:
    for chunk in run.policy.chunks:
        for parameter in chunk.parameters():
            parameter.data.copy_(parameter.data.bfloat16())


def _open_step(action: Callable[[Any], None]) -> InjectedError:
    """`action(step)` changes a restored open step."""

    def changed(original: Any, cls: Any, *args: Any) -> Any:
        step = original(cls, *args)
        action(step)
        return step

    return InjectedError(target=f"{TRAINING}.progress.OpenStep.from_record", change=changed)


def _forget_metrics(step: Any) -> None:
    step.sums = MetricSums()


def _forget_logprobs(step: Any) -> None:
    step.logprobs = None


def _reverse_logprobs(step: Any) -> None:
    for of_minibatch in step.logprobs:
        for name, column in of_minibatch.columns.items():
            pieces = [column[start:stop].flip(0) for start, stop in pairwise(of_minibatch.offsets)]
            of_minibatch.columns[name] = torch.cat(pieces)


def _forget_counts(step: Any) -> None:
    step.sums.sums = {name: replace(item, count=1.0) for name, item in step.sums.sums.items()}


RESUME_ERRORS: dict[str, InjectedError] = {
    "moments are not restored": after_resume(_reset_moments),
    "second moments are not restored": after_resume(_forget_second_moments),
    "first moments are restored one row late": after_resume(_roll_first_moments),
    "the moments of the critic are not restored": after_resume_of(PPO, _reset_moments_of_critic),
    "the bias correction starts again": after_resume(_restart_bias_correction),
    "the schedule starts again": after_resume_of(DECAY, _restart_schedule),
    "the reference is not restored": after_resume_of(FROZEN, _take_reference),
    "the teacher is not restored": after_resume_of(DISTILL, _take_reference),
    "the reference is the present policy after a resume": after_resume_of(
        {"objective": {"name": "pacs", "reference": "frozen"}}, _replace_reference
    ),
    "resumed weights are rounded": after_resume(_round_weights),
    "metrics of an interrupted step are lost": _open_step(_forget_metrics),
    "counts of an open step's metrics are lost": _open_step(_forget_counts),
    "log-probs of an interrupted step are computed again": _open_step(_forget_logprobs),
    "log-probs of an open step are restored backwards": _open_step(_reverse_logprobs),
}
