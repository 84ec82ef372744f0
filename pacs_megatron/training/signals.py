"""Stop requests: a signal or the STOP file sets a flag, which the loop and the passes poll."""

import signal
import time
from pathlib import Path
from types import FrameType

STOP_FILE = "STOP"
"""A batch script creates `<run>/STOP` where signals do not reach the ranks."""
FILE_CHECK_S = 1.0
"""Seconds between two checks of the file: ranks poll at every micro-batch, and the file system is shared."""


class StopFlag:
    """Set by SIGTERM, SIGINT or SIGUSR1, or by the stop file."""

    def __init__(self, run_dir: Path) -> None:
        self._file = run_dir / STOP_FILE
        self._next_look = 0.0
        self.reason = ""

    def install(self) -> None:
        """Handles the signals in this process. A second SIGINT raises KeyboardInterrupt."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.reason = signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def is_set(self) -> bool:
        """Whether this rank has a stop request."""
        if not self.reason and time.monotonic() >= self._next_look:
            if self._file.exists():
                self.reason = f"file {STOP_FILE}"
            self._next_look = time.monotonic() + FILE_CHECK_S
        return bool(self.reason)

    def clear_file(self) -> None:
        """Removes the file of an earlier attempt."""
        self._file.unlink(missing_ok=True)
