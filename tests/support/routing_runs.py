"""Runs that replay the experts which the sampler chose."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.tiny_run import write_tiny_run

LAYERS = 2
TOP_K = 2
STEPS = 3
COMMON = (
    f"run.steps={STEPS}",
    "checkpoint.every=null",
    "logging.save_tokens=true",
    "objective.reference=step_start",
)


def start(
    folder: Path,
    model: Path,
    *overrides: str,
    program: tuple[str, ...] = ("-m", "pacs_megatron", "train"),
) -> Any:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, *program, str(write_tiny_run(folder, model)), *COMMON, *overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=800, check=False
    )
