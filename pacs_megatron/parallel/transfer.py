"""Flat host buffers between ranks over gloo: no pickled objects, no Python list of tokens."""

import json
from collections.abc import Mapping

import numpy as np
import torch
import torch.distributed as dist

Arrays = Mapping[str, np.ndarray]


def pack_arrays(arrays: Arrays) -> torch.Tensor:
    """uint8 [bytes]: a JSON header (names, dtypes, shapes) with its length in front, then the raw arrays."""
    header = json.dumps([[name, a.dtype.str, list(a.shape)] for name, a in arrays.items()]).encode()
    parts = [np.frombuffer(np.int64(len(header)).tobytes() + header, dtype=np.uint8)]
    parts += [np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in arrays.values()]
    return torch.from_numpy(np.concatenate(parts))


def unpack_arrays(payload: torch.Tensor) -> dict[str, np.ndarray]:
    """Inverse of `pack_arrays`; the arrays own their memory."""
    raw = payload.numpy()
    header_size = int(raw[:8].view(np.int64)[0])
    header = json.loads(raw[8 : 8 + header_size].tobytes())
    arrays, start = {}, 8 + header_size
    for name, dtype, shape in header:
        size = int(np.dtype(dtype).itemsize * np.prod(shape, dtype=np.int64))
        arrays[name] = np.frombuffer(raw[start : start + size].tobytes(), dtype=np.dtype(dtype)).reshape(shape)
        start += size
    return arrays


def broadcast_arrays(arrays: Arrays | None, *, src: int, group: dist.ProcessGroup) -> dict[str, np.ndarray]:
    """`arrays` of global rank `src`, on every rank of `group`."""
    is_source = dist.get_rank() == src
    payload = pack_arrays(arrays) if is_source and arrays is not None else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([payload.numel()])
    dist.broadcast(size, src=src, group=group)
    if not is_source:
        payload = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(payload, src=src, group=group)
    return unpack_arrays(payload)


def send_arrays(arrays: Arrays, *, dst: int, group: dist.ProcessGroup) -> None:
    """To global rank `dst`, which is in `receive_arrays`."""
    payload = pack_arrays(arrays)
    dist.send(torch.tensor([payload.numel()]), dst=dst, group=group)
    dist.send(payload, dst=dst, group=group)


def receive_arrays(*, src: int, group: dist.ProcessGroup) -> dict[str, np.ndarray]:
    """From global rank `src`."""
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, src=src, group=group)
    payload = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(payload, src=src, group=group)
    return unpack_arrays(payload)


def gather_arrays(arrays: Arrays, *, group: dist.ProcessGroup) -> list[dict[str, np.ndarray]] | None:
    """On global rank 0: every rank's arrays, by rank; elsewhere None. Collective."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank:
        send_arrays(arrays, dst=0, group=group)
        return None
    return [dict(arrays), *(receive_arrays(src=other, group=group) for other in range(1, world))]


def all_gather_by_index(
    index: np.ndarray, values: np.ndarray, size: int, *, group: dist.ProcessGroup, device: torch.device
) -> torch.Tensor:
    """float64 [size] with `values` of each rank at its `index`: gathered, not summed, so bits are kept.

    Every position must be set by at least one rank; ranks of one replica may repeat each other's values.
    """
    local = torch.full((size,), float("nan"), dtype=torch.float64)
    local[torch.from_numpy(index)] = torch.from_numpy(np.asarray(values, dtype=np.float64))
    have = torch.zeros(size, dtype=torch.uint8)
    have[torch.from_numpy(index)] = 1
    world = dist.get_world_size(group)
    all_values = [torch.empty_like(local).to(device) for _ in range(world)]
    all_have = [torch.empty_like(have).to(device) for _ in range(world)]
    dist.all_gather(all_values, local.to(device), group=group)
    dist.all_gather(all_have, have.to(device), group=group)
    result = torch.full((size,), float("nan"), dtype=torch.float64)
    for other_values, other_have in zip(all_values, all_have, strict=True):
        mask = other_have.to("cpu").bool()
        result[mask] = other_values.to("cpu")[mask]
    return result
