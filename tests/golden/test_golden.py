"""The authors' loss in float64: scores, weights, loss and gradients, matched to 1e-9.

PACS_GOLDEN may name another file.
"""

import itertools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pacs_megatron.objectives.pacs import PacsOptions
from pacs_megatron.objectives.registry import build_objective
from tests.support.policies.objective_reference import (
    Batch,
    make_facts,
    objective_gradient,
    objective_scores,
)

OWN_FILE = Path(__file__).parent / "pacs_golden.json"
NUM_OWN_CASES = 35
RTOL = 1e-9
ATOL = 1e-15  # of quantities of order 1e-3 to 1: for exact zeros only


def load_cases() -> list[Any]:
    files = [OWN_FILE]
    if "PACS_GOLDEN" in os.environ:
        files.append(Path(os.environ["PACS_GOLDEN"]))
    cases = []
    for file in files:
        for number, case in enumerate(json.loads(file.read_text())["cases"]):
            words = (file.stem, str(number), case["reward_proxy"], case["score"], case["weighting"])
            cases.append(pytest.param(case, id="-".join(words)))
    return cases


def shuffled_batch(case: dict[str, Any], seed: int) -> tuple[Batch, np.ndarray]:
    """The case with its samples in a random order; second: which sample of the case stands in each
    row.
    """
    n = case["groups"] * case["group_size"]
    order = np.random.default_rng(seed).permutation(n)
    lens = np.asarray(case["lengths"])[order]
    facts = make_facts(
        (order // case["group_size"]).tolist(),
        np.asarray(case["labels"])[order].tolist(),
        lens=lens.tolist(),
    )
    sample_of_token = torch.from_numpy(np.repeat(np.arange(n), lens))
    flat = {}
    for key in ("log_probs", "ref_log_probs"):
        values = list(itertools.chain.from_iterable(case[key][row] for row in order))
        flat[key] = torch.tensor(values, dtype=torch.float64)
    assert len(flat["log_probs"]) == lens.sum()
    batch = Batch(
        facts=facts,
        logprobs=flat["log_probs"],
        reference=flat["ref_log_probs"],
        mask=torch.ones(len(sample_of_token), dtype=torch.float64),
        sample_of_token=sample_of_token,
    )
    return batch, order


def test_the_committed_file_is_complete() -> None:
    cases = json.loads(OWN_FILE.read_text())["cases"]
    assert len(cases) == NUM_OWN_CASES
    assert len({(c["reward_proxy"], c["score"], c["weighting"]) for c in cases}) == 2 * 4 * 4


@pytest.mark.parametrize("case", load_cases())
def test_authors_figures(case: dict[str, Any]) -> None:
    batch, order = shuffled_batch(case, seed=len(case["labels"]))
    options = PacsOptions(
        name="pacs",
        beta=case["beta"],
        reward_proxy=case["reward_proxy"],
        score=case["score"],
        weighting=case["weighting"],
        **({"reference": "frozen"} if case["reward_proxy"] == "sum_log_ratio" else {}),
        # The authors have no floor. No standard deviation here is as small as this one.
        **({"score_std_floor": 1e-12} if case["score"] == "grpo" else {}),
    )
    objective = build_objective(options, updates_per_step=1)
    proxy = objective_scores(objective, batch)
    prepared = objective.prepare(proxy, batch.facts, objective.prepare_step(batch.facts))
    gradient, _ = objective_gradient(objective, batch, prepared, cuts=5)

    expected = case["expected"]
    for got, key in (
        (proxy, "reward_proxy"),
        (prepared.per_sample["score"], "score"),
        (prepared.per_sample["weight"], "weight"),
    ):
        np.testing.assert_allclose(
            got.numpy(), np.asarray(expected[key])[order], rtol=RTOL, atol=ATOL, err_msg=key
        )
    assert prepared.loss == pytest.approx(expected["loss"], rel=RTOL)
    wanted = np.concatenate([expected["grad_log_probs"][row] for row in order])
    np.testing.assert_allclose(gradient.numpy(), wanted, rtol=RTOL, atol=ATOL)
