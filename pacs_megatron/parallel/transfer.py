"""Host data between ranks over gloo: flat arrays and plain JSON values.

Nothing is pickled, and tokens are arrays, never Python lists.
"""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.numpy import load, save

Arrays = Mapping[str, np.ndarray]


def pack_arrays(arrays: Arrays) -> bytes:
    """The arrays in safetensors format."""
    # safetensors writes the buffer of an array as it is, so the buffer must be in C order.
    contiguous = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    return save(contiguous)


def unpack_arrays(data: bytes) -> dict[str, np.ndarray]:
    """Inverse of `pack_arrays`; the arrays are read-only."""
    return load(data)


def broadcast_bytes(data: bytes, *, src: int, group: dist.ProcessGroup) -> bytes:
    """The bytes of one rank, on every rank of `group`. Collective.

    Args:
        data: the bytes on rank `src`; the other ranks pass anything.
        src: global rank.
        group: gloo group that contains `src`.
    """
    is_source = dist.get_rank() == src
    size = torch.tensor([len(data)])
    dist.broadcast(size, src=src, group=group)

    payload = _tensor(data) if is_source else torch.empty(int(size), dtype=torch.uint8)
    if payload.numel():
        dist.broadcast(payload, src=src, group=group)

    if is_source:
        return data
    return payload.numpy().tobytes()


def broadcast_json(value: Any, *, src: int, group: dist.ProcessGroup) -> Any:
    """The value of one rank, on every rank of `group`. Collective.

    Args:
        value: plain JSON values on rank `src`; the other ranks pass anything.
        src: global rank.
        group: gloo group that contains `src`.
    """
    data = b""
    if dist.get_rank() == src:
        data = json.dumps(value).encode()
    return json.loads(broadcast_bytes(data, src=src, group=group))


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
    data = b""
    if dist.get_rank() == src:
        data = pack_arrays(arrays or {})
    return unpack_arrays(broadcast_bytes(data, src=src, group=group))


def send_arrays(arrays: Arrays, *, dst: int, group: dist.ProcessGroup) -> None:
    """Sends arrays to one rank, which calls `receive_arrays`.

    Args:
        arrays: of any dtype that safetensors has.
        dst: global rank.
        group: gloo group that contains both ranks.
    """
    payload = _tensor(pack_arrays(arrays))
    size = torch.tensor([payload.numel()])
    dist.send(size, dst=dst, group=group)
    dist.send(payload, dst=dst, group=group)


def receive_arrays(*, src: int, group: dist.ProcessGroup) -> dict[str, np.ndarray]:
    """The arrays that one rank sends with `send_arrays`, read-only.

    Args:
        src: global rank.
        group: gloo group that contains both ranks.
    """
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, src=src, group=group)

    payload = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(payload, src=src, group=group)
    return unpack_arrays(payload.numpy().tobytes())


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
        send_arrays(arrays, dst=0, group=group)
        return None

    shares = [dict(arrays)]
    for source in range(1, dist.get_world_size()):
        shares.append(receive_arrays(src=source, group=group))
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


def _tensor(data: bytes) -> torch.Tensor:
    """uint8 [bytes], a copy of the data, because torch has no read-only tensors."""
    if not data:  # frombuffer rejects an empty buffer
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def all_gather_by_index(
    values: Mapping[int, float],
    size: int,
    *,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """The values of all ranks as one vector. Collective.

    The values are gathered, not added, so every bit is kept.

    Args:
        values: index -> value of this rank. Ranks of one replica may set the same index.
        size: length n of the vector.
        group: gloo group.

    Returns:
        float64 [n], the same on every rank; NaN where no rank has a value.
    """
    index = torch.tensor(list(values), dtype=torch.int64)
    numbers = torch.tensor(list(values.values()), dtype=torch.float64)
    local = torch.zeros(2, size, dtype=torch.float64)  # the values, and whether each one is set
    local[0, index] = numbers
    local[1, index] = 1

    shares = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shares, local, group=group)

    result = torch.full((size,), float("nan"), dtype=torch.float64)
    for share, is_set in shares:
        result = torch.where(is_set.bool(), share, result)
    return result
