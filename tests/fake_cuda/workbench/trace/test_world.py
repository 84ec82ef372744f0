"""All ranks of small worlds: their collectives match in every layout, and a rank that skips one is
found with file and line.

The model is tiny. The ranks run the trainer's own step and weight update; decisions and shapes
travel between them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from pacs_megatron.workbench.trace.rank import TraceRequest
from tests.support.tiers import in_test, in_tiers
from tests.support.traced_rank import ROOT, Change, trace_worlds, unreviewed_waits

DENSE = "configs/runs/pacs-qwen3-14b-2n8g-tp4.yaml"
EXPERTS = "configs/runs/pacs-qwen3-30b-a3b-4n8g-ep8.yaml"
SHAPE = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 512,
}
EXPERT_SHAPE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
COMMON = (
    "resources.nodes=1",
    "resources.gpus_per_node=4",
    "resources.rollout_nodes=1",
    "policy.offload=none",
    "rollout.servers.colocated=false",
    "rollout.servers.count=1",
    "rollout.sync.transport=broadcast",
    "batch.tokens_per_microbatch=48",
    "batch.updates_per_step=2",
    "data.max_prompt_tokens=16",
    "rollout.sampling.max_response_tokens=32",
    "parallel.tp=1",
    "parallel.ep=1",
    "parallel.sequence_parallel=false",
)

LAYOUTS = {
    "tp-pp": ["parallel.tp=2", "parallel.pp=2"],
    "tp-vpp": ["parallel.tp=2", "parallel.pp=2", "parallel.vpp=2"],
    "tp-cp": ["parallel.tp=2", "parallel.cp=2"],
    "tp-dp": ["parallel.tp=2"],
    "tp-dp with sequence parallelism": ["parallel.tp=2", "parallel.sequence_parallel=true"],
    "pp-cp": ["parallel.pp=2", "parallel.cp=2"],
    "pp-dp": ["parallel.pp=2"],
    "vpp-cp": ["parallel.pp=2", "parallel.vpp=2", "parallel.cp=2"],
    "vpp-dp": ["parallel.pp=2", "parallel.vpp=2"],
    "cp-dp": ["parallel.cp=2"],
    "ep-tp": ["parallel.ep=2", "parallel.tp=2", "parallel.sequence_parallel=true"],
    "ep-pp": ["parallel.ep=2", "parallel.pp=2"],
    "ep-vpp": ["parallel.ep=2", "parallel.pp=2", "parallel.vpp=2"],
    "ep-cp": ["parallel.ep=2", "parallel.cp=2"],
    "ep-dp": ["parallel.ep=2"],
}
UNEVEN = "uneven micro-batches"
STOP = "a stop request in a pass"
EMPTY = "no samples"
SKIPPED = "skipped samples"
SITUATIONS: dict[str, dict[str, Any]] = {
    UNEVEN: {},
    EMPTY: {"num_groups": 0},
    STOP: {"stop_rank": 3, "stop_at_poll": 3},
    "a stop request before the step": {"stop_rank": 3, "stop_at_poll": 0},
    SKIPPED: {"num_one_class_groups": 3},
}
IN_MAKE_TEST = {"tp-pp": [EMPTY, STOP]}
"""of the other layouts, some run in all situations, and the rest in the first three"""
IN_ALL_SITUATIONS = ("tp-pp", "vpp-dp", "ep-dp")


def request_of(layout: str, situation: str) -> TraceRequest:
    has_experts = layout.startswith("ep")
    options: dict[str, Any] = {
        "num_groups": 5,
        "group_size": 2,
        "prompt_tokens": 4,
        "response_tokens": 24,
        "has_uneven_lengths": True,
        **SITUATIONS[situation],
    }
    return TraceRequest(
        config=EXPERTS if has_experts else DENSE,
        overrides=[*COMMON, *LAYOUTS[layout]],
        shape=SHAPE | EXPERT_SHAPE if has_experts else SHAPE,
        num_layers=4 if "vpp" in layout else 2,
        transformer_engine=False,
        paths=("whole step",),
        **options,
    )


def check(layout: str, situations: Sequence[str]) -> None:
    worlds = trace_worlds(request_of(layout, situation) for situation in situations)
    for situation, world in zip(situations, worlds, strict=True):
        assert not world["errors"], situation
        assert not world["hang"], situation
        assert not world["differences"], situation
        outcome = "stopped" if "stop" in situation else "trained"
        assert world["outcomes"] == [outcome] * 4, situation
        assert not unreviewed_waits(world["host_syncs"]), situation
    calls = {}
    paths = {}
    for situation, world in zip(situations, worlds, strict=True):
        calls[situation] = world["num_collectives"]
        paths[situation] = (*world["num_collectives"], *world["num_bytes"])
    if layout.startswith("ep"):
        # A pass records the routes of all samples, so the first update skips none.
        assert calls.get(SKIPPED, calls[UNEVEN]) == calls[UNEVEN]
    # Each situation took another path than the others. An interleaved pipeline without the skipped
    # samples has as many micro-batches, in multiples of its stages, and sends less.
    assert len(set(paths.values())) == len(paths)


@pytest.mark.parametrize("layout", IN_MAKE_TEST)
def test_all_ranks_match_in_short_steps(layout: str) -> None:
    check(layout, IN_MAKE_TEST[layout])


@pytest.mark.full
@pytest.mark.parametrize("layout", in_tiers(LAYOUTS, "tp-pp"))
def test_all_ranks_of_a_layout_match(layout: str) -> None:
    situations = list(SITUATIONS)
    check(layout, situations if layout in IN_ALL_SITUATIONS else situations[:3])


@dataclass(frozen=True, slots=True)
class Skip:
    """Something that rank 3 leaves out."""

    layout: str
    situation: str
    change: Change
    found: str
    """regular expression; `LINE` is the number of the changed line"""


SKIPS = {
    "a decision over gloo": Skip(
        "tp-pp",
        EMPTY,
        (
            "pacs_megatron.parallel.control",
            "        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self._group)",
            "        if self.rank.rank != 3: dist.all_reduce(value, group=self._group)",
        ),
        r"rank 0 waits in allreduce .* at pacs_megatron/parallel/control.py:LINE .*"
        r"rank 3 waits in allreduce .* at pacs_megatron/parallel/control.py:\d+",
    ),
    "a reduction over NCCL": Skip(
        "tp-pp",
        UNEVEN,
        (
            "pacs_megatron.policy.head",
            "        dist.all_reduce(tensor, op=op, group=self.group)",
            "        if dist.get_rank() != 3: dist.all_reduce(tensor, op=op, group=self.group)",
        ),
        r"group of ranks \[2, 3\]: .*rank 2 allreduce of [\d,]+ bytes float32 at "
        r"pacs_megatron/policy/head.py:LINE ",
    ),
    "a micro-batch": Skip(
        "tp-pp",
        UNEVEN,
        (
            "pacs_megatron.policy.schedule",
            "        len(batches),\n        loss_of_output,",
            "        len(batches) - (torch.distributed.get_rank() == 3),\n        loss_of_output,",
        ),
        # The other stage of the replica waits for it.
        r"rank 1 waits in recv from rank 3 at .*|from rank 1 to rank 3: ",
    ),
}


@pytest.mark.parametrize("name", in_test(SKIPS, "a decision over gloo"))
def test_what_one_rank_leaves_out_is_found(name: str) -> None:
    skip = SKIPS[name]
    module, old, _ = skip.change
    source = (ROOT / (module.replace(".", "/") + ".py")).read_text()
    line = source[: source.index(old)].count("\n") + 1

    world = trace_worlds([request_of(skip.layout, skip.situation)], skip.change)[0]
    found = "\n".join([world["hang"], *world["differences"]])
    assert re.search(skip.found.replace("LINE", str(line)), found), found
