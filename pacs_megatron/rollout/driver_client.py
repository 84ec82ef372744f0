"""Rank 0's end of the driver: starts it, asks, waits with a heartbeat, ends it.

A question has a number and its answers bear it, so that what comes for a question that was abandoned is told apart.
"""

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
from pacs_megatron.runtime.environment import VISIBLE_GPUS, visible_gpus

_CLOSE_GRACE_S = 10.0
_POLL_S = 1.0


class DriverClient:
    """One driver process."""

    def __init__(self, run_dir: Path, model_dir: Path, *, timeout_s: float, heartbeat_interval_s: float) -> None:
        self._asked = 0
        self.is_lost = False
        """it has died or does not answer: nothing can be asked any more"""
        self.on_progress: Callable[[int, int], None] = lambda _done, _total: None
        """called with (finished, all) samples of the question that is outstanding"""
        self._timeout_s = timeout_s
        self._heartbeat_s = heartbeat_interval_s
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
                env={
                    **os.environ,
                    VISIBLE_GPUS: ",".join(visible_gpus(os.environ)),  # for servers that the driver starts
                    "CUDA_VISIBLE_DEVICES": "",
                    "OMP_NUM_THREADS": "1",
                },
            )
        theirs.close()
        self._connection = Connection(ours, "rollout driver", timeout_s)

    def send(self, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None) -> None:
        """A question; `reply` instead where the driver has asked back."""
        self._asked += 1
        self.reply(header, arrays)

    def reply(self, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None) -> None:
        """What belongs to the question that is outstanding."""
        self._connection.send({**header, "ask": self._asked}, arrays)

    def abandon(self) -> None:
        """Nobody waits for the outstanding question any more."""
        with contextlib.suppress(errors.RolloutError):  # then it is lost, which the next question will tell
            self.reply({"op": "abandon"})

    def receive(self, on_wait: Callable[[], None] | None = None) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """The next answer; `on_wait` is called every second (or `heartbeat_interval_s`) while it is outstanding.

        The time limit starts anew whenever the driver reports progress. Raises the error that the driver named, or
        RolloutError for a time-out or its death.
        """
        deadline = time.monotonic() + self._timeout_s
        while True:
            while not self._connection.poll(min(self._heartbeat_s, _POLL_S)):
                if time.monotonic() > deadline:
                    self.is_lost = True
                    raise errors.RolloutError(
                        f"the rollout driver has not answered for parallel.control_timeout_s={self._timeout_s:g} s; "
                        "see logs/driver.log in the run's folder"
                    )
                if on_wait is not None:
                    on_wait()
            header, arrays = self._receive()
            if header["ask"] != self._asked:
                continue  # of a question that was abandoned
            if header["kind"] != "progress":
                break
            deadline = time.monotonic() + self._timeout_s
            self.on_progress(header["done"], header["total"])
            if on_wait is not None:
                on_wait()
        if header["kind"] == "error":
            raise errors.named_error(header["type"], header["message"])
        return header, arrays

    def _receive(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        try:
            return self._connection.receive()
        except errors.RolloutError:
            self.is_lost = True
            raise

    def ask(
        self, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """One question, one answer."""
        self.send(header, arrays)
        return self.receive()

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
