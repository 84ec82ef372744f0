"""The phases of a training step, with their timers."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from pacs_megatron.contracts import Interrupted, MiniBatch, UpdateReport
from pacs_megatron.objectives.pacs import Pacs
from pacs_megatron.objectives.ppo import PpoOptions
from pacs_megatron.objectives.registry import passes_of
from pacs_megatron.objectives.shared.base import StepInputs
from pacs_megatron.observability.metrics import MetricSums
from pacs_megatron.policy.critic import critic_report
from pacs_megatron.policy.estimates import with_certainty, with_estimates
from pacs_megatron.rollout.collect import StepSamples
from pacs_megatron.training.context import RunContext
from pacs_megatron.training.distribute import cut_step
from pacs_megatron.training.progress import Logprobs

NOISE_GROUPS = 4


def poll(run: RunContext) -> None:
    """Raises Interrupted on all ranks if any rank has a stop request. Collective."""
    if run.channel.any_rank(run.stop.is_set()):
        raise Interrupted


def collect(run: RunContext, step: int) -> StepSamples:
    """The admitted samples of `step`. Collective; raises the same error on all ranks.

    Raises:
        Interrupted: a rank has a stop request.
        RolloutError, RewardError: the driver's error.
    """
    with run.timer.span("rollout"):
        samples = run.rollouts.collect(step)
    samples.metrics["admission/num_samples"] = float(samples.facts.num_samples)
    samples.metrics["admission/num_groups"] = float(samples.facts.num_groups)
    return samples


def cut(run: RunContext, samples: StepSamples) -> list[MiniBatch]:
    """The mini-batches of one epoch, with this rank's tokens."""
    with run.timer.span("batch"):
        return cut_step(samples.facts, samples.tokens, run.rank, run.config.batch, run.objective)


def logprobs(
    run: RunContext, minibatches: Sequence[MiniBatch]
) -> tuple[list[Logprobs], MetricSums]:
    """The log-probs and values that the objective needs, for the updates of all epochs.

    Returns:
        For each mini-batch, see `Logprobs`.
        `policy/entropy_step_start`, with `logging.step_start_entropy`.

    Raises:
        Interrupted: on all ranks, before a micro-batch.
    """
    by_minibatch = []
    metrics = MetricSums()
    with run.timer.span("logprobs"):
        for minibatch in minibatches:
            by_minibatch.append(_logprobs(run, minibatch))
            if run.policy.measures_entropy:
                total, count = run.policy.step_start_entropy
                metrics.add_means({"policy/entropy_step_start": total / max(count, 1.0)}, count)
    return by_minibatch, metrics


def _logprobs(run: RunContext, minibatch: MiniBatch) -> Logprobs:
    """The log-probs of one mini-batch; see `logprobs`."""
    updates = run.config.batch.updates_of(minibatch.index)
    sources = passes_of(run.objective, updates)
    found = Logprobs.of_samples(minibatch.tokens)
    for source in sorted(sources, reverse=True):
        model = run.models[-1] if source == "value" else run.policy
        found.columns[source] = model.logprobs(minibatch, source, run.stop.is_set)
        if source == "step_start":
            found.columns |= run.policy.certainty

    if "step_start" not in sources:
        if run.policy.measures_entropy:
            # Only for its entropies: an update with given log-probs skips no samples.
            run.policy.logprobs(minibatch, "step_start", run.stop.is_set)
        return found

    # Without the sampler's experts, the update replays those of the step-start pass.
    if minibatch.routes is None:
        found.routes = run.policy.routes
    return found


def with_logprobs(minibatch: MiniBatch, logprobs: Logprobs, device: torch.device) -> MiniBatch:
    """`minibatch` with its log-probs and values, and the experts of its `step_start` pass if it has
    none yet.

    Args:
        minibatch: with this rank's tokens.
        logprobs: of at least this rank's samples.
        device: of the columns.
    """
    columns = logprobs.columns_of(minibatch.tokens, device)
    routes = minibatch.routes
    if routes is None:
        routes = logprobs.routes
    names = ("value", "certainty", "logit")
    estimates = {name: columns[name] for name in names if name in columns}
    return replace(
        minibatch,
        step_start_logprobs=columns.get("step_start"),
        reference_logprobs=columns.get("reference"),
        routes=routes,
        estimates=estimates,
    )


def measure_noise(run: RunContext, minibatch: MiniBatch, step: int) -> dict[str, float]:
    """The noise of the scores, measured on four groups of the mini-batch in two packings.

    Returns:
        `pacs/score_noise*` (docs/metrics.md); empty if no measurement is due.
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
) -> tuple[list[MiniBatch], StepInputs]:
    """The mini-batches of all epochs, and what every update needs from all samples of the step.

    Returns:
        Mini-batches, epoch after epoch.
        The objective's columns of the step, such as advantages; none without a mini-batch.
    """
    if not minibatches:
        return [], {}

    facts = samples.facts
    if run.objective.kl_in_reward:
        facts = run.policy.with_sample_kl(facts, minibatches, run.objective)
    if run.objective.has_estimates:
        facts, minibatches = with_estimates(run.policy, facts, minibatches, run.objective)

    if run.config.objective.needs_certainty:
        facts = with_certainty(run.policy, facts, minibatches)

    repeated = []
    for epoch in range(run.config.batch.epochs):
        first = epoch * len(minibatches)
        repeated += [replace(one, index=first + one.index) for one in minibatches]
    return repeated, run.objective.prepare_step(facts)


def update(
    run: RunContext, step: int, minibatch: MiniBatch, step_inputs: StepInputs
) -> UpdateReport:
    """Runs one optimizer update of the policy and of the critic.

    The policy runs a score pass before it if the objective needs one. While the critic warms up,
    the policy does not change.

    Args:
        run: the run.
        step: number of the step, from 1.
        minibatch: with log-probs and, with a critic, values.
        step_inputs: the objective's columns of the step, from `step_inputs`.

    Returns:
        Metrics with their denominators, gradient norm and learning rate.

    Raises:
        Interrupted: during the score pass, before any weight of that model changes.
        NonFiniteError: before any weight of that model changes.
    """
    options = run.config.objective
    inputs = {name: values[minibatch.rows] for name, values in step_inputs.items()}
    with run.timer.span("update"):
        report = None
        if not isinstance(options, PpoOptions) or step > options.critic.warmup_steps:
            report = run.policy.update(minibatch, run.objective, inputs, run.stop.is_set)
        if run.critic is None:
            assert report is not None
            return report

        assert run.objective.critic is not None
        without_routes = replace(minibatch, routes=None)  # they are the policy's experts
        critic_update = run.critic.update(without_routes, run.objective.critic, {})
        return critic_report(report, critic_update)
