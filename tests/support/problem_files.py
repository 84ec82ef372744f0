"""Paths of problem files: the shipped samples, and real ones on machines that have them."""

from __future__ import annotations

import os
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
SAMPLES = _ROOT / "tests" / "data" / "problems"
"""A few made-up rows for each preset; the file name is the preset."""

PRESET_OF_FILE = {
    "deepscaler_300.json": "deepscaler",
    "gsm8k_200.jsonl": "gsm8k",
    "math500_120.json": "math500",
    "aime24_30.json": "aime",
    "amc_40.json": "amc23",
}
"""Real files that a machine may have."""


def problem_folder() -> Path | None:
    """PACS_PROBLEMS, else ../shared/data/problems beside the checkout.

    None without such a folder.
    """
    named = os.environ.get("PACS_PROBLEMS")
    folder = Path(named) if named else _ROOT.parent / "shared" / "data" / "problems"
    return folder if folder.is_dir() else None
