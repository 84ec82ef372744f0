"""Metrics of two runs of the same seed, compared bit for bit."""

from collections.abc import Mapping
from pathlib import Path

from pacs_megatron.observability.metrics import MetricsRow, MetricValue, read_metrics
from pacs_megatron.runtime.files import json_line


def strip_times(row: Mapping[str, MetricValue]) -> MetricsRow:
    """`row` without keys that differ between two runs with equal results:
    seconds, rates, memory.
    """
    return {
        k: v
        for k, v in row.items()
        if not k.startswith(("time/", "memory/"))
        and not k.endswith("_per_s")
        and "/seconds_" not in k
    }


def reproducible_bytes(path: Path) -> bytes:
    """`metrics.jsonl` without these keys as bytes, equal for two runs of the same seed."""
    return b"".join(json_line(strip_times(row)) for row in read_metrics(path))
