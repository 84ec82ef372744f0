"""The scripts of slurm/ and tools/: short, accepted by shellcheck, with their usage at the top."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pacs_megatron.config import load_config
from pacs_megatron.launch.serve import servers_here
from tests.support.run_files import BASE

ROOT = Path(__file__).parents[2]
BATCH = sorted((ROOT / "slurm").glob("*.sbatch"))
SCRIPTS = [*BATCH, *sorted((ROOT / "tools").glob("*.sh"))]
SHELLCHECK = Path(sys.executable).with_name("shellcheck")


def test_the_scripts_are_there() -> None:
    assert [path.stem for path in BATCH] == [
        "certify",
        "command",
        "eval",
        "preflight",
        "selftest",
        "train",
    ]
    listed = (ROOT / "slurm" / "README.md").read_text()
    assert all(f"`{path.name}" in listed for path in BATCH)


@pytest.mark.parametrize("path", BATCH, ids=lambda path: path.name)
def test_batch_scripts_are_short_and_show_their_usage(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) <= 100
    assert max(len(line) for line in lines) <= 140
    assert "set -euo pipefail" in lines
    assert any(line.startswith("#   sbatch ") for line in lines[:20])


def called(path: Path, *words: str, **variables: str) -> str:
    """The one line of a script that was called wrongly."""
    environment = {"PATH": "/usr/bin:/bin", **variables}
    done = subprocess.run(
        ["bash", path, *words], capture_output=True, text=True, check=False, env=environment
    )
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    return line


@pytest.mark.parametrize("path", BATCH, ids=lambda path: path.name)
def test_a_batch_script_that_is_called_wrongly_prints_an_error(path: Path) -> None:
    """And starts nothing."""
    config = str(ROOT / "configs" / "runs" / "quickstart.yaml")
    assert called(path).startswith("usage: sbatch ")
    assert "runs inside a job; submit it" in called(path, config)
    assert "PACS_SITE=nothere: no such file" in called(
        path, config, SLURM_JOB_ID="1", PACS_SITE="nothere"
    )
    if path.stem in ("eval", "preflight", "train"):
        assert called(path, "nothere.yaml", SLURM_JOB_ID="1").startswith(
            "nothere.yaml: no such configuration;"
        )


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(path: Path) -> None:
    assert SHELLCHECK.exists(), "make install-dev"
    done = subprocess.run([SHELLCHECK, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("launcher", "expected"), [("srun", "--cpus-per-task=4"), ("torchrun", "--cpus-per-task=16")]
)
def test_ranks_get_all_cores_of_a_node(tmp_path: Path, launcher: str, expected: str) -> None:
    """srun does not take --cpus-per-task from sbatch. Every process starts with all cores of the
    node, unless the site binds it: srun takes the last --cpu-bind.
    """
    (tmp_path / "run.yaml").write_text(BASE)
    programs = {"srun": f'echo "$@" >>{tmp_path}/calls', "scontrol": "echo n1"}
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        ["bash", str(ROOT / "slurm" / "train.sbatch"), "run.yaml", "run.nproc=4"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={
            "PATH": f"{tmp_path}:/usr/bin:/bin",
            "PYTHONPATH": str(ROOT),
            "SLURM_JOB_ID": "1",
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_JOB_NODELIST": "n1",
            "SLURM_CPUS_ON_NODE": "16",
            "PACS_PYTHON": sys.executable,
            "PACS_LAUNCHER": launcher,
            "PACS_SRUN_ARGS": "--cpu-bind=cores",
        },
    )
    assert done.returncode == 0, done.stderr
    [call] = (tmp_path / "calls").read_text().splitlines()
    assert f" {expected} --cpu-bind=none --cpu-bind=cores " in call


def test_an_evaluation_on_several_nodes_loads_configurations_of_colocated_servers(
    tmp_path: Path,
) -> None:
    """`slurm/eval.sbatch` with two nodes: eight servers on each, with memory of their own and
    weights through files.
    """
    srun = """#!/bin/sh
printf '%s\\n' "$@" >CALLS/$$
for word in "$@"; do
    if [ "$previous" = pacs_megatron.launch.serve ]; then
        for node in a b; do echo http://$node:1 >"$word/$node.urls"; done
    fi
    previous=$word
done
"""
    (tmp_path / "calls").mkdir()
    (tmp_path / "srun").write_text(srun.replace("CALLS", str(tmp_path / "calls")))
    (tmp_path / "srun").chmod(0o755)
    config = ROOT / "configs" / "runs" / "pacs-qwen3-8b-1n8g-tp2.yaml"
    model = tmp_path / "model"
    done = subprocess.run(
        [
            "bash",
            str(ROOT / "slurm" / "eval.sbatch"),
            str(config),
            "run.seed=3",
            "--model",
            str(model),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={
            "PATH": f"{tmp_path}:/usr/bin:/bin",
            "PYTHONPATH": str(ROOT),
            "SLURM_JOB_ID": "1",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_GPUS_ON_NODE": "8",
            "PACS_PYTHON": sys.executable,
        },
    )
    assert done.returncode == 0, done.stderr
    calls = [path.read_text().splitlines() for path in (tmp_path / "calls").iterdir()]
    [servers] = [words for words in calls if "pacs_megatron.launch.serve" in words]
    [client] = [words for words in calls if "eval" in words]
    of_servers, of_client = (
        load_config(config, [w for w in words if "=" in w and w[0] != "-"])
        for words in (servers, client)
    )
    managed = of_servers.config.rollout.managed_servers
    options = of_client.config.rollout.sglang
    assert managed is not None and options is not None
    assert (servers_here(of_servers.config), managed.colocated, managed.mem_fraction) == (
        8,
        False,
        None,
    )
    assert (options.urls, options.sync.transport) == (("http://a:1", "http://b:1"), "disk")
    assert of_client.config.run.seed == of_servers.config.run.seed == 3
    assert str(model) in client
