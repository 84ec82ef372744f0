"""A disk that is full from some call on, at every place where a run needs space: one line, and the
run continues later.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pacs_megatron.checkpoint.manifest import check_checkpoint
from pacs_megatron.checkpoint.names import whole_checkpoints
from tests.support.fault_fs import FaultyDisk
from tests.support.metrics import reproducible_bytes
from tests.support.tiny_models import make_tiny_qwen3
from tests.support.tiny_run import write_tiny_run

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
OVERRIDES = (
    "parallel.tp=1",
    "logging.save_tokens=true",
    "logging.tensorboard=true",
    "checkpoint.keep_last=1",
)
MODULE = "pacs_megatron.training.main"


class World:
    """A run on a faulty disk, in forks of a process that has imported everything."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        model = make_tiny_qwen3(folder / "model", num_hidden_layers=2, vocab_size=262)
        self.config = write_tiny_run(folder, model)
        self.run_dir = folder / "runs" / "tiny"
        self.disk = FaultyDisk(folder / "fault", folder / "runs")
        self.prefork = subprocess.Popen(
            [sys.executable, "-m", "tests.support.train_prefork", str(folder / "stderr.txt")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **self.disk.environ, "HF_HOME": str(folder / "hub")},
        )

    def train(self) -> tuple[int, str]:
        """Exit code and standard error of one attempt."""
        return self.command("train", str(self.config), *OVERRIDES)

    def command(self, *words: str) -> tuple[int, str]:
        """The same of `train <config> ...` or `cli <verb> ...`."""
        assert self.prefork.stdin is not None and self.prefork.stdout is not None
        self.prefork.stdin.write("\t".join(words) + "\n")
        self.prefork.stdin.flush()
        code = int(self.prefork.stdout.readline())
        return code, (self.folder / "stderr.txt").read_text()

    def clear(self) -> None:
        shutil.rmtree(self.run_dir, ignore_errors=True)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory):
    found = World(tmp_path_factory.mktemp("full-disk"))
    yield found
    found.prefork.kill()
    found.prefork.wait()


def kind_of(call: str) -> str:
    return re.sub(r"[0-9a-f]{6,}|\d+|tmp\w+", "N", call)


def whole_run(world: World) -> tuple[list[str], bytes, bytes]:
    """The calls of an undisturbed run, its metrics and its model."""
    world.clear()
    world.disk.fail(0)
    code, error = world.train()
    assert code == 0, error
    model = (world.run_dir / "hf" / "model.safetensors").read_bytes()
    return world.disk.calls(), reproducible_bytes(world.run_dir), model


def faults_of(code: int, error: str, reason: str = "No space left") -> list[str]:
    """The faults of a command on a full disk, by how it ended; it may not need the disk at all."""
    wrong = [] if code in (0, 1, 2) else [f"exit code {code}"]
    if "Traceback" in error or "InternalError" in error:
        wrong.append("traceback or internal error")
    named = [line for line in error.splitlines() if re.match(r"\w+Error: ", line)]
    if code and not (len(named) == 1 and reason in named[0] and "/" in named[0]):
        wrong.append("not one line with place and reason")
    return wrong


def check(world: World, first: int, call: str, metrics: bytes, model: bytes) -> list[str]:
    """The faults of a run whose disk is full from call `first` on, and of its continuation."""
    world.clear()
    world.disk.fail(first)
    code, error = world.train()
    wrong = faults_of(code, error)
    # mkdir: `write_exit_code` before its file; the folder exists.
    optional = r"heartbeats|logs/|run\.lock|exit_code|^mkdir tiny$"
    if code == 0 and (
        needed := [c for c in world.disk.calls()[first - 1 :] if not re.search(optional, c)]
    ):
        wrong.append(f"exit code 0 after {needed[0]}")
    world.disk.fail(0)
    again, later = world.train()
    if again != 0:
        wrong.append(f"the continuation ends with {again}: {later[-600:]}")
    elif reproducible_bytes(world.run_dir) != metrics:
        wrong.append("other metrics after the continuation")
    elif (world.run_dir / "hf" / "model.safetensors").read_bytes() != model:
        wrong.append("another model after the continuation")
    return [f"call {first} ({call}): {'; '.join(wrong)}\n{error[-1500:]}"] if wrong else []


@pytest.mark.campaign  # ten minutes
@pytest.mark.timeout(3600)
def test_a_full_disk_at_every_kind_of_call(world: World) -> None:
    calls, metrics, model = whole_run(world)
    firsts: dict[str, int] = {}
    for number, call in enumerate(calls, start=1):
        firsts.setdefault(kind_of(call), number)
    assert len(firsts) > 60
    wrong = []
    for call, number in firsts.items():
        wrong += check(world, number, call, metrics, model)
    assert not wrong, f"{len(wrong)} of {len(firsts)}\n" + "\n".join(wrong)


@pytest.mark.campaign
@pytest.mark.timeout(14400)
def test_a_full_disk_at_every_call(world: World) -> None:
    calls, metrics, model = whole_run(world)
    wrong = []
    for number, call in enumerate(calls, start=1):
        for text in check(world, number, call, metrics, model):
            wrong.append(text)
    assert not wrong, f"{len(wrong)} of {len(calls)}\n" + "\n".join(wrong)


def commands_of(world: World) -> dict[str, tuple[list[str], Path]]:
    """Command -> arguments, and the folder that it writes."""
    out = world.folder / "out"
    config = str(world.config)
    benchmark = (
        f"evaluation.benchmarks=[{{path: {world.folder}/train.jsonl, columns: {{problem: problem, "
        f"answer: answer}}}}]"
    )
    return {
        "export": (["export", str(world.run_dir), "--out", str(out)], out),
        "convert to-megatron": (
            ["convert", "to-megatron", "--hf", str(world.folder / "model"), "--out", str(out)],
            out,
        ),
        "eval": (
            [
                "eval",
                config,
                benchmark,
                "evaluation.sampling={max_response_tokens: 4}",
                "--out",
                str(out),
            ],
            out,
        ),
    }


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["export", "convert to-megatron", "eval"])
def test_a_full_disk_under_a_command(world: World, name: str) -> None:
    whole_run(world)
    words, out = commands_of(world)[name]
    shutil.rmtree(out, ignore_errors=True)
    world.disk.fail(0, folder=out)
    code, error = world.command("cli", *words)
    assert code == 0, error
    firsts: dict[str, int] = {}
    for number, call in enumerate(world.disk.calls(), start=1):
        firsts.setdefault(kind_of(call), number)
    assert len(firsts) > 5
    wrong = []
    for call, first in firsts.items():
        shutil.rmtree(out, ignore_errors=True)
        world.disk.fail(first, folder=out)
        code, error = world.command("cli", *words)
        faults = faults_of(code, error) + ([] if code else ["exit code 0"])
        if name != "eval" and out.exists() and "fsync" not in call:
            faults.append("something was left that looks complete")
        wrong += [f"call {first} ({call}): {'; '.join(faults)}\n{error[-1500:]}"] if faults else []
        world.disk.fail(0)
        shutil.rmtree(out, ignore_errors=True)
        code, error = world.command("cli", *words)
        assert code == 0, error
    assert not wrong, "\n".join(wrong)


@pytest.mark.full
def test_model_and_data_may_be_read_only(world: World) -> None:
    for part in ("model", "train.jsonl", "reward.py"):
        world.clear()
        world.disk.fail(1, error=errno.EROFS, folder=world.folder / part)
        code, error = world.train()
        assert (code, world.disk.calls()) == (0, []), error


@pytest.mark.full
def test_the_folder_of_the_hub_may_be_read_only(world: World) -> None:
    world.clear()
    world.disk.fail(1, error=errno.EROFS, folder=world.folder / "hub")
    code, error = world.train()
    assert (code, world.disk.calls()) == (0, []), error


@pytest.mark.full
@pytest.mark.parametrize("name", ["export", "convert to-megatron", "eval"])
def test_a_read_only_target_is_one_line(world: World, name: str) -> None:
    whole_run(world)
    words, out = commands_of(world)[name]
    shutil.rmtree(out, ignore_errors=True)
    world.disk.fail(1, error=errno.EROFS, folder=out)
    code, error = world.command("cli", *words)
    assert code != 0 and not faults_of(code, error, "Read-only file system"), error
    assert not out.exists()


@pytest.mark.full
@pytest.mark.parametrize(
    "part", ["runs", "runs/tiny/checkpoints", "runs/tiny/rollouts", "runs/tiny/hf"]
)
def test_a_read_only_folder_is_one_line(world: World, part: str) -> None:
    world.clear()
    world.disk.fail(1, error=errno.EROFS, folder=world.folder / part)
    code, error = world.train()
    assert code == 1 and not faults_of(code, error, "Read-only file system"), error
    world.disk.fail(0)
    code, error = world.train()
    assert code == 0, error


@pytest.mark.full
def test_a_real_file_system_that_fills_up(world: World) -> None:
    """Includes what the preloaded library cannot fail: buffers of C's stdio, and writes that are
    cut short.
    """
    _, metrics, model = whole_run(world)
    runs = world.run_dir.parent
    world.disk.fail(0, folder=world.folder / "elsewhere")
    mount = ["mount", "-t", "tmpfs", "-o", "size=40k", "tmpfs", str(runs)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user cannot mount a tmpfs")
    try:
        failed = 0
        for size in ("40k", "160k", "700k", "1600k", "2400k", "3200k", "4200k", "5200k"):
            world.clear()
            subprocess.run(["mount", "-o", f"remount,size={size}", str(runs)], check=True)
            code, error = world.train()
            assert not faults_of(code, error), (size, error)
            failed += code != 0
            for _, folder in whole_checkpoints(world.run_dir):
                check_checkpoint(folder)
            subprocess.run(["mount", "-o", "remount,size=100m", str(runs)], check=True)
            code, error = world.train()
            assert code == 0, (size, error)
            assert reproducible_bytes(world.run_dir) == metrics
            assert (world.run_dir / "hf" / "model.safetensors").read_bytes() == model
        assert failed >= 5
    finally:
        subprocess.run(["umount", "-l", str(runs)], check=True)
