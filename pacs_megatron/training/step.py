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
    """Trains the step after `progress.step` and returns its metrics.

    Collective; raises the same error on all ranks.

    `progress.open_step` counts the completed updates. A later call, also after a resume, gets the
    same samples and continues with the next update.

    Raises:
        Interrupted: a rank has a stop request.
        RolloutError: the driver or the rollout engine failed.
        RewardError: too many samples could not be judged.
        SyncError: colocated servers failed.
        NonFiniteError: before the update changes a weight of that model.
    """
    step = progress.step + 1
    done = progress.open_step

    samples = collect(run, step)  # admitted groups: facts on all ranks, tokens on rank 0
    poll(run)  # for stop requests
    release_memory(run)  # of colocated servers

    # Whole groups, this replica's tokens, the plan of micro-batches.
    minibatches = cut(run, samples)

    # A checkpoint inside the step has the log-probs: the step-start weights no longer exist.
    if done.logprobs is None:
        done.logprobs, entropy = logprobs(run, minibatches)
        done.sums.add(entropy)  # where configured
    pairs = zip(minibatches, done.logprobs, strict=True)
    minibatches = [with_logprobs(*pair, run.rank.device) for pair in pairs]

    # If admission dropped every group, there is no mini-batch: the step is counted but no weight
    # changes.
    if minibatches and not done.updates:
        noise = measure_noise(run, minibatches[0], step)  # of the scores, where configured
        done.sums.add_means(noise, 1)

    # Mini-batches of all epochs, and e.g. the advantages of the step.
    minibatches, inputs = step_inputs(run, samples, minibatches)
    for minibatch in minibatches[done.updates :]:
        poll(run)
        report = update(run, step, minibatch, inputs)
        done.add(report, minibatch.facts.num_samples)

    # Counts updates without groups too; `num_updates` is updates_per_step * epochs.
    for model in run.models:
        model.optimizer.advance_schedule(step * run.config.batch.num_updates)

    if run.reset_every and step % run.reset_every == 0:
        run.policy.take_reference(reset_optimizer=True)
    return with_signal_to_noise({**samples.metrics, **done.sums.values()})
