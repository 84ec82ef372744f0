"""The examples of every objective load; runs of some of them train, stop and resume with the same
bits.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pacs_megatron.config import load_config
from pacs_megatron.config.explain import show
from pacs_megatron.objectives.registry import REGISTRY, build_objective
from pacs_megatron.observability.metrics import read_metrics
from tests.support.metrics import reproducible_bytes
from tests.support.tiny_models import make_tiny_qwen3
from tests.support.tiny_run import write_tiny_run

EXAMPLES = sorted((Path(__file__).parents[3] / "examples" / "objectives").glob("*.yaml"))


def test_every_rival_has_an_example_that_loads() -> None:
    names = set()
    for path in EXAMPLES:
        loaded = load_config(path)
        objective = build_objective(
            loaded.config.objective, updates_per_step=loaded.config.batch.updates_per_step
        )
        assert f'objective.name = "{objective.name}"' in show(path)
        assert loaded.config.run.name == f"quickstart-{path.stem.replace('_', '-')}"
        names.add(objective.name)
    assert names == set(REGISTRY) - {"pacs", "sft"}


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            (
                "objective.name=gspo",
                "objective.importance=mask",
                "objective.importance_level=sequence",
            ),
            marks=pytest.mark.campaign,
        ),
        (
            "objective.name=rloo",
            "objective.kl_coef=0.1",
            "objective.kl_in=reward",
            "objective.kl_estimator=k1",
        ),
        pytest.param(("objective.name=real", "batch.groups=apart"), marks=pytest.mark.campaign),
        ("objective.name=ppo", "objective.lam=0.95", "batch.epochs=2"),
        (
            "objective.name=pacs",
            "admission.resample={{schedule: hardness, max_samples: 8, by_std: true}}",
        ),
        pytest.param(
            ("objective.name=vimpo", "objective.beta=0.1", "objective.actor_coef=1.0"),
            marks=pytest.mark.campaign,
        ),
        ("objective.name=distill", "objective.label_coef=0.5", "objective.teacher={teacher}"),
    ],
    ids=lambda options: options[0].partition("=")[2],
)
def test_a_run_resumes_with_the_same_bits(tmp_path: Path, options: tuple[str, ...]) -> None:
    config = write_tiny_run(tmp_path, make_tiny_qwen3(tmp_path / "model"))
    teacher = make_tiny_qwen3(tmp_path / "teacher", seed=1)
    options = tuple(option.format(teacher=teacher) for option in options)
    fixed = ("run.steps=4", "checkpoint.keep_last=4", *options)

    def train() -> bytes:
        done = subprocess.run(
            [sys.executable, "-m", "pacs_megatron", "train", str(config), *fixed],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=900,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return reproducible_bytes(folder)

    folder = tmp_path / "runs" / "tiny"
    undisturbed = train()
    rows = [row for row in read_metrics(folder) if "objective/loss" in row]
    assert len(rows) == 4 and all(row["optimizer/grad_norm"] > 0 for row in rows)
    for step in (3, 4):
        shutil.rmtree(folder / "checkpoints" / f"step_{step:06d}")
    assert train() == undisturbed
