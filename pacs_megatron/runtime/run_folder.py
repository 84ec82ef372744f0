"""Names of the files of a run folder, exit codes, checks of the folder, and the record of software
versions.
"""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from pacs_megatron import __version__
from pacs_megatron.config import LoadedConfig, load_config
from pacs_megatron.config.load import leaves
from pacs_megatron.config.text import near_file
from pacs_megatron.errors import ConfigError
from pacs_megatron.runtime.environment import PACKAGES, installed
from pacs_megatron.runtime.files import Fields, json_line, naming, read_rows, write_atomically

CONFIG_FILE = "config.yaml"
ENVIRONMENT_FILE = "environment.json"
REPORT_FILE = "report.html"
METRICS_FILE = "metrics.jsonl"
CHANGES_FILE = "changes.jsonl"
"""Options that an attempt changed, with the last complete step before it"""
PROMPTS_FILE = "prompts.json"
"""File with the time that the prompts of all attempts have, and the notices about the data"""
LOG_FOLDER = "logs"
HEARTBEAT_FOLDER = "heartbeats"
EXIT_CODE_FILE = "exit_code"
"""File with rank 0's exit code, which torchrun hides"""
FAILED_RANK_FILE = "failed_rank"
"""File with the exit code of another rank that failed before training; rank 0 receives only a
SIGTERM then
"""
ATTEMPT_VARIABLE = "PACS_ATTEMPT"
"""Set by batch scripts: the log folder of the attempt."""
TENSORBOARD_FOLDER = "tensorboard"
PROFILE_FOLDER = "profile"
_FOLDERS = (
    "checkpoints",
    "rollouts",
    "hf",
    LOG_FOLDER,
    HEARTBEAT_FOLDER,
    TENSORBOARD_FOLDER,
    PROFILE_FOLDER,
)

_MAX_NAMES = 5
"""Names of runs in a message"""
FIXED_KEYS = (
    "run.seed",
    "model.path",
    "objective.name",
    "objective.critic.path",
    "objective.teacher",
    "data.",
    "batch.prompts_per_step",
    "batch.samples_per_prompt",
)
"""Keys that a resumed run may not change, because its metrics would mix two experiments"""
_NOT_FIXED = ("data.max_dropped_frac",)
"""Keys below those that change no sample"""


def write_exit_code(run_dir: Path, code: int, name: str = EXIT_CODE_FILE) -> None:
    """Writes the exit code of the run; ignores a full disk, because that may be the cause of the
    code.
    """
    with suppress(OSError):
        write_atomically(run_dir / name, [f"{int(code)}\n".encode()])


def read_exit_code(file: Path, otherwise: int) -> int:
    """The code that rank 0 wrote; `otherwise` if the file is damaged."""
    with file.open("rb") as stream:
        text = stream.read(4).decode(errors="replace").strip()
    return int(text) if text.isdecimal() else otherwise


def run_folder(loaded: LoadedConfig) -> Path:
    """`<run.dir>/<run.name>`."""
    return Path(loaded.config.run.dir) / loaded.config.run.name


def check_run_folder(run_dir: Path) -> None:
    """Checks that a run can write to `run_dir`, which need not exist.

    Raises:
        ConfigError: The folder is inside another run's folder or below a file, or a file or link
            has the path of a file of the run.
    """
    for outer in run_dir.absolute().parents:
        if os.path.lexists(outer) and not outer.is_dir():
            raise ConfigError(
                f"{outer} is not a folder; choose another run.dir than {run_dir.parent}"
            )
        if (outer / CONFIG_FILE).is_file() and (outer / HEARTBEAT_FOLDER).is_dir():
            raise ConfigError(
                f"{run_dir} is inside the folder of the run {outer}; choose another run.dir or "
                "run.name"
            )

    folders = [run_dir, *(run_dir / name for name in _FOLDERS)]
    for folder in folders:
        if os.path.lexists(folder) and not folder.is_dir():
            raise ConfigError(f"{folder} is not a folder; remove it, or choose another run.name")

    # The run appends to these files, so a link would change a file outside of the folder. A batch
    # script makes the link logs/latest, to a folder.
    files = [run_dir / METRICS_FILE, run_dir / CHANGES_FILE]
    files += (run_dir / LOG_FOLDER).glob("*")
    files += (run_dir / "rollouts").glob("*")
    for path in files:
        if path.is_symlink() and not path.is_dir():
            raise ConfigError(
                f"{path} is a link, not a file of the run; remove it, or choose another run.name"
            )


def near_run(path: Path) -> str:
    """The end of a message about a folder that is not of a run: the runs in it, or a like name."""
    names = [file.parent.name for file in islice(sorted(path.glob(f"*/{CONFIG_FILE}")), _MAX_NAMES)]
    return f"; it has the runs {', '.join(names)}" if names else near_file(path)


def changed_since(loaded: LoadedConfig, run_dir: Path) -> list[str]:
    """Keys whose values differ from the last attempt's in this folder; empty for the first attempt.

    Raises:
        ConfigError: One of FIXED_KEYS differs and the run has a checkpoint, or `run_dir` is not the
            folder of a run, or `check_run_folder` fails.
    """
    check_run_folder(run_dir)
    config_file = run_dir / CONFIG_FILE
    if not config_file.exists():
        # Metrics without a configuration and checkpoints are not of a run, and a run would replace
        # them.
        has_metrics = (run_dir / METRICS_FILE).exists()
        if has_metrics and not (run_dir / "checkpoints").exists():
            raise ConfigError(
                f"{run_dir} has {METRICS_FILE} and no {CONFIG_FILE}: not of a run; choose another "
                "run.name"
            )
        return []

    before = dict(leaves(load_config(config_file).config))
    after = dict(leaves(loaded.config))
    changed = sorted(
        key for key in before.keys() | after.keys() if before.get(key) != after.get(key)
    )
    forbidden = [key for key in changed if key.startswith(FIXED_KEYS) and key not in _NOT_FIXED]
    if forbidden and _has_checkpoint(run_dir):
        raise ConfigError(
            f"{run_dir} contains a run with another {forbidden[0]}; use the same, or choose "
            "another run.name"
        )
    return changed


def _has_checkpoint(run_dir: Path) -> bool:
    return any((run_dir / "checkpoints").glob("step_*/manifest.json"))


def record_changes(
    loaded: LoadedConfig, run_dir: Path, keys: Sequence[str], step: int
) -> list[tuple[str, str, str]]:
    """Appends changed options to `changes.jsonl`, before the new configuration is written.

    Args:
        loaded: the new configuration.
        run_dir: of the run, with the last attempt's configuration.
        keys: from `changed_since`.
        step: the last complete step before the change.

    Returns:
        Key, value before and value after of each.
    """
    before = dict(leaves(load_config(run_dir / CONFIG_FILE).config))
    after = dict(leaves(loaded.config))
    changes = [(key, str(before.get(key)), str(after.get(key))) for key in keys]
    lines = []
    for key, old, new in changes:
        lines.append(json_line({"step": step, "key": key, "before": old, "after": new}))
    with naming(run_dir / CHANGES_FILE), (run_dir / CHANGES_FILE).open("ab") as file:
        file.write(b"".join(lines))
    return changes


def read_changes(run_dir: Path) -> list[dict[str, Any]]:
    """The changes of a run: `step`, `key`, `before` and `after`, in their order."""
    fields: Fields = {"step": int, "key": str, "before": str, "after": str}
    return read_rows(run_dir / CHANGES_FILE, fields)


def write_environment(run_dir: Path, extra: Mapping[str, str]) -> None:
    """Writes `environment.json`: versions of this program, Python and the packages that matter, and
    `extra`.
    """
    record = {
        "pacs-megatron": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    for package in PACKAGES:
        version = installed(package)
        if version is not None:
            record[package] = version

    text = json.dumps(record | dict(extra), indent=2, ensure_ascii=False)
    write_atomically(run_dir / ENVIRONMENT_FILE, [text.encode(), b"\n"])
