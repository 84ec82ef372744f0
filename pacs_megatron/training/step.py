"""One training step: rollouts in, updates out.

The loop sends the new weights to the rollout engine after the step.
"""

from pacs_megatron.training.breaker import with_signal_to_noise
from pacs_megatron.training.context import RunContext
from pacs_megatron.training.phases import (
    collect,
    cut,
    logprobs,
    measure_noise,
    poll,
    step_inputs,
    update,
    with_logprobs,
)
from pacs_megatron.training.progress import RunProgress
from pacs_megatron.training.sync import release_memory


def train_step(run: RunContext, progress: RunProgress) -> dict[str, float | None]:
    """Trains the step after `progress.step` and returns its metrics. Collective.

    Raises on all ranks: Interrupted after a stop request on any rank, RolloutError, RewardError,
    SyncError (of colocated servers), and NonFiniteError before the update changes a weight of that
    model. `progress.open_step` counts the completed updates. A later call, also after a resume,
    gets the same samples and continues with the next update.
    """
    step = progress.step + 1
    done = progress.open_step
    samples = collect(run, step)  # admitted groups: facts on all ranks, tokens on rank 0
    poll(run)  # for stop requests
    release_memory(run)  # of colocated servers
    minibatches = cut(
        run, samples
    )  # whole groups; this replica's tokens; the plan of micro-batches
    if (
        done.logprobs is None
    ):  # a checkpoint inside the step has them: the step-start weights no longer exist
        done.logprobs = [logprobs(run, minibatch) for minibatch in minibatches]
    minibatches = [with_logprobs(*pair) for pair in zip(minibatches, done.logprobs, strict=True)]
    # If admission dropped every group, there is no mini-batch: the step is counted but no weight
    # changes.
    if minibatches and not done.updates:
        done.sums.add_means(
            measure_noise(run, minibatches[0], step), 1
        )  # of the scores, where configured
    minibatches, inputs = step_inputs(
        run, samples, minibatches
    )  # all epochs; e.g. advantages of the step
    for minibatch in minibatches[done.updates :]:
        poll(run)
        done.add(update(run, step, minibatch, inputs), minibatch.facts.num_samples)
    for model in (
        run.models
    ):  # counts updates without groups too; `num_updates` is updates_per_step * epochs
        model.optimizer.advance_schedule(step * run.config.batch.num_updates)
    if run.reset_every and step % run.reset_every == 0:
        run.policy.take_reference(reset_optimizer=True)
    return with_signal_to_noise({**samples.metrics, **done.sums.values()})
