"""Seconds of data-parallel collectives against arithmetic by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from pacs_megatron.config import load_config
from pacs_megatron.runtime.gpus import GPUS
from pacs_megatron.workbench.plan.collectives import (
    DataParallelSums,
    data_parallel_sums,
    export_seconds,
)
from pacs_megatron.workbench.plan.plan import Plan, make_plan
from pacs_megatron.workbench.plan.render import render

RUNS = Path(__file__).parents[4] / "configs" / "runs"


def plan_of(name: str, *overrides: str) -> Plan:
    return make_plan(load_config(RUNS / f"{name}.yaml", list(overrides)))


def sums_of(plan: Plan) -> DataParallelSums:
    return data_parallel_sums(plan.config, plan.spec, plan.layout, GPUS["h200"])


def updates_s(plan: Plan) -> float:
    [updates] = [phase for phase in plan.phases if phase.name == "updates"]
    return updates.seconds


def test_replicas_inside_a_node() -> None:
    """Qwen3-8B, tp 2, dp 4: 4.0955 billion parameters a rank over three quarters of NVLink."""
    sums = sums_of(plan_of("pacs-qwen3-8b-1n8g-tp2"))
    sent = 4_095_521_792 * 3 / 4
    assert sums.gradients_s == pytest.approx(4 * sent / (0.75 * 450e9), rel=1e-3)
    assert sums.weights_s == pytest.approx(2 * sent / (0.75 * 450e9), rel=1e-3)


def test_replicas_on_several_nodes() -> None:
    """14B, tp 4, dp 4 on two nodes: two ranks of a group on each node, two links of 40 GB/s."""
    plan = plan_of("pacs-qwen3-14b-2n8g-tp4")
    elements = plan.stages[0].items[0].num_bytes / 2
    sums = sums_of(plan)
    assert sums.gradients_s == pytest.approx(4 * elements * 3 / 4 / 80e9)

    # All of a node's GPUs of a group together are as fast as NVLink at most.
    alone = sums_of(plan_of("grpo-qwen3-8b-1n8g-tp1", "resources.nodes=4", SERVERS))
    assert alone.gradients_s == pytest.approx(4 * 8_190_735_360 * 31 / 32 / 320e9, rel=1e-3)


SERVERS = "rollout.servers.count=32"


def test_without_the_distributed_optimizer_gradients_are_sent_twice() -> None:
    name = "pacs-qwen3-8b-1n8g-tp2"
    divided = sums_of(plan_of(name))
    whole = sums_of(plan_of(name, "parallel.distributed_optimizer=false"))
    assert whole.weights_s == 0
    assert whole.gradients_s == pytest.approx(2 * divided.gradients_s, rel=1e-3)


def test_experts_have_their_own_replicas() -> None:
    """30B-A3B, ep 8 on 32 GPUs: four ranks with the same 16 experts of a layer, one on each node;
    the other 1.54 billion parameters are on all 32.
    """
    sums = sums_of(plan_of("grpo-qwen3-30b-a3b-4n8g-ep8"))
    experts = 48 * 16 * 3 * 2048 * 768
    dense = 30_532_122_624 - 8 * experts
    seconds = 4 * experts * 3 / 4 / 40e9 + 4 * dense * 31 / 32 / 320e9
    assert sums.gradients_s == pytest.approx(seconds, rel=1e-3)


def test_a_single_replica_sends_nothing() -> None:
    name = "pacs-qwen3-8b-1n8g-tp2"
    assert sums_of(plan_of(name, "parallel.tp=8")).seconds == 0


@pytest.mark.parametrize(
    ("overlaps", "visible"),
    # Of 6 s, the backward pass hides 4 s of the gradients and the forward pass 2 s of the weights.
    [((True, True), 1 + 0), ((True, False), 1 + 1.5), ((False, False), 5 + 1.5)],
)
def test_what_a_microbatch_hides(overlaps: tuple[bool, bool], visible: float) -> None:
    sums = DataParallelSums(5.0, 1.5, *overlaps)
    assert sums.visible_s(6.0) == pytest.approx(visible)


def test_visible_seconds_are_in_the_update() -> None:
    name = "pacs-qwen3-14b-2n8g-tp4"
    hidden = plan_of(name)
    visible = plan_of(name, "parallel.megatron.overlap_grad_reduce=false")
    more_s = updates_s(visible) - updates_s(hidden)
    assert more_s == pytest.approx(4 * sums_of(hidden).seconds)
    assert f"over replicas {4 * sums_of(hidden).seconds:.1f} s, 0.0 s of them" in render(hidden)


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        # tp 4 inside a node; tp 1: nothing; ep 8 inside a node, of the experts.
        ("pacs-qwen3-14b-2n8g-tp4", 2 * 14_768_307_200 * 3 / 4 / 337.5e9),
        ("grpo-qwen3-8b-1n8g-tp1", 0.0),
        ("grpo-qwen3-30b-a3b-4n8g-ep8", 2 * 48 * 128 * 3 * 2048 * 768 * 7 / 8 / 337.5e9),
        # tp 8 of a stage's quarter, then three quarters from other nodes over one link of 40 GB/s.
        (
            "pacs-qwen2.5-72b-8n8g-tp8-pp4",
            2 * 72_706_203_648 * (7 / 8 / 4 / 337.5e9 + 3 / 4 / 40e9),
        ),
    ],
)
def test_seconds_of_an_export(name: str, seconds: float) -> None:
    plan = plan_of(name)
    gathered = export_seconds(plan.config, plan.spec, plan.layout, GPUS["h200"])
    assert gathered == pytest.approx(seconds, rel=0.01)
