"""Saves the position of a run as a checkpoint, and resumes a run from its newest checkpoint.

A checkpoint has, for each model, weights, optimizer and reference (`policy.state`); the generators
of each rank; the driver's position in the data and its samples of later steps; the metrics of a
step whose row is not written yet; and inside a step the log-probs and metrics of its first updates
(`OpenStep`). `checkpoint.run_checkpoint` writes and reads the files.
"""

import logging
from pathlib import Path
from typing import Any

from pacs_megatron.checkpoint import run_checkpoint
from pacs_megatron.checkpoint.adapters import LoraFacts, check_facts
from pacs_megatron.checkpoint.manifest import DIST_FOLDER
from pacs_megatron.errors import CheckpointError
from pacs_megatron.policy import state as policy_state
from pacs_megatron.rollout.collect import DriverState
from pacs_megatron.rollout.sample_arrays import check_saved
from pacs_megatron.runtime.json_reader import parsing
from pacs_megatron.training.context import RunContext
from pacs_megatron.training.progress import OpenStep, RunProgress
from pacs_megatron.training.sync import release_memory

logger = logging.getLogger(__name__)


def save(run: RunContext, progress: RunProgress, *, final: bool = False) -> None:
    """Saves the position of the run, with all finished samples of later steps. Collective.

    Args:
        run: the run, whose weights are those of `progress`.
        progress: its position.
        final: whether the run ends after this checkpoint, which is then written in the foreground.
    """
    is_last = final or progress.step >= run.config.run.steps
    in_background = run.saver.in_background and not is_last
    with run.timer.span("checkpoint"):
        run.saver.finish()
        driver_state = run.rollouts.state(
            progress.step, final=final, at_boundary=not progress.open_step.updates
        )
        write = run_checkpoint.start_checkpoint(
            run.run_dir,
            progress.position,
            run.rank,
            _contents(run, progress, driver_state),
            keep_last=run.config.checkpoint.keep_last,
            # The next update changes the tensors while the thread writes them.
            copy=policy_state.own_copy(*run.models) if in_background else lambda data: data,
        )
        run.saver.write(write, in_background=in_background)


def resume(run: RunContext) -> RunProgress | None:
    """Loads the newest checkpoint and returns its position; None if there is none. Collective.

    Raises CheckpointError if it is damaged or does not fit the run.
    """
    folder = _newest_checkpoint(run)
    if folder is None:
        if run.has_reference and run.policy.reference is None:
            run.policy.take_reference(reset_optimizer=False, is_start=True)
        return None

    run_checkpoint.verify_checkpoint(folder, run.channel)
    if run.config.policy.offload != "none":
        release_memory(run)  # the state is loaded on the device

    saved = run_checkpoint.read_state(folder)
    _check_support(run, folder, saved)
    check_facts(LoraFacts.read(folder), run.lora_facts, folder)
    _load_models(run, folder, saved)
    _load_rollouts(run, folder, saved)
    if run.rank.rank == 0:
        logger.info("resumed from %s", folder)

    open_step = _read_open_step(run, folder)
    # In this attempt's updates, because batch.updates_per_step can differ from the last attempt's.
    num_updates = saved["step"] * run.config.batch.num_updates + open_step.updates
    for model in run.models:
        model.optimizer.advance_schedule(num_updates)
    return RunProgress(
        step=saved["step"],
        row=saved["row"],
        open_step=open_step,
        idle_steps=saved.get("idle_steps"),
    )


def _contents(
    run: RunContext, progress: RunProgress, driver_state: DriverState
) -> run_checkpoint.Contents:
    """The content of a checkpoint at `progress`. Collective."""
    has_reference = run.policy.has_snapshot
    sharded = _sharded(run, is_loading=False, with_reference=has_reference)
    rng = policy_state.rng_state()
    open_step = None
    if progress.open_step.updates:
        open_step = progress.open_step.to_record(run.rank, _settings(run))

    return run_checkpoint.Contents(
        sharded=sharded,
        state={
            "policy_version": run.policy.version,
            "driver": driver_state.order,
            "row": progress.row,
            "idle_steps": progress.idle_steps,
            "has_reference": has_reference,
            "optimizer_format": policy_state.OPTIMIZER_FORMAT,
        },
        rng=rng,
        hf_metadata=run.model_dir,
        stop_token_ids=run.stop_token_ids,
        dtype=run.policy.config.params_dtype,
        buffer=driver_state.buffer,
        open_step=open_step,
        lora=run.lora_facts,
    )


def _newest_checkpoint(run: RunContext) -> Path | None:
    """The newest complete checkpoint of the run; None if there is none. Collective."""
    newest = None
    if run.rank.rank == 0:
        run_checkpoint.finish_interrupted(run.run_dir)
        newest = run_checkpoint.latest_checkpoint(run.run_dir)

    # Rank 0 selects: on a shared file system a new folder can appear later for other ranks.
    path = run.channel.broadcast_json(None if newest is None else str(newest))
    return None if path is None else Path(path)


def _check_support(run: RunContext, folder: Path, saved: dict[str, Any]) -> None:
    """Raises CheckpointError if the run cannot continue from this checkpoint."""
    if saved.get("optimizer_format") != policy_state.OPTIMIZER_FORMAT:
        raise CheckpointError(
            f"{folder} has the optimizer of an earlier release, which this release does not read; "
            "resume with that release, or export the checkpoint and start a new run from its "
            "weights"
        )
    if run.critic is not None and not (folder / run_checkpoint.CRITIC_DIST).is_dir():
        raise CheckpointError(
            f"{folder} has no critic, which objective.name=ppo needs; export the checkpoint and "
            "start a new run from its weights"
        )


def _load_models(run: RunContext, folder: Path, saved: dict[str, Any]) -> None:
    """Loads weights, optimizers, reference and random generators. Collective."""
    # The state dict to fill has a reference only if the policy has one.
    if saved["has_reference"] and run.policy.reference is None:
        run.policy.take_reference(reset_optimizer=False)
    sharded = _sharded(run, is_loading=True, with_reference=saved["has_reference"])
    loaded, rng = run_checkpoint.load_checkpoint(folder, run.rank, sharded)
    for model, state in zip(run.models, loaded.values(), strict=True):
        policy_state.load_sharded_state(model, state)
    if rng is not None:
        policy_state.load_rng_state(rng, folder / "rng")

    if run.has_reference and run.policy.reference is None:
        if not run.policy.starts_at_base:
            logger.warning(
                "%s has no frozen reference: the policy of this checkpoint becomes the reference",
                folder,
            )
        run.policy.take_reference(reset_optimizer=False, is_start=True)
    run.policy.version = saved["policy_version"]


def _load_rollouts(run: RunContext, folder: Path, saved: dict[str, Any]) -> None:
    """Loads the position in the data and the samples of later steps into the driver. Collective."""
    step = saved["step"]
    buffer = run_checkpoint.read_record(folder) if run.rank.rank == 0 else None
    if buffer is not None:
        with parsing(f"{folder}/buffer.json or buffer.safetensors", CheckpointError):
            header, arrays = buffer
            # After max_staleness was lowered, the checkpoint has more steps than the run now
            # samples ahead.
            num_ahead = max(run.config.rollout.steps_ahead + 1, len(header["steps"]))
            steps = range(step + 1, step + 1 + num_ahead)
            check_saved(header, arrays, steps, run.policy.spec.vocab_size)
    run.rollouts.load_state(DriverState(order=saved["driver"], buffer=buffer), step)


def _read_open_step(run: RunContext, folder: Path) -> OpenStep:
    """The step in progress of a checkpoint; one without updates at a step boundary."""
    open_step = OpenStep()
    record = run_checkpoint.read_open_step(folder)
    if record is not None:
        with parsing(f"{folder}/open_step.json", CheckpointError):
            open_step = OpenStep.from_record(record, _settings(run))
    return open_step


def _sharded(
    run: RunContext, *, is_loading: bool, with_reference: bool
) -> dict[str, dict[str, Any]]:
    """Folder of a checkpoint -> the state of its model. Collective."""
    folders = (DIST_FOLDER, run_checkpoint.CRITIC_DIST)
    sharded = {}
    for folder, model in zip(folders, run.models, strict=False):
        sharded[folder] = policy_state.sharded_state(
            model,
            is_loading=is_loading,
            with_reference=with_reference and folder == DIST_FOLDER,
        )
    return sharded


def _settings(run: RunContext) -> dict[str, Any]:
    """Values that a run may not change inside a step: its samples, mini-batches and log-probs
    depend on them.
    """
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
