"""Rank 0's client of the driver: starts the process, sends requests, waits with a heartbeat, ends
the process.

Every request has a number, and its responses repeat it. The client discards responses to an
abandoned request.
"""

import contextlib
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pacs_megatron import errors
from pacs_megatron.contracts.pieces import ToSend
from pacs_megatron.rollout.sample_arrays import Message
from pacs_megatron.rollout.wire import Connection, OnWait
from pacs_megatron.runtime.environment import VISIBLE_GPUS, visible_gpus
from pacs_megatron.runtime.processes import is_stopped
from pacs_megatron.runtime.waiting import report_wait

logger = logging.getLogger(__name__)
_CLOSE_GRACE_S = 10.0
STOPPED_PATIENCE_S = 10.0
"""timeout after a stop request for a driver that SIGSTOP has stopped"""
PATIENCE_S = 60.0
"""timeout after a stop request for any other driver"""
_POLL_S = 1.0


class DriverClient:
    """The driver's process, and the connection to it. One thread uses it."""

    def __init__(self, run_dir: Path, model_dir: Path, *, timeout_s: float) -> None:
        """Starts the driver. `receive` returns its first message, "ready".

        Args:
            run_dir: the run's folder with config.yaml.
            model_dir: the folder with config.json and tokenizer.
            timeout_s: longest wait without a message of the driver, seconds.
        """
        self._number = 0
        self.is_lost = False
        """the driver died or exceeded its timeout; further requests fail"""
        self.on_progress: Callable[[int, int, bool], None] = (
            lambda _done, _total, _waits_for_rewards: None
        )
        """called with the numbers of finished and of all samples, and whether only verdicts are
        missing
        """
        self.should_stop: Callable[[], bool] = lambda: False
        """whether this rank has a stop request"""
        self.notices: list[str] = []
        """lines about the data and about changes since the checkpoint, which rank 0 logs"""
        self._timeout_s = timeout_s

        ours, theirs = socket.socketpair()
        descriptor = theirs.fileno()
        log_dir = run_dir / "logs"
        log_dir.mkdir(parents=True, exist_ok=True)
        environment = {
            **os.environ,
            # For servers that the driver starts; the driver itself uses no GPU.
            VISIBLE_GPUS: ",".join(visible_gpus(os.environ)),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }
        with (log_dir / "driver.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "pacs_megatron.rollout.driver",
                    str(run_dir),
                    str(model_dir),
                    str(descriptor),
                ],
                pass_fds=(descriptor,),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
            )
        theirs.close()
        self._connection = Connection(ours, "rollout driver", timeout_s)

    def call(self, header: Mapping[str, Any], arrays: ToSend | None = None) -> Message:
        """Sends a request and returns its response. Raises the driver's error, or RolloutError."""
        self.send(header, arrays)
        return self.receive()

    def send(
        self, header: Mapping[str, Any], arrays: ToSend | None = None, on_wait: OnWait = None
    ) -> None:
        """Sends a request. `reply` sends data for the open request."""
        self._number += 1
        self.reply(header, arrays, on_wait)

    def reply(
        self, header: Mapping[str, Any], arrays: ToSend | None = None, on_wait: OnWait = None
    ) -> None:
        """Sends data for the open request.

        Calls `on_wait` every second until the driver has read it. With `on_wait` a stop request
        ends the wait only after the driver reads nothing for `_patience_s`.

        Raises RolloutError if the driver is lost, does not read, or has ended.
        """
        if self.is_lost:
            raise errors.RolloutError(
                "the rollout driver is lost; see logs/driver.log in the run's folder"
            )
        start = time.monotonic()

        def check_patience() -> None:
            if time.monotonic() - start > self._patience_s:
                raise errors.RolloutError(
                    f"the rollout driver reads no messages for {self._patience_s:g} s"
                )
            assert on_wait is not None
            on_wait()

        message = {**header, "request": self._number}
        self.is_lost = True  # half a message makes the connection unusable
        self._connection.send(message, arrays, None if on_wait is None else check_patience)
        self.is_lost = False

    def receive(self, on_wait: OnWait = None) -> Message:
        """The response to the open request. Calls `on_wait` every second until it arrives.

        The timeout restarts with every progress report; without `on_wait` a stop request shortens
        it. Raises the driver's error, or RolloutError.
        """

        def reason() -> str:
            # With `on_wait` the caller reports progress.
            is_reported = on_wait is None or is_stopped(self._process.pid)
            return self._described if is_reported else ""

        with report_wait(reason):
            header, arrays = self._wait(on_wait)
        if header["kind"] == "error":
            raise errors.named_error(header["type"], header["message"])
        return header, arrays

    def abandon(self) -> None:
        """Closes the open request. If the driver is lost, the next request raises the error."""
        with contextlib.suppress(errors.RolloutError):
            self.reply({"op": "abandon"})

    def close(self) -> None:
        """Ends the process; safe to call at any time."""
        if self.is_lost:
            self._process.kill()
        elif self._process.poll() is None:
            with contextlib.suppress(errors.RolloutError):  # it is ending already
                self._connection.send({"op": "close"})
        self._connection.close()
        try:
            self._process.wait(_CLOSE_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def _patience_s(self) -> float:
        """Limit of a wait for the driver; shorter after a stop request."""
        if not self.should_stop():
            return self._timeout_s
        patience_s = STOPPED_PATIENCE_S if is_stopped(self._process.pid) else PATIENCE_S
        return min(self._timeout_s, patience_s)

    @property
    def _described(self) -> str:
        """The wait for the driver, for messages."""
        state = ", stopped by SIGSTOP" if is_stopped(self._process.pid) else ""
        return f"for the rollout driver (pid {self._process.pid}{state})"

    def _wait(self, on_wait: OnWait) -> Message:
        """The next message of the open request that is not a progress report."""
        start = time.monotonic()
        while True:
            while not self._connection.poll(_POLL_S):
                self._check_wait(time.monotonic() - start, on_wait)
                if on_wait is not None:
                    on_wait()

            try:
                header, arrays = self._connection.receive()
            except errors.RolloutError:
                self.is_lost = True
                raise
            if header["request"] != self._number:
                continue  # an abandoned request
            if header["kind"] != "progress":
                return header, arrays

            start = time.monotonic()
            self.on_progress(header["done"], header["total"], header["waits_for_rewards"])
            if on_wait is not None:
                on_wait()

    def _check_wait(self, waited_s: float, on_wait: OnWait) -> None:
        """Raises RolloutError after the timeout.

        A stop request shortens it, except with `on_wait`, which handles stop requests.
        """
        limit_s = self._patience_s if on_wait is None else self._timeout_s
        if waited_s > limit_s:
            self.is_lost = True
            raise errors.RolloutError(
                f"waited {waited_s:.0f} s {self._described} "
                f"(parallel.control_timeout_s={self._timeout_s:g}); see logs/driver.log in the "
                "run's folder"
            )
