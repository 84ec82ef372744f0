"""A converted checkpoint, and whether a policy loads it at any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from pacs_megatron.convert.convert import ConversionOptions, hf_to_megatron
from tests.support.policies.policy_cases import make_policy
from tests.support.ranks import run_ranks


def exported(policy: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.export_weights()}


def fill_from_checkpoint(policy: Any, folder: Path) -> None:
    """By Megatron's own loader, into a model whose weights were destroyed before."""
    from pacs_megatron.checkpoint.dist_files import load_sharded
    from pacs_megatron.policy.state import _model_state

    with torch.no_grad():
        for model in policy.models:
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
    state = {
        part: {key: value for key, value in chunk.items() if "_extra_state" not in key}
        for part, chunk in _model_state(policy, "model").items()
    }
    loaded = load_sharded(state, folder / "dist")
    for number, model in enumerate(policy.models):
        found = model.load_state_dict(loaded[f"model{number}"], strict=False)
        # Transformer Engine's modules have FP8 state, which a converted folder does not.
        assert not found.unexpected_keys and all(
            "_extra_state" in key for key in found.missing_keys
        )


def check_loading(hf: Path, checkpoint: Path, layout: dict[str, Any], dtype: Any = "fp32") -> None:
    """The weights that the policy exports after loading are those of the folder, bit for bit."""
    options = {k: v for k, v in layout.items() if k != "world"}

    def on_rank(rank: int, world: int) -> dict[str, Any]:
        policy = make_policy(hf, world, dtype=dtype, **options)
        fill_from_checkpoint(policy, checkpoint)
        found = exported(policy)
        return {name: tensor.float().numpy() for name, tensor in found.items()} if rank == 0 else {}

    found = run_ranks(on_rank, layout["world"])[0]
    expected = load_file(hf / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        cast = tensor.bfloat16().float() if dtype == "bf16" else tensor
        assert torch.equal(torch.from_numpy(found[name]), cast), name


def convert(hf: Path, out: Path, **options: Any) -> Path:
    hf_to_megatron(str(hf), ConversionOptions(out=out, **options))
    return out
