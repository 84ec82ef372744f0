"""Runs the steps of training with evaluation, metrics and checkpoints, and ends the run.

A step, in this order:

    train_step   rollouts in, updates out (training/step.py)
    sync         the rollout engine gets the new weights and samples the steps ahead
    evaluate     pass@k of the benchmarks, if due
    write        the row of metrics.jsonl, which is on disk before the step's checkpoint
    save         the checkpoint, if due

Every phase is collective, and its errors are raised on all ranks. A stop request or such an error
ends the run after a checkpoint of its position, which can be inside a step.
"""

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from pacs_megatron.checkpoint.names import Position, describe_newest
from pacs_megatron.config.layout import draws_of
from pacs_megatron.contracts import Interrupted
from pacs_megatron.errors import ExitCode, RewardError, RolloutError, SyncError
from pacs_megatron.observability.metrics import MetricsWriter
from pacs_megatron.observability.progress import Progress, training_fields
from pacs_megatron.observability.rank_times import truncate_rank_times
from pacs_megatron.observability.report import write_report
from pacs_megatron.observability.rollout_log import rollout_path, truncate_after
from pacs_megatron.observability.writers import open_sinks
from pacs_megatron.rollout.passk import benchmark_metrics
from pacs_megatron.runtime.waiting import report_wait
from pacs_megatron.training.breaker import (
    check_idle,
    exceeded_limit,
    idle_reason,
    warn_of_clipping,
)
from pacs_megatron.training.context import RunContext
from pacs_megatron.training.export import export_adapters, export_hf
from pacs_megatron.training.profiling import Profiling, has_step_times, step_metrics
from pacs_megatron.training.progress import RunProgress
from pacs_megatron.training.saving import resume, save
from pacs_megatron.training.step import train_step
from pacs_megatron.training.sync import sync

logger = logging.getLogger(__name__)


class Outputs:
    """Metrics, progress bar and report of rank 0; does nothing on the other ranks."""

    def __init__(self, run: RunContext, progress: RunProgress, stack: ExitStack) -> None:
        """Removes the rows after the position of the run; `stack` closes the writers."""
        self._run = run
        if run.driver is None:
            return

        config = run.config
        last_written = progress.step if progress.row is None else progress.step - 1
        truncate_after(run.run_dir, last_written, progress.step)
        truncate_rank_times(run.run_dir, last_written)

        self._metrics = stack.enter_context(MetricsWriter(run.run_dir))
        self._sinks = open_sinks(
            run.run_dir,
            config.run.name,
            config.logging,
            first_step=last_written + 1,
            config=config.model_dump(mode="json"),
        )
        for sink in self._sinks:
            stack.enter_context(sink)
        self._progress = stack.enter_context(
            Progress(config.run.name, config.run.steps, done=max(last_written, 0))
        )
        self._clipped: list[float] = []
        self._was_idle = False
        self._num_idle = 0

        run.timer.on_change(self._progress.phase)
        run.driver.on_progress = self._show_samples

    def _show_samples(self, done: int, total: int, waits_for_rewards: bool) -> None:
        phase = self._run.timer.phase
        if waits_for_rewards:
            phase = (*phase, "rewards")
        self._progress.samples(phase, done, total)

    def write(self, row: Mapping[str, Any]) -> None:
        """Flushes one row of metrics to disk before returning."""
        if self._run.driver is None:
            return
        self._metrics.append(row)
        for sink in self._sinks:
            sink.write(row)
        self._progress.advance(int(row["step"]), training_fields(row))

        reason = idle_reason(row)
        if reason is not None and not self._was_idle:
            logger.warning("step %d has trained nothing: %s", row["step"], reason)
        self._was_idle = reason is not None
        self._num_idle += self._was_idle

        clipped_frac = row.get("optimizer/clipped_frac")
        if clipped_frac is not None:
            self._clipped.append(clipped_frac)

    def report(self, progress: RunProgress) -> None:
        """Writes the report of the run; warns if most updates were clipped, and of idle steps."""
        if self._run.driver is None:
            return
        warn_of_clipping(self._clipped, self._run.config.objective)
        if progress.step and progress.idle_steps == progress.step:
            logger.warning(
                "the run has trained nothing: its weights are those of %s",
                self._run.config.model.path,
            )
        elif self._num_idle:
            logger.warning("%d steps of this attempt have trained nothing", self._num_idle)
        write_report(self._run.run_dir)


def train(run: RunContext) -> ExitCode:
    """Trains to the last step, from the newest checkpoint if there is one. Collective.

    Returns:
        OK after the last step and the export of the weights; PREEMPTED after a stop request.

    Raises:
        RolloutError, RewardError, SyncError: on all ranks, without a stop request.
    """
    with report_wait("" if run.rank.rank else "for the newest checkpoint to load"):
        progress = resume(run) or RunProgress(row={})

    with ExitStack() as stack:
        stack.callback(run.saver.close)
        out = Outputs(run, progress, stack)
        run.rollouts.send_weights = partial(sync, run)
        profiling = Profiling(run)
        if not progress.open_step.updates:  # weights from inside a step must not sample
            sync(run, progress.step)
        run.timer.take()

        # A barrier: from here on all ranks handle a stop request together.
        run.channel.any_rank(False)
        run.stop.defer()
        try:
            if progress.row is not None:
                _finish_step(run, progress, out)
            while progress.step < run.config.run.steps:
                step = progress.step + 1
                with profiling.step(step):
                    with profiling.servers(step):
                        row = train_step(run, progress)
                    progress.complete_step(row)
                    sync(run, progress.step)
                    _finish_step(run, progress, out)
        except (Interrupted, RolloutError, RewardError, SyncError) as error:  # raised on all ranks
            saved = _save_before_exit(run, progress, error)
            if not isinstance(error, Interrupted) and not run.channel.any_rank(run.stop.is_set()):
                raise
            out.report(progress)
            if run.rank.rank == 0:
                logger.info(
                    "stopped after %s; %s; the same command continues", progress.position, saved
                )
            return ExitCode.PREEMPTED

        export_hf(run, run.policy, run.run_dir / "hf")
        if run.config.policy.lora is not None:
            export_adapters(run, run.run_dir / "adapters")
        if run.critic is not None:
            export_hf(run, run.critic, run.run_dir / "critic_hf")
        out.report(progress)
    return ExitCode.OK


def evaluate(run: RunContext, step: int) -> dict[str, float | None]:
    """Evaluates every benchmark with the weights after `step`. Collective.

    Returns:
        `eval/<benchmark>/pass@k` and the counts behind it (`rollout.passk.benchmark_metrics`);
        empty when no benchmark is configured.
    """
    options = run.config.evaluation
    if not options.benchmarks:
        return {}
    with run.timer.span("evaluation"):
        benchmarks = run.rollouts.evaluate(step)

    metrics: dict[str, float | None] = {}
    for benchmark, (name, problems) in zip(options.benchmarks, benchmarks.items(), strict=True):
        _, ks = draws_of(options, benchmark)
        metrics |= benchmark_metrics(name, problems, ks)
    return metrics


def _finish_step(run: RunContext, progress: RunProgress, out: Outputs) -> None:
    """Evaluates, writes the row and saves, as due. Step 0 is the evaluation before training.

    Raises RolloutError on all ranks if the row exceeds a limit of `mismatch`.
    """
    step = progress.step
    is_last = step == run.config.run.steps
    assert progress.row is not None
    run.saver.finish()  # raises an error of the last checkpoint before the next step starts

    row = dict(progress.row)
    if step == 0 or is_last or _is_due(step, run.config.evaluation.every):
        row |= evaluate(run, step)

    times = run.timer.take()
    num_tokens = row.get("response/tokens")
    if num_tokens is not None:
        times["tokens_per_s"] = num_tokens / times["time/step_s"]
    if step and has_step_times(run.config.observability):
        row |= step_metrics(run, step, times)
    if row:
        out.write({"step": step, **row, **times})
    progress.row = None

    exceeded = exceeded_limit(run.config.mismatch, row)
    if exceeded is not None:  # the row is the same on every rank
        raise RolloutError(f"step {step}: {exceeded}")
    check_idle(step, row, progress.idle_steps, run.config.admission.max_idle_steps)
    if is_last or (step > 0 and _is_due(step, run.config.checkpoint.every)):
        save(run, progress)


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _save_before_exit(run: RunContext, progress: RunProgress, reason: Exception) -> str:
    """Saves the position of the run if the driver's state is available.

    Returns "saved", or names the newest checkpoint.
    """
    if progress.position == Position(0) and not isinstance(reason, Interrupted):
        return "not saved; nothing was trained yet"

    try:
        save(run, progress, final=True)
    except RolloutError as error:
        saved = f"not saved; {describe_newest(run.run_dir)}"
        if run.rank.rank == 0:
            logger.warning("%s: %s", saved, error)
        return saved

    if run.rank.rank == 0:
        _warn_of_missing_samples(run, progress.step)
    return "saved"


def _warn_of_missing_samples(run: RunContext, step: int) -> None:
    """Warns if the driver ended before it wrote the samples of the trained `step`."""
    file = rollout_path(run.run_dir, step)
    if run.config.rollout.is_sampled and step and not file.exists():
        logger.warning("step %d was trained, but the driver ended before it wrote %s", step, file)
