"""torchrun with useful exit codes: `python -m pacs_megatron.launch.agent <torchrun arguments>`.

torchrun always exits 1 with a traceback if a rank or its rendezvous fails, and SIGUSR1 kills it.
This wrapper forwards SIGUSR1 to the ranks, prints one line for a killed rank, and exits with the
code of the first rank that failed. With `--standalone` its rendezvous listens on loopback only.
"""

import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import psutil

from pacs_megatron.errors import ConnectError
from pacs_megatron.runtime.command_line import run_command
from pacs_megatron.runtime.processes import AGENT_PID, die_with_parent


def main(arguments: Sequence[str]) -> int:
    """Runs torchrun; returns 0, the exit code of the first failed rank, or 128 + its signal.

    Raises:
        ConnectError: torchrun cannot reach, or lost, its rendezvous.
    """
    die_with_parent(signal.SIGTERM)
    os.environ[AGENT_PID] = str(os.getpid())
    signal.signal(signal.SIGUSR1, _pass_on)
    if "--standalone" in arguments:
        _listen_on_loopback()

    from torch.distributed.elastic.multiprocessing.api import SignalException

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # `_run` reports it
    try:
        return _run(arguments)
    except SignalException as error:  # also while the failure of a rank is handled
        return 128 + int(error.sigval)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's handler raises


def _run(arguments: Sequence[str]) -> int:
    from torch.distributed import DistError, run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    try:
        run.main(list(arguments))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code: int = failure.exitcode
        if code >= 0:
            return code
        name = signal.Signals(-code).name
        sys.stderr.write(
            f"rank {rank} (pid {failure.pid}) was killed by {name}; see its output above\n"
        )
        return 128 - code
    except (RendezvousError, DistError) as error:
        raise ConnectError(
            "torchrun cannot reach, or lost, its rendezvous", error.__cause__ or error
        ) from error
    return 0


def _listen_on_loopback() -> None:
    """Makes the stores of a run on one host listen on 127.0.0.1.

    torchrun's stores listen on all interfaces, and a store executes the commands of every process
    that connects. Call this before torchrun's modules import the class.
    """
    from torch import distributed

    original: Any = vars(distributed)["TCPStore"]

    class LoopbackStore(original):
        def __init__(self, host_name: str, port: int, **options: Any) -> None:
            if options.get("is_master"):
                listener = socket.socket()
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(("127.0.0.1", port))
                listener.listen(128)
                host_name, port = listener.getsockname()
                options["master_listen_fd"] = listener.detach()
            super().__init__(host_name, port, **options)

    vars(distributed)["TCPStore"] = LoopbackStore


def _pass_on(number: int, _frame: FrameType | None) -> None:
    """Forwards SIGUSR1 to the ranks.

    Before the time limit Slurm sends it to this process only.
    """
    for rank in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.send_signal(number)


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(sys.argv[1:])))
