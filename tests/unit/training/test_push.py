"""The push and the bucket, with receivers that only listen (the real one: tests/integration/sglang)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pacs_megatron.contracts.digest import WeightDigest
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
    return {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3, dtype=torch.bfloat16), "c": torch.tensor(2)}


def test_every_receiver_gets_everything_in_order() -> None:
    one, two = Listener(), Listener()
    pushed = push(3, weights().items(), [one, two])
    digest = WeightDigest()
    for name, tensor in weights().items():
        digest.update(name, tensor)
    assert one.heard == two.heard == ["begin 3", "a", "b", "c", f"end {digest.hexdigest()}"]
    assert pushed.digest == digest.hexdigest()
    assert pushed.num_bytes == 24 + 6 + 8


@pytest.mark.parametrize("fail_at", ["begin 1", "b"])
def test_a_failing_receiver_stops_neither_the_others_nor_the_export(fail_at: str) -> None:
    taken = []

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights().items():
            taken.append(name)
            yield name, tensor

    bad, good = Listener(fail_at), Listener()
    with pytest.raises(SyncError, match=f"{fail_at} failed"):
        push(1, export(), [bad, good])
    assert taken == ["a", "b", "c"]
    assert bad.heard[-1] == fail_at
    assert good.heard[-1].startswith("end ")


def test_a_rank_without_receivers_takes_part_and_knows_the_digest() -> None:
    assert push(1, weights().items(), []).digest == push(1, weights().items(), [Listener()]).digest


def test_the_digest_sees_names_types_shapes_bytes_and_order_but_not_strides() -> None:
    def digest(items: list[tuple[str, torch.Tensor]]) -> str:
        state = WeightDigest()
        for name, tensor in items:
            state.update(name, tensor)
        return state.hexdigest()

    a, b = torch.arange(6.0).reshape(2, 3), torch.zeros(2)
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


def test_a_bucket_gives_back_what_was_put_in() -> None:
    bucket = Bucket(64)
    a, b = torch.randn(3, 2), torch.randn(4).to(torch.bfloat16)
    for name, tensor in (("a", a.T), ("b", b)):
        assert bucket.fits(tensor)
        bucket.add(name, tensor)
    got = dict(bucket.tensors())
    assert torch.equal(got["a"], a.T)
    assert torch.equal(got["b"], b)
    assert bucket.data.numel() == bucket.num_bytes == 32
    assert not bucket.fits(torch.zeros(9))  # 36 bytes more than 64
    assert bucket.fits(torch.zeros(8))
    bucket.clear()
    assert bucket.tensors() == []


def test_a_tensor_larger_than_the_bucket_goes_alone_and_views_stay_aligned() -> None:
    bucket = Bucket(16)
    large = torch.randn(100)
    assert bucket.fits(large)
    bucket.add("large", large)
    assert not bucket.fits(torch.zeros(1))
    assert torch.equal(bucket.tensors()[0][1], large)
    bucket.clear()
    bucket.add("odd", torch.zeros(3, dtype=torch.uint8))
    assert not bucket.fits(torch.zeros(1))  # would begin at byte 3
    assert bucket.fits(torch.zeros(1, dtype=torch.uint8))
