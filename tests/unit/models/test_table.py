"""The weight table: exact inverses, tensor-parallel cuts, names of both layer specs."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pacs_megatron.errors import ConversionError
from pacs_megatron.models import (
    Entry,
    WeightTable,
    canonical_name,
    load_spec,
    read_spec,
    weight_table,
)
from tests.support.tiny_families import CASES, config_of, make_family


def table_of(case: str) -> WeightTable:
    family, changes = CASES[case]
    return weight_table(read_spec(config_of(family, changes).to_dict()))


def random_hf(entry: Entry, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in entry.hf_shapes]


@pytest.mark.parametrize("case", CASES)
def test_rows_are_exactly_the_tensors_that_transformers_saves(case: str, tmp_path: Path) -> None:
    folder = make_family(tmp_path / "hf", case)
    saved = {name: tuple(t.shape) for name, t in load_file(folder / "model.safetensors").items()}
    table = weight_table(load_spec(folder))
    rows = {}
    for e in table.entries:
        for name, shape in zip(e.hf_names, e.hf_shapes, strict=True):
            rows[name] = shape
    assert rows == saved
    assert table.num_parameters == sum(math.prod(shape) for shape in saved.values())


@pytest.mark.parametrize("case", CASES)
def test_there_and_back_and_through_every_cut(case: str) -> None:
    table = table_of(case)
    for entry in table.entries:
        tensors = random_hf(entry)
        full = entry.to_megatron(tensors)
        assert tuple(full.shape) == entry.megatron_shape
        for tp in (1, 2):
            if entry.transform.tp_dim is not None and entry.transform.tp_units(entry.sizes) % tp:
                with pytest.raises(ConversionError, match=f"tp={tp}"):
                    entry.split_tp(full, tp)
                continue
            shards = entry.split_tp(full, tp)
            assert [tuple(s.shape) for s in shards] == [entry.shard_shape(tp)] * tp
            assert torch.equal(entry.merge_tp(shards), full)
        back = entry.to_hf(full)
        assert all(torch.equal(a, b) for a, b in zip(back, tensors, strict=True))


def test_order_and_lookups() -> None:
    table = table_of("qwen3_moe")
    places = [entry.place for entry in table.entries]
    assert places[0] == "embedding" and places[-2:] == ["final_norm", "output"]
    layers = [entry.layer for entry in table.entries if entry.layer is not None]
    assert layers == sorted(layers) and set(layers) == {0, 1}
    entry = table.by_hf["model.layers.1.mlp.experts.3.up_proj.weight"]
    assert (
        entry is table.by_megatron["decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight"]
    )
    assert (entry.layer, entry.expert) == (1, 3)
    assert table_of("qwen2-tied-mqa").entries[-1].place == "final_norm"


def test_query_groups_are_interleaved_as_megatron_reads_them() -> None:
    """Against a loop over groups: q heads of the group, its k head, its v head."""
    table = table_of("qwen2")
    for name in ("weight", "bias"):
        entry = table.by_megatron[f"decoder.layers.0.self_attention.linear_qkv.{name}"]
        q, k, v = random_hf(entry)
        spec = table.spec
        d = spec.head_dim
        heads_in_group = spec.num_heads // spec.num_kv_heads
        rows = []
        for group in range(spec.num_kv_heads):
            for head in range(group * heads_in_group, (group + 1) * heads_in_group):
                rows.append(q[head * d : (head + 1) * d])
            rows += [k[group * d : (group + 1) * d], v[group * d : (group + 1) * d]]
        assert torch.equal(entry.to_megatron([q, k, v]), torch.cat(rows))


def test_each_rank_holds_its_own_gate_over_its_own_up() -> None:
    entry = table_of("llama").by_megatron["decoder.layers.0.mlp.linear_fc1.weight"]
    gate, up = random_hf(entry)
    shards = entry.split_tp(entry.to_megatron([gate, up]), 2)
    for rank, shard in enumerate(shards):
        assert torch.equal(shard, torch.cat([gate.chunk(2)[rank], up.chunk(2)[rank]]))


def test_vocabulary_padding_is_zero_and_leaves_no_trace() -> None:
    table = table_of("qwen3-tied-mha-odd-vocabulary")
    entry = table.by_megatron["embedding.word_embeddings.weight"]
    assert (table.padded_vocab, entry.megatron_shape[0]) == (128, 128)
    full = entry.to_megatron(random_hf(entry))
    assert full[97:].count_nonzero() == 0
    assert entry.to_hf(full)[0].shape == (97, 32)
    assert weight_table(replace(table.spec, vocab_size=128)).padded_vocab == 128


def test_names_of_transformer_engines_spec() -> None:
    layer = "decoder.layers.7"
    names = {
        f"{layer}.self_attention.linear_qkv.layer_norm_weight": f"{layer}.input_layernorm.weight",
        f"{layer}.mlp.linear_fc1.layer_norm_weight": f"{layer}.pre_mlp_layernorm.weight",
        f"{layer}.mlp.experts.linear_fc1.weight12": (
            f"{layer}.mlp.experts.local_experts.12.linear_fc1.weight"
        ),
        f"{layer}.mlp.linear_fc1.weight": f"{layer}.mlp.linear_fc1.weight",
        "embedding.word_embeddings.weight": "embedding.word_embeddings.weight",
    }
    assert {name: canonical_name(name) for name in names} == names


def test_wrong_tensors_are_named() -> None:
    entry = table_of("qwen2").by_megatron["decoder.layers.0.self_attention.linear_qkv.weight"]
    q, k, v = random_hf(entry)
    with pytest.raises(
        ConversionError, match=r"k_proj.weight: shape is \[8, 32\], expected \[16, 32\]"
    ):
        entry.to_megatron([q, k[:8], v])
    with pytest.raises(ConversionError, match="dtypes differ"):
        entry.to_megatron([q, k.bfloat16(), v])
    with pytest.raises(ConversionError, match="got 2 tensors, expected 3"):
        entry.to_megatron([q, k])
    with pytest.raises(ConversionError, match=r"linear_qkv.weight: shape is \[10, 32\]"):
        entry.to_hf(torch.zeros(10, 32))
    with pytest.raises(ConversionError, match="tp=4 does not divide its 2 units"):
        entry.split_tp(entry.to_megatron([q, k, v]), 4)
