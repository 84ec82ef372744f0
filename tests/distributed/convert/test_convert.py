"""Converted checkpoints and real Megatron models: loaded by dist_checkpointing at any layout,
exported after training.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pacs_megatron.checkpoint.megatron_weights import MegatronWeights
from pacs_megatron.convert.convert import ConversionOptions, megatron_to_hf
from pacs_megatron.objectives.pacs import PacsOptions
from pacs_megatron.objectives.registry import build_objective
from tests.support.converted import check_loading, convert, exported
from tests.support.needs import needs_delta_nets
from tests.support.policies.policy_cases import make_policy, random_step, train
from tests.support.ranks import run_ranks
from tests.support.tiers import in_test
from tests.support.tiny_families import make_family
from tests.support.tiny_models import make_tiny_qwen3

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"world": 1},
    "tp2": {"world": 2, "tp": 2},
    "pp2": {"world": 2, "pp": 2},
    "tp2pp2": {"world": 4, "tp": 2, "pp": 2},
    "pp2vpp2": {"world": 2, "pp": 2, "vpp": 2},
}
DENSE = ("qwen2", "qwen3-tied-mha-odd-vocabulary", "llama", "mistral")
BUDGET = 256


@pytest.mark.parametrize("case", DENSE)
@pytest.mark.parametrize("layout", in_test(["one", "tp2pp2"], "tp2pp2"))
def test_megatron_loads_every_dense_family(case: str, layout: str, tmp_path: Path) -> None:
    hf = make_family(tmp_path / "hf", case)
    check_loading(hf, convert(hf, tmp_path / "ckpt"), LAYOUTS[layout])


@pytest.mark.parametrize("layout", ["tp2", "pp2", "pp2vpp2"])
def test_megatron_loads_at_other_layouts(layout: str, tmp_path: Path) -> None:
    hf = make_tiny_qwen3(tmp_path / "hf", tied=True, num_hidden_layers=4)
    check_loading(hf, convert(hf, tmp_path / "ckpt"), LAYOUTS[layout])


@pytest.mark.parametrize(
    "layout",
    [{"world": 1}, {"world": 2, "ep": 2}, {"world": 2, "tp": 2}, {"world": 4, "pp": 2, "ep": 2}],
    ids=str,
)
def test_megatron_loads_experts(layout: dict[str, Any], tmp_path: Path) -> None:
    hf = make_family(tmp_path / "hf", "qwen3_moe")
    check_loading(hf, convert(hf, tmp_path / "ckpt"), layout)


@needs_delta_nets
@pytest.mark.parametrize("layout", in_test(["one", "tp2", "pp2"], "tp2"))
@pytest.mark.parametrize("case", ["qwen3_5", "qwen3_next"])
def test_megatron_loads_hybrids(case: str, layout: str, tmp_path: Path) -> None:
    hf = make_family(tmp_path / "hf", case)
    check_loading(hf, convert(hf, tmp_path / "ckpt"), LAYOUTS[layout])


def test_a_model_of_another_dtype_loads_it(tmp_path: Path) -> None:
    hf = make_tiny_qwen3(tmp_path / "hf")
    check_loading(hf, convert(hf, tmp_path / "ckpt"), {"world": 1}, dtype="bf16")


def test_the_policy_loads_a_checkpoint_as_it_loads_a_folder(tmp_path: Path) -> None:
    """`model.path` may name either."""
    hf = make_tiny_qwen3(tmp_path / "hf")
    checkpoint = convert(hf, tmp_path / "ckpt")

    def on_rank(_rank: int, world: int) -> bool:
        policy = make_policy(hf, world, tp=2)
        expected = exported(policy)
        policy.load_weights(
            lambda name: torch.full(
                policy.table.by_hf[name].hf_shapes[policy.table.by_hf[name].hf_names.index(name)],
                7.0,
            )
        )
        policy.load_weights(MegatronWeights(checkpoint).get)
        found = exported(policy)
        return all(torch.equal(found[name], expected[name]) for name in expected)

    assert run_ranks(on_rank, 2) == [True, True]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_training_checkpoint_exports_what_the_policy_holds(dtype: str, tmp_path: Path) -> None:
    """TP2 x PP2, distributed optimizer, two updates, saved by the training's own code."""
    hf = make_tiny_qwen3(
        tmp_path / "hf", num_hidden_layers=4, dtype="bfloat16" if dtype == "bf16" else "float32"
    )

    def on_rank(rank: int, world: int) -> dict[str, torch.Tensor]:
        from pacs_megatron.checkpoint.names import Position
        from pacs_megatron.checkpoint.run_checkpoint import Contents, start_checkpoint
        from pacs_megatron.policy import state

        policy = make_policy(
            hf,
            world,
            dtype=dtype,
            tp=2,
            pp=2,
            distributed_optimizer=True,
            tokens_per_microbatch=BUDGET,
        )
        objective = build_objective(PacsOptions(name="pacs"), updates_per_step=1)
        train(policy, objective, [random_step(0), random_step(1)], tokens_per_microbatch=BUDGET)
        contents = Contents(
            sharded={"dist": state.sharded_state(policy, is_loading=False, with_reference=False)},
            state={},
            rng=state.rng_state(),
            hf_metadata=hf,
            dtype=policy.config.params_dtype,
            buffer=None,
        )
        start_checkpoint(tmp_path / "run", Position(2), policy.rank, contents, keep_last=1)(
            policy.rank
        )
        found = {n: t.view(torch.uint8).numpy() for n, t in exported(policy).items()}
        return found if rank == 0 else {}

    held = run_ranks(on_rank, 4)[0]
    options = ConversionOptions(out=tmp_path / "back", verify=True)
    megatron_to_hf(tmp_path / "run", options, step=2, max_shard_bytes=10**9)
    written = load_file(tmp_path / "back" / "model.safetensors")
    assert written.keys() == held.keys() == load_file(hf / "model.safetensors").keys()
    for name, tensor in written.items():
        assert torch.equal(tensor.view(torch.uint8), torch.from_numpy(held[name])), name
    start = load_file(hf / "model.safetensors")
    assert any(not torch.equal(written[n], start[n]) for n in written)  # it did train
