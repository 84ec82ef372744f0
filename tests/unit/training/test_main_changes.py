"""The record of the options that a later attempt changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from pacs_megatron.checkpoint.names import MANIFEST_NAME
from pacs_megatron.config import load_config
from pacs_megatron.runtime.run_folder import CONFIG_FILE, read_changes
from pacs_megatron.training.main import _write_configuration
from tests.support.tiny_run import write_tiny_run


@pytest.mark.parametrize(
    ("checkpoints", "step"),
    [
        ([], 0),
        (["step_000004"], 4),
        (["step_000004_plus_01"], 4),
        (["step_000002", "step_000004_plus_01"], 4),
        (["step_000000_plus_01"], 0),
    ],
)
def test_a_change_has_the_last_complete_step_before_it(
    tmp_path: Path, checkpoints: list[str], step: int
) -> None:
    """Also where the run was stopped inside a step."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    config = write_tiny_run(tmp_path, tmp_path)
    (run_dir / CONFIG_FILE).write_text(load_config(config).to_yaml())
    for name in checkpoints:
        (run_dir / "checkpoints" / name).mkdir(parents=True)
        (run_dir / "checkpoints" / name / MANIFEST_NAME).touch()
    _write_configuration(load_config(config, ("optimizer.lr=0.5",)), run_dir)
    [change] = read_changes(run_dir)
    assert (change["step"], change["key"], change["after"]) == (step, "optimizer.lr", "0.5")
