"""An export has the checkpoint's tensors bit for bit, in few collectives."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.support.policies.policy_cases import make_policy
from tests.support.ranks import run_ranks
from tests.support.tiers import in_test
from tests.support.tiny_families import make_family

LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "tp2": ("qwen3", 2, {"tp": 2}),
    "tp2-tied": ("llama-tied-mha", 2, {"tp": 2}),
    "tp2-pp2": ("qwen3", 4, {"tp": 2, "pp": 2}),
    "pp2-vpp2": ("qwen3", 2, {"pp": 2, "vpp": 2, "layers": 4}),
    "ep2": ("qwen3_moe", 2, {"ep": 2}),
    "experts-tp2": ("qwen3_moe", 2, {"tp": 2}),
    "ep2-pp2-bf16": ("qwen3_moe", 4, {"ep": 2, "pp": 2, "dtype": "bf16"}),
    "ep2-tp2-sp": ("qwen3_moe", 4, {"ep": 2, "tp": 2, "sequence_parallel": True}),
}
"""name -> family, ranks, options"""


@pytest.mark.parametrize("largest", [0, 2000, 2**28], ids=["single", "small", "shipped"])
@pytest.mark.parametrize("layout", in_test(LAYOUTS, "ep2"))
def test_an_export_is_the_checkpoint_in_any_run_length(
    tmp_path: Path, layout: str, largest: int
) -> None:
    """Runs of one entry, of a few, and of all entries that the same ranks have."""
    family, world, options = LAYOUTS[layout]
    options = dict(options)
    changes = {"num_hidden_layers": options.pop("layers")} if "layers" in options else {}
    dtype = "bfloat16" if options.get("dtype") == "bf16" else "float32"
    model = make_family(tmp_path / "model", family, dtype=dtype, **changes)
    expected = load_file(model / "model.safetensors")

    def on_rank(_rank: int, world_size: int) -> tuple[dict[str, torch.Tensor], Counter[str]]:
        from pacs_megatron.policy import weights

        weights._RUN_BYTES = largest
        policy = make_policy(model, world_size, **options)
        calls: Counter[str] = Counter()
        for name in ("broadcast", "all_gather"):
            _count_calls(name, calls)
        exported = {name: tensor.clone() for name, tensor in policy.export_weights()}
        return exported, calls

    results = run_ranks(on_rank, world)
    for exported, _ in results:
        assert exported.keys() == expected.keys()
        for name, tensor in exported.items():
            assert torch.equal(tensor, expected[name]), name

    if layout == "ep2" and largest == 2**28:
        # Of each layer, both tensors of the experts of each of the two ranks.
        num_layers = len({name.split(".")[2] for name in expected if ".experts." in name})
        assert [calls["broadcast"] for _, calls in results] == [4 * num_layers] * 2
    if layout == "ep2" and largest == 0:
        num_experts = sum("down_proj" in name for name in expected)
        assert [calls["broadcast"] for _, calls in results] == [2 * num_experts] * 2


def _count_calls(name: str, calls: Counter[str]) -> None:
    """Counts the calls of a collective of `torch.distributed` in this process."""
    real = getattr(dist, name)

    def counted(*args: Any, **options: Any) -> Any:
        calls[name] += 1
        return real(*args, **options)

    setattr(dist, name, counted)
