"""Every objective with random options against the formulas in float64, on mini-batches with ratios
beyond every limit, groups of one class, equal rewards, and no sample of a class.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from pacs_megatron.objectives.shared.base import CommonOptions
from pacs_megatron.workbench.certify.probe import evaluate
from pacs_megatron.workbench.certify.reference_probe import by_place, draw, expected, probes
from tests.support.policies.random_objectives import NAMES, random_options

IN_TEST = 3 * len(NAMES)
"""options of each objective in `make test`"""
IN_FULL = 40 * len(NAMES)


def largest_error(options: CommonOptions, seed: int) -> float:
    """Of losses (relative) and of each sample's derivatives (relative to its largest)."""
    # The actor term allows one update a step.
    updates = 1 if getattr(options, "actor_term", 0.0) else 2
    plain_options = options.model_dump(mode="json")
    errors = []
    for probe in probes(plain_options, updates, seed):
        found = by_place(probe, evaluate(options, updates, probe))
        reference = by_place(probe, expected(plain_options, probe))
        assert found.keys() == reference.keys()
        for place, values in reference.items():
            floor = 1e-3 if place.endswith("loss") else 1e-5
            error = np.abs(found[place] - values).max() / (np.abs(values).max() + floor)
            assert np.isfinite(error), f"{probe.name}, {place}"
            errors.append(float(error))
    return max(errors)


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=[] if seed < IN_TEST else pytest.mark.full)
        for seed in range(IN_FULL)
    ],
)
def test_random_options_equal_the_formulas(seed: int) -> None:
    options = random_options(seed)
    assert largest_error(options, seed) < 1e-8, options


def test_the_options_cover_what_changes_a_loss() -> None:
    drawn = [random_options(seed) for seed in range(IN_FULL)]
    counts = Counter(options.name for options in drawn)
    assert set(counts) == set(NAMES) and len(set(counts.values())) == 1

    values: dict[str, set[Any]] = {}
    for options in drawn:
        for key, value in options.model_dump(mode="json").items():
            if not isinstance(value, dict):
                values.setdefault(key, set()).add(value)
    wanted = {
        "loss_mean": {"token", "sequence", "dr_grpo"},
        "kl_in": {None, "loss", "reward"},
        "kl_estimator": {None, "k1", "k2", "k3"},
        "importance": {"none", "truncate", "mask"},
        "importance_level": {None, "token", "sequence"},
        "classes": {"both", "positive", "negative"},
    }
    for key, expected_values in wanted.items():
        assert values[key] >= expected_values, key


@pytest.mark.parametrize("labels", ["drawn", "correct", "incorrect"])
def test_a_probe_has_the_content_of_its_name(labels: str) -> None:
    rng = np.random.default_rng(0)
    near, far = (draw(rng, index=1, kind=kind, labels=labels) for kind in ("near", "far"))
    for probe in (near, far):
        classes = [set(probe.labels[probe.groups == group]) for group in np.unique(probe.groups)]
        assert classes[:2] == ([{1.0}, {0.0}] if labels == "drawn" else classes[:1] * 2)
        assert ({0.0, 1.0} in classes) == (labels == "drawn")
        last_group = probe.rewards[probe.groups == probe.groups.max()]
        assert len(last_group) > 1 and len(set(last_group)) == 1

    def largest_sum(values: np.ndarray, lens: np.ndarray) -> float:
        sums = [part.sum() for part in np.split(values, np.cumsum(lens)[:-1])]
        return float(np.max(sums))

    assert largest_sum(near.logprobs - near.starts, near.lens) < 2
    assert largest_sum(far.logprobs - far.starts, far.lens) > 25
    assert (far.references - far.logprobs).max() > 25
