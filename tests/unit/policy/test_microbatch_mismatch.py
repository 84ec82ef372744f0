"""The five figures of trainer against sampler, over micro-batches with padding, against numpy on
all tokens at once.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch

from pacs_megatron.policy.engine import _mismatch_metrics
from pacs_megatron.policy.microbatch import SampleStatistics, UpdateLoss


@pytest.mark.parametrize("scale", [1e-3, 0.1, 2.0])
def test_against_numpy(scale: float) -> None:
    rng = np.random.default_rng(0)
    trainer = -rng.exponential(1.0, 900).astype(np.float32)
    sampler = np.minimum(trainer + rng.normal(0.3 * scale, scale, 900).astype(np.float32), 0)
    mask = (rng.random(900) > 0.2).astype(np.float32)
    loss = UpdateLoss(
        prepared=cast("Any", None),
        objective=cast("Any", None),
        statistics=SampleStatistics(names=()),
        is_step_start=True,
        mismatch_threshold=0.1,
    )
    reports = []
    for rows in np.split(
        np.arange(900), [130, 131, 131, 700]
    ):  # one micro-batch has a token, one has none
        log_ratio = torch.from_numpy((trainer - sampler)[rows]) * torch.from_numpy(mask[rows])
        reports.append(loss._mismatch(log_ratio))
    sums = {
        name: (max if name.startswith("max/") else sum)(float(report[name]) for report in reports)
        for name in reports[0]
    }
    got = _mismatch_metrics(sums, float(mask.sum()))

    p = trainer[mask > 0].astype(np.float64)
    q = sampler[mask > 0].astype(np.float64)
    expected = {
        "mismatch/logprob_abs_mean": np.abs(p - q).mean(),
        "mismatch/logprob_abs_max": np.abs(p - q).max(),
        "mismatch/ratio": np.exp((p - q).mean()),
        "mismatch/kl": (np.exp(p - q) - 1 - (p - q)).mean(),
        "mismatch/over_frac": (np.abs(p - q) > 0.1).mean(),
    }
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        # k3 is a difference of numbers near 1: fp32 leaves it 1e-7 a token
        assert got[name] == pytest.approx(value, rel=1e-4, abs=1e-7), name


@pytest.mark.parametrize("sampler", [-95.0, -1000.0])
def test_a_gross_mismatch_stays_finite_for_the_circuit_breaker(sampler: float) -> None:
    """exp(95) is beyond fp32: a row that is not finite would end the run before the breaker names
    what to look at.
    """
    loss = UpdateLoss(
        prepared=cast("Any", None),
        objective=cast("Any", None),
        statistics=SampleStatistics(names=()),
        is_step_start=True,
        mismatch_threshold=0.1,
    )
    report = loss._mismatch(torch.full((5000,), -0.5 - sampler))
    got = _mismatch_metrics({name: float(value) for name, value in report.items()}, 5000.0)
    assert all(np.isfinite(value) for value in got.values())
    assert (
        got["mismatch/logprob_abs_mean"] == pytest.approx(-0.5 - sampler)
        and got["mismatch/over_frac"] == 1.0
    )
    assert got["mismatch/kl"] > 1e25 and got["mismatch/ratio"] > 1e25
