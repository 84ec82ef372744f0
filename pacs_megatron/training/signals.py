"""A signal sets a flag; the loop and the passes read it often and turn it into a decision for all ranks."""

import signal
import time
from pathlib import Path
from types import FrameType

STOP_FILE = "STOP"
"""A batch script touches `<run>/STOP` where signals do not reach the ranks."""
FILE_CHECK_S = 1.0
"""Between two looks at the file: every rank asks at every micro-batch, and the file system is shared."""


class StopFlag:
    """Set by SIGTERM, SIGINT or SIGUSR1, or by the stop file."""

    def __init__(self, run_dir: Path) -> None:
        self._file = run_dir / STOP_FILE
        self._next_look = 0.0
        self.reason = ""

    def install(self) -> None:
        """Handle the signals in this process. A second SIGINT interrupts at once."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.reason = signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def is_set(self) -> bool:
        """Whether this rank was asked to stop."""
        if not self.reason and time.monotonic() >= self._next_look:
            if self._file.exists():
                self.reason = f"file {STOP_FILE}"
            self._next_look = time.monotonic() + FILE_CHECK_S
        return bool(self.reason)

    def clear_file(self) -> None:
        """At the start of an attempt: an old stop file does not count."""
        self._file.unlink(missing_ok=True)
