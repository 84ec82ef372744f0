"""Folders of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from pacs_megatron.config import load_config
from pacs_megatron.errors import ConfigError
from pacs_megatron.launch.job import begin, end
from pacs_megatron.runtime.run_folder import (
    changed_since,
    check_run_folder,
    read_changes,
    record_changes,
)
from tests.support.run_files import BASE
from tests.support.tiny_run import write_tiny_run


@pytest.mark.parametrize("name", ["checkpoints", "rollouts", "hf", "logs"])
@pytest.mark.parametrize("kind", ["file", "lost link"])
def test_a_file_in_the_place_of_a_folder_is_an_error(name: str, kind: str, tmp_path: Path) -> None:
    config = tmp_path / "base.yaml"
    config.write_text(BASE)
    loaded = load_config(config)
    assert changed_since(loaded, tmp_path) == []
    (tmp_path / name).touch() if kind == "file" else (tmp_path / name).symlink_to("nowhere")
    with pytest.raises(ConfigError, match=f"{name} is not a folder"):
        changed_since(loaded, tmp_path)


@pytest.mark.parametrize("name", ["checkpoints", "hf", "x/y"])
def test_a_run_in_the_folder_of_another_run_is_an_error(name: str, tmp_path: Path) -> None:
    config = tmp_path / "base.yaml"
    config.write_text(BASE)
    loaded = load_config(config)
    (tmp_path / "run" / "heartbeats").mkdir(parents=True)
    assert changed_since(loaded, tmp_path / "run" / name) == []
    (tmp_path / "run" / "config.yaml").write_text(BASE)
    with pytest.raises(ConfigError, match="is inside the folder of the run"):
        changed_since(loaded, tmp_path / "run" / name)


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "changes.jsonl", "logs/driver.log", "rollouts/step_000001.jsonl"]
)
def test_a_file_of_the_run_that_is_a_link_is_an_error(name: str, tmp_path: Path) -> None:
    config = tmp_path / "base.yaml"
    config.write_text(BASE)
    (tmp_path / "data.jsonl").write_text("mine")
    (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "run" / name).symlink_to(tmp_path / "data.jsonl")
    with pytest.raises(ConfigError, match=f"{name} is a link"):
        changed_since(load_config(config), tmp_path / "run")


def test_the_link_of_a_job_to_its_newest_attempt_is_allowed(tmp_path: Path) -> None:
    config = tmp_path / "base.yaml"
    config.write_text(BASE)
    for job_id in ("1", "2"):
        begin(tmp_path / "run", job_id)
        assert changed_since(load_config(config), tmp_path / "run") == []
        end(tmp_path / "run", 75, 3)


@pytest.mark.parametrize("folder", ["/dev/full", "file", "file/deeper"])
def test_a_folder_below_a_file_is_an_error(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"is not a folder; choose another run\.dir"):
        check_run_folder(tmp_path / folder / "run")


def test_metrics_of_another_program_are_an_error(tmp_path: Path) -> None:
    config = tmp_path / "base.yaml"
    config.write_text(BASE)
    loaded = load_config(config)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "loss": 3.5}\n')
    with pytest.raises(ConfigError, match=r"metrics\.jsonl and no config\.yaml: not of a run"):
        changed_since(loaded, tmp_path / "run")
    (tmp_path / "run" / "checkpoints").mkdir()  # a run whose config.yaml was removed
    assert changed_since(loaded, tmp_path / "run") == []


def test_changes_of_later_attempts_are_recorded_in_their_order(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(BASE)
    assert read_changes(tmp_path) == []
    for step, lr in ((20, 0.5), (30, 0.25)):
        loaded = load_config(tmp_path / "config.yaml", [f"optimizer.lr={lr}"])
        changed = changed_since(loaded, tmp_path)
        assert changed == ["optimizer.lr"]
        ((key, _, after),) = record_changes(loaded, tmp_path, changed, step)
        assert (key, after) == ("optimizer.lr", str(lr))
        (tmp_path / "config.yaml").write_text(loaded.to_yaml())
    first, second = read_changes(tmp_path)
    assert (first["step"], first["key"], first["after"]) == (20, "optimizer.lr", "0.5")
    assert (second["step"], second["before"], second["after"]) == (30, "0.5", "0.25")


def test_the_limit_of_dropped_rows_may_change_and_other_keys_of_the_data_may_not(
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    config = write_tiny_run(tmp_path, tmp_path)
    (run_dir / "config.yaml").write_text(load_config(config).to_yaml())
    changed = load_config(config, ("data.max_dropped_frac=0.5",))
    assert changed_since(changed, run_dir) == ["data.max_dropped_frac"]
    corrected = load_config(config, ("data.max_prompt_tokens=99",))
    assert changed_since(corrected, run_dir) == ["data.max_prompt_tokens"], "nothing was saved"
    (run_dir / "checkpoints" / "step_000001.partial").mkdir(parents=True)
    assert changed_since(corrected, run_dir) == ["data.max_prompt_tokens"], "not complete"
    (run_dir / "checkpoints" / "step_000000_plus_01").mkdir()
    (run_dir / "checkpoints" / "step_000000_plus_01" / "manifest.json").touch()
    with pytest.raises(ConfigError, match=r"another data\.max_prompt_tokens"):
        changed_since(corrected, run_dir)
