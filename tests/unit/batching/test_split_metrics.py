"""Metrics of a plan of micro-batches: computed by hand for a small plan."""

from dataclasses import replace

import numpy as np
import pytest

from pacs_megatron.batching.split import plan_metrics, plan_microbatches
from pacs_megatron.contracts import Layout, MicroBatchPlan, SampleFacts

FACTS = SampleFacts(
    ids=tuple(f"0:p{row // 2}#{row % 2}" for row in range(6)),
    groups=np.arange(6) // 2,
    labels=np.arange(6) % 2.0,
    rewards=np.arange(6) % 2.0,
    prompt_lens=np.full(6, 2),
    response_lens=np.array([8, 8, 3, 5, 28, 18]),  # groups of 20, 12 and 50 tokens
    environment_lens=np.zeros(6, dtype=np.int64),
    truncated=np.zeros(6, dtype=bool),
)


def test_metrics_of_a_plan_by_hand() -> None:
    plan = MicroBatchPlan(
        by_dp_rank=(
            (np.array([4]), np.array([5])),
            (np.array([0, 1, 2, 3]), np.array([], dtype=np.int64)),
        ),
        together=np.array([True, True, True, True, False, False]),
    )
    found = plan_metrics(plan, FACTS, Layout(world_size=4, pp=2))
    assert found["batch/groups_together_frac"] == pytest.approx(4 / 6)
    assert found["batch/dp_imbalance"] == pytest.approx(50 / 41 - 1)
    assert found["batch/pipeline_bubble"] == pytest.approx(1 / 2)
    assert plan_metrics(plan, FACTS, Layout(world_size=8, pp=2, vpp=4))[
        "batch/pipeline_bubble"
    ] == pytest.approx(1 / 8)


def test_an_even_plan_on_one_stage_has_no_idle_time() -> None:
    layout = Layout(world_size=1)
    plan = plan_microbatches(FACTS, layout=layout, tokens_per_microbatch=64, keep_groups=True)
    assert plan_metrics(plan, FACTS, layout) == {
        "batch/groups_together_frac": 1.0,
        "batch/dp_imbalance": 0.0,
        "batch/pipeline_bubble": 0.0,
    }
    assert (
        plan_metrics(replace(plan, together=~plan.together), FACTS, layout)[
            "batch/groups_together_frac"
        ]
        == 0.0
    )
