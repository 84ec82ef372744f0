"""Arithmetic within groups of samples, in float64 on any device: the same bits on every rank and in every run."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pacs_megatron.contracts import SampleFacts, SampleTable
from pacs_megatron.objectives.shared.lazy import Tensor, torch

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Groups:
    """Group arithmetic on values [m] of a table's samples. Group sizes may differ."""

    of_sample: Tensor
    """int64 [m], 0-based group number"""
    members: Tensor
    """int64 [g, largest group], positions in [m]; m in the unused places of smaller groups"""

    @property
    def num_groups(self) -> int:
        return len(self.members)

    @property
    def sizes(self) -> Tensor:
        """float64 [g]"""
        return (self.members < len(self.of_sample)).sum(1).double()

    def total(self, values: Tensor) -> Tensor:
        """[g], sums by group, in the order of the members: one fixed order on every device, unlike `index_add`."""
        padded = torch.cat([values, values.new_zeros(1)])
        result = values.new_zeros(self.num_groups)
        for column in self.members.unbind(1):
            result = result + padded[column]
        return result

    def centred(self, values: Tensor) -> Tensor:
        """[m], `values` minus their group's mean.

        Exactly 0 where all values of a group are equal: the first member is subtracted before the mean is taken, so
        G * x / G causes no rounding.
        """
        shifted = values - values[self.members[:, 0]][self.of_sample]
        return shifted - (self.total(shifted) / self.sizes)[self.of_sample]

    def std(self, centred: Tensor) -> Tensor:
        """[g], unbiased standard deviation of centred values."""
        return torch.sqrt(self.total(centred * centred) / (self.sizes - 1.0))


def groups_of(table: SampleTable) -> Groups:
    """The groups of a table's samples."""
    return Groups(table.group_of_sample, table.members)


def build_table(
    facts: SampleFacts,
    rows: IntArray | None = None,
    device: "torch.device | str" = "cpu",
    *,
    whole_groups: bool = True,
) -> SampleTable:
    """The table of the samples `rows` (None: all), in the order of their ids.

    Sums in this order have the same bits for any order of arrival.
    Raises ValueError (an internal error) if group numbers are not dense, or with `whole_groups` if a group has one sample.
    """
    rows = np.arange(facts.num_samples) if rows is None else rows
    order = rows[np.argsort(np.asarray(facts.ids)[rows], kind="stable")]
    numbers, of_sample, sizes = np.unique(facts.groups[order], return_inverse=True, return_counts=True)
    if len(order) == facts.num_samples and (len(numbers) == 0 or numbers[-1] != len(numbers) - 1):
        raise ValueError(
            f"objective: group numbers are not dense: {len(order)} samples, groups {numbers.tolist()[:16]}"
        )
    lone = np.flatnonzero(sizes[of_sample] < 2)
    if whole_groups and len(lone):
        raise ValueError(
            f"objective: sample {facts.ids[order[lone[0]]]} is alone in its group ({len(lone)} such samples); admission "
            "must drop groups with fewer than 2 samples"
        )
    by_group = np.argsort(of_sample, kind="stable")
    ends = np.cumsum(sizes)
    members = np.full((len(sizes), sizes.max(initial=1)), len(order), dtype=np.int64)
    members[of_sample[by_group], np.arange(len(order)) - (ends - sizes)[of_sample[by_group]]] = by_group

    def tensor(values: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values).to(device)

    return SampleTable(
        rows=tensor(order),
        labels=tensor(facts.labels[order]),
        response_lens=tensor(facts.response_lens[order].astype(np.float64)),
        group_of_sample=tensor(of_sample.astype(np.int64)),
        members=tensor(members),
        num_samples=facts.num_samples,
    )


def by_row(values: Tensor, table: SampleTable) -> Tensor:
    """[n] in the order of the facts, from the [m] values of a table of all samples."""
    return torch.empty_like(values).index_copy(0, table.rows, values)
