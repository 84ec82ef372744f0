"""`certify` on real ranks: green for correct configurations, red for injected errors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pacs_megatron.runtime.shipped import run_file
from pacs_megatron.workbench.certify import ranks
from pacs_megatron.workbench.certify.certificate import Certificate
from pacs_megatron.workbench.certify.run import certify
from tests.support.needs import HAS_DELTA_NETS
from tests.support.policies.certify_runs import (
    EXAMPLE_FOLDER,
    EXAMPLES,
    OBJECTIVE_RUNS,
    SHIPPED,
    UNSEEN,
    UPSTREAM,
    full_tier_of_objective_runs,
    random_run,
    write_run,
)
from tests.support.policies.injected_errors import INJECTED_ERRORS, is_number
from tests.support.tiers import in_tiers

EVERYTHING: dict[str, Any] = {
    "run": {"nproc": 4},
    "parallel": {"tp": 2, "sequence_parallel": True, "distributed_optimizer": True},
    "objective": {"name": "pacs", "reference": "frozen", "reset_every": 2, "clip_grad": 1.0},
    "optimizer": {"weight_decay": 0.1, "schedule": "cosine", "min_lr": 2e-7, "warmup_updates": 2},
    "logging": {"step_start_entropy": True},
}


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """`certify` sets variables for the processes that it forks."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def run(folder: Path, changes: dict[str, Any], family: str = "qwen3") -> Certificate:
    out = folder / "certificate"
    certificate = certify(write_run(folder, changes, family), [], out=out)
    assert certificate is not None
    assert (out / "certificate.html").exists()
    assert [path.name for path in out.iterdir() if path.name.startswith(".")] == []
    return certificate


def in_full(names: Any, in_full_tier: Any) -> list[Any]:
    """`in_full_tier` of `names` run in `make test-full`, the others in `make campaign`."""
    params = []
    for name in names:
        mark = pytest.mark.full if name in in_full_tier else pytest.mark.campaign
        params.append(pytest.param(name, marks=mark))
    return params


def test_a_correct_configuration_is_green(tmp_path: Path) -> None:
    certificate = run(tmp_path, EVERYTHING)
    assert certificate.is_green, certificate.line()
    quantities = certificate.content["quantities"]
    compared = {quantity["name"]: quantity["compared"] for quantity in quantities}
    assert len(compared) >= 15
    assert min(compared.values()) > 0


AGENT = {"agent": {"function": "my_agent.py:solve"}}
"""Responses have random spans of the environment; the function is not loaded."""


@pytest.mark.parametrize(
    ("objective", "parallel"),
    [
        ({"name": "pacs", "reference": "frozen"}, {"tp": 2}),
        pytest.param({"name": "pacs"}, {"cp": 2}, marks=pytest.mark.full),
        pytest.param({"name": "gspo"}, {"pp": 2}, marks=pytest.mark.full),
        pytest.param({"name": "dapo"}, {"cp": 2}, marks=pytest.mark.full),
        pytest.param({"name": "ppo"}, {"tp": 2}, marks=pytest.mark.full),
    ],
    ids=lambda values: "-".join(map(str, values.values())),
)
def test_random_spans_of_the_environment(
    tmp_path: Path, objective: dict[str, Any], parallel: dict[str, Any]
) -> None:
    changes = {"objective": objective, "parallel": parallel, "rollout": AGENT}
    certificate = run(tmp_path, changes)
    assert certificate.is_green, certificate.line()


@pytest.mark.full
def test_a_span_one_token_late_turns_it_red(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers = ranks._RecordedRollouts._writers

    def late(rollouts: Any, step: int, facts: Any) -> np.ndarray:
        found = writers(rollouts, step, facts)
        ends = np.cumsum(facts.lens)
        starts = ends - facts.lens
        for start, end, prompt_len in zip(starts, ends, facts.prompt_lens, strict=True):
            # Between the prompt and the last token, which is the policy's.
            first = start + prompt_len
            found[first : end - 1] = np.roll(found[first : end - 1], 1)
        return found

    monkeypatch.setattr(ranks._RecordedRollouts, "_writers", late)
    certificate = run(tmp_path, {"rollout": AGENT})
    assert not certificate.is_green
    assert is_number(certificate.content["first_deviation"])


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3", {"parallel": {"tp": 2, "sequence_parallel": True}}),
        pytest.param(
            "qwen2",
            {
                "run": {"nproc": 4},
                "parallel": {"pp": 2, "distributed_optimizer": True},
                "objective": {"name": "pacs", "reference": "frozen", "reset_every": 2},
            },
            marks=pytest.mark.full,
        ),
        pytest.param("qwen3_moe", {"parallel": {"ep": 2}}, marks=pytest.mark.full),
    ],
    ids=["tp2-sp", "pp2-reset", "moe-ep2"],
)
def test_adapters_are_green(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    """Against LoRA by hand, from adapters whose B is 0; the reference is the frozen model."""
    adapters: dict[str, Any] = {"rank": 8, "alpha": 20.0}
    if family == "qwen3_moe":
        adapters["targets"] = ["q_proj", "k_proj", "v_proj", "o_proj"]
    frozen = {"objective": {"name": "pacs", "reference": "frozen"}}
    certificate = run(tmp_path, frozen | changes | {"policy": {"lora": adapters}}, family)
    assert certificate.is_green, certificate.line()


@pytest.mark.parametrize(
    "name",
    in_tiers(
        INJECTED_ERRORS,
        "slope of wrong responses 2 % low",
        "moments are not restored",
        "gate and up are swapped",
        "the gradient of a replicated matrix is not summed",
    ),
)
def test_an_injected_error_turns_it_red_by_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A crash is not a detection: the first deviation is a quantity above its tolerance."""
    error = INJECTED_ERRORS[name]
    error.inject(monkeypatch)
    certificate = run(tmp_path, error.changes, error.family)
    assert not certificate.is_green, name
    first_deviation = certificate.content["first_deviation"]
    assert is_number(first_deviation), first_deviation


@pytest.mark.parametrize(
    ("first_deviation", "expected"),
    [
        ("update 1, rank 0: gradient norm differ by 0.3 (of the value; tolerance 2e-05)", True),
        ("update 2: samples of an update differ by 13 (samples; tolerance 0)", True),
        ("update 1: gradient norm differ by inf (of the value; tolerance 2e-05)", False),
        ("update 1: gradient norm differ by nan (of the value; tolerance 2e-05)", False),
        ("attempt 1, rank 0: AttributeError: 'SampleTable' object has no attribute 'x'", False),
        ("step 1: metric policy/entropy is missing", False),
        ("", False),
    ],
)
def test_a_crash_is_not_a_number(first_deviation: str, expected: bool) -> None:
    assert is_number(first_deviation) == expected


@pytest.mark.parametrize("seed", in_full(range(270), range(6)))
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


@pytest.mark.parametrize("name", in_full(UPSTREAM, list(UPSTREAM)[1:]))
def test_a_known_error_of_megatron_is_not_reached(tmp_path: Path, name: str) -> None:
    family, changes = UPSTREAM[name]
    certificate = run(tmp_path, changes, family)
    assert certificate.is_green, certificate.line()


@pytest.mark.parametrize(
    "name",
    in_full(
        SHIPPED,
        ("pacs-qwen3-8b-1n8g-tp2", "grpo-qwen3-14b-7n8g-tp2-ahead", "quickstart-warmstart"),
    ),
)
def test_a_shipped_configuration_is_green(tmp_path: Path, name: str) -> None:
    if not HAS_DELTA_NETS and ("qwen3.5" in name or "hybrid" in name):
        pytest.skip("Megatron-Core 0.16 has no gated delta nets for packed samples")
    certificate = certify(run_file(name), [], out=tmp_path)
    assert certificate is not None
    assert certificate.is_green, certificate.line()


@pytest.mark.parametrize("name", in_full(EXAMPLES, list(EXAMPLES)[:3]))
def test_an_example_of_an_objective_is_green(tmp_path: Path, name: str) -> None:
    certificate = certify(EXAMPLE_FOLDER / f"{name}.yaml", EXAMPLES[name], out=tmp_path)
    assert certificate is not None
    assert certificate.is_green, certificate.line()


@pytest.mark.parametrize("name", in_full(OBJECTIVE_RUNS, full_tier_of_objective_runs()))
def test_an_objective_is_green_in_a_layout(tmp_path: Path, name: str) -> None:
    family, changes = OBJECTIVE_RUNS[name]
    certificate = run(tmp_path, changes, family)
    assert certificate.is_green, certificate.line()
