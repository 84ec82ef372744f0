"""Steps in order: evaluation, metrics, checkpoints, and how a run ends."""

import json
import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pacs_megatron.checkpoint import run_checkpoint
from pacs_megatron.checkpoint.names import Position
from pacs_megatron.contracts import Interrupted
from pacs_megatron.errors import ExitCode, RewardError, RolloutError, SyncError
from pacs_megatron.evaluation.passk import ProblemCounts, benchmark_metrics
from pacs_megatron.observability.metrics import MetricsWriter
from pacs_megatron.observability.progress import Progress, training_fields
from pacs_megatron.observability.report import write_report
from pacs_megatron.observability.truncate import truncate_after
from pacs_megatron.observability.writers import MetricSinks, open_sinks
from pacs_megatron.parallel.transfer import broadcast_arrays
from pacs_megatron.policy import state as policy_state
from pacs_megatron.rollout.collect import DriverState
from pacs_megatron.training.begun import Begun, StoppedInStep
from pacs_megatron.training.clipping import ClippingWarning
from pacs_megatron.training.context import RunContext, array_of
from pacs_megatron.training.export import export_hf
from pacs_megatron.training.step import train_step
from pacs_megatron.training.sync import sync

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class RunProgress:
    """How far the run is: what a checkpoint holds beside the policy. Changes at step boundaries, and where a step is cut."""

    step: int = 0
    version: int = 0
    """of the policy's weights"""
    row: dict[str, float | None] | None = None
    """metrics of `step` that are not written yet: its evaluation is to come"""
    begun: Begun | None = None
    """the step after `step` is in the middle of its updates"""

    @property
    def position(self) -> Position:
        return Position(self.step, 0 if self.begun is None else self.begun.updates)


class Outputs:
    """Rank 0's files and screens; does nothing on the other ranks."""

    def __init__(self, run: RunContext, first_step: int, stack: ExitStack) -> None:
        self._on = run.rank.rank == 0
        self._run = run
        if not self._on:
            return
        truncate_after(run.run_dir, first_step)
        self._metrics = stack.enter_context(MetricsWriter(run.run_dir))
        self._sinks: MetricSinks = stack.enter_context(
            open_sinks(
                run.run_dir,
                run.config.run.name,
                run.config.logging,
                first_step=first_step + 1,
                config=run.config.model_dump(mode="json"),
            )
        )
        self.progress = stack.enter_context(
            Progress(run.config.run.name, run.config.run.steps, done=max(first_step, 0))
        )
        self._clipping = ClippingWarning()
        run.timer.on_change(self.progress.phase)
        assert run.driver is not None
        run.driver.on_progress = lambda done, total: self.progress.samples(run.timer.phase, done, total)

    def write(self, row: Mapping[str, Any]) -> None:
        """One row of metrics, on disk when this returns."""
        if not self._on:
            return
        self._metrics.append(row)
        self._sinks.write(row)
        self.progress.advance(int(row["step"]), training_fields(row))
        self._clipping.add(row)

    def report(self) -> None:
        if self._on:
            write_report(self._run.run_dir, num_samples=self._run.config.logging.samples_in_report)


def train(run: RunContext) -> ExitCode:
    """Train to the last step, from the newest checkpoint if there is one. Returns how the run ended."""
    done = resume(run) or RunProgress(version=run.policy.version, row={})
    written = done.step if done.row is None else done.step - 1
    with ExitStack() as stack:
        out = Outputs(run, written, stack)
        run.rollouts.send_weights = partial(sync, run)
        if done.begun is None:  # else they are no step's weights, and nothing is to be sampled with them
            sync(run, done.step)
        run.timer.take()
        try:
            if done.row is not None:
                _finish_step(run, done, out)
            while done.step < run.config.run.steps:
                done.row = train_step(run, done.step + 1, done.begun)
                done.step, done.version, done.begun = done.step + 1, run.policy.version, None
                sync(run, done.step)
                _finish_step(run, done, out)
        except (RolloutError, RewardError, SyncError):
            _save_what_there_is(run, done)
            raise
        except Interrupted as stopped:
            if isinstance(stopped, StoppedInStep):
                done.begun, done.version = stopped.begun, run.policy.version
            save(run, done)
            out.report()
            if run.rank.rank == 0:
                logger.info("stopped after %s; saved; the same command continues", done.position)
            return ExitCode.PREEMPTED
        export_hf(run, run.run_dir / "hf")
        out.report()
    return ExitCode.OK


def _finish_step(run: RunContext, done: RunProgress, out: Outputs) -> None:
    """Evaluate if that is due, write the row, save if that is due. Step 0 is the evaluation before any training."""
    step, last = done.step, done.step == run.config.run.steps
    assert done.row is not None
    row = dict(done.row)
    if step == 0 or last or _due(step, run.config.evaluation.every):
        row |= evaluate(run, step)
    times = run.timer.take()
    tokens = row.get("response/tokens")
    if tokens is not None:
        times["tokens_per_s"] = tokens / times["time/step_s"]
    if row:
        out.write({"step": step, **row, **times})
    done.row = None
    _break_on_mismatch(run, done, row)
    if last or (step > 0 and _due(step, run.config.checkpoint.every)):
        save(run, done)


def _break_on_mismatch(run: RunContext, done: RunProgress, row: Mapping[str, float | None]) -> None:
    """The circuit breaker: stop (and save) when trainer and sampler disagree. The row is the same on every rank."""
    limit, found = run.config.mismatch.max_abs_mean, row.get("mismatch/logprob_abs_mean")
    if limit is None or found is None or found <= limit:
        return
    raise RolloutError(
        f"step {done.step}: trainer and sampler log-probs differ by {found:.4f} nats a token, more than "
        f"mismatch.max_abs_mean={limit:g}; saved. Look at weight sync (rollout.sync.verify=full), the sampler's dtype or "
        "quantisation, temperature and filters, then packing and layout (mismatch/* in metrics.jsonl)"
    )


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def evaluate(run: RunContext, step: int) -> dict[str, float | None]:
    """pass@k of every benchmark with the weights after `step`; empty when none is configured. Collective."""
    if not run.config.evaluation.benchmarks:
        return {}
    with run.timer.span("evaluation"):
        benchmarks = run.rollouts.evaluate(step)
    metrics: dict[str, float | None] = {}
    for name, problems in benchmarks.items():
        counts = [
            ProblemCounts(
                problem_id=p["id"],
                num_samples=p["samples"],
                num_correct=p["correct"],
                num_unjudged=p["unjudged"],
            )
            for p in problems
        ]
        metrics |= benchmark_metrics(name, counts, run.config.evaluation.k)
        total = sum(p["samples"] + p["unjudged"] for p in problems)
        metrics[f"eval/{name}/truncated_frac"] = sum(p["truncated"] for p in problems) / total
        metrics[f"eval/{name}/len_mean"] = sum(p["tokens"] for p in problems) / total
    return metrics


def _save_what_there_is(run: RunContext, done: RunProgress) -> None:
    """Before an error that all ranks have ends the run: the last boundary, so that nothing is lost but what failed."""
    # Weights that changed since are those of half a step.
    if done.step == 0 or run.policy.version != done.version:
        return
    try:
        save(run, done)
    except RolloutError as lost:
        logger.warning("not saved: %s", lost)


def save(run: RunContext, done: RunProgress) -> None:
    """Checkpoint of `done`, with all samples of later steps that are finished. Collective."""
    has_reference = run.policy.reference is not None
    with run.timer.span("checkpoint"):
        driver = run.rollouts.state(done.step)
        contents = run_checkpoint.Contents(
            sharded=policy_state.sharded_state(run.policy, is_loading=False, with_reference=has_reference),
            state={
                "policy_version": run.policy.version,
                "schedule": run.policy.optimizer.schedule.state_dict(),
                "driver": driver.order,
                "row": done.row,
                "digest": run.digest,
                "has_reference": has_reference,
            },
            rng=policy_state.rng_state(),
            hf_metadata=run.model_dir,
            dtype=run.policy.config.params_dtype,
            buffer=driver.buffer,
            begun=None if done.begun is None else done.begun.to_record(),
        )
        folder = run_checkpoint.save_checkpoint(
            run.run_dir, done.position, run.rank, contents, keep_last=run.config.checkpoint.keep_last
        )
    if run.rank.rank == 0:
        logger.info("saved %s", folder)


def resume(run: RunContext) -> RunProgress | None:
    """Load the newest checkpoint; None when there is none: the run starts. Collective.

    Raises CheckpointError when it is damaged or belongs to another run.
    """
    folder = _agreed_checkpoint(run)
    if folder is None:
        if run.has_reference:
            run.policy.take_reference(reset_optimizer=False)
        return None
    run_checkpoint.verify_checkpoint(folder, run.rank)
    saved = run_checkpoint.read_state(folder)
    if saved["has_reference"] and run.policy.reference is None:
        run.policy.take_reference(reset_optimizer=False)
    state = policy_state.sharded_state(run.policy, is_loading=True, with_reference=saved["has_reference"])
    filled, rng = run_checkpoint.load_checkpoint(folder, run.rank, state)
    policy_state.load_sharded_state(run.policy, filled)
    if rng is not None:
        policy_state.load_rng_state(rng)
    run.policy.version = saved["policy_version"]
    run.policy.optimizer.schedule.load_state_dict(saved["schedule"])
    buffer = run_checkpoint.read_buffer(folder) if run.rank.rank == 0 else None
    run.rollouts.load_state(DriverState(order=saved["driver"], buffer=buffer))
    if run.rank.rank == 0:
        logger.info("resumed from %s", folder)
    return RunProgress(step=saved["step"], version=run.policy.version, row=saved["row"], begun=_read_begun(run, folder))


def _read_begun(run: RunContext, folder: Path) -> Begun | None:
    """What is left of a step, from the checkpoint; its arrays on rank 0 only. Collective."""
    found = run_checkpoint.read_begun(folder) if run.rank.rank == 0 else None
    answer = broadcast_arrays(array_of("" if found is None else json.dumps(found[0])), src=0, group=run.rank.control)
    text = answer["text"].tobytes().decode()
    if not text:
        return None
    return Begun.from_record(json.loads(text), found[1] if found is not None else {})


def _agreed_checkpoint(run: RunContext) -> Path | None:
    """Rank 0's choice, on every rank: a shared file system may show a new folder later elsewhere."""
    found = None
    if run.rank.rank == 0:
        run_checkpoint.finish_interrupted(run.run_dir)
        found = run_checkpoint.latest_checkpoint(run.run_dir)
    answer = broadcast_arrays(array_of("" if found is None else str(found)), src=0, group=run.rank.control)
    text = answer["text"].tobytes().decode()
    return Path(text) if text else None
