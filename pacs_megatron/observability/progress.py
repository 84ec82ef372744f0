"""Progress: one live bar on a terminal, plain log lines elsewhere."""

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TextIO

from tqdm import tqdm

from pacs_megatron.observability.logs import PROGRESS_LOGGER, is_terminal
from pacs_megatron.observability.metrics import MetricValue

logger = logging.getLogger(PROGRESS_LOGGER)

Unit = Literal["step", "bytes"]
_RATE_WEIGHT = 0.3
"""Weight of the newest step in the moving average that the time left is computed from."""
SAMPLES_INTERVAL_S = 30.0
"""Between two log lines about sampling, where there is no bar."""
_ROWS = 20
_FALLBACK_COLUMNS = 80
_BAR = "{desc} |{bar}| {postfix}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Console:
    """Where progress is drawn, and how often a line is logged where no bar can be."""

    stream: TextIO = field(default_factory=lambda: sys.stderr)
    interval_s: float = 5.0
    clock: Callable[[], float] = time.perf_counter


class Progress:
    """Shows how far a run is, what it reached, and the time left.

    On a terminal one bar, redrawn at every call; elsewhere a log line at the first and last step and at most one
    every `interval_s` between. The log file gets those lines in both cases. Use it on rank 0 only, or pass
    `enabled=False` on the others: then nothing is shown.
    """

    def __init__(
        self,
        label: str,
        total: int,
        *,
        done: int = 0,
        unit: Unit = "step",
        enabled: bool = True,
        console: Console | None = None,
    ) -> None:
        console = Console() if console is None else console
        self._label = label
        self._total = total
        self._done = done
        self._unit = unit
        self._enabled = enabled
        self._interval_s = console.interval_s
        self._clock = console.clock
        self._last_advance = console.clock()
        self._last_line: float | None = None
        self._last_samples = console.clock()
        self._units_per_s: float | None = None
        self._fields: dict[str, float] = {}
        self._phase = ""
        self._bar: Any = None
        if enabled and is_terminal(console.stream):
            # The height is given because tqdm draws nothing in a terminal that says it has none, as containers' do.
            columns = _columns(console.stream)
            self._bar = tqdm(
                total=total, initial=done, file=console.stream, bar_format=_BAR, ncols=columns, nrows=_ROWS
            )
            self._draw()

    def advance(self, done: int, fields: Mapping[str, float] | None = None) -> None:
        """`done` units of `total` are finished; `fields` (name to value) stay shown until they are replaced."""
        now = self._clock()
        self._measure(done - self._done, now - self._last_advance)
        self._done, self._last_advance = done, now
        self._fields.update(fields or {})
        if not self._enabled:
            return
        due = self._last_line is None or now - self._last_line >= self._interval_s
        if due or done >= self._total:
            self._last_line = now
            logger.info("%s %s", self._head(), self._tail())
        if self._bar is not None:
            self._bar.n = min(done, self._total)
            self._draw()

    def phase(self, names: tuple[str, ...] | str) -> None:
        """Show what is going on inside the step; fits `Timer.on_change`, or takes text (`rollout 512/8192`)."""
        self._phase = names if isinstance(names, str) else " ".join(names)
        if self._bar is not None:
            self._draw()

    def samples(self, names: tuple[str, ...], done: int, total: int) -> None:
        """How far sampling is within the open spans `names`: beside the bar, or rarely a log line."""
        self.phase(" ".join([*names, f"{done}/{total}"]))
        now = self._clock()
        if self._enabled and self._bar is None and now - self._last_samples >= SAMPLES_INTERVAL_S:
            self._last_samples = now
            logger.info("%s %s", self._head(), self._phase)

    def close(self) -> None:
        """Leave the bar's last state on the terminal."""
        if self._bar is not None:
            self._phase = ""
            self._draw()
            self._bar.close()
            self._bar = None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def seconds_left(self) -> float | None:
        """From a moving average of the last units' speed; None before the first one."""
        if self._units_per_s is None:
            return None
        return (self._total - self._done) / self._units_per_s

    def _measure(self, units: int, seconds: float) -> None:
        if units <= 0 or seconds <= 0:
            return
        rate = units / seconds
        old = rate if self._units_per_s is None else self._units_per_s
        # Averaged over seconds per unit: one slow step (an evaluation) must count by its time.
        self._units_per_s = 1.0 / (_RATE_WEIGHT / rate + (1.0 - _RATE_WEIGHT) / old)

    def _head(self) -> str:
        if self._unit == "bytes":
            return f"{self._label} {self._done / 1e9:.2f}/{self._total / 1e9:.2f} GB"
        return f"{self._label} {self._done}/{self._total}"

    def _tail(self) -> str:
        parts = [f"{name} {format_value(value)}" for name, value in self._fields.items()]
        if self._unit == "bytes" and self._units_per_s is not None:
            parts.append(f"{self._units_per_s / 1e9:.2f} GB/s")
        left = self.seconds_left
        if left is not None and self._done < self._total:
            parts.append(f"left {format_duration(left)}")
        return "  ".join(parts)

    def _draw(self) -> None:
        tail = self._tail()
        self._bar.set_description_str(self._head(), refresh=False)
        self._bar.set_postfix_str("  ".join(part for part in (tail, self._phase) if part), refresh=False)
        self._bar.ncols = _columns(self._bar.fp)
        self._bar.refresh()


def _columns(stream: TextIO) -> int:
    """Width of the terminal now. A container's may say 0, on which tqdm would draw nothing."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or _FALLBACK_COLUMNS
    except OSError:  # no descriptor, or none of a terminal
        return _FALLBACK_COLUMNS


def training_fields(row: Mapping[str, MetricValue]) -> dict[str, float]:
    """Returns reward (loss in a run without rewards), pass@1 and tokens/s of a row of metrics, where it has them."""
    fields: dict[str, float] = {}
    name, key = ("reward", "reward/mean") if "reward/mean" in row else ("loss", "objective/loss")
    value = row.get(key)
    if value is not None:
        fields[name] = value
    passed = [v for k, v in row.items() if k.startswith("eval/") and k.endswith("/pass@1") and v is not None]
    if passed:
        fields["pass@1"] = sum(passed) / len(passed)  # the mean over benchmarks
    rate = row.get("tokens_per_s")
    if rate is not None:
        fields["tokens/s"] = rate
    return fields


def format_value(value: float) -> str:
    """0.7123 -> `0.712`, 12.345 -> `12.3`, 1234.5 -> `1,234`, 8 -> `8`."""
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3f}"


def format_duration(seconds: float) -> str:
    """`45s`, `3m05s`, `2h07m`, `3d04h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes, second = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}m{second:02d}s"
    hours, minute = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}h{minute:02d}m"
    days, hour = divmod(hours, 24)
    return f"{days}d{hour:02d}h"
