"""The position of a run, (step, update), and the state of the step in progress.

A checkpoint contains both.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from pacs_megatron.batching.tables import flat, ranges
from pacs_megatron.checkpoint.names import Position
from pacs_megatron.checkpoint.run_checkpoint import Record
from pacs_megatron.contracts import TokenBuffers, UpdateReport
from pacs_megatron.errors import CheckpointError
from pacs_megatron.observability.metrics import MetricSum, MetricSums
from pacs_megatron.parallel.groups import Rank
from pacs_megatron.parallel.transfer import gather_arrays
from pacs_megatron.training.breaker import idle_reason

_ROUTES = "routes"
"""source of the experts in a record"""


@dataclass(slots=True, kw_only=True)
class Logprobs:
    """Results of the passes over one mini-batch before its first update."""

    index: np.ndarray
    """int64 [m], ascending, rows of the samples in the mini-batch's SampleFacts: this rank's, or
    all after a resume
    """
    offsets: np.ndarray
    """int64 [m + 1], of the samples in a column"""
    columns: dict[str, torch.Tensor] = field(default_factory=dict)
    """`step_start`, `reference`: float32 [sum of response lens], nats; `value`: in units of the
    reward. [0] except on the last pipeline stage
    """
    routes: dict[int, np.ndarray] | None = None
    """row -> experts of the step-start pass (policy/routing.py), on every stage; None: not to be
    replayed
    """

    @classmethod
    def of_samples(cls, tokens: TokenBuffers) -> "Logprobs":
        """The results of no pass yet, for this rank's samples."""
        return cls(index=tokens.index, offsets=tokens.response_offsets)

    def columns_of(self, tokens: TokenBuffers, device: torch.device) -> dict[str, torch.Tensor]:
        """The columns of this rank's samples, as `MiniBatch` has them, on the device."""
        if np.array_equal(self.index, tokens.index):
            return {name: column.to(device) for name, column in self.columns.items()}

        # After a resume, which may have another layout.
        positions = np.searchsorted(self.index, tokens.index)
        lens = np.diff(tokens.response_offsets)
        places = torch.from_numpy(ranges(self.offsets[positions], lens))
        return {name: column[places].to(device) for name, column in self.columns.items()}

    def by_row(self) -> dict[tuple[str, int], np.ndarray]:
        """(source, row) -> the values of a sample; experts have the source `routes`."""
        arrays: dict[tuple[str, int], np.ndarray] = {}
        for name, column in self.columns.items():
            if not len(column):
                continue
            pieces = np.split(column.cpu().numpy(), self.offsets[1:-1])
            for row, values in zip(self.index.tolist(), pieces, strict=True):
                arrays[name, row] = values
        for row, experts in (self.routes or {}).items():
            arrays[_ROUTES, row] = experts
        return arrays

    @classmethod
    def from_rows(cls, arrays: Mapping[tuple[str, int], np.ndarray]) -> "Logprobs":
        """Inverse of `by_row`; the columns are on the host."""
        rows_of: dict[str, dict[int, np.ndarray]] = {}
        for (name, row), values in arrays.items():
            rows_of.setdefault(name, {})[row] = values

        routes = rows_of.pop(_ROUTES, None)
        found = cls(index=np.empty(0, np.int64), offsets=np.zeros(1, np.int64), routes=routes)
        for name, values_of in rows_of.items():
            rows = sorted(values_of)
            column, found.offsets = flat([values_of[row] for row in rows], np.float32)
            found.index = np.array(rows, dtype=np.int64)
            found.columns[name] = torch.from_numpy(column)
        return found


@dataclass(slots=True, kw_only=True)
class OpenStep:
    """The step in progress. Its samples are in the rollout buffer, its weights in the policy."""

    updates: int = 0
    sums: MetricSums = field(default_factory=MetricSums)
    """of the completed updates"""
    logprobs: list[Logprobs] | None = None
    """By mini-batch.

    Step-start log-probs cannot be computed again after the first update changed the weights.
    """

    def add(self, report: UpdateReport, num_samples: int) -> None:
        """Counts a completed update and adds its metrics.

        Args:
            report: its metrics, and the denominators of those that are not means over samples.
            num_samples: samples of its mini-batch, on all ranks.
        """
        for name, value in report.metrics.items():
            # Later updates have changed weights, which `mismatch/*` would include.
            if self.updates == 0 or not name.startswith("mismatch/"):
                self.sums.add_means({name: value}, report.denominators.get(name, num_samples))

        optimizer = {
            "optimizer/grad_norm": report.grad_norm,
            "optimizer/clipped_frac": float(report.is_clipped),
            "optimizer/lr": report.lr,
        }
        self.sums.add_means(optimizer, 1)
        self.updates += 1

    def to_record(self, rank: Rank, settings: Mapping[str, Any]) -> Record | None:
        """The checkpoint's record on rank 0, None elsewhere. Collective.

        Args:
            rank: this rank.
            settings: values that must not change inside the step.
        """
        logprobs = self.logprobs or []
        shares = gather_arrays(_own_arrays(logprobs, rank), group=rank.control)
        if shares is None:
            return None

        # Several ranks have parts of one sample's routes; -1 marks the layers of other stages.
        arrays: dict[str, np.ndarray] = {}
        for share in shares:
            for name, values in share.items():
                arrays[name] = np.maximum(arrays.get(name, values), values)
        header = {
            "updates": self.updates,
            "minibatches": len(logprobs),
            "settings": settings,
            "sums": {name: [item.total, item.count] for name, item in self.sums.sums.items()},
            "extremes": self.sums.extremes,
        }
        return header, arrays

    @classmethod
    def from_record(cls, record: Record, settings: Mapping[str, Any]) -> "OpenStep":
        """Inverse of `to_record`; every rank gets the log-probs of all samples.

        Raises CheckpointError when a setting differs.
        """
        header, arrays = record
        for key, value in settings.items():
            saved = header["settings"].get(key)
            if saved != value:
                raise CheckpointError(
                    f"{key} is {value!r}, but the newest checkpoint was saved inside a step, after "
                    f"{header['updates']} of its updates, with {saved!r}: resume with that value "
                    "and change it after the step's checkpoint, or remove the folder "
                    "step_*_plus_* to repeat the step"
                )

        by_row: list[dict[tuple[str, int], np.ndarray]] = [{} for _ in range(header["minibatches"])]
        for name, values in arrays.items():
            index, source, row = name.split(".")
            by_row[int(index)][source, int(row)] = values
        logprobs = [Logprobs.from_rows(of_minibatch) for of_minibatch in by_row]

        sums = MetricSums(
            sums={name: MetricSum(total, count) for name, (total, count) in header["sums"].items()},
            extremes=dict(header["extremes"]),
        )
        return cls(updates=header["updates"], sums=sums, logprobs=logprobs)


@dataclass(slots=True, kw_only=True)
class RunProgress:
    """The position of the run. Always matches the policy's weights."""

    step: int = 0
    open_step: OpenStep = field(default_factory=OpenStep)
    row: dict[str, float | None] | None = None
    """metrics of `step` that are not written yet because its evaluation is not done"""
    idle_steps: int | None = 0
    """number of the run's first steps that have trained nothing; None after a step that has"""

    @property
    def position(self) -> Position:
        return Position(self.step, self.open_step.updates)

    def complete_step(self, row: dict[str, float | None]) -> None:
        """Moves the position to the end of the step in progress; `row` has its metrics."""
        self.step = self.step + 1
        self.open_step = OpenStep()
        self.row = row
        if self.idle_steps is not None:
            self.idle_steps = None if idle_reason(row) is None else self.idle_steps + 1


def _own_arrays(logprobs: list[Logprobs], rank: Rank) -> dict[str, np.ndarray]:
    """`<mini-batch>.<source>.<row>` -> the arrays that this rank adds to the record."""
    # Log-probs are on the last pipeline stage, equal on its tensor- and context-parallel ranks.
    # Routes are on every stage: each has those of its layers.
    is_sender = rank.rank == rank.model_parallel_ranks[-1]
    arrays: dict[str, np.ndarray] = {}
    for index, of_minibatch in enumerate(logprobs):
        for (source, row), values in of_minibatch.by_row().items():
            if is_sender or source == _ROUTES:
                arrays[f"{index}.{source}.{row}"] = values
    return arrays
