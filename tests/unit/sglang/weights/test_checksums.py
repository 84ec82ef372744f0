"""The expected checksums, against plain constructions of what SGLang holds."""

from __future__ import annotations

import hashlib
import subprocess

import pytest
import torch

from pacs_megatron.errors import SyncError
from pacs_megatron.sglang.weights.checksums import (
    ExpectedChecksums,
    ModelDims,
    compare,
    hash_for,
    sha_hash,
    word_hash,
)
from tests.support.needs import require_sglang

HIDDEN = 16
HEAD = 4
FFN = 24


def reference(tensor: torch.Tensor) -> str:
    raw = b"".join(
        row.contiguous().view(torch.uint8).numpy().tobytes() for row in tensor.reshape(-1, 1)
    )
    return hashlib.sha256(raw).hexdigest()[:16]


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(torch.bfloat16)


def test_fused_and_padded_on_one_rank() -> None:
    q = bf16(16, 16)
    k = bf16(8, 16)
    v = bf16(8, 16)
    gate = bf16(24, 16)
    up = bf16(24, 16)
    embed = bf16(70, 16)
    norm = bf16(16)
    expected = ExpectedChecksums(ModelDims(num_kv_heads=2), 1, sha_hash)
    pre = "model.layers.0."
    order = {
        f"{pre}self_attn.v_proj.weight": v,  # parts may come in any order
        f"{pre}self_attn.q_proj.weight": q,
        f"{pre}self_attn.k_proj.weight": k,
        f"{pre}mlp.up_proj.weight": up,
        f"{pre}mlp.gate_proj.weight": gate,
        "model.embed_tokens.weight": embed,
        "model.norm.weight": norm,
    }
    for name, tensor in order.items():
        expected.add(name, tensor)
    expected.check_complete()
    assert expected.by_name == {
        f"{pre}self_attn.qkv_proj.weight": [reference(torch.cat([q, k, v]))],
        f"{pre}mlp.gate_up_proj.weight": [reference(torch.cat([gate, up]))],
        "model.embed_tokens.weight": [
            reference(torch.cat([embed, torch.zeros(58, 16, dtype=torch.bfloat16)]))
        ],
        "model.norm.weight": [reference(norm)],
    }


@pytest.mark.parametrize(("tp", "num_kv_heads"), [(2, 2), (4, 2), (2, 4)])
def test_tensor_parallel_parts(tp: int, num_kv_heads: int) -> None:
    num_heads = 8
    q = bf16(num_heads * HEAD, HIDDEN)
    k = bf16(num_kv_heads * HEAD, HIDDEN)
    v = bf16(num_kv_heads * HEAD, HIDDEN)
    down = bf16(HIDDEN, FFN)
    embed = bf16(128, HIDDEN)
    expected = ExpectedChecksums(ModelDims(num_kv_heads=num_kv_heads), tp, sha_hash)
    for what, tensor in (("q", q), ("k", k), ("v", v)):
        expected.add(f"model.layers.3.self_attn.{what}_proj.weight", tensor)
    expected.add("model.layers.3.mlp.down_proj.weight", down)
    expected.add("lm_head.weight", embed)
    for rank in range(tp):
        heads = range(rank * num_heads // tp, (rank + 1) * num_heads // tp)
        groups = sorted({head * num_kv_heads // num_heads for head in heads})
        rows = [q[h * HEAD : (h + 1) * HEAD] for h in heads]
        for weight in (k, v):
            rows += [weight[g * HEAD : (g + 1) * HEAD] for g in groups]
        assert expected.by_name["model.layers.3.self_attn.qkv_proj.weight"][rank] == reference(
            torch.cat(rows)
        )
        width = FFN // tp
        part = down[:, rank * width : (rank + 1) * width]
        assert expected.by_name["model.layers.3.mlp.down_proj.weight"][rank] == reference(part)
        assert expected.by_name["lm_head.weight"][rank] == reference(
            embed[rank * 128 // tp : (rank + 1) * 128 // tp]
        )


def test_experts_of_a_layer_are_stacked() -> None:
    num = 3
    gate, up, down = ([bf16(FFN, HIDDEN) for _ in range(num)] for _ in range(3))
    down = [bf16(HIDDEN, FFN) for _ in range(num)]
    expected = ExpectedChecksums(ModelDims(num_kv_heads=2, num_experts=num), 1, sha_hash)
    for e in range(num):
        for what, tensors in (("gate", gate), ("up", up), ("down", down)):
            expected.add(f"model.layers.0.mlp.experts.{e}.{what}_proj.weight", tensors[e])
    w13 = torch.stack([torch.cat([gate[e], up[e]]) for e in range(num)])
    assert expected.by_name == {
        "model.layers.0.mlp.experts.w13_weight": [reference(w13)],
        "model.layers.0.mlp.experts.w2_weight": [reference(torch.stack(down))],
    }


def test_a_missing_part_is_an_incomplete_export() -> None:
    expected = ExpectedChecksums(ModelDims(num_kv_heads=2), 1, sha_hash)
    expected.add("model.layers.0.self_attn.q_proj.weight", bf16(16, 16))
    with pytest.raises(SyncError, match=r"qkv_proj\.weight got 1 of its 3 parts"):
        expected.check_complete()


def test_only_the_sampled_parameters_are_hashed() -> None:
    expected = ExpectedChecksums(ModelDims(num_kv_heads=2), 1, sha_hash)
    for name in ("a.weight", "b.weight"):
        expected.add(name, bf16(4), frozenset({"b.weight"}))
    assert list(expected.by_name) == ["b.weight"]


def test_compare_names_what_differs() -> None:
    expected = {"a": ["1", "2"], "b": ["3", "4"]}
    assert compare("u", expected, [{"a": "1", "b": "3"}, {"a": "2", "b": "4"}], complete=True) == 4
    with pytest.raises(SyncError, match=r"u: 1 of 2 .* b \(rank 1: x, expected 4\)"):
        compare("u", expected, [{"a": "1", "b": "3"}, {"a": "2", "b": "x"}], complete=True)
    with pytest.raises(SyncError, match=r"b \(not on the server\)"):
        compare("u", expected, [{"a": "1"}, {"a": "2", "b": "4"}], complete=False)
    extra = [{"a": "1", "b": "3", "c": "9"}, {"a": "2", "b": "4", "c": "9"}]
    assert compare("u", expected, extra, complete=False) == 4
    with pytest.raises(SyncError, match=r"c \(never sent\)"):
        compare("u", expected, extra, complete=True)


def test_the_hash_goes_by_the_servers_device() -> None:
    assert hash_for("cpu") is sha_hash
    assert hash_for("cuda") is word_hash
    with pytest.raises(SyncError, match="'npu' is not supported"):
        hash_for("npu")


def naive_word_hash(data: bytes) -> str:
    """Word by word in Python integers."""
    mask = 0xFFFFFFFF

    def mix(x: int) -> int:
        x = ((x ^ x >> 16) * 0x85EBCA6B) & mask
        x = ((x ^ x >> 13) * 0xC2B2AE35) & mask
        return x ^ x >> 16

    def turn(x: int, by: int) -> int:
        return (x << by | x >> 32 - by) & mask

    data += b"\0" * (-len(data) % 4)
    words = [int.from_bytes(data[i : i + 4], "little") for i in range(0, len(data), 4)]
    seed = 0x243F6A88
    other = (seed * 0x9E3779B1 ^ 0xDEADBEEF) & mask
    total = 0
    for begin in range(0, len(words), 8192):
        high = low = 0
        for i, word in enumerate(words[begin : begin + 8192], begin):
            high += mix(word ^ ((i * 0x27D4EB2D + seed) & mask) ^ turn(i, 15))
            low += mix(word ^ ((i * 0x165667B1 + other) & mask) ^ turn(i, 13))
        size = len(words) * 4 & mask
        total += mix(high & mask ^ size) << 32 | mix(low & mask ^ size)
    wide = (1 << 64) - 1
    total &= wide
    total = (total ^ total >> 30) * 0xBF58476D1CE4E5B9 & wide
    total = (total ^ total >> 27) * 0x94D049BB133111EB & wide
    return f"{total ^ total >> 31:016x}"


@pytest.mark.parametrize("num", [1, 5, 8192, 16391, 3 * 8192 + 1])
def test_the_word_hash_against_python_integers(num: int) -> None:
    tensor = bf16(num)
    assert word_hash(tensor) == naive_word_hash(tensor.view(torch.uint8).numpy().tobytes())


def test_the_word_hash_over_more_than_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = bf16(5 * 16384 + 3)
    whole = word_hash(tensor)
    monkeypatch.setattr("pacs_megatron.sglang.weights.checksums._CHUNK_TILES", 2)
    assert word_hash(tensor) == whole


SGLANG_HASH = """
import os, sys
os.environ["TRITON_INTERPRET"] = "1"
import torch
from importlib import import_module
from unittest import mock
module = import_module("sglang.kernels.ops.memory.gpu_tensor_hash")
for num in map(int, sys.argv[1:]):
    tensor = (torch.arange(num) % 251).to(torch.bfloat16)
    with mock.patch.object(torch.Tensor, "is_cuda", property(lambda self: True)):
        print(f"{module.gpu_tensor_hash(tensor):016x}")
"""


@pytest.mark.sglang
@pytest.mark.full
def test_the_word_hash_is_sglangs_own() -> None:
    """SGLang's Triton kernel itself, interpreted on CPU: what a CUDA server will report."""
    python = require_sglang()
    sizes = [1, 5, 4097, 16391, 8192 * 12]
    command = [str(python), "-c", SGLANG_HASH, *map(str, sizes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    ours = [word_hash((torch.arange(num) % 251).to(torch.bfloat16)) for num in sizes]
    assert done.stdout.split() == ours
