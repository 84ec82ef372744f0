"""Host data between ranks over gloo: flat arrays and plain JSON values.

No pickled objects, no Python list of tokens.
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
    return save({name: np.asarray(array, order="C") for name, array in arrays.items()})


def unpack_arrays(data: bytes) -> dict[str, np.ndarray]:
    """Inverse of `pack_arrays`; the arrays are read-only."""
    return load(data)


def broadcast_bytes(data: bytes, *, src: int, group: dist.ProcessGroup) -> bytes:
    """`data` of global rank `src`, on every rank of `group`."""
    is_source = dist.get_rank() == src
    size = torch.tensor([len(data)])
    dist.broadcast(size, src=src, group=group)
    payload = _tensor(data) if is_source else torch.empty(int(size), dtype=torch.uint8)
    if payload.numel():
        dist.broadcast(payload, src=src, group=group)
    return data if is_source else payload.numpy().tobytes()


def broadcast_json(value: Any, *, src: int, group: dist.ProcessGroup) -> Any:
    """`value` of global rank `src`, on every rank of `group`: plain JSON values.

    Other ranks pass anything.
    """
    data = json.dumps(value).encode() if dist.get_rank() == src else b""
    return json.loads(broadcast_bytes(data, src=src, group=group))


def broadcast_arrays(
    arrays: Arrays | None, *, src: int, group: dist.ProcessGroup
) -> dict[str, np.ndarray]:
    """As `broadcast_json`."""
    data = pack_arrays(arrays or {}) if dist.get_rank() == src else b""
    return unpack_arrays(broadcast_bytes(data, src=src, group=group))


def send_arrays(arrays: Arrays, *, dst: int, group: dist.ProcessGroup) -> None:
    """Sends arrays to global rank `dst`, which calls `receive_arrays`."""
    payload = _tensor(pack_arrays(arrays))
    dist.send(torch.tensor([payload.numel()]), dst=dst, group=group)
    dist.send(payload, dst=dst, group=group)


def receive_arrays(*, src: int, group: dist.ProcessGroup) -> dict[str, np.ndarray]:
    """Receives the arrays of global rank `src`."""
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, src=src, group=group)
    payload = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(payload, src=src, group=group)
    return unpack_arrays(payload.numpy().tobytes())


def gather_arrays(
    arrays: Arrays, *, group: dist.ProcessGroup
) -> list[dict[str, np.ndarray]] | None:
    """The arrays of every rank, by rank, on global rank 0; None elsewhere. Collective."""
    rank = dist.get_rank()
    world = dist.get_world_size()
    if rank:
        send_arrays(arrays, dst=0, group=group)
        return None
    return [dict(arrays), *(receive_arrays(src=other, group=group) for other in range(1, world))]


def gather_json(value: Any, *, group: dist.ProcessGroup) -> list[Any] | None:
    """The plain JSON value of every rank, by rank, on global rank 0; None elsewhere. Collective."""
    data = {"json": np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)}
    shares = gather_arrays(data, group=group)
    return None if shares is None else [json.loads(share["json"].tobytes()) for share in shares]


def _tensor(data: bytes) -> torch.Tensor:
    """The data as a uint8 tensor; a copy, because torch has no read-only tensors."""
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if data
        else torch.empty(0, dtype=torch.uint8)
    )


def all_gather_by_index(
    values: Mapping[int, float], size: int, *, group: dist.ProcessGroup
) -> torch.Tensor:
    """float64 [size] with each rank's `values` at their index, NaN where no rank has one: gathered,
    so every bit is kept. Ranks of one replica may set the same positions.
    """
    own = torch.zeros(2, size, dtype=torch.float64)
    index = torch.tensor(list(values), dtype=torch.int64)
    own[0, index] = torch.tensor(list(values.values()), dtype=torch.float64)
    own[1, index] = 1
    shares = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shares, own, group=group)
    result = torch.full((size,), float("nan"), dtype=torch.float64)
    for numbers, is_set in shares:
        result = torch.where(is_set.bool(), numbers, result)
    return result
