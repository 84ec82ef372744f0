"""Host data between ranks over gloo: flat arrays and plain JSON values.

Nothing is pickled, and tokens are arrays, never Python lists.

A buffer has the size of its layout (int64), the layout as JSON, and the arrays. Every part starts
at a multiple of 8 bytes, so the arrays that arrive are views of the buffer.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pacs_megatron.contracts.pieces import Pieces, ToSend

Arrays = Mapping[str, np.ndarray]
Layout = Mapping[str, Sequence[Any]]
"""Name -> dtype and shape of each array, in the order of the buffer; JSON values"""

_ALIGNMENT = 8
"""bytes; the largest item of an array"""


def layout_of(arrays: ToSend) -> dict[str, Sequence[Any]]:
    """The layout of the arrays, from which `views` restores them."""
    return {name: (array.dtype.str, array.shape) for name, array in arrays.items()}


def padded_bytes(arrays: ToSend) -> list[np.ndarray]:
    """The bytes of the arrays, uint8, each followed by its padding; views of contiguous arrays."""
    parts = []
    for array in arrays.values():
        size = 0
        for piece in array.pieces if isinstance(array, Pieces) else (array,):
            data = np.ascontiguousarray(piece).reshape(-1).view(np.uint8)
            parts.append(data)
            size += len(data)
        parts.append(np.zeros(-size % _ALIGNMENT, np.uint8))
    return parts


def views(data: np.ndarray, layout: Layout) -> dict[str, np.ndarray]:
    """The arrays of `padded_bytes`, as read-only views.

    Args:
        data: uint8, all parts one after the other.
        layout: of `layout_of`.
    """
    arrays = {}
    start = 0
    for name, (dtype, shape) in layout.items():
        size = np.dtype(dtype).itemsize * int(np.prod(shape))
        array = data[start : start + size].view(dtype).reshape(shape)
        array.flags.writeable = False
        arrays[name] = array
        start += size + -size % _ALIGNMENT
    return arrays


def pack_arrays(arrays: ToSend) -> np.ndarray:
    """The arrays as one buffer, uint8."""
    layout = json.dumps(layout_of(arrays)).encode()
    layout += b" " * (-len(layout) % _ALIGNMENT)
    size = np.array([len(layout)]).view(np.uint8)
    return np.concatenate([size, np.frombuffer(layout, np.uint8), *padded_bytes(arrays)])


def unpack_arrays(buffer: np.ndarray) -> dict[str, np.ndarray]:
    """Inverse of `pack_arrays`; the arrays are read-only views of the buffer."""
    end = _ALIGNMENT + int(buffer[:_ALIGNMENT].view(np.int64)[0])
    layout = json.loads(buffer[_ALIGNMENT:end].tobytes())
    return views(buffer[end:], layout)


def broadcast_buffer(
    buffer: np.ndarray | None,
    *,
    src: int,
    group: dist.ProcessGroup,
) -> np.ndarray:
    """The buffer of one rank, uint8, on every rank of `group`. Collective.

    Args:
        buffer: the buffer on rank `src`; the other ranks pass anything.
        src: global rank.
        group: gloo group that contains `src`.
    """
    if dist.get_rank() != src or buffer is None:
        buffer = np.empty(0, np.uint8)
    size = torch.tensor([len(buffer)])
    dist.broadcast(size, src=src, group=group)

    if dist.get_rank() != src:
        buffer = np.empty(int(size), np.uint8)
    # A group of one rank has nothing to send.
    if len(buffer) and dist.get_world_size(group) > 1:
        dist.broadcast(_tensor(buffer), src=src, group=group)
    return buffer


def broadcast_json(value: Any, *, src: int, group: dist.ProcessGroup) -> Any:
    """The value of one rank, on every rank of `group`. Collective.

    Args:
        value: plain JSON values on rank `src`; the other ranks pass anything.
        src: global rank.
        group: gloo group that contains `src`.
    """
    buffer = None
    if dist.get_rank() == src:
        buffer = np.frombuffer(json.dumps(value).encode(), np.uint8)
    return json.loads(broadcast_buffer(buffer, src=src, group=group).tobytes())


def broadcast_arrays(
    arrays: Arrays | None,
    *,
    src: int,
    group: dist.ProcessGroup,
) -> dict[str, np.ndarray]:
    """The arrays of one rank, on every rank of `group`, read-only. Collective.

    Args:
        arrays: the arrays on rank `src`; the other ranks pass anything.
        src: global rank.
        group: gloo group that contains `src`.
    """
    buffer = None
    if dist.get_rank() == src:
        buffer = pack_arrays(arrays or {})
    return unpack_arrays(broadcast_buffer(buffer, src=src, group=group))


def send_buffer(buffer: np.ndarray, *, dst: int, group: dist.ProcessGroup) -> None:
    """Sends a buffer to one rank, which calls `receive_buffer`.

    Args:
        buffer: uint8, of `pack_arrays`.
        dst: global rank.
        group: gloo group that contains both ranks.
    """
    dist.send(torch.tensor([len(buffer)]), dst=dst, group=group)
    dist.send(_tensor(buffer), dst=dst, group=group)


def receive_buffer(*, src: int, group: dist.ProcessGroup) -> np.ndarray:
    """The buffer that one rank sends with `send_buffer`, uint8.

    Args:
        src: global rank.
        group: gloo group that contains both ranks.
    """
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, src=src, group=group)

    buffer = np.empty(int(size), np.uint8)
    dist.recv(_tensor(buffer), src=src, group=group)
    return buffer


def gather_arrays(
    arrays: Arrays,
    *,
    group: dist.ProcessGroup,
) -> list[dict[str, np.ndarray]] | None:
    """The arrays of every rank, by rank, on global rank 0; None elsewhere. Collective.

    Args:
        arrays: this rank's arrays.
        group: gloo group of all ranks.
    """
    if dist.get_rank() != 0:
        send_buffer(pack_arrays(arrays), dst=0, group=group)
        return None

    shares = [dict(arrays)]
    for source in range(1, dist.get_world_size()):
        shares.append(unpack_arrays(receive_buffer(src=source, group=group)))
    return shares


def gather_json(value: Any, *, group: dist.ProcessGroup) -> list[Any] | None:
    """The plain JSON value of every rank, by rank, on global rank 0; None elsewhere. Collective.

    Args:
        value: this rank's value.
        group: gloo group of all ranks.
    """
    data = json.dumps(value).encode()
    shares = gather_arrays({"json": np.frombuffer(data, dtype=np.uint8)}, group=group)
    if shares is None:
        return None
    return [json.loads(share["json"].tobytes()) for share in shares]


def _tensor(buffer: np.ndarray) -> torch.Tensor:
    """uint8 [bytes], the memory of the buffer, or a copy of a read-only one, which torch lacks."""
    return torch.from_numpy(buffer if buffer.flags.writeable else buffer.copy())


def all_gather_by_index(
    index: np.ndarray,
    values: np.ndarray,
    size: int,
    *,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """The values of all ranks as one vector. Collective.

    The values are not added, so every bit is kept: an all-reduce takes the maximum of their bits as
    integers, and ranks without a value have the lowest integer. A rank sends and receives about 32
    bytes for each element, on any number of ranks.

    Args:
        index: int64 [m], of this rank's values. Ranks of one replica may set the same index, to
            the same bits.
        values: float64 [m].
        size: length n of the vector.
        group: gloo group.

    Returns:
        float64 [n], the same on every rank; NaN where no rank has a value.
    """
    bits = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float64)).view(torch.int64)
    lowest = torch.iinfo(torch.int64).min
    # The bits, and whether each one is set: -0.0 has the bits of the lowest integer.
    found = torch.zeros(2, size, dtype=torch.int64)
    found[0] = lowest
    found[0, index] = bits
    found[1, index] = 1

    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    missing = torch.full((size,), float("nan"), dtype=torch.float64)
    return torch.where(found[1].bool(), found[0].view(torch.float64), missing)
