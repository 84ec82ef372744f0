"""Runs the steps of training with evaluation, metrics and checkpoints, and ends the run."""

import logging
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from pacs_megatron.checkpoint import run_checkpoint
from pacs_megatron.checkpoint.hf_folder import HfFolderWriter, hf_tensors
from pacs_megatron.checkpoint.manifest import DIST_FOLDER
from pacs_megatron.checkpoint.names import Position, describe_newest
from pacs_megatron.config.layout import draws_of
from pacs_megatron.contracts import Interrupted
from pacs_megatron.errors import CheckpointError, ExitCode, RewardError, RolloutError, SyncError
from pacs_megatron.evaluation.passk import benchmark_metrics
from pacs_megatron.observability.metrics import MetricsWriter
from pacs_megatron.observability.progress import Progress, training_fields
from pacs_megatron.observability.report import write_report
from pacs_megatron.observability.rollout_log import rollout_path, truncate_after
from pacs_megatron.observability.writers import open_sinks
from pacs_megatron.policy import state as policy_state
from pacs_megatron.policy.engine import MegatronPolicy
from pacs_megatron.rollout.collect import DriverState
from pacs_megatron.rollout.sample_arrays import check_saved
from pacs_megatron.runtime.json_reader import parsing
from pacs_megatron.runtime.waiting import report_wait
from pacs_megatron.training.breaker import exceeded_limit, warn_of_clipping
from pacs_megatron.training.context import RunContext
from pacs_megatron.training.progress import OpenStep, RunProgress
from pacs_megatron.training.step import train_step
from pacs_megatron.training.sync import release_memory, sync

logger = logging.getLogger(__name__)


class Outputs:
    """Metrics, progress bar and report of rank 0; does nothing on the other ranks."""

    def __init__(self, run: RunContext, progress: RunProgress, stack: ExitStack) -> None:
        self._run = run
        if run.driver is None:
            return
        config = run.config
        first_step = progress.step if progress.row is None else progress.step - 1
        truncate_after(run.run_dir, first_step, progress.step)
        self._metrics = stack.enter_context(MetricsWriter(run.run_dir))
        values = config.model_dump(mode="json")
        self._sinks = open_sinks(run.run_dir, config.run.name, config.logging, first_step=first_step + 1, config=values)
        for sink in self._sinks:
            stack.enter_context(sink)
        self._progress = stack.enter_context(Progress(config.run.name, config.run.steps, done=max(first_step, 0)))
        self._clipped: list[float] = []
        run.timer.on_change(self._progress.phase)
        run.driver.on_progress = self._show_samples

    def _show_samples(self, done: int, total: int, waits_for_rewards: bool) -> None:
        phase = self._run.timer.phase
        self._progress.samples((*phase, "rewards") if waits_for_rewards else phase, done, total)

    def write(self, row: Mapping[str, Any]) -> None:
        """Flushes one row of metrics to disk before returning."""
        if self._run.driver is None:
            return
        self._metrics.append(row)
        for sink in self._sinks:
            sink.write(row)
        self._progress.advance(int(row["step"]), training_fields(row))
        if (share := row.get("optimizer/clipped_frac")) is not None:
            self._clipped.append(share)

    def report(self) -> None:
        if self._run.driver is not None:
            warn_of_clipping(self._clipped)
            write_report(self._run.run_dir)


def train(run: RunContext) -> ExitCode:
    """Trains to the last step, from the newest checkpoint if there is one. Returns how the run ended."""
    with report_wait("" if run.rank.rank else "for the newest checkpoint to load"):
        progress = resume(run) or RunProgress(row={})
    with ExitStack() as stack:
        stack.callback(run.saver.close)
        out = Outputs(run, progress, stack)
        run.rollouts.send_weights = partial(sync, run)
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
                progress.complete_step(train_step(run, progress))
                sync(run, progress.step)
                _finish_step(run, progress, out)
        except (Interrupted, RolloutError, RewardError, SyncError) as error:  # raised on all ranks
            saved = _save_before_exit(run, progress, error)
            if not isinstance(error, Interrupted) and not run.channel.any_rank(run.stop.is_set()):
                raise
            out.report()
            if run.rank.rank == 0:
                logger.info("stopped after %s; %s; the same command continues", progress.position, saved)
            return ExitCode.PREEMPTED
        export_hf(run, run.policy, run.run_dir / "hf")
        if run.critic is not None:
            export_hf(run, run.critic, run.run_dir / "critic_hf")
        out.report()
    return ExitCode.OK


def _finish_step(run: RunContext, progress: RunProgress, out: Outputs) -> None:
    """Evaluates, writes the row and saves, as due. Step 0 is the evaluation before training."""
    step, last = progress.step, progress.step == run.config.run.steps
    assert progress.row is not None
    run.saver.finish()
    row = dict(progress.row)
    if step == 0 or last or _due(step, run.config.evaluation.every):
        row |= evaluate(run, step)
    times = run.timer.take()
    if (tokens := row.get("response/tokens")) is not None:
        times["tokens_per_s"] = tokens / times["time/step_s"]
    if row:
        out.write({"step": step, **row, **times})
    progress.row = None
    if exceeded := exceeded_limit(run.config.mismatch, row):  # the row is the same on every rank
        raise RolloutError(f"step {step}: {exceeded}")
    if last or (step > 0 and _due(step, run.config.checkpoint.every)):
        save(run, progress)


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def evaluate(run: RunContext, step: int) -> dict[str, float | None]:
    """pass@k of every benchmark with the weights after `step`; empty when none is configured. Collective."""
    options = run.config.evaluation
    if not options.benchmarks:
        return {}
    with run.timer.span("evaluation"):
        benchmarks = run.rollouts.evaluate(step)
    metrics: dict[str, float | None] = {}
    for benchmark, (name, problems) in zip(options.benchmarks, benchmarks.items(), strict=True):
        metrics |= benchmark_metrics(name, problems, draws_of(options, benchmark)[1])
    return metrics


def _save_before_exit(run: RunContext, progress: RunProgress, reason: Exception) -> str:
    """Saves the position of the run if the driver's state is available. Returns "saved", or names the newest checkpoint."""
    if progress.position == Position(0) and not isinstance(reason, Interrupted):
        return "not saved; nothing was trained yet"
    try:
        save(run, progress, final=True)
    except RolloutError as error:
        saved = f"not saved; {describe_newest(run.run_dir)}"
        if run.rank.rank == 0:
            logger.warning("%s: %s", saved, error)
        return saved
    file = rollout_path(run.run_dir, progress.step)
    if run.rank.rank == 0 and run.config.rollout.is_sampled and progress.step and not file.exists():
        logger.warning("step %d was trained, but the driver ended before it wrote %s", progress.step, file)
    return "saved"


def save(run: RunContext, progress: RunProgress, *, final: bool = False) -> None:
    """Saves the position of the run, with all finished samples of later steps. Collective. `final`: the run ends."""
    has_reference = run.policy.reference is not None
    with run.timer.span("checkpoint"):
        run.saver.finish()
        driver = run.rollouts.state(progress.step, final=final, at_boundary=not progress.open_step.updates)
        state = {
            "policy_version": run.policy.version,
            "driver": driver.order,
            "row": progress.row,
            "has_reference": has_reference,
            "optimizer_format": policy_state.OPTIMIZER_FORMAT,
        }
        contents = run_checkpoint.Contents(
            sharded=_sharded(run, is_loading=False, with_reference=has_reference),
            state=state,
            rng=policy_state.rng_state(),
            hf_metadata=run.model_dir,
            dtype=run.policy.config.params_dtype,
            buffer=driver.buffer,
            open_step=progress.open_step.to_record(run.rank, _settings(run)) if progress.open_step.updates else None,
        )
        in_background = run.saver.in_background and not final and progress.step < run.config.run.steps
        write = run_checkpoint.start_checkpoint(
            run.run_dir,
            progress.position,
            run.rank,
            contents,
            keep_last=run.config.checkpoint.keep_last,
            copy=policy_state.own_copy(*run.models) if in_background else lambda data: data,
        )
        run.saver.write(write, in_background=in_background)


def resume(run: RunContext) -> RunProgress | None:
    """Loads the newest checkpoint, None if there is none. Collective. Raises CheckpointError when it is damaged."""
    found = None
    if run.rank.rank == 0:
        run_checkpoint.finish_interrupted(run.run_dir)
        found = run_checkpoint.latest_checkpoint(run.run_dir)
    # Rank 0 selects: on a shared file system a new folder can appear later for other ranks.
    found = run.channel.broadcast_json(None if found is None else str(found))
    if found is None:
        if run.has_reference:
            run.policy.take_reference(reset_optimizer=False)
        return None
    folder = Path(found)
    run_checkpoint.verify_checkpoint(folder, run.channel)
    if run.config.policy.offload != "none":
        release_memory(run)  # the state is loaded on the device
    saved = run_checkpoint.read_state(folder)
    if saved.get("optimizer_format") != policy_state.OPTIMIZER_FORMAT:
        raise CheckpointError(
            f"{folder} has the optimizer of an earlier release, which this release does not read; resume with that "
            "release, or export the checkpoint and start a new run from its weights"
        )
    if saved["has_reference"] and run.policy.reference is None:
        run.policy.take_reference(reset_optimizer=False)
    if run.critic is not None and not (folder / run_checkpoint.CRITIC_DIST).is_dir():
        raise CheckpointError(
            f"{folder} has no critic, which objective.name=ppo needs; export the checkpoint and start a new run from its weights"
        )
    state = _sharded(run, is_loading=True, with_reference=saved["has_reference"])
    filled, rng = run_checkpoint.load_checkpoint(folder, run.rank, state)
    for model, own in zip(run.models, filled.values(), strict=True):
        policy_state.load_sharded_state(model, own)
    if rng is not None:
        policy_state.load_rng_state(rng, folder / "rng")
    if run.has_reference and run.policy.reference is None:
        logger.warning("%s has no frozen reference: the policy of this checkpoint becomes the reference", folder)
        run.policy.take_reference(reset_optimizer=False)
    run.policy.version = saved["policy_version"]
    buffer = run_checkpoint.read_record(folder) if run.rank.rank == 0 else None
    if buffer is not None:
        with parsing(f"{folder}/buffer.json or buffer.safetensors", CheckpointError):
            # After max_staleness was lowered, the checkpoint has more steps than the run now samples ahead.
            ahead = max(run.config.rollout.steps_ahead + 1, len(buffer[0]["steps"]))
            steps = range(saved["step"] + 1, saved["step"] + 1 + ahead)
            check_saved(*buffer, steps, run.policy.spec.vocab_size)
    run.rollouts.load_state(DriverState(order=saved["driver"], buffer=buffer), saved["step"])
    if run.rank.rank == 0:
        logger.info("resumed from %s", folder)
    record = run_checkpoint.read_open_step(folder)
    with parsing(f"{folder}/open_step.json", CheckpointError):
        open_step = OpenStep() if record is None else OpenStep.from_record(record, _settings(run))
    for model in run.models:  # in this attempt's updates: batch.updates_per_step can differ
        model.optimizer.advance_schedule(saved["step"] * run.config.batch.num_updates + open_step.updates)
    return RunProgress(step=saved["step"], row=saved["row"], open_step=open_step)


def _sharded(run: RunContext, *, is_loading: bool, with_reference: bool) -> dict[str, dict[str, Any]]:
    """Folder of a checkpoint -> the state of its model. Collective."""
    folders = (DIST_FOLDER, run_checkpoint.CRITIC_DIST)
    return {
        folder: policy_state.sharded_state(model, is_loading=is_loading, with_reference=with_reference and number == 0)
        for number, (folder, model) in enumerate(zip(folders, run.models, strict=False))
    }


def _settings(run: RunContext) -> dict[str, Any]:
    """Values that a run may not change inside a step: its samples, mini-batches and log-probs depend on them."""
    config = run.config
    return {
        "batch.updates_per_step": config.batch.updates_per_step,
        "batch.epochs": config.batch.epochs,
        "policy.routing": config.policy.routing,
        "objective.*": sorted(run.objective.logprob_passes(1)),
        "objective.* (first update)": sorted(run.objective.logprob_passes(0)),
        "admission.truncated": config.admission.truncated == "drop",
        "admission.drop_one_class_groups": config.admission.drop_one_class_groups,
        "rollout.max_staleness": config.rollout.steps_ahead,
        "rollout.sampling.temperature": config.rollout.sampling.temperature,
    }


def export_hf(run: RunContext, model: MegatronPolicy, target: Path) -> None:
    """Writes the weights of `model` with config and tokenizer to `target`, which it replaces. Collective; rank 0 writes."""
    with run.timer.span("export"):
        if run.rank.rank:
            for _ in model.export_weights():
                pass
            return
        before = target.with_name(f"{target.name}.before")
        if target.exists():
            if before.exists():  # the last attempt ended before `_keep_others`
                _keep_others(before, target)
            target.rename(before)
        tensors = hf_tensors(model.table.entries, model.config.params_dtype)
        with HfFolderWriter(target, tensors) as writer:
            for name, tensor in model.export_weights():
                writer.put(name, tensor.cpu())
            writer.finish(run.model_dir)
        if before.exists():
            _keep_others(before, target)


def _keep_others(before: Path, target: Path) -> None:
    """Removes an earlier export. Files that an export does not write are the user's, and move to `target`."""
    for path in before.iterdir():
        if ".safetensors" not in path.name and not (target / path.name).exists():
            path.rename(target / path.name)
    shutil.rmtree(before)
