"""The phases of a training step, each under its timer. All of them are collective."""

from dataclasses import replace

from torch import Tensor

from pacs_megatron.batching.distribute import cut_step
from pacs_megatron.contracts import Interrupted, MiniBatch, Prepared, UpdateReport
from pacs_megatron.rollout.collect import StepSamples
from pacs_megatron.training.context import RunContext
from pacs_megatron.training.progress import Logprobs


def collect(run: RunContext, step: int) -> StepSamples:
    """The admitted samples of `step`. Raises Interrupted."""
    with run.timer.span("rollout"):
        samples = run.rollouts.collect(step)
    samples.metrics["admission/num_samples"] = float(samples.facts.num_samples)
    samples.metrics["admission/num_groups"] = float(samples.facts.num_groups)
    return samples


def cut(run: RunContext, samples: StepSamples) -> list[MiniBatch]:
    """The mini-batches of the step, with this rank's share of the tokens."""
    with run.timer.span("batch"):
        return cut_step(
            samples.facts,
            samples.tokens,
            run.rank,
            updates_per_step=run.config.batch.updates_per_step,
            tokens_per_microbatch=run.config.batch.tokens_per_microbatch,
        )


def logprobs(run: RunContext, minibatch: MiniBatch) -> Logprobs:
    """The trainer's log-probs of this rank's samples that the objective needs. Raises Interrupted."""
    with run.timer.span("logprobs"):
        sources = sorted(run.objective.logprob_passes(), reverse=True)
        return {source: run.policy.logprobs(minibatch, source, run.stop.is_set) for source in sources}


def with_logprobs(run: RunContext, minibatch: MiniBatch, found: Logprobs) -> MiniBatch:
    """`minibatch` with its log-probs, and with every sample's mean log-ratio to the sampler."""
    with run.timer.span("logprobs"):
        minibatch = replace(
            minibatch,
            step_start_logprobs=found.get("step_start"),
            reference_logprobs=found.get("reference"),
        )
        return minibatch if "step_start" not in found else run.policy.with_log_ratio_to_sampler(minibatch)


def scores(run: RunContext, minibatch: MiniBatch) -> Tensor:
    """float64 [n], the reward proxies r of the mini-batch. Raises Interrupted."""
    with run.timer.span("scores"):
        return run.policy.scores(minibatch, run.objective, run.stop.is_set)


def update(run: RunContext, minibatch: MiniBatch, prepared: Prepared, psi: Tensor | None) -> UpdateReport:
    """One optimizer update. Raises NonFiniteError before any weight changes."""
    with run.timer.span("update"):
        return run.policy.update(minibatch, prepared, run.objective, psi)


def poll(run: RunContext) -> None:
    """Raises Interrupted on all ranks when one has a stop request."""
    if run.channel.any_rank(run.stop.is_set()):
        raise Interrupted
