"""The push and the bucket, with receivers that only listen (the real one:
tests/integration/sglang).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

import pytest
import torch

from pacs_megatron.contracts import digest as contracts_digest
from pacs_megatron.contracts.digest import TILE, WeightDigest, word_sum
from pacs_megatron.errors import SyncError
from pacs_megatron.sglang.weights.bucket import Bucket
from pacs_megatron.training.push import push


class Listener:
    def __init__(self, fail_at: str = "") -> None:
        self.heard: list[str] = []
        self.fail_at = fail_at

    def _hear(self, what: str) -> None:
        self.heard.append(what)
        if what == self.fail_at:
            raise SyncError(f"{what} failed")

    def begin_update(self, version: int) -> None:
        self._hear(f"begin {version}")

    def put(self, name: str, tensor: torch.Tensor) -> None:
        self._hear(name)

    def end_update(self, digest: str) -> None:
        self._hear(f"end {digest}")


def weights() -> dict[str, torch.Tensor]:
    return {
        "a": torch.arange(6.0).reshape(2, 3),
        "b": torch.ones(3, dtype=torch.bfloat16),
        "c": torch.tensor(2),
    }


def test_every_receiver_gets_everything_in_order() -> None:
    one = Listener()
    two = Listener()
    pushed = push(3, weights().items(), [one, two])
    digest = WeightDigest()
    for name, tensor in weights().items():
        digest.update(name, tensor)
    assert one.heard == two.heard == ["begin 3", "a", "b", "c", f"end {digest.hexdigest()}"]
    assert pushed == digest.hexdigest()


@pytest.mark.parametrize("fail_at", ["begin 1", "b"])
def test_a_failing_receiver_stops_neither_the_others_nor_the_export(fail_at: str) -> None:
    taken = []

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights().items():
            taken.append(name)
            yield name, tensor

    bad = Listener(fail_at)
    good = Listener()
    with pytest.raises(SyncError, match=f"{fail_at} failed"):
        push(1, export(), [bad, good])
    assert taken == ["a", "b", "c"]
    assert bad.heard[-1] == fail_at
    assert good.heard[-1].startswith("end ")


def test_a_rank_without_receivers_takes_part_and_knows_the_digest() -> None:
    assert push(1, weights().items(), []) == push(1, weights().items(), [Listener()])


@pytest.mark.parametrize("on_gpu", [False, True])
def test_the_digest_sees_names_types_shapes_bytes_and_order_but_not_strides(
    on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contracts_digest, "is_on_gpu", lambda _tensor: on_gpu)

    def digest(items: list[tuple[str, torch.Tensor]]) -> str:
        state = WeightDigest()
        for name, tensor in items:
            state.update(name, tensor)
        return state.hexdigest()

    a = torch.arange(6.0).reshape(2, 3)
    b = torch.zeros(2)
    base = digest([("a", a), ("b", b)])
    others = [
        [("a", a), ("c", b)],
        [("b", b), ("a", a)],
        [("a", a.reshape(3, 2)), ("b", b)],
        [("a", a.to(torch.float64)), ("b", b)],
        [("a", a), ("b", b + 1e-45)],
        [("a", a)],
    ]
    assert len({base, *map(digest, others)}) == 7
    assert digest([("a", a.T.contiguous().T), ("b", b)]) == base


def plain_word_sum(data: bytes) -> int:
    """`word_sum` in Python's integers, from its description."""
    mask = (1 << 64) - 1

    def multiplier(number: int) -> int:
        x = (number + 1) * 0x9E3779B97F4A7C15 & mask
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        return (x ^ (x >> 31)) | 1

    data += bytes(-len(data) % 4)
    total = 0
    for number, (word,) in enumerate(struct.iter_unpack("<i", data)):
        tile, index = divmod(number, TILE)
        total += word * multiplier(index) * multiplier(TILE + tile)
    return ((total + (1 << 63)) & mask) - (1 << 63)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 4096, 2 * TILE - 1, 2 * TILE, 2 * TILE + 3, 5 * TILE])
def test_the_sum_of_words_is_the_one_of_its_description(size: int) -> None:
    tensor = torch.randn(size + 1).to(torch.bfloat16)
    expected = plain_word_sum(tensor[1:].contiguous().clone().view(torch.uint8).numpy().tobytes())
    assert (
        int(word_sum(tensor[1:])) == expected
    )  # a view that does not begin at a multiple of 4 bytes
    assert int(word_sum(tensor[1:].clone())) == expected


def test_the_sum_of_words_detects_damage() -> None:
    """Exchanged, moved and cleared words, each flipped bit,
    and signs exchanged between elements.
    """
    generator = torch.Generator().manual_seed(3)
    good = torch.randn(3 * TILE, generator=generator).to(torch.bfloat16)
    expected = int(word_sum(good))
    words = good.view(torch.int32)

    def found(change: Callable[[torch.Tensor], object]) -> bool:
        bad = words.clone()
        change(bad)
        assert not torch.equal(bad, words)
        return int(word_sum(bad)) != expected

    def exchanged(i: int, j: int) -> Callable[[torch.Tensor], None]:
        return lambda bad: bad.__setitem__([i, j], bad[[j, i]].clone())

    for bit in range(32):
        flip = torch.tensor(1 << bit, dtype=torch.int64).to(torch.int32)
        for at in (0, 1, 4095, TILE - 1, TILE, len(words) - 1):
            assert found(lambda bad, at=at, flip=flip: bad[at : at + 1].bitwise_xor_(flip))  # type: ignore[misc]
    for i, j in ((0, 1), (5, TILE), (TILE - 1, TILE), (7, TILE + 7), (0, len(words) - 1)):
        assert found(exchanged(i, j))
    assert found(lambda bad: bad.copy_(bad.roll(1)))
    assert found(lambda bad: bad.copy_(bad.roll(TILE)))
    assert found(lambda bad: bad[100:200].zero_())
    assert found(lambda bad: bad.neg_())
    signs = torch.zeros(8, dtype=torch.int32)
    signs[2] = -(1 << 31)  # only the highest bit differs: products modulo 2**64 lose it most easily
    moved = [int(word_sum(signs.roll(k))) for k in range(8)]
    assert len(set(moved)) == 8


def test_on_a_gpu_only_sums_reach_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contracts_digest, "is_on_gpu", lambda _tensor: True)
    copied = []
    to_cpu = torch.Tensor.cpu

    def recorded(tensor: torch.Tensor) -> torch.Tensor:
        copied.append(tensor.nbytes)
        return to_cpu(tensor)

    monkeypatch.setattr(torch.Tensor, "cpu", recorded)
    digest = WeightDigest()
    for name, tensor in weights().items():
        digest.update(name, tensor)
    assert copied == []
    digest.hexdigest()
    assert copied == [8 * len(weights())]


def test_a_bucket_gives_back_what_was_put_in() -> None:
    bucket = Bucket(64)
    a = torch.randn(3, 2)
    b = torch.randn(4).to(torch.bfloat16)
    for name, tensor in (("a", a.T), ("b", b)):
        assert bucket.fits(tensor)
        bucket.add(name, tensor)
    got = dict(bucket.tensors)
    assert torch.equal(got["a"], a.T)
    assert torch.equal(got["b"], b)
    assert bucket.data.numel() == bucket.num_bytes == 32
    assert not bucket.fits(torch.zeros(9))  # 36 bytes more than 64
    assert bucket.fits(torch.zeros(8))
    bucket.clear()
    assert bucket.tensors == []


def test_a_tensor_larger_than_the_bucket_goes_alone_and_views_stay_aligned() -> None:
    bucket = Bucket(16)
    large = torch.randn(100)
    assert bucket.fits(large)
    bucket.add("large", large)
    assert not bucket.fits(torch.zeros(1))
    assert torch.equal(bucket.tensors[0][1], large)
    bucket.clear()
    bucket.add("odd", torch.zeros(3, dtype=torch.uint8))
    assert not bucket.fits(torch.zeros(1))  # would begin at byte 3
    assert bucket.fits(torch.zeros(1, dtype=torch.uint8))
