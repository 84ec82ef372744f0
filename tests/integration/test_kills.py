"""100 `kill -9` at seeded random moments in five layouts; every run ends with the bits of an undisturbed one.

PACS_KILL_LOG names a file to which each run appends its kills; `python -m tests.support.kills FILE` prints the table.
"""

import json
import os
import random
import time
from pathlib import Path

import pytest

from pacs_megatron.errors import ExitCode
from tests.integration.test_training import assert_same_run, finish, start
from tests.support.kills import MOMENTS, TARGETS, kill_at
from tests.support.tiny_models import make_tiny_qwen3
from tests.support.tiny_run import write_tiny_run

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(3600)]
LAYOUTS = {
    "one": ("parallel.tp=1", "run.nproc=1"),
    "tp2": ("parallel.tp=2",),
    "pp2": ("parallel.tp=1", "parallel.pp=2"),
    "cp2": ("parallel.tp=1", "parallel.cp=2"),
    "dp2-distopt": ("parallel.tp=1", "run.nproc=2", "parallel.distributed_optimizer=true"),
}
KILLS = 4
SEEDS = range(5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3(tmp_path_factory.mktemp("model"), tied=True, vocab_size=262, num_hidden_layers=2)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, model: Path) -> dict[str, Path]:
    """By layout; filled by the first test of each."""
    return {}


def overrides(folder: Path, layout: str) -> tuple[str, ...]:
    benchmark = f"{{path: {folder}/train.jsonl, name: test, columns: {{problem: problem, answer: answer}}}}"
    evaluation = f"evaluation={{benchmarks: [{benchmark}], every: 3, samples_per_prompt: 2, k: [1], sampling: "
    return (*LAYOUTS[layout], "checkpoint.every=1", evaluation + "{max_response_tokens: 8}}")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_killed_runs_end_with_the_same_bits(
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
    model: Path,
    undisturbed: dict[str, Path],
    layout: str,
    seed: int,
) -> None:
    if layout not in undisturbed:
        folder = tmp_path_factory.mktemp("undisturbed")
        code, err = finish(start(write_tiny_run(folder, model), *overrides(folder, layout)), 600)
        assert code == ExitCode.OK, err
        undisturbed[layout] = folder / "runs" / "tiny"
    rng = random.Random(f"{layout} {seed}")
    config, run_dir, kills = write_tiny_run(tmp_path, model, delay_s=0.02), tmp_path / "runs" / "tiny", []
    begin = time.time()
    for _ in range(KILLS):
        process = start(config, *overrides(tmp_path, layout))
        kills.append(kill_at(process, run_dir, rng.choice(MOMENTS), rng.choice(TARGETS), rng))
        finish(process, 600)
    code, err = finish(start(config, *overrides(tmp_path, layout)), 600)
    entry = {"layout": layout, "seed": seed, "code": code, "seconds": round(time.time() - begin), "kills": kills}
    same_bits = False
    try:
        assert code == ExitCode.OK, err
        assert_same_run(run_dir, undisturbed[layout])
        same_bits = True
    finally:
        if "PACS_KILL_LOG" in os.environ:
            with Path(os.environ["PACS_KILL_LOG"]).open("a") as log:
                log.write(json.dumps(entry | {"same_bits": same_bits}) + "\n")
