"""Weights from the policy to the embedded engine of the same rank, through the same export as every other way."""

from collections.abc import Iterator

import numpy as np
import torch

from pacs_megatron.contracts.digest import WeightDigest
from pacs_megatron.contracts.protocols import WeightReceiver
from pacs_megatron.errors import SyncError
from pacs_megatron.parallel.groups import Rank
from pacs_megatron.parallel.transfer import broadcast_arrays


def push_inprocess(
    weights: Iterator[tuple[str, torch.Tensor]], receiver: WeightReceiver, version: int, rank: Rank
) -> str:
    """Every rank feeds its own engine; returns the digest. Collective.

    Raises SyncError when the ranks did not export the same weights, or a weight is missing.
    """
    digest = WeightDigest()
    receiver.begin_update(version)
    for name, tensor in weights:
        digest.update(name, tensor)
        receiver.put(name, tensor)
    mine = digest.hexdigest()
    wire = {"digest": np.frombuffer(mine.encode(), dtype=np.uint8)}
    theirs = broadcast_arrays(wire, src=0, group=rank.control)["digest"].tobytes().decode()
    if mine != theirs:
        raise SyncError(
            f"rank {rank.rank} exported weights with digest {mine}, rank 0 with {theirs}: the replicas have drifted apart; "
            "resume from the last checkpoint"
        )
    receiver.end_update(mine)
    return mine
