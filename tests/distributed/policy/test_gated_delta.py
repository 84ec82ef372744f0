"""Hybrids on the policy against an independent float64 reference: three PACS updates, packed
samples, and planted errors that the reference finds.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pacs_megatron.convert.logits import fixed_prompts
from pacs_megatron.objectives.pacs import PacsOptions
from pacs_megatron.objectives.registry import build_objective
from tests.support.needs import needs_delta_nets
from tests.support.policies.hybrid_reference import HybridReference, HybridTrainer
from tests.support.policies.plain_trainer import pacs_loss
from tests.support.policies.policy_cases import (
    logprobs_by_row,
    make_part,
    make_policy,
    random_step,
    train,
)
from tests.support.ranks import run_ranks
from tests.support.tiny_families import make_family

STEPS = [random_step(seed, num_groups=2, group_size=3) for seed in range(3)]
TOLERANCE = 1e-5
"""Of log-probs and of weights after three updates; fp32 against float64"""
BUDGET = 64
"""Tokens of a micro-batch: several samples in each"""


def tiny(folder: Path, case: str) -> Path:
    return make_family(folder, case, vocab_size=272)


@pytest.fixture(scope="module")
def expected_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """(folder, log-probs before, losses and norms, weights after) of a case."""
    known: dict[str, Any] = {}

    def find(case: str) -> Any:
        if case not in known:
            folder = tiny(tmp_path_factory.mktemp("model"), case)
            trainer = HybridTrainer(folder)
            before = [logps.numpy() for logps in trainer.logprobs(*STEPS[0])]
            numbers = []
            for facts, tokens in STEPS:
                loss = pacs_loss(trainer.logprobs(facts, tokens), facts)
                numbers.append(trainer.update(facts, tokens, loss))
            known[case] = folder, before, numbers, trainer.weights()
        return known[case]

    return find


def differences(
    expected: Any, world: int, inject: Callable[[], None] | None = None, **options: Any
) -> tuple[float, float]:
    """Largest differences from the reference: of a log-prob before, of a weight after three
    updates.
    """
    folder, before, _, weights = expected

    def on_rank(rank: int, world: int) -> Any:
        # Megatron's modules must be imported with the redirections of a host without CUDA.
        importlib.import_module("pacs_megatron.policy.model")
        if inject is not None:
            inject()
        policy = make_policy(folder, world, tokens_per_microbatch=BUDGET, **options)
        objective = build_objective(PacsOptions(name="pacs"), updates_per_step=1)
        found = logprobs_by_row(policy, make_part(*STEPS[0], policy, BUDGET))
        train(policy, objective, STEPS, tokens_per_microbatch=BUDGET)
        exported = {name: tensor.clone().numpy() for name, tensor in policy.export_weights()}
        return found, exported if rank == 0 else None

    results = run_ranks(on_rank, world)
    found: dict[int, np.ndarray] = {}
    for logprobs, _ in results:
        found |= logprobs
    assert len(found) == len(before)
    exported = results[0][1]
    assert exported.keys() == weights.keys()
    of_logprobs = max(np.abs(found[row] - logps).max() for row, logps in enumerate(before))
    of_weights = max(np.abs(exported[name] - weight).max() for name, weight in weights.items())
    return float(of_logprobs), float(of_weights)


@needs_delta_nets
@pytest.mark.parametrize("case", ["qwen3_5", "qwen3_next"])
def test_three_updates_equal_the_reference_in_float64(expected_of: Any, case: str) -> None:
    expected = expected_of(case)
    of_logprobs, of_weights = differences(expected, 1)
    assert of_logprobs < TOLERANCE and of_weights < TOLERANCE
    start = load_file(expected[0] / "model.safetensors")
    for name, weight in expected[3].items():
        moved = np.abs(weight - start[name].numpy()).max()
        assert moved > 1e-4, f"the reference did not train {name}"


@pytest.mark.parametrize("case", ["qwen3_5", "qwen3_5-tied-odd-vocabulary", "qwen3_next"])
def test_the_reference_equals_transformers_in_float64(case: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = make_family(tmp_path, case)
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    ours = HybridReference(folder)
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        # transformers computes delta nets, norms, routers and rotations in float32.
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        rotation = theirs.model.rotary_emb
        rotation.inv_freq, _ = rotation.compute_default_rope_parameters(theirs.config)
        for prompt in fixed_prompts(97):
            ids = torch.tensor([prompt])
            expected = theirs(ids, use_cache=False).logits
            found = ours(ids).logits
            assert expected.std() > 0.3  # far from uniform, so that a wrong formula shows
            torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)


@needs_delta_nets
def test_packed_samples_equal_separate_ones(tmp_path: Path) -> None:
    """The log-probs and the gradients' norm do not depend on what is beside a sample."""
    folder = tiny(tmp_path, "qwen3_5")

    def results(budget: int) -> Any:
        def on_rank(_rank: int, world: int) -> Any:
            objective = build_objective(PacsOptions(name="pacs"), updates_per_step=1)
            policy = make_policy(folder, world, tokens_per_microbatch=budget)
            found = logprobs_by_row(policy, make_part(*STEPS[0], policy, budget))
            reports = train(policy, objective, STEPS, tokens_per_microbatch=budget)
            return found, [report.grad_norm for report in reports]

        return run_ranks(on_rank, 1)[0]

    separate, norms = results(24)  # one sample a micro-batch
    packed, packed_norms = results(1024)  # all samples in one
    for row, logprobs in separate.items():
        np.testing.assert_allclose(packed[row], logprobs, atol=2e-6, rtol=0)
    np.testing.assert_allclose(packed_norms, norms, rtol=1e-5)


def _state_leaks() -> None:
    """One recurrence over all packed samples."""
    from megatron.core.ssm.gated_delta_net import gdn

    from pacs_megatron.parallel import delta_rule

    def leaking(*args: Any, cu_seqlens: Any, **options: Any) -> Any:
        return delta_rule.gated_delta_rule(*args, **options)

    gdn.chunk_gated_delta_rule = leaking


def _convolution_reads_the_sample_before() -> None:
    from megatron.core.ssm.gated_delta_net import gdn

    from pacs_megatron.parallel import delta_rule

    def shifted(*args: Any, cu_seqlens: Any, **options: Any) -> Any:
        return delta_rule.causal_convolution(*args, **options)

    gdn.causal_conv1d = shifted


def _gate_before_norm() -> None:
    from pacs_megatron.policy.gated_delta import DeltaNet

    def gated(self: Any, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return self.out_norm((x * self.act_fn(gate)).reshape(-1, x.shape[-1]))

    DeltaNet._apply_gated_norm = gated


def _beta_and_alpha_exchanged() -> None:
    from pacs_megatron.policy.gated_delta import DeltaNet

    original = DeltaNet._compute_g_and_beta
    DeltaNet._compute_g_and_beta = lambda self, rate, bias, alpha, beta: original(
        self, rate, bias, beta, alpha
    )


def _decay_in_bf16() -> None:
    from pacs_megatron.policy.gated_delta import DeltaNet

    original = DeltaNet._compute_g_and_beta

    def rounded(self: Any, *args: Any) -> Any:
        g, beta = original(self, *args)
        return g.bfloat16().float(), beta

    DeltaNet._compute_g_and_beta = rounded


def _heads_share_the_wrong_key() -> None:
    """Value head h reads key head h modulo their number."""
    from pacs_megatron.policy.gated_delta import DeltaNet

    original = DeltaNet._prepare_input_for_gated_delta_rule

    def interleaved(self: Any, *args: Any) -> Any:
        query, key, *others = original(self, *args)
        share = self.num_value_heads // self.num_key_heads
        order = torch.arange(query.shape[2]).reshape(-1, share).T.flatten()
        return query[:, :, order], key[:, :, order], *others

    DeltaNet._prepare_input_for_gated_delta_rule = interleaved


def _keys_without_length_1() -> None:
    from megatron.core.ssm.gated_delta_net import common

    common.l2norm = lambda x: x * x.shape[-1] ** -0.5


def _norm_around_0() -> None:
    from pacs_megatron.policy.model import RMSNorm, ZeroCentredRMSNorm

    ZeroCentredRMSNorm.scale = RMSNorm.scale


def _gated_norm_around_1() -> None:
    from pacs_megatron.policy.gated_delta import HeadNorm

    original = HeadNorm.forward
    HeadNorm.forward = lambda self, x: original(self, x) * (1 + 1 / self.weight)


def _no_gate_of_the_attention() -> None:
    from megatron.core.transformer.attention import Attention

    Attention._apply_output_gate = lambda self, x, gate: x


def _whole_head_rotates() -> None:
    from dataclasses import replace

    from pacs_megatron.policy import model

    original = model.rope_frequencies
    model.rope_frequencies = lambda spec: original(replace(spec, rotary_dim=None))


def _shared_expert_without_gate() -> None:
    from megatron.core.transformer.mlp import MLP
    from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

    SharedExpertMLP.forward = lambda self, hidden: MLP.forward(self, hidden)[0]


def _norm_gradient_of_one_rank() -> None:
    from megatron.core import tensor_parallel

    tensor_parallel.copy_to_tensor_model_parallel_region = lambda weight: weight


PLANTED: dict[str, tuple[Callable[[], None], str]] = {
    "the state leaks over a border": (_state_leaks, "qwen3_5"),
    "the convolution reads the sample before": (_convolution_reads_the_sample_before, "qwen3_5"),
    "the gate is before the norm": (_gate_before_norm, "qwen3_5"),
    "beta and alpha are exchanged": (_beta_and_alpha_exchanged, "qwen3_5"),
    "the decay is rounded to bf16": (_decay_in_bf16, "qwen3_5"),
    "value heads share the wrong key": (_heads_share_the_wrong_key, "qwen3_5"),
    "keys have another length": (_keys_without_length_1, "qwen3_5"),
    "the norms are around 0": (_norm_around_0, "qwen3_5"),
    "the gated norm is around 1": (_gated_norm_around_1, "qwen3_5"),
    "the attention has no gate": (_no_gate_of_the_attention, "qwen3_5"),
    "the whole head rotates": (_whole_head_rotates, "qwen3_5"),
    "the shared expert has no gate": (_shared_expert_without_gate, "qwen3_next"),
}


@needs_delta_nets
@pytest.mark.full
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_error_is_found(expected_of: Any, name: str) -> None:
    inject, case = PLANTED[name]
    of_logprobs, of_weights = differences(expected_of(case), 1, inject)
    assert of_logprobs > 10 * TOLERANCE and of_weights > 10 * TOLERANCE


@needs_delta_nets
@pytest.mark.full
def test_a_norm_gradient_that_is_not_summed_over_ranks_is_found(expected_of: Any) -> None:
    """Megatron sums it with sequence parallelism only."""
    layout = {"tp": 2, "sequence_parallel": False}
    _, right = differences(expected_of("qwen3_5"), 2, **layout)
    of_logprobs, wrong = differences(
        expected_of("qwen3_5"), 2, _norm_gradient_of_one_rank, **layout
    )
    assert of_logprobs < TOLERANCE and right < TOLERANCE
    assert wrong > 10 * TOLERANCE
