"""The phases of a training step, with their timers."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pacs_megatron.contracts import Interrupted, MiniBatch, UpdateReport
from pacs_megatron.objectives.pacs import Pacs
from pacs_megatron.objectives.ppo import PpoOptions
from pacs_megatron.objectives.registry import passes_of
from pacs_megatron.policy.critic import critic_report
from pacs_megatron.rollout.collect import StepSamples
from pacs_megatron.training.context import RunContext
from pacs_megatron.training.distribute import cut_step
from pacs_megatron.training.progress import Logprobs

NOISE_GROUPS = 4


def collect(run: RunContext, step: int) -> StepSamples:
    """The admitted samples of `step`. Raises Interrupted."""
    with run.timer.span("rollout"):
        samples = run.rollouts.collect(step)
    samples.metrics["admission/num_samples"] = float(samples.facts.num_samples)
    samples.metrics["admission/num_groups"] = float(samples.facts.num_groups)
    return samples


def cut(run: RunContext, samples: StepSamples) -> list[MiniBatch]:
    with run.timer.span("batch"):
        return cut_step(samples.facts, samples.tokens, run.rank, run.config.batch, run.objective)


def logprobs(run: RunContext, minibatch: MiniBatch) -> Logprobs:
    """The log-probs and values of this rank's samples that the objective needs, of all epochs.

    Raises Interrupted.
    """
    sources = sorted(
        passes_of(run.objective, run.config.batch.updates_of(minibatch.index)), reverse=True
    )
    with run.timer.span("logprobs"):
        models = {source: run.models[-1] if source == "value" else run.policy for source in sources}
        found: Logprobs = {
            source: model.logprobs(minibatch, source, run.stop.is_set)
            for source, model in models.items()
        }
        if "step_start" in found and minibatch.routes is None and run.policy.routes is not None:
            found["routes"] = run.policy.routes
        return found


def with_logprobs(minibatch: MiniBatch, found: Logprobs) -> MiniBatch:
    """`minibatch` with its log-probs and values, and the experts of its `step_start` pass if it has
    none yet.
    """
    return replace(
        minibatch,
        step_start_logprobs=found.get("step_start"),
        reference_logprobs=found.get("reference"),
        routes=found.get("routes") if minibatch.routes is None else minibatch.routes,
        estimates={"value": found["value"]} if "value" in found else {},
    )


def measure_noise(run: RunContext, minibatch: MiniBatch, step: int) -> dict[str, float]:
    """Metrics of the scores' noise, measured on four groups of the mini-batch; empty if no
    measurement is due.
    """
    every = run.config.mismatch.score_noise_every
    if every is None or step % every or not isinstance(run.objective, Pacs):
        return {}
    with run.timer.span("logprobs"):
        groups = np.linspace(0, minibatch.facts.num_groups - 1, NOISE_GROUPS).round()
        rows = np.flatnonzero(np.isin(minibatch.facts.groups, groups))
        return run.policy.score_noise(minibatch, run.objective, rows, run.stop.is_set)


def step_inputs(
    run: RunContext, samples: StepSamples, minibatches: Sequence[MiniBatch]
) -> tuple[list[MiniBatch], Any]:
    """(mini-batches of all epochs, values that every update needs from all samples of the step,
    such as advantages)
    """
    facts = samples.facts
    if not minibatches:
        return [], None
    if run.objective.kl_in_reward:
        facts = run.policy.with_sample_kl(facts, minibatches, run.objective)
    if run.critic is not None:
        facts, minibatches = run.critic.with_estimates(facts, minibatches, run.objective)
    size = len(minibatches)
    epochs = range(run.config.batch.epochs)
    repeated = [
        replace(part, index=part.index + size * epoch) for epoch in epochs for part in minibatches
    ]
    return repeated, run.objective.prepare_step(facts)


def update(run: RunContext, step: int, minibatch: MiniBatch, step_inputs: Any) -> UpdateReport:
    """Runs one optimizer update of the policy and of the critic, with a score pass if the objective
    needs one.

    Raises Interrupted (during the score pass) or NonFiniteError, both before any weight of that
    model changes.
    """
    options = run.config.objective
    with run.timer.span("update"):
        report = None
        if not isinstance(options, PpoOptions) or step > options.critic.warmup_steps:
            report = run.policy.update(minibatch, run.objective, step_inputs, run.stop.is_set)
        if run.critic is None:
            assert report is not None
            return report
        assert run.objective.critic is not None
        own = replace(minibatch, routes=None)  # they are the policy's experts
        return critic_report(report, run.critic.update(own, run.objective.critic, None))


def poll(run: RunContext) -> None:
    """Raises Interrupted on all ranks if any rank has a stop request."""
    if run.channel.any_rank(run.stop.is_set()):
        raise Interrupted
