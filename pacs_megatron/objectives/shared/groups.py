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
    """The table of the samples `rows` (None: all) in the order of their ids: sums are equal for any
    order of arrival.

    Raises ValueError (an internal error) if group numbers are not dense, or with `whole_groups` if
    a group has one sample.
    """
    rows = np.arange(facts.num_samples) if rows is None else rows
    order = rows[np.argsort(np.asarray(facts.ids)[rows], kind="stable")]
    numbers, of_sample, sizes = np.unique(
        facts.groups[order], return_inverse=True, return_counts=True
    )
    if len(order) == facts.num_samples and (len(numbers) == 0 or numbers[-1] != len(numbers) - 1):
        raise ValueError(
            f"objective: group numbers are not dense: {len(order)} samples, groups "
            f"{numbers.tolist()[:16]}"
        )
    lone = np.flatnonzero(sizes[of_sample] < 2)
    if whole_groups and len(lone):
        raise ValueError(
            f"objective: sample {facts.ids[order[lone[0]]]} is alone in its group ({len(lone)} "
            "such samples); admission "
            "must drop groups with fewer than 2 samples"
        )
    by_group = np.argsort(of_sample, kind="stable")
    ends = np.cumsum(sizes)
    members = np.full((len(sizes), sizes.max(initial=1)), len(order), dtype=np.int64)
    members[of_sample[by_group], np.arange(len(order)) - (ends - sizes)[of_sample[by_group]]] = (
        by_group
    )

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
