"""The whole program as a user starts it: killed, signalled, resumed, and the same bits as if
nothing had happened.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pacs_megatron.errors import ExitCode
from tests.support.metrics import reproducible_bytes
from tests.support.tiny_models import make_tiny_qwen3
from tests.support.tiny_run import write_tiny_run

STEPS = 8
OVERRIDES = (
    f"run.steps={STEPS}",
    "checkpoint.every=2",
    "objective.reference=frozen",
    "objective.reset_every=3",
    "precision.dtype=bf16",
)


def start(
    config: Path, *overrides: str, module: tuple[str, ...] = ("pacs_megatron", "train")
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", *module, str(config), *OVERRIDES, *overrides],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def finish(process: subprocess.Popen[str], timeout_s: float = 100) -> tuple[int, str]:
    _, err = process.communicate(timeout=timeout_s)
    return process.returncode, err


def kill_everything(process: subprocess.Popen[str]) -> None:
    """`kill -9` of launcher, ranks and driver, as when a node is lost."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):  # the driver follows its rank by itself
            member.kill()
    psutil.wait_procs(family, timeout=600)
    process.communicate(timeout=600)


def wait_for_rows(run_dir: Path, count: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 600
    path = run_dir / "metrics.jsonl"
    while not (path.is_file() and path.read_bytes().count(b"\n") >= count):
        assert process.poll() is None, f"the run ended early: {process.communicate()[1]}"
        assert time.monotonic() < deadline, f"no {count} rows in {path}"
        time.sleep(0.02)


def rows(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else 0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3(tmp_path_factory.mktemp("model"), tied=True, vocab_size=262)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    code, err = finish(start(write_tiny_run(folder, model)))
    assert code == ExitCode.OK, err
    return folder / "runs" / "tiny"


def assert_same_run(got: Path, expected: Path) -> None:
    assert reproducible_bytes(got) == reproducible_bytes(expected)
    assert (got / "hf" / "model.safetensors").read_bytes() == (
        expected / "hf" / "model.safetensors"
    ).read_bytes()
    mine, theirs = (sorted((folder / "rollouts").iterdir()) for folder in (got, expected))
    assert [path.name for path in mine] == [path.name for path in theirs]
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(mine, theirs, strict=True))


@pytest.mark.full
def test_the_same_seed_gives_the_same_bits_through_a_signal_and_a_kill(
    undisturbed: Path, tmp_path: Path, model: Path
) -> None:
    config = write_tiny_run(tmp_path, model, delay_s=0.01)
    run_dir = tmp_path / "runs" / "tiny"
    first = start(config)
    wait_for_rows(run_dir, 1, first)
    first.send_signal(signal.SIGTERM)
    code, err = finish(first)
    assert code == ExitCode.PREEMPTED, err
    saved = rows(run_dir)
    assert 0 < saved < STEPS
    second = start(config)
    wait_for_rows(run_dir, min(saved + 2, STEPS - 1), second)
    kill_everything(second)
    code, err = finish(start(config))
    assert code == ExitCode.OK, err
    assert_same_run(run_dir, undisturbed)


@pytest.mark.full
def test_a_mixture_of_files_goes_on_where_it_was_stopped(tmp_path: Path, model: Path) -> None:
    """Two sets with weights: the same prompts, samples and weights as in an undisturbed run."""

    def mixture(folder: Path) -> str:
        rows = [{"q": f"{a} - 1 = ?", "gold": {"value": str(a - 1)}} for a in range(5)]
        (folder / "other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        columns = "columns: {problem: q, answer: gold.value}"
        return f"data.mix=[{{path: {folder}/other.jsonl, {columns}, weight: 2}}]"

    whole = tmp_path / "whole"
    cut = tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    code, err = finish(start(write_tiny_run(whole, model), mixture(whole), "data.train.weight=3"))
    assert code == ExitCode.OK, err

    config = write_tiny_run(cut, model, delay_s=0.02)
    words = (mixture(cut), "data.train.weight=3")
    run_dir = cut / "runs" / "tiny"
    process = start(config, *words)
    wait_for_rows(run_dir, 3, process)
    process.send_signal(signal.SIGTERM)
    code, err = finish(process)
    assert code == ExitCode.PREEMPTED, err
    assert 0 < rows(run_dir) < STEPS

    code, err = finish(start(config, words[0], "data.train.weight=1"))
    assert code == ExitCode.MISCONFIGURED and "data.train.weight" in err, err
    code, err = finish(start(config, *words))
    assert code == ExitCode.OK, err
    assert_same_run(run_dir, whole / "runs" / "tiny")
    sources = []
    for file in (run_dir / "rollouts").glob("step_*.jsonl"):
        sources += [json.loads(line)["source"] for line in file.read_text().splitlines()]
    share = sources.count("other") / len(sources)
    assert abs(share - 0.4) < 0.05, "of whole groups: 32 prompts of 8 steps"


@pytest.mark.campaign
def test_five_kills_at_random_moments(undisturbed: Path, tmp_path: Path, model: Path) -> None:
    config = write_tiny_run(tmp_path, model, delay_s=0.02)
    run_dir = tmp_path / "runs" / "tiny"
    moments = random.Random(7)
    for _ in range(5):
        process = start(config)
        time.sleep(moments.uniform(6.0, 20.0))
        if process.poll() is None:
            kill_everything(process)
    code, err = finish(start(config))
    assert code == ExitCode.OK, err
    assert_same_run(run_dir, undisturbed)


@pytest.mark.full
def test_a_kill_with_steps_ahead(tmp_path: Path, model: Path) -> None:
    whole = tmp_path / "whole"
    cut = tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    code, err = finish(start(write_tiny_run(whole, model), "rollout.max_staleness=2"), 250)
    assert code == ExitCode.OK, err
    config = write_tiny_run(cut, model, delay_s=0.02)
    run_dir = cut / "runs" / "tiny"
    process = start(config, "rollout.max_staleness=2")
    wait_for_rows(run_dir, 3, process)
    kill_everything(process)
    [*_, newest] = sorted((run_dir / "checkpoints").glob("step_*[0-9]"))
    assert (newest / "buffer.safetensors").is_file()
    code, err = finish(start(config, "rollout.max_staleness=2"), 250)
    assert code == ExitCode.OK, err
    assert_same_run(run_dir, whole / "runs" / "tiny")


@pytest.fixture
def broken(tmp_path: Path, model: Path) -> Iterator[tuple[Path, Path]]:
    """(configuration, model folder) to break; afterwards there must be no run folder."""
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    yield write_tiny_run(tmp_path, folder), folder
    assert not (tmp_path / "runs" / "tiny").exists(), "a wrong input left something behind"


def truncate_weights(config: Path, model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def remove_weights(config: Path, model: Path) -> None:
    (model / "model.safetensors").unlink()


def remove_template(config: Path, model: Path) -> None:
    (model / "chat_template.jinja").unlink()


def unsupported_family(config: Path, model: Path) -> None:
    path = model / "config.json"
    path.write_text(path.read_text().replace('"qwen3"', '"gpt2"'))


def malformed_line(config: Path, model: Path) -> None:
    path = config.parent / "train.jsonl"
    lines = path.read_text().splitlines()
    lines[4] = lines[4][:-3]
    path.write_text("\n".join(lines))


def missing_column(config: Path, model: Path) -> None:
    path = config.parent / "train.jsonl"
    path.write_text(path.read_text().replace('"answer"', '"gold"'))


@pytest.mark.parametrize(
    ("break_it", "names"),
    [
        pytest.param(truncate_weights, ("model.safetensors",), marks=pytest.mark.full),
        pytest.param(remove_weights, ("model",), marks=pytest.mark.full),
        pytest.param(remove_template, ("chat template",), marks=pytest.mark.full),
        pytest.param(unsupported_family, ("gpt2",), marks=pytest.mark.full),
        (malformed_line, ("train.jsonl:5",)),
        pytest.param(missing_column, ("answer", "gold"), marks=pytest.mark.full),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    broken: tuple[Path, Path], break_it: object, names: tuple[str, ...]
) -> None:
    config, folder = broken
    break_it(config, folder)  # type: ignore[operator]
    # The rank itself, without launcher and torchrun: a third of the time.
    code, err = finish(start(config, "parallel.tp=1", module=("pacs_megatron.training.main",)))
    assert code not in (0, ExitCode.PREEMPTED)
    lines = [line for line in err.splitlines() if "Error:" in line]
    assert len(lines) == 1 and "Traceback" not in err, err
    assert all(name in lines[0] for name in names), lines[0]


def test_an_error_of_another_rank_than_0_is_reported_too(broken: tuple[Path, Path]) -> None:
    """It gives rank 0 the time to report first; torchrun ends rank 0 when this one exits."""
    config, _ = broken
    code = (
        "import sys\nfrom pacs_megatron.training import main\nmain._PRINT_AFTER_S = "
        "0.5\nmain.main(sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(config), "model.path=an/absent/folder"],
        env=os.environ
        | {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == ExitCode.FAILED
    [line] = [line for line in done.stderr.splitlines() if "Error:" in line]
    assert line.startswith("CheckpointError: rank 1: model.path=an/absent/folder: no such folder")


@pytest.mark.full
def test_a_stopped_rank_is_found_and_the_run_ends_with_its_own_code(
    tmp_path: Path, model: Path
) -> None:
    config = write_tiny_run(tmp_path, model, delay_s=0.01)
    run_dir = tmp_path / "runs" / "tiny"
    process = start(config, "run.steps=200", "checkpoint.every=100", "parallel.hang_timeout_s=20.0")
    wait_for_rows(run_dir, 2, process)
    ranks = [
        p
        for p in psutil.Process(process.pid).children(recursive=True)
        if "pacs_megatron.training.main" in p.cmdline()
    ]
    victim = next(p for p in ranks if p.environ().get("RANK") == "1")
    victim.suspend()
    code, err = finish(process)
    assert code == ExitCode.HANG, err
    assert "rank 0: no progress" in err and "rank 1: phase" in err
    assert "train_step" in (run_dir / "logs" / "rank0.stack").read_text()
