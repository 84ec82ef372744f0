"""torchrun with readable ends: `python -m pacs_megatron.launch.agent <torchrun arguments>`.

torchrun itself exits 1 with a traceback whatever its ranks said, and dies on SIGUSR1. This runs the same program, passes
SIGUSR1 on to the ranks, prints one line about a failed rank, and ends with the exit code of the first rank that failed.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
from collections.abc import Sequence
from types import FrameType

import psutil  # type: ignore[import-untyped]

from pacs_megatron.runtime.processes import die_with_parent


def main(arguments: Sequence[str]) -> int:
    """Run torchrun; returns 0, the exit code of the first failed rank, or 128 + its signal."""
    die_with_parent(signal.SIGTERM)
    _pass_on_usr1()
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the line below says it
    try:
        run.main(list(arguments))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code: int = failure.exitcode
        if code < 0:
            name = signal.Signals(-code).name
            sys.stderr.write(f"rank {rank} (pid {failure.pid}) was ended by {name}; its last output is above\n")
            return 128 - code
        return code
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def _pass_on_usr1() -> None:
    """Slurm's signal before a time limit reaches this process alone, and torchrun would die of it: ranks save instead."""

    def pass_on(number: int, _frame: FrameType | None) -> None:
        for rank in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.send_signal(number)

    signal.signal(signal.SIGUSR1, pass_on)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
