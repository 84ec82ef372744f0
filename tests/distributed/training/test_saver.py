"""`checkpoint.async_save`: files are written while the next step trains; kills, stop requests and
full disks meanwhile.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pacs_megatron.checkpoint.run_checkpoint import latest_checkpoint
from pacs_megatron.errors import ExitCode
from tests.support.metrics import reproducible_bytes
from tests.support.ranks import RankError, run_ranks
from tests.support.tiny_models import make_tiny_qwen3
from tests.support.tiny_run import write_tiny_run

LIMIT_S = 300.0
OPTIONS = (
    "run.steps=4",
    "checkpoint.every=1",
    "checkpoint.keep_last=9",
    "objective.reference=frozen",
    "parallel.tp=1",
    "precision.dtype=bf16",
)
LAYOUTS = {
    "distopt": "parallel.distributed_optimizer=true",
    "plain": "parallel.distributed_optimizer=false",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3(tmp_path_factory.mktemp("model"), num_hidden_layers=2, vocab_size=262)


class Hooks:
    """Of one rank: the thread's write begins with `in_write`, an update of the main thread with
    `in_update`.
    """

    def __init__(self, in_write: Callable[[Hooks], None] = lambda _hooks: None) -> None:
        self.rank = int(os.environ["RANK"])
        self.writes = 0
        self.next_update = threading.Event()
        self.waits = threading.Event()
        self._in_write = in_write

    def install(self) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter

        from pacs_megatron.policy.engine import MegatronPolicy
        from pacs_megatron.training.saver import Saver

        update = MegatronPolicy.update
        write_data = FileSystemWriter.write_data
        begin = Saver.write
        finish = Saver.finish

        def counted(policy: Any, *args: Any, **options: Any) -> Any:
            report = update(policy, *args, **options)
            self.next_update.set()
            return report

        def in_thread(writer: Any, *args: Any, **options: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                self.writes += 1
                self._in_write(self)
            return write_data(writer, *args, **options)

        def begun(saver: Any, *args: Any, **options: Any) -> None:
            self.next_update.clear()
            begin(saver, *args, **options)

        def finished(saver: Any) -> None:
            self.waits.set()
            finish(saver)

        MegatronPolicy.update = counted
        FileSystemWriter.write_data = in_thread
        Saver.write = begun
        Saver.finish = finished


def run(
    folder: Path, model: Path, *overrides: str, in_write: Callable[[Hooks], None] | None = None
) -> list[int]:
    """Exit codes of two ranks."""
    folder.mkdir(exist_ok=True)
    config = (
        folder / "run.yaml" if (folder / "run.yaml").exists() else write_tiny_run(folder, model)
    )

    def on_rank(_rank: int, _world: int) -> int:
        from pacs_megatron.training.main import run_rank

        if in_write is not None:
            Hooks(in_write).install()
        return int(run_rank(config, [*OPTIONS, *overrides]))

    return run_ranks(on_rank, 2, init_process_group=False)


def digests(run_dir: Path) -> dict[str, str]:
    """Of every file of tensors of every checkpoint."""
    found = {}
    for manifest in sorted(run_dir.glob("checkpoints/step_*/manifest.json")):
        files = json.loads(manifest.read_text())["files"]
        found |= {
            f"{manifest.parent.name}/{name}": str(facts)
            for name, facts in files.items()
            if "distcp" in name
        }
    return found


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Callable[[str], Path]:
    known: dict[str, Path] = {}

    def run_once(layout: str) -> Path:
        if layout not in known:
            folder = tmp_path_factory.mktemp(layout)
            assert run(folder, model, LAYOUTS[layout]) == [ExitCode.OK] * 2
            known[layout] = folder / "runs" / "tiny"
        return known[layout]

    return run_once


def assert_equal_runs(got: Path, expected: Path) -> None:
    assert reproducible_bytes(got) == reproducible_bytes(expected)
    assert digests(got) == digests(expected) and len(digests(got)) == 8
    assert (got / "hf" / "model.safetensors").read_bytes() == (
        expected / "hf" / "model.safetensors"
    ).read_bytes()


def after_the_next_update(hooks: Hooks) -> None:
    assert hooks.next_update.wait(LIMIT_S), "the main thread waits for the files before it trains"


@pytest.mark.parametrize("layout", ["distopt", pytest.param("plain", marks=pytest.mark.full)])
def test_files_written_after_the_next_update_are_those_of_a_synchronous_save(
    tmp_path: Path, model: Path, layout: str, synchronous: Callable[[str], Path]
) -> None:
    options = (LAYOUTS[layout], "checkpoint.async_save=true")
    assert run(tmp_path, model, *options, in_write=after_the_next_update) == [ExitCode.OK] * 2
    assert_equal_runs(tmp_path / "runs" / "tiny", synchronous(layout))


@pytest.mark.full
def test_a_kill_during_the_write_leaves_the_earlier_checkpoint(
    tmp_path: Path, model: Path, synchronous: Callable[[str], Path]
) -> None:
    def killed(hooks: Hooks) -> None:
        after_the_next_update(hooks)
        if hooks.rank == 1 and hooks.writes == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    options = (LAYOUTS["distopt"], "checkpoint.async_save=true")
    with pytest.raises(RankError, match="SIGKILL"):
        run(tmp_path, model, *options, in_write=killed)
    newest = latest_checkpoint(tmp_path / "runs" / "tiny")
    assert newest is not None and newest.name == "step_000001"
    assert run(tmp_path, model, *options, in_write=after_the_next_update) == [ExitCode.OK] * 2
    assert_equal_runs(tmp_path / "runs" / "tiny", synchronous("distopt"))


@pytest.mark.full
def test_a_stop_request_waits_for_the_files(
    tmp_path: Path, model: Path, synchronous: Callable[[str], Path]
) -> None:
    def stopped(hooks: Hooks) -> None:
        if hooks.writes < 3:  # after the stop request there may be no update
            after_the_next_update(hooks)
        if hooks.writes == 2:
            hooks.waits.clear()
            os.kill(os.getpid(), signal.SIGTERM)
            assert hooks.waits.wait(LIMIT_S), "the main thread does not wait for the files"

    options = (LAYOUTS["distopt"], "checkpoint.async_save=true")
    assert run(tmp_path, model, *options, in_write=stopped) == [ExitCode.PREEMPTED] * 2
    names = {path.name for path in (tmp_path / "runs" / "tiny" / "checkpoints").iterdir()}
    assert {"step_000001", "step_000002"} < names and len(names) >= 3, names
    assert run(tmp_path, model, *options) == [ExitCode.OK] * 2
    assert_equal_runs(tmp_path / "runs" / "tiny", synchronous("distopt"))


@pytest.mark.full
def test_a_full_disk_during_the_write_ends_all_ranks_with_one_error(
    tmp_path: Path, model: Path, synchronous: Callable[[str], Path]
) -> None:
    def full(hooks: Hooks) -> None:
        after_the_next_update(hooks)
        if hooks.rank == 1 and hooks.writes == 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    options = (LAYOUTS["distopt"], "checkpoint.async_save=true")
    with pytest.raises(RankError, match=r"step_000002 was not saved \(No space left on device\)"):
        run(tmp_path, model, *options, in_write=full)
    newest = latest_checkpoint(tmp_path / "runs" / "tiny")
    assert newest is not None and newest.name == "step_000001"
    assert not list(newest.parent.glob("*.partial"))
    assert run(tmp_path, model, *options) == [ExitCode.OK] * 2
    assert_equal_runs(tmp_path / "runs" / "tiny", synchronous("distopt"))
