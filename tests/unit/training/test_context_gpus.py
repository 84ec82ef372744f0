"""Which GPUs a rank uses: those of resources.gpus_per_node, and none of a host that happens to have
some.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pacs_megatron.errors import ExitCode
from pacs_megatron.runtime import environment
from pacs_megatron.training import main
from tests.support.tiny_models import make_tiny_qwen3
from tests.support.tiny_run import write_tiny_run

GPU_RUN = ("resources.gpus_per_node=2", "resources.gpu=h100")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_tiny_run(tmp_path, make_tiny_qwen3(tmp_path / "model"))


@pytest.mark.parametrize(
    ("overrides", "visible"), [((), ""), (GPU_RUN, "0,1")], ids=["cpu", "gpus"]
)
def test_a_run_on_the_cpu_hides_the_gpus_of_its_host(
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    overrides: tuple[str, ...],
    visible: str,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(environment, "DRIVER_FILES", (tmp_path,))
    logged: list[str] = []
    monkeypatch.setattr(main.logger, "info", logged.append)
    monkeypatch.setattr(main, "_train", lambda *_args, **_options: ExitCode.OK)
    main.run_rank(config, overrides)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == visible
    assert (
        logged == []
        if visible
        else ["resources.gpus_per_node=0: the run uses the CPU, not this host's GPUs"]
    )


def test_a_host_with_too_few_gpus_ends_in_one_line(config: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pacs_megatron", "train", str(config), *GPU_RUN]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == ExitCode.MISCONFIGURED, done.stderr
    assert "resources.gpus_per_node=2: torch finds 0 GPUs for 2 ranks on " in done.stderr
