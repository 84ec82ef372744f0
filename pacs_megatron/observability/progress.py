"""Progress: one live tqdm bar on a terminal, plain log lines elsewhere."""

import logging
import os
import sys
from collections.abc import Mapping
from typing import Literal, TextIO

from tqdm import tqdm

from pacs_megatron.observability.logs import PROGRESS_LOGGER
from pacs_megatron.observability.metrics import MetricValue
from pacs_megatron.runtime.closing import Closing

logger = logging.getLogger(PROGRESS_LOGGER)

Unit = Literal["step", "bytes"]
LINE_INTERVAL_S = 5.0
SAMPLES_INTERVAL_S = 8.0
"""Minimum time between two log lines about finished steps, and about sampling."""
_DISCARD = open(os.devnull, "w")  # noqa: SIM115  (open until the process ends)
"""Stream of a bar that is not drawn: tqdm still measures the speed."""
_LINE = "{desc} {n_fmt}/{total_fmt}, {rate_fmt}, {remaining} left{postfix}"
_BAR = "{desc} {n_fmt}/{total_fmt} |{bar}| {rate_fmt}, {remaining} left{postfix}"


class Progress(Closing):
    """Shows the progress of a run, its last results, its speed and the time left. For rank 0 only.

    On a terminal it draws one bar and updates it at every call. Elsewhere it logs a line at the
    first and the last step and at most one per `LINE_INTERVAL_S` between. The log file has these
    lines in both cases.

    Args:
        label: Start of the line.
        total: Units at the end.
        done: Units before the start.
        unit: `step` or `bytes`.
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
        self._last_line = -LINE_INTERVAL_S
        self._last_samples = 0.0
        self._fields: dict[str, float] = {}
        self._phase = ""
        self._bar = tqdm(
            desc=label,
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
        """Reports `done` of `total` units; `fields` (name to value) are shown until they are
        replaced.
        """
        self._fields.update(fields or {})
        self._show(done)
        elapsed = self._elapsed()
        is_complete = self._bar.n >= self._bar.total
        if is_complete or elapsed - self._last_line >= LINE_INTERVAL_S:
            self._last_line = elapsed
            state = {**self._bar.format_dict, "bar_format": _LINE, "ncols": None}
            text = tqdm.format_meter(**state)
            logger.info("%s", " ".join(text.split()))

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
            logger.info("%s %s/%s %s", self._bar.desc, self._bar.n, self._bar.total, self._phase)

    def close(self) -> None:
        """Leaves the bar's last state on the terminal."""
        self.phase(())
        self._bar.close()

    def _elapsed(self) -> float:
        """Seconds since the start."""
        return float(self._bar.format_dict["elapsed"])

    def _show(self, done: int) -> None:
        texts = [f"{name} {format_value(value)}" for name, value in self._fields.items()]
        if self._phase:
            texts.append(self._phase)
        self._bar.set_postfix_str(", ".join(texts), refresh=False)

        if self._live:
            self._bar.ncols = _columns(self._bar.fp)
        if done == self._bar.n:
            self._bar.refresh()
        else:
            self._bar.update(min(done, self._bar.total) - self._bar.n)


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
