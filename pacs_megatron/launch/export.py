"""`export`: write a checkpoint of a run as a Hugging Face folder, without Megatron."""

from contextlib import nullcontext
from pathlib import Path

from pacs_megatron.checkpoint.names import CHECKPOINTS_FOLDER, MANIFEST_NAME, Position, newest_step
from pacs_megatron.errors import ConfigError
from pacs_megatron.runtime.run_lock import RunLock


def export(run_dir: Path, *, step: int | None, out: Path | None, verify: bool = True) -> str:
    """Writes the weights of `step` (default: the newest checkpoint) to `out`, and those of its critic beside it.

    Returns the lines to print.

    Raises ConfigError without a checkpoint, or if `out` is None and the run folder is in use, and CheckpointError or
    ConversionError for an unreadable checkpoint.
    """
    from pacs_megatron.convert.convert import Options, megatron_to_hf
    from pacs_megatron.observability.logs import setup_logging

    newest = newest_step(run_dir)
    if newest is None:
        raise ConfigError(
            f"{run_dir} has no checkpoint of a completed step in {CHECKPOINTS_FOLDER}/; give the folder of a run with a "
            "checkpoint"
        )
    chosen = newest if step is None else step
    folder = run_dir / CHECKPOINTS_FOLDER / Position(chosen).name
    if not (folder / MANIFEST_NAME).is_file():
        raise ConfigError(f"{folder} does not exist or is incomplete; the newest checkpoint is step {newest}")
    target = out if out is not None else run_dir / "hf_exports" / Position(chosen).name
    setup_logging(None, 0)
    # A folder elsewhere needs no lock: readers of a run are never rejected.
    with RunLock(run_dir, "export") if out is None else nullcontext():
        sources = {folder: target}
        if (folder / "critic" / MANIFEST_NAME).is_file():
            sources[folder / "critic"] = target.with_name(f"{target.name}_critic")
        return "\n".join(
            megatron_to_hf(source, Options(out=to, verify_source=verify), step=None) for source, to in sources.items()
        )
