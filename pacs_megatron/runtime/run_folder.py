"""Names of the files of a run folder, exit codes, checks of the folder, and the record of software
versions.
"""

import json
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from pacs_megatron import __version__
from pacs_megatron.config import LoadedConfig, load_config
from pacs_megatron.config.load import leaves
from pacs_megatron.errors import ConfigError
from pacs_megatron.runtime.environment import PACKAGES, installed
from pacs_megatron.runtime.files import write_atomically

CONFIG_FILE = "config.yaml"
ENVIRONMENT_FILE = "environment.json"
REPORT_FILE = "report.html"
METRICS_FILE = "metrics.jsonl"
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
_FOLDERS = ("checkpoints", "rollouts", "hf", LOG_FOLDER, HEARTBEAT_FOLDER, TENSORBOARD_FOLDER)

FIXED_KEYS = (
    *("run.seed", "model.path", "objective.name", "objective.critic.path", "data."),
    *("batch.prompts_per_step", "batch.samples_per_prompt"),
)
"""Keys that a resumed run may not change, because its metrics would mix two experiments"""


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
    """Raises ConfigError for a folder inside another run's folder, and for a file or link at the
    path of a run's file.
    """
    for outer in run_dir.absolute().parents:
        if (outer / CONFIG_FILE).is_file() and (outer / HEARTBEAT_FOLDER).is_dir():
            raise ConfigError(
                f"{run_dir} is inside the folder of the run {outer}; choose another run.dir or "
                "run.name"
            )
    for folder in (run_dir, *(run_dir / name for name in _FOLDERS)):
        if os.path.lexists(folder) and not folder.is_dir():
            raise ConfigError(f"{folder} is not a folder; remove it, or choose another run.name")
    for path in (
        run_dir / METRICS_FILE,
        *(run_dir / LOG_FOLDER).glob("*"),
        *(run_dir / "rollouts").glob("*"),
    ):
        if (
            path.is_symlink() and not path.is_dir()
        ):  # the run appends to some of these; a job links logs/latest
            raise ConfigError(
                f"{path} is a link, not a file of the run; remove it, or choose another run.name"
            )


def changed_since(loaded: LoadedConfig, run_dir: Path) -> list[str]:
    """Keys whose values differ from the last attempt's in this folder; empty where there was none.

    Raises ConfigError as `check_run_folder`, and when one of FIXED_KEYS differs.
    """
    check_run_folder(run_dir)
    target = run_dir / CONFIG_FILE
    if not target.exists():
        if (run_dir / METRICS_FILE).exists() and not (
            run_dir / "checkpoints"
        ).exists():  # the run would replace it
            raise ConfigError(
                f"{run_dir} has {METRICS_FILE} and no {CONFIG_FILE}: not of a run; choose another "
                "run.name"
            )
        return []
    before = dict(leaves(load_config(target).config))
    after = dict(leaves(loaded.config))
    changed = sorted(key for key in {*before, *after} if before.get(key) != after.get(key))
    forbidden = [key for key in changed if any(key.startswith(fixed) for fixed in FIXED_KEYS)]
    if forbidden:
        raise ConfigError(
            f"{run_dir} contains a run with another {forbidden[0]}; use the same, or choose "
            "another run.name"
        )
    return changed


def write_environment(run_dir: Path, extra: Mapping[str, str]) -> None:
    """Writes `environment.json`: versions of this program, Python and the packages that matter, and
    `extra`.
    """
    found = {
        "pacs-megatron": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    packages = {name: version for name in PACKAGES if (version := installed(name)) is not None}
    text = json.dumps({**found, **packages, **extra}, indent=2, ensure_ascii=False)
    write_atomically(run_dir / ENVIRONMENT_FILE, [text.encode(), b"\n"])
