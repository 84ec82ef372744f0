"""`plan` counts bytes as a live Megatron model holds them: parameters, gradient buffers, optimizer
state.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from pacs_megatron.config import RunConfig
from pacs_megatron.config.layout import layout_of
from pacs_megatron.config.schema import LoraOptions
from pacs_megatron.models import load_spec
from pacs_megatron.objectives.pacs import PacsOptions
from pacs_megatron.workbench.plan import activations, state
from pacs_megatron.workbench.plan.plan import plan_of
from tests.support.needs import HAS_DELTA_NETS
from tests.support.planned import run_config
from tests.support.policies.policy_cases import make_part, make_policy, random_step
from tests.support.ranks import run_ranks
from tests.support.tiny_families import make_family

# name: (ranks, layout, family, tied)
CASES: dict[str, tuple[int, dict[str, Any], str, bool]] = {
    "one": (1, {}, "qwen3", False),
    "tp2-tied": (2, {"tp": 2}, "qwen3", True),
    "pp2-tied": (2, {"pp": 2}, "qwen3", True),
    "vpp2": (2, {"pp": 2, "vpp": 2}, "qwen3", False),
    "tp2pp2": (4, {"tp": 2, "pp": 2}, "qwen3", False),
    "cp2-distopt": (2, {"cp": 2, "distributed_optimizer": True}, "qwen3", False),
    "dp2-distopt": (2, {"distributed_optimizer": True}, "qwen3", False),
    "pp2dp2-distopt-tied": (4, {"pp": 2, "distributed_optimizer": True}, "qwen3", True),
    "qwen2-tp2": (2, {"tp": 2}, "qwen2", True),
    "llama-tp2": (2, {"tp": 2}, "llama", False),
    "mistral-pp2": (2, {"pp": 2}, "mistral", False),
    "moe": (1, {}, "qwen3_moe", False),
    "moe-tp2": (2, {"tp": 2, "sequence_parallel": True}, "qwen3_moe", False),
    "moe-ep2": (2, {"ep": 2}, "qwen3_moe", False),
    "moe-ep2-distopt": (2, {"ep": 2, "distributed_optimizer": True}, "qwen3_moe", False),
    "moe-ep2-dp4-distopt": (4, {"ep": 2, "distributed_optimizer": True}, "qwen3_moe", False),
    "moe-tp2ep2": (4, {"tp": 2, "ep": 2, "sequence_parallel": True}, "qwen3_moe", False),
    "moe-pp2ep2-distopt": (
        4,
        {"pp": 2, "ep": 2, "distributed_optimizer": True},
        "qwen3_moe",
        False,
    ),
    "hybrid-tp2": (2, {"tp": 2}, "qwen3_5", True),
    "hybrid-pp2-distopt": (2, {"pp": 2, "distributed_optimizer": True}, "qwen3_5", False),
    "hybrid-moe-tp2ep2": (2, {"tp": 2, "ep": 2, "sequence_parallel": True}, "qwen3_next", False),
}
QUICK = (
    "tp2-tied",
    "vpp2",
    "cp2-distopt",
    "pp2dp2-distopt-tied",
    "qwen2-tp2",
    "llama-tp2",
    "mistral-pp2",
    "moe-ep2-distopt",
    "moe-tp2ep2",
    "hybrid-tp2",
    "hybrid-moe-tp2ep2",
)
"""In `make test`, in bf16; the others and fp32 in `make test-full`."""
SHAPE = {"num_hidden_layers": 4, "vocab_size": 301, "hidden_size": 64, "intermediate_size": 96}


@dataclass(frozen=True)
class Live:
    stage: int
    parameters: int
    gradients: int
    moments: int
    masters: int
    snapshot: int


def live_bytes(folder: Path, world: int, dtype: str, parallel: dict[str, Any]) -> list[Live]:
    def on_rank(_rank: int, size: int) -> Live:
        policy = make_policy(folder, size, dtype=dtype, **parallel)
        parameters = []
        for chunk in policy.chunks:
            for p in chunk.parameters():
                parameters.append(p)
        buffers = []
        for chunk in policy.chunks:
            buffers += [*chunk.buffers, *chunk.expert_parallel_buffers]
        moments = masters = 0
        weights = {p.data_ptr() for p in parameters}
        for part in policy.optimizer.optimizers():
            for group in part.optimizer.param_groups:
                for held in group["params"]:
                    state = part.optimizer.state[held]
                    moments += sum(state[name].nbytes for name in ("exp_avg", "exp_avg_sq"))
                    if (
                        held.dtype == torch.float32
                        and dtype == "bf16"
                        and held.data_ptr() not in weights
                    ):
                        masters += held.nbytes
        policy.take_reference(reset_optimizer=False)
        return Live(
            stage=policy.rank.pp,
            parameters=sum(p.nbytes for p in parameters),
            gradients=sum(b.grad_data.nbytes for b in buffers),
            moments=moments,
            masters=masters,
            snapshot=sum(tensor.nbytes for tensor in policy.reference.tensors),
        )

    return run_ranks(on_rank, world)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *(
            pytest.param(case, "bf16", marks=[] if case in QUICK else pytest.mark.full)
            for case in CASES
        ),
        *(pytest.param(case, "fp32", marks=pytest.mark.full) for case in CASES),
    ],
)
def test_bytes_are_exact(case: str, dtype: str, tmp_path: Path) -> None:
    world, parallel, family, tied = CASES[case]
    if case.startswith("hybrid") and not HAS_DELTA_NETS:
        pytest.skip("Megatron-Core 0.16 has no gated delta nets for packed samples")
    folder = make_family(tmp_path, family, tie_word_embeddings=tied, **SHAPE)
    spec = load_spec(folder)
    config = run_config(dtype, parallel)
    layout = layout_of(config, world)
    live = live_bytes(folder, world, dtype, parallel)
    assert plan_of(config_with_world(config, world), spec).host_bytes_per_rank == max(
        found.snapshot for found in live
    )
    for stage in range(layout.pp):
        ranks = [found for found in live if found.stage == stage]
        parameters = state.rank_parameters(spec, layout, stage)
        planned = {
            item.name.split(" (")[0]: item.num_bytes
            for item in state.state_items(config, spec, layout, stage)
        }
        padding = planned["gradients"] / 4 - parameters.total
        width = 2 if dtype == "bf16" else 4
        for found in ranks:
            # Planned weights include the padding of the distributed optimizer's buffer, which live
            # tensors leave out.
            assert found.parameters == planned["weights"] - padding * width
            assert found.gradients == planned["gradients"]
            assert found.moments <= planned["Adam moments"]
        # Every element of a stage has its moments once among the ranks that hold it.
        dense = (sum(parameters.dense) + parameters.shared_embedding) * layout.tp
        elements = dense + sum(parameters.experts) * layout.expert_tp * layout.ep
        if not config.parallel.distributed_optimizer:
            assert padding == 0
            assert all(found.moments == planned["Adam moments"] for found in ranks)
            assert all(found.masters == planned.get("master weights", 0) for found in ranks)
        else:
            assert sum(found.moments for found in ranks) == elements * 8
            assert sum(found.masters for found in ranks) == (elements * 4 if dtype == "bf16" else 0)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ("tp2-tied", "bf16"),
        pytest.param("pp2dp2-distopt-tied", "bf16", marks=pytest.mark.full),
        pytest.param("moe-ep2-distopt", "bf16", marks=pytest.mark.full),
        pytest.param("moe-tp2", "fp32", marks=pytest.mark.full),
    ],
)
def test_bytes_with_adapters_are_exact(case: str, dtype: str, tmp_path: Path) -> None:
    """Frozen weights have no gradient, no moments and no copy."""
    world, parallel, family, tied = CASES[case]
    folder = make_family(tmp_path, family, tie_word_embeddings=tied, **SHAPE)
    spec = load_spec(folder)
    targets = ["q_proj", "v_proj", "o_proj"]
    if spec.moe is None:
        targets += ["up_proj", "down_proj"]
    adapters: dict[str, Any] = {"rank": 5, "alpha": 7.0, "targets": tuple(targets)}
    config = run_config(dtype, parallel)
    policy = config.policy.model_copy(update={"lora": LoraOptions(**adapters)})
    config = config.model_copy(update={"policy": policy})
    layout = layout_of(config, world)
    width = 2 if dtype == "bf16" else 4
    live = live_bytes(folder, world, dtype, parallel | {"lora": adapters})
    assert plan_of(config_with_world(config, world), spec).host_bytes_per_rank == 0

    for stage in range(layout.pp):
        ranks = [found for found in live if found.stage == stage]
        trained = state.trained_parameters(config, spec, layout, stage)
        planned = {
            item.name.split(" (")[0]: item.num_bytes
            for item in state.state_items(config, spec, layout, stage)
        }
        padding = planned["gradients"] / 4 - trained.total
        for found in ranks:
            weights = planned["weights, frozen"] + planned["weights"] - padding * width
            assert found.parameters == weights
            assert found.gradients == planned["gradients"]
            assert found.snapshot == trained.total * width
        if config.parallel.distributed_optimizer:
            num_elements = trained.total * layout.tp
            assert sum(found.moments for found in ranks) == num_elements * 8
        else:
            assert padding == 0
            assert all(found.moments == planned["Adam moments"] for found in ranks)
            assert all(found.masters == planned.get("master weights", 0) for found in ranks)


def config_with_world(config: RunConfig, world: int) -> RunConfig:
    """The same with that many ranks on a host, and an objective that keeps a reference."""
    run = config.run.model_copy(update={"nproc": world})
    return config.model_copy(
        update={"run": run, "objective": PacsOptions(name="pacs", reference="frozen")}
    )


@pytest.mark.parametrize(
    ("world", "parallel"),
    [
        (2, {"ep": 2}),
        (2, {"tp": 2, "sequence_parallel": True}),
        (4, {"tp": 2, "ep": 2, "sequence_parallel": True}),
    ],
    ids=["ep2", "tp2", "tp2ep2"],
)
def test_tokens_that_experts_see(world: int, parallel: dict[str, Any], tmp_path: Path) -> None:
    """The mean over the ranks is exact; which rank gets more is the router's choice."""
    folder = make_family(tmp_path, "qwen3_moe", **SHAPE)
    facts, tokens = random_step(3, num_groups=6)

    def on_rank(_rank: int, size: int) -> tuple[int, int]:
        policy = make_policy(folder, size, tokens_per_microbatch=10_000, **parallel)
        rows: list[int] = []
        layer = policy.models[0].decoder.layers[0].mlp.experts
        layer.register_forward_pre_hook(
            lambda _module, inputs: rows.append(int(inputs[0].shape[0]))
        )
        part = make_part(facts, tokens, policy, 10_000)
        (batch,) = policy._batches(part)
        policy.logprobs(part, "step_start")
        return sum(rows), batch.input_ids.shape[1]

    found = run_ranks(on_rank, world)
    copies = activations.expert_copies(run_config("fp32", parallel), load_spec(folder))
    assert sum(rows for rows, _ in found) == sum(copies * tokens for _, tokens in found)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3_moe", "llama", "mistral"])
def test_parameter_count_is_megatrons_own(family: str, tmp_path: Path) -> None:
    folder = make_family(tmp_path, family, **SHAPE)
    spec = load_spec(folder)

    def on_rank(_rank: int, size: int) -> int:
        policy = make_policy(folder, size)
        values = []
        for chunk in policy.chunks:
            for p in chunk.parameters():
                values.append(p.numel())
        return sum(values)

    (held,) = run_ranks(on_rank, 1)
    config = run_config("fp32", {})
    padded = state.rank_parameters(spec, layout_of(config, 1), 0).total
    assert held == padded
    padding_rows = -(-spec.vocab_size // 128) * 128 - spec.vocab_size
    assert held - (1 if spec.tied else 2) * padding_rows * spec.hidden_size == state.num_parameters(
        spec
    )


def test_a_mini_batch_on_the_device(tmp_path: Path) -> None:
    folder = make_family(tmp_path, "qwen3", **SHAPE)
    facts, tokens = random_step(3, num_groups=6)

    def on_rank(_rank: int, size: int) -> tuple[int, int]:
        policy = make_policy(folder, size)
        batches = policy._batches(make_part(facts, tokens, policy))
        values = []
        for b in batches:
            for t in (b.input_ids, b.position_ids, b.labels, b.input_index):
                values.append(t.nbytes)
        by_token = sum(values)
        by_response = sum(b.sample_of_token.nbytes + b.slots.nbytes for b in batches)
        return by_token, by_response

    ((by_token, by_response),) = run_ranks(on_rank, 1)
    # As in `minibatch_bytes`, whose 20 other bytes of a response token are five fp32 values.
    fed = int((facts.lens - 1).sum())
    responses = int(facts.response_lens.sum())
    assert (by_token, by_response) == (32 * fed, 16 * responses)


def test_chunk_of_logits_is_the_heads() -> None:
    from pacs_megatron.policy import head

    assert head.logits_per_chunk is activations.logits_per_chunk
