"""`certify` on real ranks: green for correct configurations, red for planted errors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pacs_megatron.runtime.shipped import run_file
from pacs_megatron.workbench.certify.certificate import Certificate
from pacs_megatron.workbench.certify.run import certify
from tests.support.policies.certify_runs import KIN_LAYOUTS, KIN_RUNS, UNSEEN, random_run, write_run
from tests.support.policies.planted_more import PLANTED
from tests.support.tiers import in_tiers

SHIPPED = sorted(
    path.stem for path in (Path(__file__).parents[4] / "configs" / "runs").glob("*.yaml")
)
EVERYTHING: dict[str, Any] = {
    "run": {"nproc": 4},
    "parallel": {"tp": 2, "sequence_parallel": True, "distributed_optimizer": True},
    "objective": {"name": "pacs", "reference": "frozen", "reset_every": 2, "clip_grad": 1.0},
    "optimizer": {"weight_decay": 0.1, "schedule": "cosine", "min_lr": 2e-7, "warmup_updates": 2},
}


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """`certify` sets variables for the processes that it forks."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def run(folder: Path, changes: dict[str, Any], family: str = "qwen3") -> Certificate:
    certificate = certify(write_run(folder, changes, family), [], out=folder / "certificate")
    assert certificate is not None and (folder / "certificate" / "certificate.html").exists()
    assert [
        path.name for path in (folder / "certificate").iterdir() if path.name.startswith(".")
    ] == []
    return certificate


def test_a_correct_configuration_is_green(tmp_path: Path) -> None:
    certificate = run(tmp_path, EVERYTHING)
    assert certificate.is_green, certificate.line()
    compared = {
        quantity["name"]: quantity["compared"] for quantity in certificate.content["quantities"]
    }
    assert len(compared) >= 15 and min(compared.values()) > 0


@pytest.mark.parametrize(
    "name",
    in_tiers(
        PLANTED,
        "slope of wrong responses 2 % low",
        "moments are not restored",
        "gate and up are swapped",
    ),
)
def test_a_planted_error_turns_it_red(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    planted = PLANTED[name]
    planted.plant(monkeypatch)
    certificate = run(tmp_path, planted.changes, planted.family)
    assert not certificate.is_green, name
    print(f"{name}: {certificate.content['first_deviation']}")


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=pytest.mark.full if seed < 6 else pytest.mark.campaign)
        for seed in range(270)
    ],
)
def test_a_random_legal_configuration_is_green(tmp_path: Path, seed: int) -> None:
    family, changes = random_run(seed)
    certificate = run(tmp_path, changes, family)
    assert certificate.is_green, f"{family} {changes}: {certificate.line()}"


@pytest.mark.campaign
@pytest.mark.parametrize("name", UNSEEN)
def test_an_unseen_combination_is_green(tmp_path: Path, name: str) -> None:
    family, changes = UNSEEN[name]
    certificate = run(tmp_path, changes, family)
    assert certificate.is_green, certificate.line()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=pytest.mark.full
            if name
            in ("pacs-qwen3-8b-1n8g-tp2", "grpo-qwen3-14b-2n8g-tp4-ahead", "quickstart-warmstart")
            else pytest.mark.campaign,
        )
        for name in SHIPPED
    ],
)
def test_a_shipped_configuration_is_green(tmp_path: Path, name: str) -> None:
    certificate = certify(run_file(name), [], out=tmp_path)
    assert certificate is not None and certificate.is_green, certificate and certificate.line()


RIVALS: dict[str, list[str]] = {
    "gspo": ["objective.importance=truncate"],
    "rloo": ["objective.kl_coef=0.1", "objective.kl_in=reward", "objective.kl_estimator=k1"],
    "ppo": [
        "objective.kl_coef=0.1",
        "objective.kl_in=reward",
        "objective.kl_estimator=k1",
        "parallel.pp=2",
    ],
    "real": [],
    "dapo": [
        "objective.entropy_coef=0.01",
        "objective.importance=mask",
        "objective.importance_level=sequence",
    ],
    "luspo": ["objective.kl_coef=0.1", "objective.kl_estimator=k2"],
    "real_bce": ["parallel.tp=1", "parallel.pp=2"],
    "cispo": ["parallel.tp=1", "parallel.cp=2"],
    **{
        name: []
        for name in (
            "grpo",
            "dr_grpo",
            "w_reinforce",
            "psr",
            "nsr",
            "reinforce_pp",
            "reinforce_pp_baseline",
        )
    },
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.full if index < 3 else pytest.mark.campaign)
        for index, name in enumerate(RIVALS)
    ],
)
def test_an_example_of_a_rival_is_green(tmp_path: Path, name: str) -> None:
    path = Path(__file__).parents[4] / "examples" / "objectives" / f"{name}.yaml"
    certificate = certify(path, RIVALS[name], out=tmp_path)
    assert certificate is not None and certificate.is_green, certificate and certificate.line()


def kin_cases() -> list[Any]:
    """Every rival once, in each layout in turn; the whole product in the campaign.

    `test_kin.py` has all pairs.
    """
    layouts = len(KIN_LAYOUTS)
    size = 2 * len(KIN_LAYOUTS)
    found = []
    for number, name in enumerate(KIN_RUNS):
        rival, place = divmod(number, size)
        in_turn = place == rival % layouts * 2 + rival // layouts % 2
        found.append(
            pytest.param(name, marks=pytest.mark.full if in_turn else pytest.mark.campaign)
        )
    return found


@pytest.mark.parametrize("name", kin_cases())
def test_a_rival_is_green_in_a_layout(tmp_path: Path, name: str) -> None:
    family, changes = KIN_RUNS[name]
    certificate = run(tmp_path, changes, family)
    assert certificate.is_green, certificate.line()
