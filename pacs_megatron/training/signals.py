"""Stop requests: a signal or the STOP file sets a flag, which the loop and the passes poll."""

import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

from pacs_megatron.runtime.processes import JOB_SIGNALS

STOP_FILE = "STOP"
"""File in the run folder, created by `cancel --save`, or by a batch script whose signals do not
reach the ranks.
"""
FILE_CHECK_S = 1.0
"""Seconds between two checks of the file: ranks poll at every micro-batch, and the file system is
shared.
"""


class StopFlag:
    """Set by SIGTERM, SIGINT or SIGUSR1, or by the stop file."""

    def __init__(self, run_dir: Path) -> None:
        self._file = run_dir / STOP_FILE
        self._next_check = 0.0
        self._end_now: Callable[[str], None] | None = None
        self.reason = ""
        """signal or file of the stop request; empty without one"""

    def install(
        self, end_now: Callable[[str], None] | None = None, *, with_file: bool = False
    ) -> None:
        """Handles the signals in this process. A second SIGINT raises KeyboardInterrupt.

        Args:
            end_now: until `defer`, a thread calls it with the reason of a stop request: there is
                nothing to save yet.
            with_file: whether the thread also checks the file; for rank 0, which removes the file
                of an earlier attempt.
        """
        self._end_now = end_now
        self._with_file = with_file
        for number in JOB_SIGNALS:
            signal.signal(number, self._on_signal)

        # Python runs no handler while the main thread waits in a collective, so a thread reads the
        # signal.
        self._wakeup, notify = socket.socketpair()
        self._wakeup.settimeout(FILE_CHECK_S)
        notify.setblocking(False)
        signal.set_wakeup_fd(notify.detach(), warn_on_full_buffer=False)
        threading.Thread(target=self._listen, name="stop flag", daemon=True).start()

    def defer(self) -> None:
        """Makes later stop requests only set the flag, because the run has a state to save."""
        self._end_now = None

    def is_set(self) -> bool:
        """Whether there is a stop request. Checks the file at most once a second."""
        if not self.reason and time.monotonic() >= self._next_check:
            if self._file.exists():
                self.reason = f"file {STOP_FILE}"
            self._next_check = time.monotonic() + FILE_CHECK_S
        return bool(self.reason)

    def _listen(self) -> None:
        while True:
            numbers = b""
            with suppress(TimeoutError):
                numbers = self._wakeup.recv(64)
            for number in numbers:
                if number in JOB_SIGNALS and not self.reason:
                    self.reason = signal.Signals(number).name

            end_now = self._end_now
            if end_now is None:
                continue
            if self.reason or (self._with_file and self.is_set()):
                end_now(self.reason)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.reason = signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
