"""The table of a mini-batch's samples, in the order of their ids: the same bits on every rank and
in every run.
"""

import numpy as np
import numpy.typing as npt

from pacs_megatron.contracts import SampleFacts
from pacs_megatron.objectives.shared.lazy import Tensor, torch
from pacs_megatron.objectives.shared.sample_table import SampleTable

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


def build_table(
    facts: SampleFacts,
    rows: IntArray | None = None,
    device: "torch.device | str" = "cpu",
    *,
    whole_groups: bool = True,
) -> SampleTable:
    """The table of some samples in the order of their ids: sums are equal for any order of arrival.

    Args:
        facts: of the whole mini-batch, n samples.
        rows: [m], int64, rows of the samples in `facts`; None: all.
        device: of the table's tensors.
        whole_groups: whether a group of one sample is an error.

    Raises:
        ValueError: group numbers are not dense, or with `whole_groups` a group has one sample (an
            internal error).
    """
    rows = np.arange(facts.num_samples) if rows is None else rows
    ids = np.asarray([facts.ids[row] for row in rows])
    order = rows[np.argsort(ids, kind="stable")]
    numbers, group_of_sample, sizes = np.unique(
        facts.groups[order], return_inverse=True, return_counts=True
    )

    if len(order) == facts.num_samples:
        _check_dense(numbers, len(order))
    if whole_groups:
        _check_not_alone(facts, order, sizes[group_of_sample])

    def to_tensor(values: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values).to(device)

    return SampleTable(
        rows=to_tensor(order),
        labels=to_tensor(facts.labels[order]),
        response_lens=to_tensor(facts.response_lens[order].astype(np.float64)),
        group_of_sample=to_tensor(group_of_sample.astype(np.int64)),
        members=to_tensor(_members(group_of_sample, sizes)),
        num_samples=facts.num_samples,
    )


def by_row(values: Tensor, table: SampleTable) -> Tensor:
    """Values of a table of all samples, in the order of the facts.

    Args:
        values: [m], with m = n.

    Returns:
        [n].
    """
    return torch.empty_like(values).index_copy(0, table.rows, values)


def _check_dense(numbers: IntArray, num_samples: int) -> None:
    """`numbers`: [g], the sorted group numbers of all samples."""
    if len(numbers) == 0 or numbers[-1] != len(numbers) - 1:
        raise ValueError(
            f"objective: group numbers are not dense: {num_samples} samples, groups "
            f"{numbers.tolist()[:16]}"
        )


def _check_not_alone(facts: SampleFacts, order: IntArray, size_of_sample: IntArray) -> None:
    """`size_of_sample`: [m], size of the group of each sample in `order`."""
    alone = np.flatnonzero(size_of_sample < 2)
    if len(alone):
        raise ValueError(
            f"objective: sample {facts.ids[order[alone[0]]]} is alone in its group ({len(alone)} "
            "such samples); admission must drop groups with fewer than 2 samples"
        )


def _members(group_of_sample: IntArray, sizes: IntArray) -> IntArray:
    """The positions of each group's samples.

    Args:
        group_of_sample: [m].
        sizes: [g].

    Returns:
        [g, largest group], int64; smaller groups are padded with m.
    """
    num_samples = len(group_of_sample)
    by_group = np.argsort(group_of_sample, kind="stable")
    group = group_of_sample[by_group]

    ends = np.cumsum(sizes)
    starts = ends - sizes
    place_in_group = np.arange(num_samples) - starts[group]

    members = np.full((len(sizes), sizes.max(initial=1)), num_samples, dtype=np.int64)
    members[group, place_in_group] = by_group
    return members
