"""Progress: one live tqdm bar on a terminal, plain log lines elsewhere."""

import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import Literal, TextIO

from tqdm import tqdm

from pacs_megatron.observability.logs import PROGRESS_LOGGER
from pacs_megatron.observability.metrics import MetricValue
from pacs_megatron.runtime.closing import Closing

logger = logging.getLogger(PROGRESS_LOGGER)

Unit = Literal["step", "sample", "bytes"]
LINE_INTERVAL_S = 5.0
SAMPLES_INTERVAL_S = 8.0
"""Minimum time between two log lines about finished steps, and about sampling."""
REDRAW_S = 0.5
"""Minimum time between two drawings of the bar"""
_BAR_COLUMNS = 10
"""Columns for a bar of 8 letters and its ends; fields that would use them are left out"""
_LABEL_COLUMNS = 16
"""Maximum length of the label on a terminal"""
_DISCARD = open(os.devnull, "w")  # noqa: SIM115  (open until the process ends)
"""Stream of a bar that is not drawn: tqdm still measures the speed."""
_LINE = "{desc} {n_fmt}/{total_fmt}, {rate_fmt}, {remaining} left{postfix}"
_BAR = "{desc} {n_fmt}/{total_fmt} |{bar}| {rate_fmt}, {remaining} left{postfix}"


class Progress(Closing):
    """Shows the progress of a run, its last results, its speed and the time left. For rank 0 only.

    On a terminal it draws one bar, at most every `REDRAW_S`, of the width of the terminal: fields
    that do not fit are left out. Elsewhere it logs a line at the first and the last step and at
    most one per `LINE_INTERVAL_S` between. The log file has these lines in both cases.

    Args:
        label: Start of the line.
        total: Units at the end.
        done: Units before the start.
        unit: What is counted, for the rate.
        stream: Default: stderr.
    """

    def __init__(
        self,
        label: str,
        total: int,
        *,
        done: int = 0,
        unit: Unit = "step",
        stream: TextIO | None = None,
    ) -> None:
        stream = sys.stderr if stream is None else stream
        self._live = stream.isatty()
        self._label = label
        is_long = self._live and len(label) > _LABEL_COLUMNS
        self._last_line = -LINE_INTERVAL_S
        self._last_samples = 0.0
        self._fields: dict[str, float] = {}
        self._phase = ""
        self._bar = _Bar(
            desc=f"{label[: _LABEL_COLUMNS - 1]}…" if is_long else label,
            total=total,
            initial=done,
            unit="B" if unit == "bytes" else unit,
            unit_scale=unit == "bytes",
            file=stream if self._live else _DISCARD,
            bar_format=_BAR,
            smoothing=0.3,  # weight of the newest step in the moving average of the speed
            mininterval=0,
            miniters=0,
            ncols=_columns(stream) if self._live else None,
            nrows=20,  # terminals of containers report 0 rows, and tqdm then draws nothing
        )

    def advance(self, done: int, fields: Mapping[str, float] | None = None) -> None:
        """Reports `done` of `total` units; `fields` (name to value) are shown until the next call
        with fields.
        """
        if fields is not None:
            self._fields = dict(fields)
        self._show(done)
        elapsed = self._elapsed()
        is_complete = self._bar.n >= self._bar.total
        if is_complete or elapsed - self._last_line >= LINE_INTERVAL_S:
            self._last_line = elapsed
            logger.info("%s", self._text(self._label, [*self._field_texts(), self._phase]))

    def phase(self, names: tuple[str, ...]) -> None:
        """Shows the open spans `names`; a callback for `Timer.on_change`."""
        self._phase = " ".join(names)
        self._show(self._bar.n)

    def samples(self, names: tuple[str, ...], done: int, total: int) -> None:
        """Shows the progress of sampling within the open spans `names`: beside the bar, or in
        occasional log lines.
        """
        self.phase((*names, f"{done}/{total}"))
        elapsed = self._elapsed()
        if not self._live and elapsed - self._last_samples >= SAMPLES_INTERVAL_S:
            self._last_samples = elapsed
            logger.info("%s %s/%s %s", self._label, self._bar.n, self._bar.total, self._phase)

    def close(self) -> None:
        """Leaves the bar's last state on the terminal."""
        self.phase(())
        self._bar.close()

    def _field_texts(self) -> list[str]:
        return [f"{name} {format_value(value)}" for name, value in self._fields.items()]

    def _text(self, label: str, texts: list[str]) -> str:
        """The line without a bar, then `texts`."""
        state = {**self._bar.format_dict, "bar_format": _LINE, "ncols": None}
        state |= {"prefix": label, "postfix": _joined(texts)}
        return " ".join(tqdm.format_meter(**state).split())

    def _elapsed(self) -> float:
        """Seconds since the start."""
        return float(self._bar.format_dict["elapsed"])

    def _show(self, done: int) -> None:
        texts = self._field_texts()
        if self._live:
            self._bar.ncols = _columns(self._bar.fp)
            width = self._bar.ncols - len(self._text(self._bar.desc, [])) - _BAR_COLUMNS - len(", ")
            while texts and len(_joined([*texts, self._phase])) > width:
                texts.pop()
        self._bar.set_postfix_str(_joined([*texts, self._phase]), refresh=False)

        if done == self._bar.n:
            self._bar.refresh()
        else:
            self._bar.update(min(done, self._bar.total) - self._bar.n)


class _Bar(tqdm):
    """A bar that is drawn at most every REDRAW_S; a drawing that comes earlier is delayed."""

    _drawn = -REDRAW_S
    _timer: threading.Timer | None = None
    _is_closing = False

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """tqdm's method that draws; the caller has tqdm's lock."""
        wait_s = self._drawn + REDRAW_S - time.monotonic()
        if wait_s <= 0 or self._is_closing:
            self._drawn = time.monotonic()
            return bool(super().display(msg, pos))
        if self._timer is None:
            self._timer = threading.Timer(wait_s, self._draw_late)
            self._timer.daemon = True
            self._timer.start()
        return True

    def _draw_late(self) -> None:
        self._timer = None
        if not self.disable:
            self.refresh()

    def close(self) -> None:
        self._is_closing = True
        if self._timer is not None:
            self._timer.cancel()
        super().close()


def _joined(texts: list[str]) -> str:
    """`a, b` of `a` and `b`; empty texts are left out."""
    return ", ".join(text for text in texts if text)


def _columns(stream: TextIO) -> int:
    """Width of the terminal now; 80 if it is unknown or 0, as in some containers."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except OSError:  # not a terminal, or no descriptor
        return 80


def training_fields(row: Mapping[str, MetricValue]) -> dict[str, float]:
    """Reward (loss in a run without rewards), pass@1 and tokens/s of a row of metrics, where it has
    them.
    """
    fields: dict[str, MetricValue] = {}
    if "reward/mean" in row:
        fields["reward"] = row["reward/mean"]
    else:
        fields["loss"] = row.get("objective/loss")
    fields["pass@1"] = _mean_pass_at_1(row)
    fields["tokens/s"] = row.get("tokens_per_s")
    return {name: value for name, value in fields.items() if value is not None}


def _mean_pass_at_1(row: Mapping[str, MetricValue]) -> float | None:
    """The mean over benchmarks; None if the row has no evaluation."""
    values = []
    for key, value in row.items():
        is_pass_at_1 = key.startswith("eval/") and key.endswith("/pass@1")
        if is_pass_at_1 and value is not None:
            values.append(value)
    return sum(values) / len(values) if values else None


def format_value(value: float) -> str:
    """0.7123 -> `0.712`, 12.345 -> `12.3`, 1234.5 -> `1,234`, 8 -> `8`."""
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3f}"
