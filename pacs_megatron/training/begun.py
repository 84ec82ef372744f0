"""A step in the middle of its updates: what a checkpoint there holds beside the policy, and how the step goes on from it.

The samples are in the rollout buffer. What cannot be computed again is the log-probs of the policy at the step's start,
whose weights are gone; those of the frozen reference are kept with them, for the time that they took.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pacs_megatron.contracts import Interrupted, MiniBatch
from pacs_megatron.errors import CheckpointError
from pacs_megatron.observability.metrics import MetricSum, MetricSums
from pacs_megatron.parallel.groups import Rank
from pacs_megatron.parallel.transfer import broadcast_arrays, gather_arrays

SOURCES = ("step_start_logprobs", "reference_logprobs")
"""fields of `Part`"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """`updates` of the `total` updates of a step are done."""

    updates: int
    total: int
    sums: MetricSums
    """of the updates that are done"""
    logprobs: Mapping[str, np.ndarray]
    """on rank 0, `<update>.<source>` of the updates to come: float32 [response tokens], the mini-batch's samples in
    order, nats; empty elsewhere"""

    def to_record(self) -> tuple[dict[str, Any], Mapping[str, np.ndarray]]:
        """For a checkpoint."""
        header = {
            "updates": self.updates,
            "total": self.total,
            "sums": {name: [item.total, item.count] for name, item in self.sums.sums.items()},
            "extremes": self.sums.extremes,
        }
        return header, self.logprobs

    @classmethod
    def from_record(cls, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> "Begun":
        """Inverse of `to_record`."""
        sums = MetricSums(
            sums={name: MetricSum(total, count) for name, (total, count) in header["sums"].items()},
            extremes=dict(header["extremes"]),
        )
        return cls(updates=header["updates"], total=header["total"], sums=sums, logprobs=arrays)


class StoppedInStep(Interrupted):
    """All ranks agreed to stop between two updates of a step."""

    def __init__(self, begun: Begun) -> None:
        super().__init__()
        self.begun = begun


def begun_at(updates: int, minibatches: Sequence[MiniBatch], sums: MetricSums, rank: Rank) -> Begun:
    """What the updates from number `updates` (from 0) on need. Collective."""
    mine: dict[str, np.ndarray] = {}
    # The last stage has log-probs; its tensor- and context-parallel ranks have the same ones.
    is_sender = rank.rank == rank.model_parallel_ranks[-1]
    for index, source, found in _to_come(updates, minibatches):
        rows = sorted(found) if is_sender else []
        mine[f"{index}.{source}.rows"] = np.array(rows, dtype=np.int64)
        mine[f"{index}.{source}"] = _joined([found[row] for row in rows])
    everyone = gather_arrays(mine, group=rank.control)
    logprobs: dict[str, np.ndarray] = {}
    for index, source, _ in _to_come(updates, minibatches) if everyone is not None else []:
        name = f"{index}.{source}"
        by_row: dict[int, np.ndarray] = {}
        for theirs in everyone or []:
            members = theirs[f"{name}.rows"]
            ends = np.cumsum(minibatches[index].facts.response_lens[members])
            by_row.update(zip(members.tolist(), np.split(theirs[name], ends[:-1]), strict=False))
        logprobs[name] = _joined([by_row[row] for row in range(minibatches[index].facts.num_samples)])
    return Begun(updates=updates, total=len(minibatches), sums=sums, logprobs=logprobs)


def _to_come(updates: int, minibatches: Sequence[MiniBatch]) -> list[tuple[int, str, dict[int, np.ndarray]]]:
    return [
        (index, source, found)
        for index, minibatch in enumerate(minibatches)
        for source in SOURCES
        if index >= updates and (found := getattr(minibatch, source)) is not None
    ]


def _joined(pieces: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype=np.float32), *pieces])


def with_saved_logprobs(
    minibatches: Sequence[MiniBatch], begun: Begun, rank: Rank, sources: Sequence[str]
) -> list[MiniBatch]:
    """`parts` with the log-probs that were saved for the updates to come, each rank its own samples. Collective.

    Raises CheckpointError on every rank when the step was cut otherwise, or the objective asks for others.
    """
    names = sorted(begun.logprobs) if rank.rank == 0 else []
    text = broadcast_arrays({"n": np.frombuffer("\n".join(names).encode(), dtype=np.uint8)}, src=0, group=rank.control)
    have = text["n"].tobytes().decode().split("\n") if text["n"].size else []
    expected = sorted(f"{index}.{source}" for index in range(begun.updates, len(minibatches)) for source in sources)
    if begun.total != len(minibatches) or have != expected:
        raise CheckpointError(
            f"the newest checkpoint was taken after {begun.updates} of the {begun.total} updates of a step, and now the step "
            f"has {len(minibatches)}, or another objective: resume with the batch.updates_per_step and objective.* of the "
            "attempt before and change them at the next step's checkpoint, or remove the folder step_*_plus_* to repeat the step"
        )
    return [
        minibatch if index < begun.updates else _filled(minibatch, index, begun, rank, sources)
        for index, minibatch in enumerate(minibatches)
    ]


def _filled(minibatch: MiniBatch, index: int, begun: Begun, rank: Rank, sources: Sequence[str]) -> MiniBatch:
    ends = np.cumsum(minibatch.facts.response_lens)
    starts = ends - minibatch.facts.response_lens
    found: dict[str, dict[int, np.ndarray]] = {}
    for source in sources:
        payload = {"values": begun.logprobs[f"{index}.{source}"]} if rank.rank == 0 else None
        values = broadcast_arrays(payload, src=0, group=rank.control)["values"]
        found[source] = {int(row): values[starts[row] : ends[row]] for row in minibatch.tokens.index}
    return replace(
        minibatch,
        step_start_logprobs=found.get("step_start_logprobs"),
        reference_logprobs=found.get("reference_logprobs"),
    )
