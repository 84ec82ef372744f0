"""Names of a run's checkpoints, and the identity of the run.

`step_000010`: after step 10. `step_000010_plus_03`: three updates into step 11, where a run was
stopped; for resuming only.
"""

import re
from pathlib import Path
from typing import NamedTuple

from pacs_megatron.errors import CheckpointError
from pacs_megatron.runtime.files import is_file
from pacs_megatron.runtime.json_reader import read_text

CHECKPOINTS_FOLDER = "checkpoints"
MANIFEST_NAME = "manifest.json"
"""File that is written last; a folder without it is not a checkpoint."""
RUN_IDENTITY_FILE = "run_id"
_NAME = re.compile(r"step_(\d{6,})(?:_plus_(\d{2,}))?")


class Position(NamedTuple):
    """Position of a run: `step` complete steps, and `updates` of the next step."""

    step: int
    updates: int = 0

    @property
    def name(self) -> str:
        """Name of the checkpoint's folder."""
        suffix = f"_plus_{self.updates:02d}" if self.updates else ""
        return f"step_{self.step:06d}{suffix}"

    def __str__(self) -> str:
        suffix = f" and {self.updates} updates of the next" if self.updates else ""
        return f"step {self.step}{suffix}"


def position_of(name: str) -> Position | None:
    """The position in a folder's name; None for any other name."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    return Position(int(match[1]), int(match[2] or 0))


def whole_checkpoints(run_dir: Path) -> list[tuple[Position, Path]]:
    """(position, folder) of every complete checkpoint, in order."""
    whole = []
    for path in (run_dir / CHECKPOINTS_FOLDER).glob("step_*"):
        position = position_of(path.name)
        if position is not None and (path / MANIFEST_NAME).is_file():
            whole.append((position, path))
    return sorted(whole)


def newest_position(run_dir: Path) -> Position | None:
    """Position of the newest complete checkpoint; None if there is none."""
    whole = whole_checkpoints(run_dir)
    return whole[-1][0] if whole else None


def describe_newest(run_dir: Path) -> str:
    """Text about the newest checkpoint, for messages of a run that ends without a save."""
    newest = newest_position(run_dir)
    return f"the newest checkpoint is {newest.name}" if newest else "there is no checkpoint"


def newest_step(run_dir: Path) -> int | None:
    """Step of the newest checkpoint at a step boundary; None if there is none."""
    steps = [position.step for position, _ in whole_checkpoints(run_dir) if not position.updates]
    return steps[-1] if steps else None


def read_run_identity(run_dir: Path) -> str | None:
    """The identity that every checkpoint of the run records; None before the first save."""
    file = run_dir / RUN_IDENTITY_FILE
    if not is_file(file, CheckpointError):
        return None
    return read_text(file, error=CheckpointError).strip()
