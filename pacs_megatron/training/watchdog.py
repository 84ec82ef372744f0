"""Detects a hang before NCCL's timeout ends the job, and reports the phase and the stack of every rank.

Concurrency: a daemon thread in every rank. The main thread reports each phase and each sign of progress. Collectives
release the interpreter lock while they wait, so the thread runs while the main thread is blocked. Every rank decides
alone, without messages from a rank that hangs. Ranks read each other's phases from small files in the run folder.
"""

import faulthandler
import json
import logging
import os
import sys
import threading
import time
from pathlib import Path

from pacs_megatron.errors import ExitCode
from pacs_megatron.runtime.files import write_atomically
from pacs_megatron.runtime.run_folder import HEARTBEAT_FOLDER

logger = logging.getLogger(__name__)
_WRITE_EVERY_S = 10.0
_GRACE_S = 2.0
"""Between the report of a rank and its exit: slower ranks write their reports."""


class Watchdog:
    """Ends this process with exit code 70 after `timeout_s` without progress of the main thread."""

    def __init__(self, run_dir: Path, rank: int, world_size: int, timeout_s: float) -> None:
        self._run_dir = run_dir
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._phase = "start"
        self._since = time.monotonic()
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
        """The main thread entered or left a phase; a callback for `Timer.on_change`."""
        self._phase = " ".join(names) or "between phases"
        self.alive()

    def alive(self) -> None:
        """Progress inside a phase, for example a heartbeat while rank 0 waits for the driver."""
        self._since = time.monotonic()

    def _watch(self) -> None:
        last_write = 0.0
        while not self._stop.wait(min(1.0, self._timeout_s / 4)):
            silent_s = time.monotonic() - self._since
            if silent_s > self._timeout_s:
                self._report(silent_s)
                return
            if time.monotonic() - last_write > _WRITE_EVERY_S:
                self._write()
                last_write = time.monotonic()

    def _write(self) -> None:
        state = {"rank": self._rank, "phase": self._phase, "silent_s": round(time.monotonic() - self._since, 1)}
        write_atomically(self._file, [json.dumps(state).encode()])

    def _report(self, silent_s: float) -> None:
        self._write()
        stack = self._run_dir / "logs" / f"rank{self._rank}.stack"
        stack.parent.mkdir(parents=True, exist_ok=True)
        with stack.open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        time.sleep(_GRACE_S)
        sys.stderr.write(
            f"rank {self._rank}: no progress for {silent_s:.0f} s in phase '{self._phase}' "
            f"(parallel.hang_timeout_s={self._timeout_s:g}); stack in {stack}\n"
        )
        if self._rank == 0:
            for other in range(self._world_size):
                sys.stderr.write(f"  {self._describe(other)}\n")
            write_atomically(self._run_dir / "exit_code", [f"{int(ExitCode.HANG)}\n".encode()])
        sys.stderr.flush()
        os._exit(int(ExitCode.HANG))

    def _describe(self, rank: int) -> str:
        file = self._run_dir / HEARTBEAT_FOLDER / f"rank{rank}.json"
        try:
            state = json.loads(file.read_text())
            age_s = time.time() - file.stat().st_mtime
        except (OSError, ValueError) as error:
            return f"rank {rank}: no heartbeat ({error})"
        return f"rank {rank}: phase '{state['phase']}' for {state['silent_s']:g} s, heartbeat {age_s:.0f} s old"
