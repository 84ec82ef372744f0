"""Names of a run's checkpoints. `step_000010`: after step 10. `step_000010_plus_03`: three updates into step 11, of a run
that was stopped there; only to be resumed from."""

import re
from pathlib import Path
from typing import NamedTuple

CHECKPOINTS_FOLDER = "checkpoints"
MANIFEST_NAME = "manifest.json"
"""Written last: a folder without it is not a checkpoint."""
_NAME = re.compile(r"step_(\d{6,})(?:_plus_(\d{2,}))?")


class Position(NamedTuple):
    """How far a run is: `step` whole steps, and `updates` of the next one."""

    step: int
    updates: int = 0

    @property
    def name(self) -> str:
        """Of its checkpoint's folder."""
        return f"step_{self.step:06d}" + (f"_plus_{self.updates:02d}" if self.updates else "")

    def __str__(self) -> str:
        return f"step {self.step}" + (f" and {self.updates} updates of the next" if self.updates else "")


def position_of(name: str) -> Position | None:
    """What a folder's name says; None for any other name."""
    match = _NAME.fullmatch(name)
    return None if match is None else Position(int(match[1]), int(match[2] or 0))


def whole_checkpoints(run_dir: Path) -> list[tuple[Position, Path]]:
    """Every checkpoint that was written to its end, in order."""
    return sorted(
        (position, path)
        for path in (run_dir / CHECKPOINTS_FOLDER).glob("step_*")
        if (position := position_of(path.name)) is not None and (path / MANIFEST_NAME).is_file()
    )


def newest_position(run_dir: Path) -> Position | None:
    """Of the newest whole checkpoint; None without one."""
    whole = whole_checkpoints(run_dir)
    return whole[-1][0] if whole else None


def newest_step(run_dir: Path) -> int | None:
    """The newest checkpoint between two steps; None without one."""
    steps = [position.step for position, _ in whole_checkpoints(run_dir) if not position.updates]
    return steps[-1] if steps else None
