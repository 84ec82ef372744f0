"""Seconds of traced kernels and collectives against arithmetic by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pacs_megatron.config import load_config
from pacs_megatron.runtime.gpus import GPUS
from pacs_megatron.workbench.plan.plan import Plan, make_plan
from pacs_megatron.workbench.trace.estimate import GroupTraffic, RankEstimate
from pacs_megatron.workbench.trace.seconds import (
    FASTEST,
    SLOWEST,
    formula_seconds,
    kernel_seconds,
    traffic_seconds,
    update_seconds,
)

RUNS = Path(__file__).parents[4] / "configs" / "runs"
H200 = GPUS["h200"]
PHASE = "forward and backward"


def plan_of(name: str, *overrides: str) -> Plan:
    return make_plan(load_config(RUNS / f"{name}.yaml", list(overrides)))


def test_kernels_by_arithmetic_intensity() -> None:
    """A product of 4096 x 4096 x 16384 has 0.55 TFLOP and 0.3 GB; a sum of 1 GB computes nothing.

    72 % and, in attention, 45 % of 989 TFLOP/s; 70 % of 4800 GB/s; 45 us for a launch.
    """
    product = (2 * 4096 * 4096 * 16384, 2 * (4096 * 4096 + 2 * 4096 * 16384))
    work = {
        (PHASE, "te.generic_gemm", *product): 10,
        (PHASE, "te.generic_gemm in fp8", *product): 10,
        (PHASE, "te.fused_attn_fwd", 1e12, 1e8): 2,
        (PHASE, "aten.add.Tensor", 0, 1e9): 3,
        # The product of one row with a matrix reads more than it computes.
        (PHASE, "aten.mm.default", 2 * 4096 * 4096, 2 * 4096 * 4096): 1,
        (PHASE, "aten.neg.default", 0, 8): 100,
    }
    seconds = kernel_seconds(work, H200)

    in_bf16 = 10 * product[0] / (0.72 * 989e12)
    assert seconds["products"] == pytest.approx(in_bf16 * (1 + 1 / 1.74))
    assert seconds["attention"] == pytest.approx(2e12 / (0.45 * 989e12))
    small_s = 2 * 4096 * 4096 / (0.7 * 4800e9)
    assert seconds["memory"] == pytest.approx(3e9 / (0.7 * 4800e9) + small_s, rel=1e-6)
    assert seconds["launches"] == pytest.approx(100 * 45e-6 + 45e-6 - small_s, rel=1e-6)


def test_the_range_of_kernels() -> None:
    """A product and a sum of 1 GB at the ends of the constants' ranges; a small kernel is a launch
    of 20 to 70 us.
    """
    work = {
        (PHASE, "te.generic_gemm in fp8", 1e13, 1e8): 1,
        (PHASE, "te.fused_attn_fwd", 1e12, 1e8): 1,
        (PHASE, "aten.add.Tensor", 0, 1e9): 1,
        (PHASE, "aten.neg.default", 0, 0): 1,
    }
    fastest = kernel_seconds(work, H200, FASTEST)
    slowest = kernel_seconds(work, H200, SLOWEST)

    assert fastest["products"] == pytest.approx(1e13 / (0.8 * 989e12 * 1.85))
    assert slowest["products"] == pytest.approx(1e13 / (0.5 * 989e12 * 1.3))
    assert fastest["attention"] == pytest.approx(1e12 / (0.52 * 989e12))
    assert slowest["attention"] == pytest.approx(1e12 / (0.4 * 989e12))
    assert fastest["memory"] == pytest.approx(1e9 / (0.8 * 4800e9))
    assert slowest["memory"] == pytest.approx(1e9 / (0.5 * 4800e9))
    assert (fastest["launches"], slowest["launches"]) == pytest.approx((20e-6, 70e-6))


def traffic(operation: str, ranks: tuple[int, ...], num_bytes: float, name: str) -> GroupTraffic:
    return GroupTraffic(PHASE, f"{name} (x)", operation, 1, num_bytes, ranks, "nccl")


@pytest.mark.parametrize(
    ("operation", "buffers", "sent"),
    [
        # Of 8 GB on four ranks; a rank has 2 GB of them, or all of them.
        ("allgather_base", 8e9 + 2e9, 6e9),
        ("reduce_scatter_base", 8e9 + 2e9, 6e9),
        ("allreduce", 8e9, 12e9),
        ("alltoall_base", 8e9 + 8e9, 6e9),
        ("send", 8e9, 8e9),
    ],
)
def test_collectives_by_bytes_and_link(operation: str, buffers: float, sent: float) -> None:
    """Three quarters of NVLink's 450 GB/s in a node; between nodes the network of the group's GPUs
    on a node, 40 GB/s each.
    """
    inside = traffic(operation, (0, 1, 2, 3), buffers, "tp")
    assert traffic_seconds(inside, 8, H200) == pytest.approx(sent / (0.75 * 450e9))
    across = traffic(operation, (0, 4, 8, 12), buffers, "tp")
    assert traffic_seconds(across, 8, H200) == pytest.approx(sent / 80e9)
    alone = traffic(operation, (5,), buffers, "tp")
    assert traffic_seconds(alone, 8, H200) == 0


def estimate_of(*calls: GroupTraffic) -> RankEstimate:
    """Two micro-batches of 0.3 s each."""
    return RankEstimate(
        stage=0,
        rank=0,
        num_layers=4,
        traced_layers=(2, 4),
        num_microbatches=2,
        peaks=(),
        live_after={},
        flops={},
        traffic=calls,
        work={
            (PHASE, "aten.add.Tensor", 0, 0.6 * 0.7 * 4800e9): 1,
            ("log-probs: step_start", "aten.add.Tensor", 0, 1e15): 1,
            ("build", "aten.add.Tensor", 0, 1e15): 1,
        },
        syncs={},
    )


def test_an_update_with_overlapped_sums() -> None:
    """The gradients' sum hides behind two thirds of a micro-batch, 0.2 s, the weights' gather
    behind one third; a collective of tensor parallelism is visible, one over gloo is the host's.
    """
    plan = plan_of("pacs-qwen3-14b-2n8g-tp4")
    rate = 0.75 * 450e9
    gradients = traffic("reduce_scatter_base", (0, 1, 2, 3), 0.25 * rate * 5 / 3, "dp")
    weights = traffic("allgather_base", (0, 1, 2, 3), 0.05 * rate * 5 / 3, "dp and cp")
    shards = traffic("allreduce", (0, 1), 0.06 * rate, "tp")
    on_host = replace(shards, backend="gloo", num_bytes=1e15)
    estimate = estimate_of(gradients, weights, shards, on_host)

    seconds = update_seconds(plan.config, plan.layout, H200, estimate)
    assert seconds.kernels["memory"] == pytest.approx(0.6)
    assert seconds.collectives == pytest.approx(0.06)
    assert seconds.data_parallel == pytest.approx(0.3)
    # A micro-batch has 0.33 s with its collectives.
    assert seconds.visible_data_parallel == pytest.approx(0.25 - 0.22)
    assert seconds.bubble == 0
    assert seconds.total == pytest.approx(0.66 + 0.03)

    # Without overlap, and with four stages, which idle 3/2 of the working time.
    plain = plan_of("pacs-qwen3-14b-2n8g-tp4", "parallel.megatron={overlap_grad_reduce: false}")
    layout = replace(plan.layout, pp=4)
    seconds = update_seconds(plain.config, layout, H200, estimate)
    assert seconds.visible_data_parallel == pytest.approx(0.3)
    assert seconds.total == pytest.approx(0.66 * 2.5 + 0.3)


def test_a_microbatch_by_the_formulas() -> None:
    """A step's tokens over data-parallel ranks and token budgets."""
    plan = plan_of("pacs-qwen3-14b-2n8g-tp4")
    [updates] = [phase for phase in plan.phases if phase.name == "updates"]
    batch = plan.config.batch
    tokens = batch.prompts_per_step * batch.samples_per_prompt * plan.lengths.total
    microbatches = tokens / 4 / batch.tokens_per_microbatch
    assert formula_seconds(plan) == pytest.approx(updates.seconds / microbatches)
