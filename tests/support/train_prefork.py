"""Attempts of a run, each in a fork of this process, which has imported everything:

`... <file for standard error>`.

Reads lines `train\t<config>\t<override>...` or `cli\t<verb>\t...`, prints the exit code of each.
The driver is a fork too.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any


class ForkedDriver:
    """Replaces `subprocess.Popen` of the driver: the same process without its imports."""

    def __init__(
        self,
        command: list[str],
        *,
        pass_fds: tuple[int, ...],
        stdout: Any,
        env: dict[str, str],
        **_: Any,
    ) -> None:
        self._code: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        code = 1
        try:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
                signal.signal(number, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)
            for target in (1, 2):
                os.dup2(stdout.fileno(), target)
            os.environ.clear()
            os.environ.update(env)
            from pacs_megatron.rollout import driver

            code = driver.main(command[3:])
        except BaseException:  # noqa: BLE001  as the interpreter does
            import traceback

            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        import time

        deadline = time.monotonic() + (timeout or 1e9)
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("driver", timeout or 0)
            time.sleep(0.02)
        assert self._code is not None
        return self._code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class _Subprocess:
    """`subprocess` with the forked driver."""

    Popen = ForkedDriver

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)


def main() -> None:
    # The forks need these modules; most of them are not used here.
    import megatron.core  # noqa: F401
    import torch
    import transformers  # noqa: F401

    from pacs_megatron import cli
    from pacs_megatron.convert import convert  # noqa: F401
    from pacs_megatron.rollout import driver, driver_client  # noqa: F401
    from pacs_megatron.training import loop, main, watchdog  # noqa: F401
    from pacs_megatron.workbench.evaluation import command  # noqa: F401

    torch.set_num_threads(1)
    driver_client.subprocess = _Subprocess()  # type: ignore[assignment, attr-defined]
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            error = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(error, 2)
            os.dup2(error, 1)
            os.setsid()
            kind, *arguments = line.rstrip("\n").split("\t")
            if kind == "train":
                main.main(arguments)
            os._exit(cli.main(arguments))
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
