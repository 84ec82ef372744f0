"""A rank with all of its layers, from traces of the same rank with few layers.

Every figure of a trace is a constant and a part that is proportional to the layers, so two traces
determine a line. The peak of a phase is the largest of several such lines (`Ledger.moments`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pacs_megatron.contracts.layout import Layout
from pacs_megatron.workbench.trace.rank import TraceRequest

_PARTS_OF_UPDATE = ("update", "forward and backward", "optimizer")
UPDATE_PHASES = (*_PARTS_OF_UPDATE, *(f"critic: {name}" for name in _PARTS_OF_UPDATE))
"""phases that a trace runs once for each update"""
TrafficKey = tuple[str, str, str, tuple[int, ...], str]
"""phase, group, operation, ranks, backend"""
_LAYERS = 2
"""layers of a rank in the smaller trace; the larger one has twice as many"""


@dataclass(frozen=True, slots=True)
class Peak:
    """The largest sum of live bytes of a phase."""

    phase: str
    num_bytes: float
    by_part: Mapping[str, float]
    part: str
    """of the model, whose operation allocated last"""
    operation: str


@dataclass(frozen=True, slots=True)
class GroupTraffic:
    """Collectives of one kind in one group, of one update."""

    phase: str
    group: str
    operation: str
    calls: float
    num_bytes: float
    """of all buffers"""
    ranks: tuple[int, ...]
    backend: str


@dataclass(frozen=True, slots=True)
class RankEstimate:
    """One rank of a pipeline stage."""

    stage: int
    rank: int
    num_layers: int
    traced_layers: tuple[int, int]
    num_microbatches: int
    peaks: tuple[Peak, ...]
    """by phase"""
    live_after: Mapping[str, float]
    flops: Mapping[str, float]
    """of one update, by phase"""
    traffic: tuple[GroupTraffic, ...]
    work: Mapping[tuple[str, str, float, float], float]
    """number of kernels of one update by (phase, operation, FLOPs, bytes)"""
    syncs: Mapping[tuple[str, str, str], float]
    """host synchronisations of one update by (phase, operation, place)"""

    @property
    def peak(self) -> Peak:
        """The largest of all phases."""
        return max(self.peaks, key=lambda peak: peak.num_bytes)


def kinds_of_stages(layout: Layout) -> list[int]:
    """The first, a middle and the last stage of the pipeline."""
    return sorted({0, layout.pp // 2, layout.pp - 1})


def layers_to_trace(layout: Layout) -> tuple[int, int]:
    """Layers of a rank in both traces; a multiple of its virtual stages."""
    chunks = layout.vpp or 1
    smaller = chunks * -(-_LAYERS // chunks)
    return smaller, 2 * smaller


def extrapolate(
    stage: int, num_layers: int, request: TraceRequest, traces: tuple[Any, Any], layout: Layout
) -> RankEstimate:
    """The rank with all layers.

    Args:
        stage: of the pipeline.
        num_layers: of the stage.
        request: of the traces.
        traces: with fewer and with more layers.
        layout: of the ranks.
    """
    few, many = layers_to_trace(layout)
    smaller, larger = traces

    def at_all_layers(first: float, second: float) -> float:
        return first + (second - first) * (num_layers - few) / (many - few)

    def line(read: Callable[[Any], Mapping[Any, float]]) -> dict[Any, float]:
        values = (read(smaller), read(larger))
        keys = dict.fromkeys([*values[0], *values[1]])
        return {
            key: at_all_layers(values[0].get(key, 0.0), values[1].get(key, 0.0)) for key in keys
        }

    def per_update(values: Mapping[Any, float]) -> dict[Any, float]:
        return {key: value / _times(key, request.updates) for key, value in values.items()}

    calls = per_update(line(_calls))
    sent = per_update(line(_sent))
    traffic = []
    for key, number in calls.items():
        phase, group, operation, ranks, backend = key
        traffic.append(GroupTraffic(phase, group, operation, number, sent[key], ranks, backend))
    return RankEstimate(
        stage=stage,
        rank=request.rank,
        num_layers=num_layers,
        traced_layers=(few, many),
        num_microbatches=larger["num_microbatches"],
        peaks=_peaks(smaller, larger, at_all_layers),
        live_after=line(lambda trace: trace["live_after"]),
        flops=per_update(line(lambda trace: trace["flops"])),
        traffic=tuple(traffic),
        work=per_update(line(_work)),
        syncs=per_update(line(_syncs)),
    )


def with_highest_peaks(estimate: RankEstimate, other: RankEstimate) -> RankEstimate:
    """The estimate with the higher peak of each phase.

    Args:
        estimate: of a rank.
        other: of the same rank in another update.
    """
    peaks = {peak.phase: peak for peak in estimate.peaks}
    for peak in other.peaks:
        known = peaks.get(peak.phase)
        if known is None or known.num_bytes < peak.num_bytes:
            peaks[peak.phase] = peak
    return replace(estimate, peaks=tuple(peaks.values()))


def _times(key: str | tuple[Any, ...], updates: int) -> int:
    """How often a trace ran the phase of a key: a score pass once, the update's phases often."""
    phase = key if isinstance(key, str) else key[0]
    return updates if phase in UPDATE_PHASES else 1


def _peaks(
    smaller: Any, larger: Any, at_all_layers: Callable[[float, float], float]
) -> tuple[Peak, ...]:
    """The largest line of each phase."""
    lines: dict[str, Peak] = {}
    before = {_key(moment): moment for moment in smaller["moments"]}
    for after in larger["moments"]:
        first = before.get(_key(after))
        if first is None:
            continue
        num_bytes = at_all_layers(first["num_bytes"], after["num_bytes"])
        highest = lines.get(after["phase"])
        if highest is not None and highest.num_bytes >= num_bytes:
            continue
        parts = dict.fromkeys([*first["by_part"], *after["by_part"]])
        by_part = {
            part: at_all_layers(first["by_part"].get(part, 0), after["by_part"].get(part, 0))
            for part in parts
        }
        lines[after["phase"]] = Peak(
            after["phase"], num_bytes, by_part, after["part"], after["operation"]
        )
    return tuple(lines.values())


def _key(moment: Mapping[str, Any]) -> tuple[str, str, str]:
    return moment["phase"], moment["part"], moment["operation"]


def _calls(trace: Any) -> Counter[TrafficKey]:
    counted: Counter[TrafficKey] = Counter()
    for call in trace["collectives"]:
        counted[_traffic_key(trace, call)] += 1
    return counted


def _sent(trace: Any) -> Counter[TrafficKey]:
    counted: Counter[TrafficKey] = Counter()
    for call in trace["collectives"]:
        counted[_traffic_key(trace, call)] += call["num_bytes"]
    return counted


def _traffic_key(trace: Any, call: Mapping[str, Any]) -> TrafficKey:
    ranks = list(call["ranks"])
    names = [name for name, members in trace["groups"].items() if members == ranks]
    name = names[0] if names else "a group"
    group = f"{name} ({len(ranks)} ranks)"
    return call["phase"], group, call["operation"].strip("_"), tuple(ranks), call["backend"]


def _work(trace: Any) -> Counter[tuple[str, str, float, float]]:
    counted: Counter[tuple[str, str, float, float]] = Counter()
    for phase, operation, flops, num_bytes, count in trace["work"]:
        counted[phase, operation, flops, num_bytes] += count
    return counted


def _syncs(trace: Any) -> dict[tuple[str, str, str], float]:
    return {
        (sync["phase"], sync["operation"], sync["place"]): sync["count"]
        for sync in trace["host_syncs"]
    }
