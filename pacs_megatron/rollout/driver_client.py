"""Rank 0's end of the driver: starts it, asks, waits with a heartbeat, ends it."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pacs_megatron import errors
from pacs_megatron.rollout.wire import Connection

_CLOSE_GRACE_S = 10.0
_POLL_S = 1.0


class DriverClient:
    """One driver process."""

    def __init__(self, run_dir: Path, model_dir: Path, *, timeout_s: float, heartbeat_s: float) -> None:
        self._timeout_s = timeout_s
        self._heartbeat_s = heartbeat_s
        ours, theirs = socket.socketpair()
        log_dir = run_dir / "logs"
        log_dir.mkdir(parents=True, exist_ok=True)
        with (log_dir / "driver.log").open("ab") as log:
            command = ["pacs_megatron.rollout.driver", str(run_dir), str(model_dir), str(theirs.fileno())]
            self._process = subprocess.Popen(
                [sys.executable, "-m", *command],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            )
        theirs.close()
        self._connection = Connection(ours, "rollout driver")

    def send(self, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None) -> None:
        self._connection.send(header, arrays)

    def receive(self, on_wait: Callable[[], None] | None = None) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """The next answer; `on_wait` is called every second (or `heartbeat_s`) while it is outstanding.

        Raises the error that the driver named, or RolloutError for a time-out or its death.
        """
        deadline = time.monotonic() + self._timeout_s
        while not self._connection.poll(min(self._heartbeat_s, _POLL_S)):
            if time.monotonic() > deadline:
                raise errors.RolloutError(
                    f"the rollout driver has not answered for parallel.control_timeout_s={self._timeout_s:g} s; "
                    "see logs/driver.log in the run's folder"
                )
            if on_wait is not None:
                on_wait()
        header, arrays = self._connection.receive()
        if header["kind"] == "error":
            raise named_error(header["type"], header["message"])
        return header, arrays

    def ask(self, header: Mapping[str, Any]) -> dict[str, Any]:
        """One question, one answer without arrays."""
        self.send(header)
        return self.receive()[0]

    def close(self) -> None:
        """End the process; safe to call at any time."""
        if self._process.poll() is None:
            with contextlib.suppress(errors.RolloutError):  # it is on its way out already
                self._connection.send({"op": "close"})
        self._connection.close()
        try:
            self._process.wait(_CLOSE_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def named_error(name: str, message: str) -> errors.PacsError:
    """The PacsError of that name: an error of another process, raised here."""
    kinds: list[type[errors.PacsError]] = [errors.PacsError, *errors.PacsError.__subclasses__()]
    return next((kind for kind in kinds if kind.__name__ == name), errors.PacsError)(message)
