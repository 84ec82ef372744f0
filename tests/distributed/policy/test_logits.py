"""Every family, converted: the policy's logits at TP, PP, EP equal transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pacs_megatron.convert.convert import ConversionOptions, hf_to_megatron
from pacs_megatron.convert.logits import fixed_prompts
from tests.support.needs import HAS_DELTA_NETS
from tests.support.ranks import run_ranks
from tests.support.tiny_families import CASES, HYBRIDS, make_family

ONE: dict[str, Any] = {"world": 1}
TP2PP2: dict[str, Any] = {"world": 4, "tp": 2, "pp": 2}
TP2: dict[str, Any] = {"world": 2, "tp": 2}
PP2: dict[str, Any] = {"world": 2, "pp": 2}
EP2: dict[str, Any] = {"world": 2, "ep": 2}
LAYOUTS: dict[str, list[dict[str, Any]]] = {
    "qwen2": [TP2PP2],
    "qwen2-tied-mqa": [PP2],
    "qwen3": [ONE],
    "qwen3-tied-mha-odd-vocabulary": [TP2PP2],
    "qwen3-padded-already": [TP2],
    "qwen3_moe": [TP2, {"world": 4, "pp": 2, "ep": 2}],
    "qwen3_moe-tied-not-normalised": [EP2],
    "llama": [PP2],
    "llama-tied-mha": [TP2],
    "mistral": [TP2],
    "qwen3_next": [TP2],
    "qwen3_5": [PP2],
    "qwen3_5-tied-odd-vocabulary": [{"world": 3, "pp": 3}],
    "qwen3_5-yarn": [TP2],
    "qwen3_5_moe": [EP2],
}
FULL_LAYOUTS: dict[str, list[dict[str, Any]]] = {
    "qwen2": [ONE, TP2, PP2],
    "qwen3": [TP2, PP2, TP2PP2],
    "qwen3_moe": [ONE, PP2, EP2],
    "llama": [ONE, TP2, TP2PP2],
    "mistral": [ONE, PP2, TP2PP2],
}
RUNS = []
for case, layouts in LAYOUTS.items():
    RUNS += [pytest.param(case, layout, id=f"{case}-{layout}") for layout in layouts]
for case, layouts in FULL_LAYOUTS.items():
    for layout in layouts:
        RUNS.append(pytest.param(case, layout, id=f"{case}-{layout}", marks=pytest.mark.full))


def reference_logits(folder: Path, vocab_size: int, dtype: torch.dtype) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    ).eval()
    if dtype == torch.float64:
        # The default, grouped products, has no float64.
        model.set_experts_implementation("eager")
    with torch.no_grad():
        return torch.cat(
            [model(torch.tensor([p])).logits[0].float() for p in fixed_prompts(vocab_size)]
        )


def policy_logits(checkpoint: Path, layout: dict[str, Any], dtype: str) -> torch.Tensor:
    """[t, v] of the converted checkpoint, from the last stage."""

    def on_rank(_rank: int, world: int) -> Any:
        from pacs_megatron.checkpoint.megatron_weights import MegatronWeights
        from pacs_megatron.config.schema import ParallelOptions, PrecisionOptions
        from pacs_megatron.contracts import Layout
        from pacs_megatron.parallel import groups

        axes = {k: v for k, v in layout.items() if k != "world"}
        rank = groups.initialize(Layout(world_size=world, **axes), seed=0, control_timeout_s=600.0)
        from pacs_megatron.policy import model, precision, weights
        from pacs_megatron.policy.logits import logits

        source = MegatronWeights(checkpoint)
        machine = precision.inspect_machine()
        options = PrecisionOptions(dtype="bf16" if dtype == "bf16" else "fp32")
        config = model.transformer_config(
            source.table.spec, ParallelOptions(**axes), options, machine
        )
        chunks = model.build_chunks(
            source.table.spec, source.table.padded_vocab, config, machine, rank
        )
        for chunk in chunks:
            # In training Megatron rejects experts with TP without sequence parallelism.
            chunk.eval()
        weights.load([model.unwrap(chunk) for chunk in chunks], source.table, source.get)
        found = logits(chunks, source.table.spec, fixed_prompts(source.table.spec.vocab_size))
        return None if found is None else found.numpy()

    results = [r for r in run_ranks(on_rank, layout["world"]) if r is not None]
    assert all((r == results[0]).all() for r in results)
    return torch.from_numpy(results[0])


def convert(hf: Path, out: Path) -> Path:
    hf_to_megatron(str(hf), ConversionOptions(out=out))
    return out


def test_every_case_is_run() -> None:
    assert LAYOUTS.keys() == CASES.keys()


@pytest.mark.parametrize(("case", "layout"), RUNS)
def test_logits_equal_transformers(case: str, layout: dict[str, Any], tmp_path: Path) -> None:
    is_hybrid = CASES[case][0] in HYBRIDS
    if is_hybrid and not HAS_DELTA_NETS:
        pytest.skip("Megatron-Core 0.16 has no gated delta nets for packed samples")
    hf = make_family(tmp_path / "hf", case)
    vocab_size = CASES[case][1].get("vocab_size", 131)
    # A delta net amplifies rounding: transformers in fp32 is up to 6.1e-5 from float64.
    dtype = torch.float64 if is_hybrid else torch.float32
    expected = reference_logits(hf, vocab_size, dtype)
    found = policy_logits(convert(hf, tmp_path / "ckpt"), layout, "fp32")
    assert expected.std() > 0.3  # far from uniform, so that a wrong weight shows
    assert (found - expected).abs().max().item() <= (1e-4 if is_hybrid else 2e-5)


def test_bf16_differs_by_rounding_only(tmp_path: Path) -> None:
    hf = make_family(tmp_path / "hf", "qwen3", dtype="bfloat16")
    exact = reference_logits(hf, 131, torch.float32)
    theirs = (reference_logits(hf, 131, torch.bfloat16) - exact).abs().mean()
    ours = (policy_logits(convert(hf, tmp_path / "ckpt"), ONE, "bf16") - exact).abs().mean()
    assert 0 < ours <= 2 * theirs
