"""The position of a run, (step, update), and the state of the step in progress.

A checkpoint contains both.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np

from pacs_megatron.checkpoint.names import Position
from pacs_megatron.checkpoint.run_checkpoint import Record
from pacs_megatron.contracts import UpdateReport
from pacs_megatron.contracts.protocols import LogprobSource
from pacs_megatron.errors import CheckpointError
from pacs_megatron.observability.metrics import MetricSum, MetricSums
from pacs_megatron.parallel.groups import Rank
from pacs_megatron.parallel.transfer import gather_arrays

Source = LogprobSource | Literal["routes"]
Logprobs = dict[Source, dict[int, np.ndarray]]
"""Source -> row of the mini-batch's SampleFacts -> float32 [response], nats; `routes`: experts, see
policy/passes.py
"""


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
        # First update only: later updates have changed weights, which `mismatch/*` would include.
        metrics = {
            k: v
            for k, v in report.metrics.items()
            if self.updates == 0 or not k.startswith("mismatch/")
        }
        for name, value in metrics.items():
            self.sums.add_means({name: value}, report.denominators.get(name, num_samples))
        optimizer = {
            "grad_norm": report.grad_norm,
            "clipped_frac": float(report.is_clipped),
            "lr": report.lr,
        }
        self.sums.add_means({f"optimizer/{name}": value for name, value in optimizer.items()}, 1)
        self.updates += 1

    def to_record(self, rank: Rank, settings: Mapping[str, Any]) -> Record | None:
        """The checkpoint's record on rank 0, None elsewhere; `settings` must not change inside the
        step. Collective.
        """
        # Log-probs are on the last pipeline stage, equal on its tensor- and context-parallel ranks.
        is_sender = rank.rank == rank.model_parallel_ranks[-1]
        own: dict[str, np.ndarray] = {}
        for index, found in enumerate(self.logprobs or []):
            for source, by_row in found.items():
                if (
                    is_sender or source == "routes"
                ):  # each stage has its layers' routes, and -1 for the others
                    own |= {f"{index}.{source}.{row}": values for row, values in by_row.items()}
        shares = gather_arrays(own, group=rank.control)
        if shares is None:
            return None
        arrays: dict[str, np.ndarray] = {}
        for name, values in (item for share in shares for item in share.items()):
            arrays[name] = np.maximum(arrays.get(name, values), values)
        header = {
            "updates": self.updates,
            "minibatches": len(self.logprobs or []),
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
            if (saved := header["settings"].get(key)) != value:
                raise CheckpointError(
                    f"{key} is {value!r}, but the newest checkpoint was saved inside a step, "
                    f"after {header['updates']} of "
                    f"its updates, with {saved!r}: resume with that value and change it after the "
                    "step's checkpoint, or "
                    "remove the folder step_*_plus_* to repeat the step"
                )
        logprobs: list[Logprobs] = [{} for _ in range(header["minibatches"])]
        for name, values in arrays.items():
            index, source, row = name.split(".")
            logprobs[int(index)].setdefault(cast("Source", source), {})[int(row)] = values
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

    @property
    def position(self) -> Position:
        return Position(self.step, self.open_step.updates)

    def complete_step(self, row: dict[str, float | None]) -> None:
        """Moves the position to the end of the step in progress; `row` has its metrics."""
        self.step = self.step + 1
        self.open_step = OpenStep()
        self.row = row
