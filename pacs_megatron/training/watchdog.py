"""Detects a hang before NCCL's timeout ends the job, and reports the phase and the stack of every
rank.

torch's own watchdogs cover NCCL calls only, and faulthandler's timer reports neither phases nor
other ranks.

Concurrency: every rank has a daemon thread. The main thread reports phases and progress to it. Each
rank decides alone, because a rank that hangs sends no message. Ranks read each other's phases from
small files in the run folder.
"""

import faulthandler
import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pacs_megatron.checkpoint.names import describe_newest
from pacs_megatron.errors import DataError, ExitCode
from pacs_megatron.observability.logs import PROGRESS_LOGGER
from pacs_megatron.runtime.files import write_atomically
from pacs_megatron.runtime.json_reader import read_object
from pacs_megatron.runtime.run_folder import HEARTBEAT_FOLDER, write_exit_code
from pacs_megatron.runtime.waiting import NOTICE_S, next_notice_s

logger = logging.getLogger(__name__)
_WRITE_EVERY_S = 10.0
_NOTICE_EVERY_S = 10.0
_LEAD_SHARE = 0.95
"""Share of the lead before the watchdog ends a rank; the report and the exit use the rest."""
_GRACE_S = 2.0
"""Time between a rank's report and its exit, in which slower ranks write their reports."""


class Watchdog:
    """Ends this process with exit code 70 after `timeout_s` without progress of the main thread.

    `start` starts its thread, `close` ends it.
    """

    def __init__(
        self,
        run_dir: Path,
        rank: int,
        world_size: int,
        timeout_s: float,
        stop_reason: Callable[[], str] = str,
        lead_s: float = math.inf,
    ) -> None:
        """
        Args:
            run_dir: the run's folder, for heartbeats and stacks.
            rank: this rank.
            world_size: number of ranks.
            timeout_s: longest time without progress, seconds.
            stop_reason: returns the reason of this rank's stop request, or ""; the thread calls it.
            lead_s: seconds between a stop request and the end of the job; the watchdog ends a rank
                that has not saved by then.
        """
        self._run_dir = run_dir
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._stop_reason = stop_reason
        self._lead_s = lead_s * _LEAD_SHARE
        self._stop_since: float | None = None
        self._next_notice = 0.0
        self._phase = "start"
        self._phase_since = time.monotonic()
        self._next_phase_notice_s = NOTICE_S
        self._last_progress = time.monotonic()
        self._stop = threading.Event()
        self._file = run_dir / HEARTBEAT_FOLDER / f"rank{rank}.json"
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        self._write()
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def phase(self, names: tuple[str, ...]) -> None:
        """Records that the main thread entered or left a phase; `Timer.on_change` calls it."""
        self._phase = " ".join(names) or "between phases"
        self._phase_since = time.monotonic()
        self._next_phase_notice_s = NOTICE_S
        self.alive()

    def alive(self) -> None:
        """Records progress of the main thread."""
        self._last_progress = time.monotonic()

    def _watch(self) -> None:
        last_write = 0.0
        while not self._stop.wait(min(1.0, self._timeout_s / 4)):
            silent_s = time.monotonic() - self._last_progress
            if silent_s > self._timeout_s:
                self._end(
                    f"no progress for {silent_s:.0f} s",
                    f"parallel.hang_timeout_s={self._timeout_s:g}",
                )
                return

            self._notice_phase()
            stopping_s = self._notice_stop(silent_s)
            if stopping_s > self._lead_s:
                self._end(
                    f"not saved {stopping_s:.0f} s after {self._stop_reason()}",
                    f"resources.signal_lead_s; {describe_newest(self._run_dir)}",
                )
                return

            if time.monotonic() - last_write > _WRITE_EVERY_S:
                self._write()
                last_write = time.monotonic()

    def _notice_phase(self) -> None:
        """Logs a long phase on rank 0, for output without a live progress bar."""
        phase_s = time.monotonic() - self._phase_since
        if self._rank == 0 and phase_s > self._next_phase_notice_s:
            self._next_phase_notice_s = phase_s + next_notice_s(phase_s)
            progress_logger = logging.getLogger(PROGRESS_LOGGER)
            progress_logger.info("in phase '%s' for %.0f s", self._phase, phase_s)

    def _notice_stop(self, silent_s: float) -> float:
        """Seconds since the stop request; 0 without one.

        Rank 0 logs the phase that delays the exit every 10 s.
        """
        now = time.monotonic()
        reason = self._stop_reason()
        if not reason:
            return 0.0

        if self._stop_since is None:
            self._stop_since = now
            self._next_notice = now + _NOTICE_EVERY_S
        since_s = now - self._stop_since
        if self._rank == 0 and now >= self._next_notice:
            self._next_notice = now + _NOTICE_EVERY_S
            state = f"still in phase '{self._phase}', no progress for {silent_s:.0f} s"
            logger.warning(
                "%s %.0f s ago: %s; %s", reason, since_s, state, describe_newest(self._run_dir)
            )
        return since_s

    def _write(self) -> None:
        """Writes this rank's heartbeat."""
        state = {
            "rank": self._rank,
            "phase": self._phase,
            "silent_s": round(time.monotonic() - self._last_progress, 1),
        }
        with suppress(OSError):  # a full disk must not end this thread
            write_atomically(self._file, [json.dumps(state).encode()])

    def _end(self, reason: str, limit: str) -> None:
        """Writes the stack of this rank, on rank 0 the phases of all, and ends the process."""
        self._write()
        stack = self._run_dir / "logs" / f"rank{self._rank}.stack"
        with suppress(OSError):
            stack.parent.mkdir(parents=True, exist_ok=True)
            with stack.open("w") as file:
                faulthandler.dump_traceback(file, all_threads=True)

        time.sleep(_GRACE_S)
        sys.stderr.write(
            f"rank {self._rank}: {reason} in phase '{self._phase}' ({limit}); stack in {stack}\n"
        )
        if self._rank == 0:
            for rank in range(self._world_size):
                sys.stderr.write(f"  {self._describe(rank)}\n")
            write_exit_code(self._run_dir, ExitCode.HANG)
        sys.stderr.flush()
        os._exit(int(ExitCode.HANG))

    def _describe(self, rank: int) -> str:
        """The last heartbeat of a rank."""
        file = self._run_dir / HEARTBEAT_FOLDER / f"rank{rank}.json"
        try:
            state = read_object(file)
            phase = state["phase"]
            silent_s = float(state["silent_s"])
            age_s = time.time() - file.stat().st_mtime
        except (DataError, OSError, KeyError, TypeError, ValueError) as error:
            return f"rank {rank}: no heartbeat ({error})"
        return f"rank {rank}: phase '{phase}' for {silent_s:g} s, heartbeat {age_s:.0f} s old"
