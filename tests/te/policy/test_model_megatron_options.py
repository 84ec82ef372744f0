"""`parallel.megatron` reaches Transformer Engine's modules, its optimizer and Megatron's
dispatcher.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pacs_megatron.errors import ConfigError
from pacs_megatron.objectives.pacs import PacsOptions
from pacs_megatron.objectives.registry import build_objective
from tests.support.policies.policy_cases import CLIP_GRAD, make_part, make_policy, train
from tests.support.ranks import run_ranks
from tests.support.tiny_families import make_family
from tests.te.cases import CASES, FP8_SHAPE, STEPS, TOKENS, load, model_of, run, save, weights_of
from tests.te.stand_ins import CALLS


def _constructed(tmp_path: Path, family: str, look: Any, **options: Any) -> Any:
    folder = make_family(tmp_path / family, family)
    return run_ranks(
        lambda _rank, world: look(make_policy(folder, world, dtype="bf16", **options)), 1
    )[0]


def test_overlap_and_gradient_fusion_are_on_by_default(tmp_path: Path) -> None:
    def look(policy: Any) -> Any:
        layer = policy.models[0].decoder.layers[0]
        linears = (
            layer.self_attention.linear_qkv,
            layer.self_attention.linear_proj,
            layer.mlp.linear_fc1,
        )
        ddp = policy.chunks[0].ddp_config
        return (
            [x.fuse_wgrad_accumulation for x in linears],
            ddp.overlap_grad_reduce,
            ddp.overlap_param_gather,
        )

    assert _constructed(tmp_path, "qwen3", look, distributed_optimizer=True) == (
        [True] * 3,
        True,
        True,
    )
    off = {"overlap_grad_reduce": False, "gradient_accumulation_fusion": False}
    assert _constructed(tmp_path, "qwen2", look, megatron=off) == ([False] * 3, False, False)


@pytest.mark.parametrize(
    ("options", "is_fused"), [({}, True), ({"moe_permute_fusion": False}, False)]
)
def test_experts_have_the_fused_permutation_by_default(
    options: dict[str, Any], is_fused: bool, tmp_path: Path
) -> None:
    """Its sums over the experts of a token have one order; those of a GPU's atomics have any."""
    folder = make_family(tmp_path / "moe", "qwen3_moe")

    def on_rank(_rank: int, world: int) -> tuple[bool, set[str]]:
        policy = make_policy(
            folder, world, tokens_per_microbatch=TOKENS, dtype="bf16", megatron=options
        )
        policy.logprobs(make_part(*STEPS[0], policy, TOKENS), "step_start")
        return policy.config.moe_permute_fusion, {"permute", "unpermute"} & set(CALLS)

    kernels = {"permute", "unpermute"} if is_fused else set()
    assert run_ranks(on_rank, 1)[0] == (is_fused, kernels)


def test_flex_dispatcher_without_its_package_is_an_error(tmp_path: Path) -> None:
    folder = make_family(tmp_path / "moe", "qwen3_moe")

    def on_rank(_rank: int, world: int) -> str:
        with pytest.raises((ConfigError, ImportError)) as caught:
            make_policy(
                folder, world, dtype="bf16", ep=2, megatron={"moe_token_dispatcher_type": "flex"}
            )
        return str(caught.value)

    assert "DeepEP is not installed" in run_ranks(on_rank, 2)[0]


PRECISION_AWARE = {"use_precision_aware_optimizer": True}
BF16_MOMENTS = PRECISION_AWARE | {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
ON_THE_CPU = PRECISION_AWARE | {"optimizer_cpu_offload": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("optimizers")


@pytest.mark.parametrize(
    ("name", "options", "kinds", "rate"),
    [
        ("qwen3-tp2-sp-distopt", PRECISION_AWARE, {"FusedAdam"}, 0.0),
        ("qwen3-dp2-distopt", BF16_MOMENTS, {"FusedAdam"}, 0.02),
        pytest.param(
            "moe-ep2-distopt", BF16_MOMENTS, {"FusedAdam"}, 0.02, marks=pytest.mark.campaign
        ),
        ("qwen3-dp2-distopt", ON_THE_CPU, {"HybridDeviceOptimizer"}, 1e-3),
    ],
    ids=["fp32", "bf16-moments", "bf16-moments-moe", "cpu"],
)
def test_precision_aware_optimizers(
    name: str, options: dict[str, Any], kinds: set[str], rate: float, folder: Path
) -> None:
    """fp32 moments give the bits of the default; a resume gives the same bits; clipping scales its
    gradients too.
    """
    plain = run(name, folder, dtype="bf16")
    outcome = run(name, folder, dtype="bf16", megatron=options)
    assert set(outcome.optimizers) == kinds and outcome.resumed_equal
    assert min(plain.norms) > CLIP_GRAD  # so every update scales its gradients
    np.testing.assert_allclose(outcome.norms, plain.norms, rtol=rate)
    largest = max(
        float(np.abs(outcome.weights[name] - plain.weights[name]).max()) for name in plain.weights
    )
    # Weights up to 1 are rounded to bf16: 2**-8 is one bit of them.
    assert largest <= (0.0 if rate == 0 else 2**-8)


@pytest.mark.parametrize("options", [BF16_MOMENTS, ON_THE_CPU], ids=["bf16-moments", "cpu"])
def test_the_default_reads_their_checkpoints_and_they_read_its(
    options: dict[str, Any], folder: Path
) -> None:
    case = CASES["qwen3-dp2-distopt"]
    model = model_of(case, folder)

    def state(policy: Any) -> dict[str, torch.Tensor]:
        """fp32 weights and moments of this rank, as a checkpoint has them"""
        from pacs_megatron.policy import state

        sharded = state.sharded_state(policy, is_loading=False, with_reference=False)[
            state.OPTIMIZER
        ]
        entries = []
        for part in sharded.values():
            if isinstance(part, dict):
                for entry in part.values():
                    entries.append(entry)
        boxes = []
        for entry in entries:
            boxes += itertools.chain.from_iterable(entry.values())
        return {f"{box.key} {box.global_offset}": box.data.clone() for box in boxes}

    def written(given: dict[str, Any], path: Path) -> Any:
        def on_rank(_rank: int, world: int) -> Any:
            policy = make_policy(
                model,
                world,
                tokens_per_microbatch=TOKENS,
                dtype="bf16",
                megatron=given,
                **case.parallel,
            )
            objective = build_objective(PacsOptions(name="pacs"), updates_per_step=1)
            train(policy, objective, STEPS[:2], tokens_per_microbatch=TOKENS)
            save(policy, path)
            return state(policy)

        return run_ranks(on_rank, case.world, timeout=600)[0]

    def read(given: dict[str, Any], path: Path) -> Any:
        def on_rank(_rank: int, world: int) -> Any:
            policy = make_policy(
                model,
                world,
                tokens_per_microbatch=TOKENS,
                dtype="bf16",
                megatron=given,
                **case.parallel,
            )
            load(policy, path)
            found = state(policy)
            objective = build_objective(PacsOptions(name="pacs"), updates_per_step=1)
            train(policy, objective, STEPS[2:], tokens_per_microbatch=TOKENS)
            assert policy.optimizer.adam_step == 3
            return found

        return run_ranks(on_rank, case.world, timeout=600)[0]

    for number, (writer, reader) in enumerate([({}, options), (options, {})]):
        saved = written(writer, folder / f"saved{number}-{len(options)}")
        loaded = read(reader, folder / f"saved{number}-{len(options)}")
        assert set(saved) == set(loaded)
        moments_are_bf16 = "exp_avg_dtype" in reader
        for key, tensor in saved.items():
            rounded = (
                tensor.bfloat16().float() if moments_are_bf16 and ".exp_avg" in key else tensor
            )
            assert torch.equal(loaded[key], rounded), key


def test_userbuffers_get_one_shape_in_every_pass(folder: Path) -> None:
    """With `tp_comm_overlap` all modules overlap, every micro-batch has the buffers' shape, and
    padding changes nothing.
    """
    plain = run("qwen3-tp2-sp-distopt", folder)
    case = CASES["qwen3-tp2-sp-distopt"]
    model = model_of(case, folder)

    def on_rank(_rank: int, world: int) -> Any:
        from transformer_engine.pytorch.module import base

        from pacs_megatron.policy import schedule

        shapes: list[Any] = []

        def initialize(shape: Any, tp_size: int, *, quantization_modes: Any) -> None:
            shapes.append((shape, tp_size, [mode.value for mode in quantization_modes]))
            # Transformer Engine 2.20's modules check it when they are constructed.
            base._ub_initialized = True

        base.initialize_ub = initialize
        for kind in ("forward", "forward_backward"):
            original = getattr(schedule, kind)

            def counted(chunks: Any, batches: Any, *rest: Any, original: Any = original) -> Any:
                shapes.extend(batch.input_ids.shape[1] for batch in batches)
                return original(chunks, batches, *rest)

            setattr(schedule, kind, counted)
        options = case.parallel | {"megatron": {"tp_comm_overlap": True}}
        policy = make_policy(model, world, tokens_per_microbatch=95, **options)
        layer = policy.models[0].decoder.layers[0]
        column = layer.self_attention.linear_qkv
        row = layer.self_attention.linear_proj
        flags = [
            column.ub_overlap_ag_fprop,
            column.ub_bulk_dgrad,
            row.ub_overlap_rs_fprop,
            row.ub_overlap_ag_dgrad,
        ]
        objective = build_objective(PacsOptions(name="pacs"), updates_per_step=1)
        reports = train(policy, objective, STEPS, tokens_per_microbatch=95)
        return shapes, flags, [report.grad_norm for report in reports], weights_of(policy)

    shapes, flags, norms, weights = run_ranks(on_rank, case.world, timeout=600)[0]
    assert shapes[0] == ([96, FP8_SHAPE["hidden_size"]], 2, ["none"])
    assert len(shapes) > 6 and set(shapes[1:]) == {96}
    assert flags == [True] * 4
    np.testing.assert_allclose(norms, plain.norms, rtol=1e-5)
    for name, values in weights.items():
        np.testing.assert_allclose(values, plain.weights[name], atol=2e-6, err_msg=name)


def test_a_checkpoint_has_no_trace_of_the_head(tmp_path: Path) -> None:
    """The final norm is Transformer Engine's with both heads, so are the keys of a checkpoint,
    objects included.
    """
    folder = make_family(tmp_path / "model", "qwen3")

    def keys(head: Any) -> tuple[torch.dtype, set[str]]:
        def on_rank(_rank: int, world: int) -> tuple[torch.dtype, set[str]]:
            from pacs_megatron.policy import state

            model = make_policy(folder, world, dtype="bf16", head=head).models[0]
            sharded = model.sharded_state_dict(metadata=state.sharding_metadata())
            norm = model.decoder.final_layernorm
            assert type(norm).__module__.startswith("transformer_engine.")
            x = torch.randn(3, 1, norm.weight.shape[0], dtype=torch.bfloat16)
            return norm(x).dtype, {entry.key for entry in sharded.values()}

        return run_ranks(on_rank, 1)[0]

    (bf16_type, bf16) = keys("bf16")
    (fp32_type, fp32) = keys("fp32")
    assert (bf16_type, fp32_type) == (torch.bfloat16, torch.float32)
    assert bf16 == fp32
