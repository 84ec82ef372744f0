"""A rollout driver that is stopped by SIGSTOP or killed: the ranks save what they can and name what
they cannot.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pacs_megatron.checkpoint.run_checkpoint import latest_checkpoint
from pacs_megatron.errors import ExitCode, PacsError
from tests.support.metrics import reproducible_bytes
from tests.support.ranks import run_ranks
from tests.support.tiny_models import make_tiny_qwen3
from tests.support.tiny_run import write_tiny_run

OVERRIDES = ("parallel.tp=1", "batch.updates_per_step=2", "checkpoint.every=10", "run.steps=3")


@dataclass(frozen=True)
class Fault:
    """Signals at the start of update `version` + 1 (two updates a step)."""

    version: int
    to_driver: signal.Signals
    to_rank: signal.Signals | None = None
    is_before_the_file: bool = False
    """the driver has not written the samples of the step"""


def attempt(folder: Path, model: Path, fault: Fault | None) -> int | str:
    """Exit code or error of a run on one rank."""
    folder.mkdir(exist_ok=True)
    config = write_tiny_run(folder, model)

    def on_rank(_rank: int, _world: int) -> int | str:
        from pacs_megatron.policy.engine import MegatronPolicy
        from pacs_megatron.rollout import driver_client
        from pacs_megatron.training.main import run_rank

        drivers: list[Any] = []
        start = driver_client.DriverClient.__init__
        update = MegatronPolicy.update

        def started(client: Any, *args: Any, **options: Any) -> None:
            start(client, *args, **options)
            drivers.append(client)

        def updated(policy: Any, *args: Any) -> Any:
            if fault is not None and policy.version == fault.version:
                os.kill(drivers[0]._process.pid, fault.to_driver)
                if fault.is_before_the_file:
                    (folder / "runs" / "tiny" / "rollouts" / "step_000002.jsonl").unlink()
                if fault.to_rank is not None:
                    os.kill(os.getpid(), fault.to_rank)
            return update(policy, *args)

        driver_client.DriverClient.__init__ = started  # type: ignore[method-assign]
        MegatronPolicy.update = updated  # type: ignore[method-assign]
        try:
            return int(run_rank(config, OVERRIDES))
        except PacsError as error:
            return f"{type(error).__name__}: {error}"

    return run_ranks(on_rank, 1, init_process_group=False)[0]


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "outcome", "checkpoint"),
    [
        # The step's updates are completed; the order of the prompts came with its samples.
        pytest.param(
            Fault(3, signal.SIGKILL), "RolloutError: the rollout driver", "step_000002", id="killed"
        ),
        pytest.param(
            Fault(3, signal.SIGKILL, is_before_the_file=True),
            "RolloutError: the rollout driver",
            "step_000002",
            id="no file",
        ),
        pytest.param(
            Fault(3, signal.SIGSTOP, signal.SIGTERM),
            ExitCode.PREEMPTED,
            "step_000002",
            id="stopped",
        ),
        # Inside a step its samples are needed, which only the driver has.
        pytest.param(
            Fault(2, signal.SIGSTOP, signal.SIGTERM),
            ExitCode.PREEMPTED,
            None,
            id="stopped inside a step",
        ),
    ],
)
def test_a_boundary_is_saved_without_the_driver(
    tmp_path: Path, fault: Fault, outcome: int | str, checkpoint: str | None
) -> None:
    model = make_tiny_qwen3(tmp_path / "model", num_hidden_layers=2, vocab_size=262)
    whole = tmp_path / "whole" / "runs" / "tiny"
    cut = tmp_path / "cut" / "runs" / "tiny"
    assert attempt(tmp_path / "whole", model, None) == ExitCode.OK
    found = attempt(tmp_path / "cut", model, fault)
    assert found == outcome or (isinstance(outcome, str) and str(found).startswith(outcome)), found
    newest = latest_checkpoint(cut)
    assert (newest and newest.name) == checkpoint
    log = (cut / "logs" / "rank0.log").read_text()
    assert (
        "saved without samples of later steps"
        if checkpoint
        else "not saved; there is no checkpoint"
    ) in log
    lost = (
        f"step 2 was trained, but the driver ended before it wrote {cut}/rollouts/step_000002.jsonl"
    )
    assert (lost in log) == fault.is_before_the_file
    assert attempt(tmp_path / "cut", model, None) == ExitCode.OK
    assert reproducible_bytes(cut) == reproducible_bytes(whole)
    files = [
        sorted(path.name for path in (folder / "rollouts").iterdir()) for folder in (cut, whole)
    ]
    assert (files[0] != files[1]) == fault.is_before_the_file, (
        "the samples of a trained step stay when the run resumes"
    )
    assert (cut / "hf" / "model.safetensors").read_bytes() == (
        whole / "hf" / "model.safetensors"
    ).read_bytes()
