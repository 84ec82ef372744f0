"""TensorBoard files as TensorBoard reads them; W&B against a recording stand-in with its calls."""

import importlib.util
import os
import subprocess
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pacs_megatron.config.schema import LoggingOptions, WandbOptions
from pacs_megatron.errors import ConfigError
from pacs_megatron.observability import writers
from pacs_megatron.observability.writers import TensorBoardWriter, WandbWriter, open_sinks


def scalars(run_dir: Path, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_values_are_written_without_nulls(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path, first_step=0)
    writer.write({"step": 0, "eval/a/pass@1": 0.25, "x": None})
    writer.write({"step": 1, "reward/mean": 0.5, "n": 3})
    writer.close()
    assert scalars(tmp_path, "eval/a/pass@1") == [(0, 0.25)]
    assert scalars(tmp_path, "reward/mean") == [(1, 0.5)]
    with pytest.raises(KeyError):
        scalars(tmp_path, "x")


def test_tensorboard_shows_the_titles_and_units_of_the_report(tmp_path: Path) -> None:
    for step in (1, 2):  # the second one is a resumed run
        writer = TensorBoardWriter(tmp_path, first_step=step)
        for at in (step, step + 1):
            writer.write({"step": at, "optimizer/grad_norm": 0.25, "grpo/clip_frac": 0.5})
        writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    norm = events.SummaryMetadata("optimizer/grad_norm")
    assert (norm.display_name, norm.summary_description) == ("gradient norm", "before clipping")
    assert events.SummaryMetadata("grpo/clip_frac").display_name == "GRPO: clipped share"


def test_a_resumed_run_shows_no_step_twice(tmp_path: Path) -> None:
    first = TensorBoardWriter(tmp_path, first_step=1)
    for step in range(1, 8):
        first.write({"step": step, "x": float(step)})
    # Killed: the process does not close its file, and the last record is incomplete.
    (path,) = (tmp_path / "tensorboard").iterdir()
    content = path.read_bytes()
    first.close()
    path.write_bytes(content[:-5])
    second = TensorBoardWriter(tmp_path, first_step=5)
    for step in range(5, 10):
        second.write({"step": step, "x": 100.0 + step})
    second.close()
    expected = [(s, float(s)) for s in range(1, 5)] + [(s, 100.0 + s) for s in range(5, 10)]
    assert scalars(tmp_path, "x") == expected


def test_neither_torch_nor_tensorflow_is_imported() -> None:
    code = (
        "import sys, tempfile, pathlib\n"
        "from pacs_megatron.observability.writers import TensorBoardWriter\n"
        "import pacs_megatron.observability.report, pacs_megatron.observability.progress\n"
        "w = TensorBoardWriter(pathlib.Path(tempfile.mkdtemp()), 0); w.write({'step': 0, 'x': "
        "1.0}); w.close()\n"
        "bad = {'torch', 'tensorflow', 'megatron', 'transformers'} & set(sys.modules)\n"
        "sys.exit(str(bad) if bad else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def without(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(writers, "find_spec", lambda name: None if name == package else real(name))


def test_missing_wandb_is_a_clear_error_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, "wandb")
    options = LoggingOptions(wandb=WandbOptions(project="p"))
    with pytest.raises(ConfigError, match=r"logging.wandb.project=p: .*pip install wandb"):
        open_sinks(tmp_path, "r", options, first_step=0, config={})
    assert list(tmp_path.iterdir()) == []


class Recorder:
    """Replaces the wandb package, which the locked environment does not have, and records the
    calls.
    """

    def __init__(self) -> None:
        self.inits: list[dict[str, Any]] = []
        self.logs: list[tuple[dict[str, Any], int]] = []
        self.finished = 0

    def module(self) -> types.ModuleType:
        module = types.ModuleType("wandb")
        module.__spec__ = ModuleSpec("wandb", None)
        module.init = self.init  # type: ignore[attr-defined]
        return module

    def init(self, **options: Any) -> "Recorder":
        self.inits.append(options)
        return self

    def log(self, values: dict[str, Any], step: int) -> None:
        self.logs.append((values, step))

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setitem(sys.modules, "wandb", recorder.module())
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_API_KEY", "k")
    return recorder


def test_wandb_gets_rows_and_a_resumed_run_keeps_its_id(tmp_path: Path, wandb: Recorder) -> None:
    options = WandbOptions(project="p")
    for _ in range(2):
        writer = WandbWriter(tmp_path, "name", options, {"run": {"seed": 1}})
        writer.write({"step": 3, "x": 1.0, "y": None})
        writer.close()
    assert wandb.inits[0]["id"] == wandb.inits[1]["id"] != ""
    other = tmp_path / "other"
    WandbWriter(other, "name", options, {}).close()
    assert wandb.inits[2]["id"] != wandb.inits[0]["id"]
    assert wandb.inits[1]["resume"] == "allow"
    assert wandb.inits[0]["project"] == "p"
    assert wandb.logs == [({"x": 1.0}, 3)] * 2
    assert wandb.finished == 3


def test_wandb_requires_a_key_unless_offline(
    tmp_path: Path, wandb: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY")
    with pytest.raises(ConfigError, match="WANDB_API_KEY is not set"):
        WandbWriter(tmp_path, "name", WandbOptions(project="p"), {})
    assert wandb.inits == []
    monkeypatch.setenv("WANDB_MODE", "offline")
    WandbWriter(tmp_path, "name", WandbOptions(project="p"), {}).close()
    assert len(wandb.inits) == 1


def test_real_wandb_accepts_the_same_calls(tmp_path: Path) -> None:
    """Offline, in a process of its own because it starts a service.

    Compares the replacement above with the real package.
    """
    if importlib.util.find_spec("wandb") is None:
        pytest.skip("wandb is not installed (the optional extra `wandb`)")
    code = (
        "import sys; from pathlib import Path; from pacs_megatron.config.schema import "
        "WandbOptions\n"
        "from pacs_megatron.observability.writers import WandbWriter\n"
        "for first in (1, 2):\n"
        "    w = WandbWriter(Path(sys.argv[1]), 'name', WandbOptions(project='p'), {'seed': 1})\n"
        "    for step in range(first, 4): w.write({'step': step, 'reward/mean': 0.5, 'x': None})\n"
        "    w.close()\n"
    )
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    run_id = (tmp_path / "wandb_id").read_text()
    assert len(list(tmp_path.glob(f"wandb/offline-run-*-{run_id}"))) >= 1
