"""One step, as a page: samples in, updates. The loop then sends the new weights to the rollout engine."""

from dataclasses import replace
from typing import Any

from pacs_megatron.batching.distribute import cut_step
from pacs_megatron.contracts import Interrupted, MiniBatch
from pacs_megatron.observability.metrics import MetricSums
from pacs_megatron.training.begun import Begun, StoppedInStep, begun_at, with_saved_logprobs
from pacs_megatron.training.context import RunContext
from pacs_megatron.training.sync import release_memory


def train_step(run: RunContext, step: int, begun: Begun | None = None) -> dict[str, float | None]:
    """Step `step` (from 1): its metrics. Collective. With `begun` its samples are in the buffer, its first updates done.

    Raises Interrupted when a rank was asked to stop and nothing has changed; StoppedInStep between two updates.
    """
    with run.timer.span("rollout"):
        collected = run.rollouts.collect(step)
    metrics: dict[str, float | None] = dict(collected.metrics)
    poll(run)
    release_memory(run)
    with run.timer.span("batch"):
        minibatches = cut_step(
            collected.facts,
            collected.tokens,
            run.rank,
            updates_per_step=run.config.batch.updates_per_step,
            tokens_per_microbatch=run.config.batch.tokens_per_microbatch,
        )
    with run.timer.span("logprobs"):
        minibatches = with_logprobs(run, minibatches, begun)
    # No admitted group, no mini-batch: the step counts, the weights stay.
    step_inputs = run.objective.prepare_step(collected.facts) if minibatches else None
    poll(run)
    sums = MetricSums()
    if begun is not None:
        sums.merge(begun.sums)
    first = 0 if begun is None else begun.updates
    for index, minibatch in enumerate(minibatches[first:], first):
        try:
            if index > first:
                poll(run)
            update(run, index, minibatch, step_inputs, sums)
        except Interrupted:
            if index == 0:
                raise
            raise StoppedInStep(begun_at(index, minibatches, sums, run.rank)) from None
    if run.reset_every and step % run.reset_every == 0:
        run.policy.take_reference(reset_optimizer=True)
    metrics |= sums.values()
    metrics["admission/num_samples"] = float(collected.facts.num_samples)
    metrics["admission/num_groups"] = float(collected.facts.num_groups)
    return metrics


def update(run: RunContext, index: int, minibatch: MiniBatch, step_inputs: Any, sums: MetricSums) -> None:
    """Update `index` of the step, its metrics into `sums`. Raises Interrupted in its score pass, before anything changed."""
    scores = None
    if run.objective.needs_scores(index):
        with run.timer.span("scores"):
            scores = run.policy.scores(minibatch, run.objective, run.stop.is_set)
    with run.timer.span("update"):
        prepared = run.objective.prepare(scores, minibatch.facts, step_inputs)
        report = run.policy.update(minibatch, prepared, run.objective, scores)
    # Only the first update computes with the weights that sampled.
    comparable = {k: v for k, v in report.metrics.items() if index == 0 or not k.startswith("mismatch/")}
    sums.add_means(comparable, minibatch.facts.num_samples)
    optimizer = {"grad_norm": report.grad_norm, "clipped_frac": float(report.is_clipped), "lr": report.lr}
    sums.add_means({f"optimizer/{name}": value for name, value in optimizer.items()}, 1)


def with_logprobs(run: RunContext, minibatches: list[MiniBatch], begun: Begun | None) -> list[MiniBatch]:
    """`parts` with the trainer's own log-probs that the objective asks for, computed or, in a step that goes on, as saved.

    Raises Interrupted on all ranks, within a few micro-batches, when one was asked to stop.
    """
    if begun is None:
        return [_with_own_logprobs(run, minibatch) for minibatch in minibatches]
    sources = sorted(f"{name}_logprobs" for name in run.objective.logprob_passes())
    minibatches = with_saved_logprobs(minibatches, begun, run.rank, sources)
    if "step_start" in run.objective.logprob_passes():
        minibatches[begun.updates :] = [
            run.policy.with_log_ratio_to_sampler(minibatch) for minibatch in minibatches[begun.updates :]
        ]
    return minibatches


def _with_own_logprobs(run: RunContext, minibatch: MiniBatch) -> MiniBatch:
    """Same plan as the update."""
    passes = run.objective.logprob_passes()
    if "step_start" in passes:
        minibatch = replace(
            minibatch, step_start_logprobs=run.policy.logprobs(minibatch, "step_start", run.stop.is_set)
        )
        minibatch = run.policy.with_log_ratio_to_sampler(minibatch)
    if "reference" in passes:
        minibatch = replace(minibatch, reference_logprobs=run.policy.logprobs(minibatch, "reference", run.stop.is_set))
    return minibatch


def poll(run: RunContext) -> None:
    """Collective: whether any rank was asked to stop. Raises Interrupted on all of them."""
    if run.channel.any_rank(run.stop.is_set()):
        raise Interrupted
