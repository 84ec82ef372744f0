"""The limits at which a run stops: each one acts on its metric, names the option and what to
change.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pacs_megatron.config import load_config
from pacs_megatron.config.schema import MismatchOptions
from pacs_megatron.errors import ConfigError
from pacs_megatron.training.breaker import exceeded_limit, with_signal_to_noise

QUICKSTART = Path(__file__).parents[3] / "configs" / "runs" / "quickstart.yaml"
HEALTHY = {
    "mismatch/logprob_abs_mean": 0.01,
    "mismatch/kl": 0.001,
    "mismatch/over_frac": 0.01,
    "pacs/score_noise": 0.1,
    "pacs/score_snr": 5.0,
}


@pytest.mark.parametrize(
    ("option", "limit", "metric", "bad", "advice"),
    [
        ("max_abs_mean", 0.05, "mismatch/logprob_abs_mean", 0.06, "rollout.sync.verify"),
        ("max_kl", 0.01, "mismatch/kl", 0.02, "rollout.sync.verify"),
        ("max_over_frac", 0.05, "mismatch/over_frac", 0.06, "rollout.sync.verify"),
        ("max_score_noise", 1.0, "pacs/score_noise", 1.5, "objective.beta"),
        ("min_score_snr", 2.0, "pacs/score_snr", 1.5, "objective.beta"),
    ],
)
def test_each_limit_acts_on_its_metric_alone(
    option: str, limit: float, metric: str, bad: float, advice: str
) -> None:
    options = MismatchOptions(**{option: limit, "score_noise_every": 1})
    assert exceeded_limit(options, HEALTHY) is None
    assert (
        exceeded_limit(options, HEALTHY | {metric: None}) is None
        and exceeded_limit(options, {}) is None
    )
    assert exceeded_limit(options, HEALTHY | {metric: limit}) is None
    message = exceeded_limit(options, HEALTHY | {metric: bad})
    assert (
        message is not None
        and f"mismatch.{option}={limit:g}; saved" in message
        and advice in message
    )
    assert exceeded_limit(MismatchOptions(), HEALTHY | {metric: bad}) is None


@pytest.mark.parametrize(
    ("option", "other"),
    [("max_score_noise", "min_score_snr"), ("min_score_snr", "max_score_noise")],
)
def test_a_limit_that_nothing_measures_is_rejected(option: str, other: str) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"mismatch\.{option}=1\.0 requires mismatch\.score_noise_every > 0, got null",
    ):
        load_config(
            QUICKSTART,
            ["mismatch.score_noise_every=null", f"mismatch.{other}=null", f"mismatch.{option}=1"],
        )


def test_the_signal_to_noise_ratio_leaves_the_noise_out_of_the_signal() -> None:
    assert (
        with_signal_to_noise({"pacs/score_noise": 0.5, "pacs/psi_mean_square": 1.0})[
            "pacs/score_snr"
        ]
        == 3.0
    )
    for row in (
        {"pacs/score_noise": 0.0, "pacs/psi_mean_square": 1.0},
        {"pacs/score_noise": 0.5},
        {},
    ):
        assert "pacs/score_snr" not in with_signal_to_noise(row)
