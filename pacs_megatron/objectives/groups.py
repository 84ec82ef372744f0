"""Arithmetic within groups of samples, in float64 on the CPU: the same bits on every rank."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pacs_megatron.contracts import SampleFacts

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Which sample belongs to which group. Members need not be adjacent, sizes may differ; every size is >= 2."""

    of_sample: IntArray
    """int64 [n], 0-based group number"""
    sizes: FloatArray
    """float64 [g]"""
    first: IntArray
    """int64 [g], row of each group's first sample"""

    @property
    def num_groups(self) -> int:
        return len(self.sizes)

    @property
    def size_of_sample(self) -> FloatArray:
        """float64 [n], G of the sample's group."""
        return self.sizes[self.of_sample]

    def total(self, values: FloatArray) -> FloatArray:
        """float64 [g], sums by group; summed in the order of the rows."""
        return np.bincount(self.of_sample, weights=values, minlength=self.num_groups).astype(np.float64)

    def centred(self, values: FloatArray) -> FloatArray:
        """float64 [n], `values` minus their group's mean.

        Exactly 0 where all values of a group are equal: the first member is subtracted before the mean is taken, so
        G * x / G causes no rounding.
        """
        shifted = values - values[self.first][self.of_sample]
        return shifted - (self.total(shifted) / self.sizes)[self.of_sample]

    def std(self, centred: FloatArray) -> FloatArray:
        """float64 [g], unbiased standard deviation of centred values."""
        return np.sqrt(self.total(centred * centred) / (self.sizes - 1.0))


def canonical_order(facts: SampleFacts) -> IntArray:
    """int64 [n], rows sorted by sample id: sums in this order do not depend on the order of arrival."""
    return np.argsort(np.asarray(facts.ids), kind="stable")


def build_groups(of_sample: IntArray, ids: tuple[str, ...]) -> Groups:
    """Groups of the samples; `ids` appear in error messages.

    Raises ValueError (an internal error) if group numbers are not dense or a group has one sample.
    """
    sizes = np.bincount(of_sample)
    lone = np.flatnonzero(sizes[of_sample] < 2)
    if len(lone):
        raise ValueError(
            f"objective: sample {ids[lone[0]]} is alone in its group ({len(lone)} such samples); admission must drop "
            "groups with fewer than 2 samples"
        )
    if len(sizes) == 0 or sizes.min() == 0:
        raise ValueError(f"objective: group numbers are not dense: {len(ids)} samples, sizes {sizes.tolist()[:16]}")
    first = np.empty(len(sizes), dtype=np.int64)
    # In reverse: numpy keeps the last of several assignments to one index, which is the first sample.
    first[of_sample[::-1]] = np.arange(len(of_sample))[::-1]
    return Groups(of_sample=of_sample, sizes=sizes.astype(np.float64), first=first)
