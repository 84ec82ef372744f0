"""One step, as a page: samples in, updates. The loop then sends the new weights to the rollout engine."""

from dataclasses import replace
from typing import Any

from pacs_megatron.batching.distribute import cut_step
from pacs_megatron.contracts import Interrupted, MiniBatch
from pacs_megatron.observability.metrics import MetricSums
from pacs_megatron.training.begun import Begun, StoppedInStep, begun_at, with_saved_logprobs
from pacs_megatron.training.sync import release_memory
from pacs_megatron.training.world import World


def train_step(w: World, step: int, begun: Begun | None = None) -> dict[str, float | None]:
    """Step `step` (from 1): its metrics. Collective. With `begun` its samples are in the buffer, its first updates done.

    Raises Interrupted when a rank was asked to stop and nothing has changed; StoppedInStep between two updates.
    """
    with w.timer.span("rollout"):
        collected = w.rollouts.collect(step)
    metrics: dict[str, float | None] = dict(collected.metrics)
    poll(w)
    release_memory(w)
    with w.timer.span("batch"):
        minibatches = cut_step(
            collected.facts,
            collected.tokens,
            w.rank,
            updates_per_step=w.config.batch.updates_per_step,
            tokens_per_microbatch=w.config.batch.tokens_per_microbatch,
        )
    with w.timer.span("logprobs"):
        minibatches = with_logprobs(w, minibatches, begun)
    # No admitted group, no mini-batch: the step counts, the weights stay.
    step_inputs = w.objective.prepare_step(collected.facts) if minibatches else None
    poll(w)
    sums = MetricSums()
    if begun is not None:
        sums.merge(begun.sums)
    first = 0 if begun is None else begun.updates
    for index, minibatch in enumerate(minibatches[first:], first):
        try:
            if index > first:
                poll(w)
            update(w, index, minibatch, step_inputs, sums)
        except Interrupted:
            if index == 0:
                raise
            raise StoppedInStep(begun_at(index, minibatches, sums, w.rank)) from None
    if w.reset_every and step % w.reset_every == 0:
        w.policy.take_reference(reset_optimizer=True)
    metrics |= sums.values()
    metrics["admission/num_samples"] = float(collected.facts.num_samples)
    metrics["admission/num_groups"] = float(collected.facts.num_groups)
    return metrics


def update(w: World, index: int, minibatch: MiniBatch, step_inputs: Any, sums: MetricSums) -> None:
    """Update `index` of the step, its metrics into `sums`. Raises Interrupted in its score pass, before anything changed."""
    scores = None
    if w.objective.needs_scores(index):
        with w.timer.span("scores"):
            scores = w.policy.scores(minibatch, w.objective, w.stop.is_set)
    with w.timer.span("update"):
        prepared = w.objective.prepare(scores, minibatch.facts, step_inputs)
        report = w.policy.update(minibatch, prepared, w.objective, scores)
    # Only the first update computes with the weights that sampled.
    comparable = {k: v for k, v in report.metrics.items() if index == 0 or not k.startswith("mismatch/")}
    sums.add_means(comparable, minibatch.facts.num_samples)
    sums.add_means({"optimizer/grad_norm": report.grad_norm, "optimizer/lr": report.lr}, 1)


def with_logprobs(w: World, minibatches: list[MiniBatch], begun: Begun | None) -> list[MiniBatch]:
    """`parts` with the trainer's own log-probs that the objective asks for, computed or, in a step that goes on, as saved.

    Raises Interrupted on all ranks, within a few micro-batches, when one was asked to stop.
    """
    if begun is None:
        return [_with_own_logprobs(w, minibatch) for minibatch in minibatches]
    sources = sorted(f"{name}_logprobs" for name in w.objective.logprob_passes())
    minibatches = with_saved_logprobs(minibatches, begun, w.rank, sources)
    if "step_start" in w.objective.logprob_passes():
        minibatches[begun.updates :] = [
            w.policy.with_log_ratio_to_sampler(minibatch) for minibatch in minibatches[begun.updates :]
        ]
    return minibatches


def _with_own_logprobs(w: World, minibatch: MiniBatch) -> MiniBatch:
    """Same plan as the update."""
    passes = w.objective.logprob_passes()
    if "step_start" in passes:
        minibatch = replace(minibatch, step_start_logprobs=w.policy.logprobs(minibatch, "step_start", w.stop.is_set))
        minibatch = w.policy.with_log_ratio_to_sampler(minibatch)
    if "reference" in passes:
        minibatch = replace(minibatch, reference_logprobs=w.policy.logprobs(minibatch, "reference", w.stop.is_set))
    return minibatch


def poll(w: World) -> None:
    """Collective: whether any rank was asked to stop. Raises Interrupted on all of them."""
    if w.channel.any_rank(w.stop.is_set()):
        raise Interrupted
