"""Compares the collectives of the ranks of a traced world: a difference is a hang on GPUs.

NCCL matches the calls of a group by their order alone. So the ranks of a group must call the same
operations on the same number of bytes of the same type in the same order, and every send needs its
receive.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pacs_megatron.workbench.trace.collectives import Collective


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCalls:
    """The calls of one rank."""

    rank: int
    calls: Sequence[Collective]
    has_ended: bool
    """whether the rank came to its end; otherwise it was interrupted, and later calls are unknown
    """


def differences(ranks: Sequence[RankCalls]) -> list[str]:
    """One line for each group whose ranks differ, and for each pair of ranks whose sends do.

    Args:
        ranks: every rank of the world.

    Returns:
        The first difference of each, with the place of both ranks' calls; empty for equal traces.
    """
    return [*_between_groups(ranks), *_between_pairs(ranks)]


def _between_groups(ranks: Sequence[RankCalls]) -> Iterator[str]:
    by_group: dict[tuple[str, tuple[int, ...]], dict[int, list[Collective]]] = defaultdict(dict)
    for each in ranks:
        for call in each.calls:
            if call.peer is None and len(call.ranks) > 1:
                by_group[call.group, call.ranks].setdefault(each.rank, []).append(call)

    ended = {each.rank: each.has_ended for each in ranks}
    for (_, members), calls in sorted(by_group.items()):
        first = members[0]
        for rank in members[1:]:
            pair = (calls.get(first, []), calls.get(rank, []))
            line = _first_difference((first, rank), pair, ended)
            if line is not None:
                yield f"group of ranks {list(members)}: {line}"
                break


def _between_pairs(ranks: Sequence[RankCalls]) -> Iterator[str]:
    sent: dict[tuple[int, int], list[Collective]] = defaultdict(list)
    received: dict[tuple[int, int], list[Collective]] = defaultdict(list)
    for each in ranks:
        for call in each.calls:
            if call.peer is None:
                continue
            if call.name == "send":
                sent[each.rank, call.peer].append(call)
            else:
                received[call.peer, each.rank].append(call)

    ended = {each.rank: each.has_ended for each in ranks}
    for pair in sorted({*sent, *received}):
        line = _first_difference(pair, (sent[pair], received[pair]), ended)
        if line is not None:
            yield f"from rank {pair[0]} to rank {pair[1]}: {line}"


def _first_difference(
    ranks: tuple[int, int],
    calls: tuple[Sequence[Collective], Sequence[Collective]],
    ended: Mapping[int, bool],
) -> str | None:
    """The first call in which the ranks differ; None if there is none."""
    for number in range(max(len(calls[0]), len(calls[1]))):
        descriptions = []
        keys: list[tuple[object, ...] | None] = []
        for rank, of_rank in zip(ranks, calls, strict=True):
            if number < len(of_rank):
                call = of_rank[number]
                keys.append(call.kind)
                descriptions.append(
                    f"rank {rank} {call.name} of {call.num_bytes:,} bytes {call.dtype} at "
                    f"{call.place} ({call.phase})"
                )
            elif not ended[rank]:
                return None
            else:
                keys.append(None)
                descriptions.append(f"rank {rank} nothing more")
        if keys[0] != keys[1]:
            return f"call {number + 1}: " + "; ".join(descriptions)
    return None
