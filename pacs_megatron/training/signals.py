"""Stop requests: a signal or the STOP file sets a flag, which the loop and the passes poll."""

import signal
import socket
import threading
import time
from pathlib import Path
from types import FrameType

from pacs_megatron.runtime.processes import JOB_SIGNALS

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
        for number in JOB_SIGNALS:
            signal.signal(number, self._on_signal)
        # Python's handlers do not run while the main thread waits in a collective; a thread notices the signal then.
        self._wakeup, notify = socket.socketpair()
        notify.setblocking(False)
        signal.set_wakeup_fd(notify.detach(), warn_on_full_buffer=False)
        threading.Thread(target=self._listen, name="stop flag", daemon=True).start()

    def _listen(self) -> None:
        while True:
            for number in self._wakeup.recv(64):
                if number in JOB_SIGNALS:
                    self.reason = self.reason or signal.Signals(number).name

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
