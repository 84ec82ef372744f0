"""Whole groups of a mini-batch as tensors: sums, means and deviations within groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleTable:
    """Whole groups of a mini-batch on one device: [m] samples in the order of their ids, [g]
    groups.

    The methods compute within groups, in the dtype of the values.
    """

    rows: torch.Tensor
    """int64 [m], row in the mini-batch's SampleFacts"""
    labels: torch.Tensor
    """float64 [m], in {0, 1}"""
    response_lens: torch.Tensor
    """float64 [m]"""
    group_of_sample: torch.Tensor
    """int64 [m], 0-based"""
    members: torch.Tensor
    """int64 [g, largest group], positions in [m]; smaller groups are padded with m"""
    num_samples: int
    """N, samples of the whole mini-batch"""

    @property
    def num_groups(self) -> int:
        return len(self.members)

    @property
    def sizes(self) -> torch.Tensor:
        """float64 [g], samples of each group."""
        return (self.members < len(self.group_of_sample)).sum(1).double()

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Sums by group.

        Args:
            values: [m].

        Returns:
            [g], added in the order of the members: one fixed order on every device, unlike
            `index_add`.
        """
        # The last element is the 0 that the padding of `members` points to.
        padded = values.new_zeros(len(values) + 1)
        padded[:-1] = values

        sums = values.new_zeros(self.num_groups)
        for positions in self.members.unbind(1):
            sums = sums + padded[positions]
        return sums

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """The largest value of each group.

        Args:
            values: [m].

        Returns:
            [g].
        """
        padded = values.new_full((len(values) + 1,), float("-inf"))
        padded[:-1] = values
        return padded[self.members].amax(1)

    def centred(self, values: torch.Tensor) -> torch.Tensor:
        """Values minus their group's mean.

        Args:
            values: [m].

        Returns:
            [m]. Subtracts the first member before it computes the mean, so the result is exactly 0
            in a group of equal values.
        """
        first = values[self.members[:, 0]]
        shifted = values - first[self.group_of_sample]

        mean = self.total(shifted) / self.sizes
        return shifted - mean[self.group_of_sample]

    def std(self, centred: torch.Tensor) -> torch.Tensor:
        """Unbiased standard deviation by group.

        Args:
            centred: [m], the result of `self.centred`.

        Returns:
            [g].
        """
        return (self.total(centred * centred) / (self.sizes - 1.0)).sqrt()
