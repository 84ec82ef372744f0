"""The formulas of `plan` against traces of Transformer Engine's modules, for every shipped run.

Transformer Engine's kernels are stand-ins that allocate their outputs, so the kernels' own
workspaces are not compared.
"""

from __future__ import annotations

import pytest

from pacs_megatron.config import RunConfig, load_config
from pacs_megatron.config.layout import layout_of, ranks_to_start
from pacs_megatron.workbench.trace.estimate import kinds_of_stages
from tests.support.planned_peak import peak_of
from tests.support.traced_rank import ROOT

BF16 = "precision.fp8=null"
"""Quantizers of FP8 are not compared: the formulas assume a share for them."""
LIMIT = 0.02


def _shipped() -> list[object]:
    """(path, stage) of each kind of rank of each run on GPUs.

    Two runs whose memory follows from equal options are one case of `make test-te`; the others are
    cases of the campaign.
    """
    cases: list[object] = []
    known = set()
    for path in sorted((ROOT / "configs" / "runs").glob("*.yaml")):
        config = load_config(path, [BF16]).config
        # Megatron-Core 0.16, of this row, has no hybrids.
        if not config.resources.gpus_per_node or "qwen3.5" in path.stem:
            continue
        key = _options_of_memory(config)
        marks = [pytest.mark.campaign] if key in known else []
        known.add(key)
        for stage in kinds_of_stages(layout_of(config, ranks_to_start(config))):
            name = str(path.relative_to(ROOT))
            cases.append(pytest.param(name, stage, marks=marks, id=f"{path.stem}-stage{stage}"))
    return cases


def _options_of_memory(config: RunConfig) -> tuple[object, ...]:
    return (
        config.model.path,
        repr(config.policy.lora),
        repr(config.parallel),
        config.resources.nodes,
        config.resources.gpu,
        config.batch.tokens_per_microbatch,
    )


@pytest.mark.parametrize(("config", "stage"), _shipped())
def test_a_shipped_run(config: str, stage: int) -> None:
    peak = peak_of(config, [BF16], stage=stage)

    assert abs(peak.error) < LIMIT
    assert abs(peak.error_of_activations) < LIMIT


DENSE = "configs/runs/pacs-qwen3-14b-2n8g-tp4.yaml"
EXPERTS = "configs/runs/grpo-qwen3-30b-a3b-4n8g-ep8.yaml"
SELECTIVE = "parallel.recompute.granularity=selective"
VARIANTS = {
    "dense-full": (DENSE, ["parallel.recompute.granularity=full"], 0),
    "dense-attention": (DENSE, [SELECTIVE, "parallel.recompute.modules=[core_attn]"], 0),
    "dense-mlp": (DENSE, [SELECTIVE, "parallel.recompute.modules=[mlp]"], 0),
    "dense-norms": (DENSE, [SELECTIVE, "parallel.recompute.modules=[layernorm]"], 0),
    "dense-first-of-two": (DENSE, ["parallel.pp=2"], 0),
    "dense-first-of-two-full": (
        DENSE,
        ["parallel.pp=2", "parallel.recompute.granularity=full"],
        0,
    ),
    "dense-without-sequence-parallel": (DENSE, ["parallel.sequence_parallel=false"], 0),
    "experts-none": (EXPERTS, ["parallel.recompute.granularity=none"], 0),
    "experts-first-of-two": (
        EXPERTS,
        ["parallel.recompute.granularity=none", "parallel.pp=2"],
        0,
    ),
    "experts-moe": (EXPERTS, [SELECTIVE, "parallel.recompute.modules=[moe]"], 0),
    "experts-activation": (EXPERTS, [SELECTIVE, "parallel.recompute.modules=[moe_act]"], 0),
    "experts-norms": (EXPERTS, [SELECTIVE, "parallel.recompute.modules=[layernorm]"], 0),
    "experts-tp2": (EXPERTS, ["parallel.tp=2", "parallel.sequence_parallel=true"], 0),
}
IN_TEST_TE = ("dense-attention", "dense-first-of-two", "experts-none")


@pytest.mark.parametrize(
    "name",
    [
        name if name in IN_TEST_TE else pytest.param(name, marks=pytest.mark.campaign)
        for name in VARIANTS
    ],
)
def test_recomputation_and_layouts(name: str) -> None:
    config, overrides, stage = VARIANTS[name]
    peak = peak_of(config, overrides, stage=stage)

    assert abs(peak.error) < LIMIT
    assert abs(peak.error_of_activations) < LIMIT
