"""The run folder as a whole: its names, cutting it back to a checkpoint, and what software made it."""

import json
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pacs_megatron import __version__
from pacs_megatron.observability.files import write_atomically
from pacs_megatron.observability.metrics import truncate_metrics
from pacs_megatron.observability.rollout_log import truncate_rollouts

CONFIG_FILE = "config.yaml"
ENVIRONMENT_FILE = "environment.json"
REPORT_FILE = "report.html"
LOG_FOLDER = "logs"
TENSORBOARD_FOLDER = "tensorboard"

_PACKAGES = (
    "torch",
    "megatron-core",
    "transformers",
    "transformer-engine",
    "sglang",
    "datasets",
    "math-verify",
    "numpy",
)


def truncate_after(run_dir: Path, step: int) -> None:
    """Cut metrics and rollouts back to `step`, the step of the checkpoint that the run resumes from.

    `step = -1` (no checkpoint, start over) removes every row, also that of the evaluation before step 1. Idempotent:
    a kill in the middle is cured by the next call.
    """
    truncate_metrics(run_dir, step)
    truncate_rollouts(run_dir, step)


def write_environment(run_dir: Path, extra: Mapping[str, str]) -> None:
    """Write `environment.json`: versions of this program, Python and the packages that matter, and `extra`."""
    found = {"pacs-megatron": __version__, "python": platform.python_version(), "platform": platform.platform()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue  # optional, or not used on this machine
    text = json.dumps({**found, **extra}, indent=2, ensure_ascii=False)
    write_atomically(run_dir / ENVIRONMENT_FILE, [text.encode(), b"\n"])
