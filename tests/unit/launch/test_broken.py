"""Broken configurations and environments:
`preflight` names key and fix of each and writes nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pacs_megatron.errors import PacsError
from pacs_megatron.launch.train import run_train
from pacs_megatron.workbench.preflight.run import render, run_preflight
from tests.support.tiny_models import make_tiny_qwen3
from tests.support.tiny_run import write_tiny_run
from tests.unit.launch.broken_cases import DATA, HOST, MODEL, REWARD, Case, write
from tests.unit.launch.broken_configs import CONFIGURATION, SERVERS

RESUMED = ("another critic on resume",)
CASES = [*CONFIGURATION, *SERVERS, *MODEL, *DATA, *REWARD, *HOST]


@pytest.fixture(scope="module")
def taken_port() -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield holder.getsockname()[1]


@pytest.fixture(autouse=True)
def login_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the variables of a job."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "NCCL_", "GLOO_", "MASTER_", "HF_HUB_OFFLINE")) or name in (
            "RANK",
            "WORLD_SIZE",
        ):
            monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that preflight passes."""
    folder = tmp_path_factory.mktemp("sound")
    write_tiny_run(folder, make_tiny_qwen3(folder / "model"))
    return folder


def copy(sound: Path, folder: Path) -> Path:
    shutil.copytree(sound, folder, dirs_exist_ok=True)
    config = folder / "run.yaml"
    config.write_text(config.read_text().replace(str(sound), str(folder)))
    return config


def files(folder: Path) -> set[str]:
    # Reading a plug-in or a parquet file may leave caches of Python or of the library.
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if "__pycache__" not in str(path)
    }


def test_the_sound_run_passes(sound: Path, tmp_path: Path) -> None:
    checks = run_preflight(copy(sound, tmp_path))
    assert not [str(check) for check in checks if check.level == "fail"]
    rows = json.loads(render(checks, as_json=True))
    assert {row["level"] for row in rows} <= {"ok", "warn"}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.full] * (case.name == "reward that hangs"))
        for case in CASES
    ],  # one worker per answer
    ids=str,
)
def test_broken(
    case: Case, sound: Path, tmp_path: Path, taken_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if case.needs_no_gpu and torch.cuda.is_available():
        pytest.skip("this host has GPUs")
    config = copy(sound, tmp_path)
    monkeypatch.chdir(tmp_path)
    for variable, value in case.env.items():
        monkeypatch.setenv(variable, value.format(folder=tmp_path, port=taken_port))
    case.breaks(tmp_path)
    before = files(tmp_path)
    fails = [str(check) for check in run_preflight(config, case.overrides) if check.level == "fail"]
    assert any(case.key in line and case.fix in line for line in fails), (
        "\n".join(fails) or "nothing failed"
    )
    assert not [line for line in fails if "\n" in line]
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    "case",
    [
        case
        for case in CASES
        if case.name
        in (
            "unknown key",
            "tp and heads",
            "ranks do not factor",
            "unsupported family",
            "pp and layers",
            *RESUMED,
        )
    ],
    ids=str,
)
def test_train_rejects_too(
    case: Case, sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = copy(sound, tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    case.breaks(tmp_path)
    before = files(tmp_path)
    with pytest.raises(PacsError) as caught:
        run_train(config, case.overrides)
    assert case.fix in str(caught.value)
    assert files(tmp_path) == before


def test_what_a_lost_node_cut_off_is_no_obstacle(
    sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = copy(sound, tmp_path)
    monkeypatch.chdir(tmp_path)
    write("runs/tiny/metrics.jsonl", '{"step": 1, "time/update_s": 0.5}\n[1]\n{"step": 2, "ti')(
        tmp_path
    )
    (tmp_path / "runs/tiny/checkpoints/step_000009").mkdir(parents=True)  # without its manifest
    (tmp_path / "runs/tiny/checkpoints/step_000008.partial").mkdir()
    checks = run_preflight(config)
    assert not [str(check) for check in checks if check.level == "fail"]
    assert "has no complete checkpoint: the run starts" in "\n".join(map(str, checks))


def test_what_a_reward_prints_stays_out_of_the_report(sound: Path, tmp_path: Path) -> None:
    config = copy(sound, tmp_path)
    write("reward.py", 'print("noise")\ndef reward(p, r):\n    print("noise")\n    return 1.0\n')(
        tmp_path
    )
    command = [sys.executable, "-m", "pacs_megatron", "preflight", str(config), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {row["key"]: row["message"] for row in json.loads(done.stdout)}[
        "reward"
    ] == "custom accepts 16 of 16 gold answers"
    assert "noise" in done.stderr
