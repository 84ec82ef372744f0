"""Saves the position of a run, and resumes from the newest checkpoint."""

import logging
from pathlib import Path
from typing import Any

from pacs_megatron.checkpoint import run_checkpoint
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
    """Saves the position of the run, with all finished samples of later steps.

    Collective. `final`: the run ends.
    """
    has_reference = run.policy.reference is not None
    with run.timer.span("checkpoint"):
        run.saver.finish()
        driver = run.rollouts.state(
            progress.step, final=final, at_boundary=not progress.open_step.updates
        )
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
            open_step=progress.open_step.to_record(run.rank, _settings(run))
            if progress.open_step.updates
            else None,
        )
        in_background = (
            run.saver.in_background and not final and progress.step < run.config.run.steps
        )
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
    """Loads the newest checkpoint, None if there is none.

    Collective. Raises CheckpointError when it is damaged.
    """
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
            f"{folder} has the optimizer of an earlier release, which this release does not read; "
            "resume with that "
            "release, or export the checkpoint and start a new run from its weights"
        )
    if saved["has_reference"] and run.policy.reference is None:
        run.policy.take_reference(reset_optimizer=False)
    if run.critic is not None and not (folder / run_checkpoint.CRITIC_DIST).is_dir():
        raise CheckpointError(
            f"{folder} has no critic, which objective.name=ppo needs; export the checkpoint and "
            "start a new run from its weights"
        )
    state = _sharded(run, is_loading=True, with_reference=saved["has_reference"])
    filled, rng = run_checkpoint.load_checkpoint(folder, run.rank, state)
    for model, own in zip(run.models, filled.values(), strict=True):
        policy_state.load_sharded_state(model, own)
    if rng is not None:
        policy_state.load_rng_state(rng, folder / "rng")
    if run.has_reference and run.policy.reference is None:
        logger.warning(
            "%s has no frozen reference: the policy of this checkpoint becomes the reference",
            folder,
        )
        run.policy.take_reference(reset_optimizer=False)
    run.policy.version = saved["policy_version"]
    buffer = run_checkpoint.read_record(folder) if run.rank.rank == 0 else None
    if buffer is not None:
        with parsing(f"{folder}/buffer.json or buffer.safetensors", CheckpointError):
            # After max_staleness was lowered, the checkpoint has more steps than the run now
            # samples ahead.
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
        model.optimizer.advance_schedule(
            saved["step"] * run.config.batch.num_updates + open_step.updates
        )
    return RunProgress(step=saved["step"], row=saved["row"], open_step=open_step)


def _sharded(
    run: RunContext, *, is_loading: bool, with_reference: bool
) -> dict[str, dict[str, Any]]:
    """Folder of a checkpoint -> the state of its model. Collective."""
    folders = (DIST_FOLDER, run_checkpoint.CRITIC_DIST)
    return {
        folder: policy_state.sharded_state(
            model, is_loading=is_loading, with_reference=with_reference and number == 0
        )
        for number, (folder, model) in enumerate(zip(folders, run.models, strict=False))
    }


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
