"""Flat buffers between ranks arrive as they were sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pacs_megatron.contracts.pieces import Pieces
from pacs_megatron.parallel.transfer import (
    all_gather_by_index,
    broadcast_arrays,
    gather_arrays,
    pack_arrays,
    receive_buffer,
    send_buffer,
    unpack_arrays,
)
from tests.support.ranks import run_ranks

DTYPES = st.sampled_from([np.int32, np.int64, np.float32, np.float64, np.uint8, np.bool_])
ARRAYS = hnp.arrays(
    dtype=DTYPES, shape=hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5)
)


def same(got: dict[str, np.ndarray], sent: dict[str, np.ndarray]) -> bool:
    return set(got) == set(sent) and all(
        got[name].dtype == a.dtype
        and got[name].shape == a.shape
        and got[name].tobytes() == a.tobytes()
        for name, a in sent.items()
    )


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(max_size=12), ARRAYS, max_size=5))
def test_pack_and_unpack_are_inverse(arrays: dict[str, np.ndarray]) -> None:
    assert same(unpack_arrays(pack_arrays(arrays)), arrays)


def test_a_transposed_array_keeps_its_values() -> None:
    array = np.arange(12).reshape(3, 4).T
    np.testing.assert_array_equal(unpack_arrays(pack_arrays({"x": array}))["x"], array)


def test_pieces_arrive_as_one_array() -> None:
    """Also with padding after an odd number of bytes, and with an empty piece."""
    whole = np.arange(21, dtype=np.int16).reshape(7, 3)
    pieces = Pieces([whole[:2], whole[2:2], whole[2:]])
    arrived = unpack_arrays(pack_arrays({"x": pieces, "after": np.array([1, 2])}))
    np.testing.assert_array_equal(arrived["x"], whole, strict=True)
    assert arrived["after"].tolist() == [1, 2]
    np.testing.assert_array_equal(pieces.joined(), whole, strict=True)


def example(rank: int) -> dict[str, np.ndarray]:
    return {
        "ids": np.arange(5 * rank, dtype=np.int32),
        "logps": np.array([[-0.5, float("nan")], [float("inf"), -0.0]], dtype=np.float32),
        "empty": np.empty((0, 3), dtype=np.int64),
    }


def test_send_broadcast_gather_between_ranks() -> None:
    def on_rank(rank: int, world: int) -> Any:
        group = dist.group.WORLD
        if rank == 2:
            send_buffer(pack_arrays(example(7)), dst=0, group=group)
        sent = example(7)
        if rank == 0:
            sent = unpack_arrays(receive_buffer(src=2, group=group))
        broadcast = broadcast_arrays(example(3) if rank == 1 else None, src=1, group=group)
        return sent, broadcast, gather_arrays(example(rank), group=group)

    for rank, (sent, broadcast, gathered) in enumerate(run_ranks(on_rank, 3)):
        assert same(sent, example(7)) and same(broadcast, example(3))
        if rank:
            assert gathered is None
        else:
            assert all(same(arrays, example(source)) for source, arrays in enumerate(gathered))


def test_gather_by_index_keeps_every_bit_and_marks_missing_rows() -> None:
    values = np.array([1 / 3, -0.0, 1e-300, 2 / 7, 5e300])

    def on_rank(rank: int, _world: int) -> torch.Tensor:
        mine = np.array([0, 3, 1]) if rank == 0 else np.array([4, 1])
        return all_gather_by_index(mine, values[mine], 5, group=dist.group.WORLD)

    for result in run_ranks(on_rank, 2):
        got = result.numpy()
        assert got[[0, 1, 3, 4]].tobytes() == values[[0, 1, 3, 4]].tobytes()
        assert np.isnan(got[2])


def test_gather_by_index_of_replicas_with_every_kind_of_bits() -> None:
    """Ranks 0 and 1 are a replica and set the same rows. Each row has its owner's bits: of signs,
    zeros, infinities, NaN with a payload, the smallest and the largest number.
    """
    random = np.random.default_rng(0).integers(-(2**63), 2**63, size=200, dtype=np.int64)
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 5e-324, -5e-324, 1.8e308, -1.8e308]
    bits = np.concatenate([random, np.array(special).view(np.int64), [-(2**63), 2**63 - 1]])
    order = np.random.default_rng(1).permutation(len(bits))
    rows_of_replica = np.array_split(order, 2)

    def on_rank(rank: int, _world: int) -> torch.Tensor:
        mine = rows_of_replica[rank // 2]
        values = bits.view(np.float64)[mine]
        return all_gather_by_index(mine, values, len(bits), group=dist.group.WORLD)

    for result in run_ranks(on_rank, 4):
        assert result.numpy().tobytes() == bits.tobytes()


def test_gather_by_index_sends_as_much_on_any_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One all-reduce of 16 bytes for each row; no other collective."""

    def on_rank(_rank: int, _world: int) -> list[int]:
        sizes: list[int] = []
        real = dist.all_reduce

        def all_reduce(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
            sizes.append(tensor.nbytes)
            return real(tensor, *args, **options)

        monkeypatch.setattr(dist, "all_reduce", all_reduce)
        for name in ("all_gather", "all_gather_object", "broadcast", "gather", "all_to_all"):
            monkeypatch.delattr(dist, name)
        all_gather_by_index(np.array([1]), np.array([2.0]), 100, group=dist.group.WORLD)
        return sizes

    assert run_ranks(on_rank, 1) == [[1600]]
    assert run_ranks(on_rank, 3) == [[1600]] * 3


@pytest.mark.parametrize("world", [1, 2])
def test_gather_by_index_of_nothing(world: int) -> None:
    def on_rank(_rank: int, _world: int) -> int:
        nothing = np.empty(0, np.int64)
        return len(all_gather_by_index(nothing, np.empty(0), 0, group=dist.group.WORLD))

    assert run_ranks(on_rank, world) == [0] * world
