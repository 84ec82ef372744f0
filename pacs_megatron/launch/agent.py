"""torchrun with useful exit codes: `python -m pacs_megatron.launch.agent <torchrun arguments>`.

torchrun always exits 1 with a traceback if a rank fails, and SIGUSR1 kills it. This wrapper forwards SIGUSR1 to the
ranks, prints one line for a killed rank, and exits with the code of the first rank that failed.
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

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the line below reports it
    try:
        run.main(list(arguments))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code: int = failure.exitcode
        if code < 0:
            name = signal.Signals(-code).name
            sys.stderr.write(f"rank {rank} (pid {failure.pid}) was killed by {name}; see its output above\n")
            return 128 - code
        return code
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def _pass_on_usr1() -> None:
    """Forward SIGUSR1 to the ranks. Slurm sends it to this process only, before the time limit."""

    def pass_on(number: int, _frame: FrameType | None) -> None:
        for rank in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.send_signal(number)

    signal.signal(signal.SIGUSR1, pass_on)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
