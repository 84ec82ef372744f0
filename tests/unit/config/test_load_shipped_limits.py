"""Every shipped run that samples stops when its log-probs cannot be trusted."""

from __future__ import annotations

from pathlib import Path

import pytest

from pacs_megatron.config import load_config

RUNS = sorted((Path(__file__).resolve().parents[3] / "configs" / "runs").glob("*.yaml"))


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_the_breaker_is_on(path: Path) -> None:
    config = load_config(path).config
    limits = config.mismatch
    is_big = config.resources.gpus_per_node > 0
    if not config.rollout.is_sampled:
        assert limits.max_abs_mean is None, "demonstrations have no sampler's log-probs"
        return
    loose = config.precision.fp8 is not None or any(word in path.stem for word in ("a3b", "ahead"))
    if is_big:
        expected = 0.1 if loose else 0.05
    else:
        expected = 1e-2 if config.rollout.engine == "sglang" else 1e-3
    assert limits.max_abs_mean == expected and (limits.max_kl == 0.05 or not is_big)
    if config.objective.name == "pacs":
        assert limits.score_noise_every == 20 and limits.max_score_noise == (2.0 if is_big else 0.1)
    else:
        assert limits.score_noise_every is None
