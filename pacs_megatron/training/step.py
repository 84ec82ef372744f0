"""One step, as a page: samples in, updates. The loop then sends the new weights to the rollout engine."""

from dataclasses import replace

from pacs_megatron.batching.distribute import cut_step
from pacs_megatron.contracts import Interrupted, Part
from pacs_megatron.observability.metrics import MetricSums
from pacs_megatron.training.sync import release_memory
from pacs_megatron.training.world import World


def train_step(w: World, step: int) -> dict[str, float | None]:
    """Step `step` (from 1): its metrics. Collective.

    Raises Interrupted before the first update if a rank was asked to stop: nothing has changed then.
    """
    with w.timer.span("rollout"):
        collected = w.rollouts.collect(step)
    metrics: dict[str, float | None] = dict(collected.metrics)
    poll(w)
    release_memory(w)
    with w.timer.span("batch"):
        parts = cut_step(
            collected.facts,
            collected.tokens,
            w.rank,
            updates_per_step=w.config.batch.updates_per_step,
            tokens_per_microbatch=w.config.batch.tokens_per_microbatch,
        )
    with w.timer.span("logprobs"):
        parts = [with_logprobs(w, part) for part in parts]
    # No admitted group, no mini-batch: the step counts, the weights stay.
    step_inputs = w.objective.prepare_step(collected.facts) if parts else None
    poll(w)
    sums = MetricSums()
    for index, part in enumerate(parts):
        scores = None
        if w.objective.needs_scores(index):
            with w.timer.span("scores"):
                # From the first update on the step is finished: there is no way back to its start.
                scores = w.policy.scores(part, w.objective, w.stop.is_set if index == 0 else None)
        with w.timer.span("update"):
            prepared = w.objective.prepare(scores, part.facts, step_inputs)
            report = w.policy.update(part, prepared, w.objective, scores)
        # Only the first update computes with the weights that sampled.
        comparable = {k: v for k, v in report.metrics.items() if index == 0 or not k.startswith("mismatch/")}
        sums.add_means(comparable, part.facts.num_samples)
        sums.add_means({"optimizer/grad_norm": report.grad_norm, "optimizer/lr": report.lr}, 1)
    if w.reset_every and step % w.reset_every == 0:
        w.policy.take_reference(reset_optimizer=True)
    metrics |= sums.values()
    metrics["admission/num_samples"] = float(collected.facts.num_samples)
    metrics["admission/num_groups"] = float(collected.facts.num_groups)
    return metrics


def with_logprobs(w: World, part: Part) -> Part:
    """`part` with the trainer's own log-probs that the objective asks for: same plan as the update.

    Raises Interrupted on all ranks, within a few micro-batches, when one was asked to stop.
    """
    passes = w.objective.logprob_passes()
    if "step_start" in passes:
        part = replace(part, step_start_logprobs=w.policy.logprobs(part, "step_start", w.stop.is_set))
        part = w.policy.with_log_ratio_to_sampler(part)
    if "reference" in passes:
        part = replace(part, reference_logprobs=w.policy.logprobs(part, "reference", w.stop.is_set))
    return part


def poll(w: World) -> None:
    """Collective: whether any rank was asked to stop. Raises Interrupted on all of them."""
    if w.channel.any_rank(w.stop.is_set()):
        raise Interrupted
