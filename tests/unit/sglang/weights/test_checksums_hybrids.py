"""The expected checksums of hybrids: against plain constructions, and against SGLang's sources."""

from __future__ import annotations

import ast
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pacs_megatron.models import load_spec, weight_table
from pacs_megatron.sglang.weights.checksums import ExpectedChecksums, ModelDims, compare, sha_hash
from tests.support.needs import require_sglang
from tests.support.tiny_families import WITH_VISION, make_family, make_with_vision

KEYS = 4 * 3
VALUES = 8 * 5
DIMS = ModelDims(num_kv_heads=2, delta_keys=KEYS, delta_values=VALUES)
LAYER = "model.layers.0."
NET = f"{LAYER}linear_attn."


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(torch.bfloat16)


def sums(tensors: dict[str, torch.Tensor], tp: int) -> dict[str, list[str]]:
    expected = ExpectedChecksums(DIMS, tp, sha_hash)
    for name, tensor in tensors.items():
        expected.add(name, tensor)
    expected.check_complete()
    return expected.by_name


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_delta_net_of_qwen3_5(tp: int) -> None:
    """Each rank has its heads of queries, keys, values and gates, one below the other."""
    q, k, v, z, b, a = (bf16(rows, 6) for rows in (KEYS, KEYS, VALUES, VALUES, 8, 8))
    conv = [bf16(rows, 1, 4) for rows in (KEYS, KEYS, VALUES)]
    out = bf16(6, VALUES)
    norm = bf16(5)
    log_rate = bf16(8)
    bias = bf16(8)
    tensors = {
        f"{NET}in_proj_a.weight": a,  # parts may come in any order
        f"{NET}in_proj_qkv.weight": torch.cat([q, k, v]),
        f"{NET}in_proj_z.weight": z,
        f"{NET}in_proj_b.weight": b,
        f"{NET}conv1d.weight": torch.cat(conv),
        f"{NET}A_log": log_rate,
        f"{NET}dt_bias": bias,
        f"{NET}norm.weight": norm,
        f"{NET}out_proj.weight": out,
    }
    found = sums(tensors, tp)
    for rank in range(tp):

        def rows(tensor: torch.Tensor, rank: int = rank) -> torch.Tensor:
            size = len(tensor) // tp
            return tensor[rank * size : (rank + 1) * size]

        width = VALUES // tp
        assert (
            {name: hashes[rank] for name, hashes in found.items()}
            == {
                f"{NET}in_proj_qkvz.weight": sha_hash(torch.cat([rows(x) for x in (q, k, v, z)])),
                f"{NET}in_proj_ba.weight": sha_hash(torch.cat([rows(b), rows(a)])),
                f"{NET}conv1d.weight": sha_hash(torch.cat([rows(part) for part in conv])),
                f"{NET}A_log": sha_hash(rows(log_rate).float()),  # fp32 on a server
                f"{NET}dt_bias": sha_hash(rows(bias)),
                f"{NET}norm.weight": sha_hash(norm),
                f"{NET}out_proj.weight": sha_hash(out[:, rank * width : (rank + 1) * width]),
            }
        )


def test_a_delta_net_of_qwen3_next() -> None:
    """Interleaved by key head as exported, so that ranks have consecutive rows."""
    wide = bf16(2 * KEYS + 2 * VALUES, 6)
    narrow = bf16(16, 6)
    found = sums({f"{NET}in_proj_qkvz.weight": wide, f"{NET}in_proj_ba.weight": narrow}, 2)
    half = KEYS + VALUES
    assert found[f"{NET}in_proj_qkvz.weight"] == [sha_hash(wide[:half]), sha_hash(wide[half:])]
    assert found[f"{NET}in_proj_ba.weight"] == [sha_hash(narrow[:8]), sha_hash(narrow[8:])]


def test_the_gated_attention_and_the_norms() -> None:
    """Query and gate heads alternate; a layer has the attention's parameters itself; a norm is also
    stored as 1 + weight.
    """
    inside = "model.language_model.layers.0."
    q = bf16(2 * 4 * 3, 6)
    k = bf16(2 * 3, 6)
    v = bf16(2 * 3, 6)
    norm = bf16(6)
    tensors = {
        f"{inside}self_attn.q_proj.weight": q,
        f"{inside}self_attn.k_proj.weight": k,
        f"{inside}self_attn.v_proj.weight": v,
        f"{inside}input_layernorm.weight": norm,
    }
    rank_1 = torch.cat([q[12:], k[3:], v[3:]])
    found = sums(tensors, 2)
    assert found[f"{LAYER}qkv_proj.weight"][1] == sha_hash(rank_1)
    shifted = (norm.float() + 1).bfloat16()
    assert found[f"{LAYER}input_layernorm.weight"] == [sha_hash(norm)] * 2
    assert found[f"{LAYER}input_layernorm.gemma_weight"] == [sha_hash(shifted)] * 2
    assert found.keys() == {
        f"{LAYER}qkv_proj.weight",
        f"{LAYER}input_layernorm.weight",
        f"{LAYER}input_layernorm.gemma_weight",
    }


def test_a_servers_vision_tower_is_not_compared() -> None:
    reported = [{"a": "1", "visual.blocks.0.norm1.weight": "9"}]
    assert compare("u", {"a": ["1"]}, reported, complete=True) == 1


def _stacked(source: Path) -> Iterator[list[tuple[str, str, object]]]:
    """The lists `stacked_params_mapping` of a file: (server's part, export's part, place)."""
    for node in ast.walk(ast.parse(source.read_text())):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.List):
            continue
        if ast.unparse(node.targets[0]) == "stacked_params_mapping":
            yield ast.literal_eval(node.value)


@pytest.mark.parametrize("case", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_the_names_are_those_of_sglangs_loaders(case: str, tmp_path: Path) -> None:
    """A recorded contract, because the CPU has no kernels of a gated delta net: the fused names,
    and the order of their parts, are those of the loaders' source.
    """
    packages = require_sglang().parents[1] / "lib"
    models = next(packages.glob("python3*/site-packages/sglang/srt/models"))
    loaders = "qwen3_next.py" if case == "qwen3_next" else "qwen3_5.py"
    mappings = list(_stacked(models / loaders))
    assert mappings

    make = make_with_vision if case in WITH_VISION else make_family
    spec = load_spec(make(tmp_path / "model", case))
    expected = ExpectedChecksums(ModelDims.of(spec), 1, sha_hash)
    for name in weight_table(spec).by_hf:
        target, part, _ = expected.place(name)
        if ".experts." in name:
            assert target.endswith(("w13_weight", "w2_weight"))
            continue
        own_name = name.replace("model.language_model.", "model.").replace(".self_attn.", ".")
        for mapping in mappings:
            fused = [row for row in mapping if row[1] in own_name]
            if not fused:
                assert (target, part) == (own_name, 0)
                continue
            ((server_part, own_part, place),) = fused
            assert target == own_name.replace(own_part, server_part)
            orders: dict[object, object] = {"q": 0, "k": 1, "v": 2, (0, 1, 2): 0, 3: 1}
            assert part == orders.get(place, place)


SHARDS = """
import json, sys, torch
from sglang.srt.layers.attention.mamba.mamba import mamba_v2_sharded_weight_loader
keys, values, tp, rank = json.loads(sys.argv[1])
whole = torch.arange(2.0 * keys + values)[:, None, None]
part = torch.zeros((2 * keys + values) // tp, 1, 1)
settings = [(keys, 0, False), (keys, 0, False), (values, 0, False)]
mamba_v2_sharded_weight_loader(settings, tp, rank)(part, whole)
print(json.dumps(part.flatten().tolist()))
"""


@pytest.mark.sglang
@pytest.mark.full
def test_the_convolution_is_split_as_by_sglangs_loader() -> None:
    python = require_sglang()
    whole = torch.arange(2.0 * KEYS + VALUES)[:, None, None]
    path = Path(__file__).parents[3] / "support" / "sglang_cpu"
    result = subprocess.run(
        [str(python), "-c", SHARDS, json.dumps([KEYS, VALUES, 2, 1])],
        env={"PYTHONPATH": str(path), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    part = torch.tensor(json.loads(result.stdout.splitlines()[-1]))[:, None, None]
    assert sums({f"{NET}conv1d.weight": whole}, 2)[f"{NET}conv1d.weight"][1] == sha_hash(part)
