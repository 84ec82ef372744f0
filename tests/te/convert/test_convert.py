"""Conversion both ways between Hugging Face folders and checkpoints of Transformer Engine's
modules.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pacs_megatron.convert.convert import ConversionOptions, megatron_to_hf
from tests.support.converted import check_loading, convert
from tests.support.policies.policy_cases import make_policy, train
from tests.support.ranks import run_ranks
from tests.support.tiny_families import make_family
from tests.te.cases import FAMILIES, FP8_SHAPE, STEPS, TOKENS
from tests.te.fp8_cases import RECIPES, fp8_options

LAYOUTS = {
    "one": {},
    "tp2-sp": {"tp": 2, "sequence_parallel": True},
    "pp2": {"pp": 2},
    "ep2": {"ep": 2},
}
PAIRWISE = {("qwen3", "tp2-sp", "blockwise"), ("qwen2", "pp2", "delayed"), ("moe", "ep2", None)}
ALL = []
for _case in itertools.product(FAMILIES, LAYOUTS, RECIPES):
    if _case[1] != "ep2" or _case[0] == "moe":
        marks = [] if _case in PAIRWISE else [pytest.mark.campaign]
        ALL.append(pytest.param(*_case, marks=marks))


@pytest.mark.parametrize(("family", "layout", "recipe"), ALL)
def test_conversion_both_ways(family: str, layout: str, recipe: str | None, tmp_path: Path) -> None:
    """A converted folder is loaded bit for bit; a trained checkpoint, FP8 state included, converts
    to its export.
    """
    hf = make_family(tmp_path / "hf", FAMILIES[family], **FP8_SHAPE)
    options = LAYOUTS[layout]
    world = 1 if layout == "one" else 2
    check_loading(hf, convert(hf, tmp_path / "ckpt"), {"world": world, **options}, dtype="bf16")

    def on_rank(rank: int, world: int) -> dict[str, torch.Tensor]:
        from pacs_megatron.checkpoint.manifest import DIST_FOLDER
        from pacs_megatron.checkpoint.names import Position
        from pacs_megatron.checkpoint.run_checkpoint import Contents, start_checkpoint
        from pacs_megatron.objectives.pacs import PacsOptions
        from pacs_megatron.objectives.registry import build_objective
        from pacs_megatron.policy import state

        policy = make_policy(
            hf, world, dtype="bf16", tokens_per_microbatch=TOKENS, **options, **fp8_options(recipe)
        )
        objective = build_objective(PacsOptions(name="pacs"), updates_per_step=1)
        train(policy, objective, STEPS[:1], tokens_per_microbatch=TOKENS)
        contents = Contents(
            sharded={
                DIST_FOLDER: state.sharded_state(policy, is_loading=False, with_reference=False)
            },
            state={},
            rng=state.rng_state(),
            hf_metadata=hf,
            dtype=policy.config.params_dtype,
            buffer=None,
        )
        start_checkpoint(tmp_path / "run", Position(1), policy.rank, contents, keep_last=1)(
            policy.rank
        )
        held = {
            name: tensor.view(torch.uint8).numpy().copy()
            for name, tensor in policy.export_weights()
        }
        return held if rank == 0 else {}

    held = run_ranks(on_rank, world)[0]
    back = ConversionOptions(out=tmp_path / "back", verify=True)
    megatron_to_hf(tmp_path / "run", back, step=1, max_shard_bytes=10**9)
    written = load_file(tmp_path / "back" / "model.safetensors")
    assert written.keys() == held.keys()
    for name, tensor in written.items():
        assert torch.equal(tensor.view(torch.uint8), torch.from_numpy(held[name])), name
