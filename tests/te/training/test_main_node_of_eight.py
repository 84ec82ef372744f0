"""The shipped FP8 configurations on the modelled node of eight GPUs, with their recipe:

Transformer Engine's modules, FP8 emulated (quantisation only).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pacs_megatron.config import load_config
from pacs_megatron.runtime.run_folder import CONFIG_FILE
from tests.support.node.runs import RUNS, check_run, shipped_run

NAMES = sorted(path.stem for path in RUNS.glob("*n8g*-fp8.yaml"))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if "8b" in name else (pytest.mark.campaign,)) for name in NAMES],
)
def test_a_shipped_fp8_configuration_trains_two_steps_and_saves(tmp_path: Path, name: str) -> None:
    run = shipped_run(name, tmp_path, emulates_fp8=True)
    check_run(run)
    assert load_config(run.run_dir / CONFIG_FILE).config.precision.fp8 is not None
