"""Parent process of one SGLang server: ends it and all its children when the launcher ends for any
reason. SGLang orphans its scheduler when it is killed. If the guard is killed too, the next start
cleans up by the pid file (`server.reap`).

`python -I guard.py <pid file> <grace seconds> <store file> <command> ...`, with a pipe from the
launcher as standard input. When the pipe closes, the launcher ends, SIGTERM arrives or the server
exits, the guard ends the process group and all descendants, removes the pid file, the store file
(rendezvous of the server's ranks) and leftover shared memory, and exits with the server's exit
status (128 + signal).
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from pacs_megatron.runtime.processes import die_with_parent, start_ticks, stat_fields

PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.2
SHARED = "/dev/shm/"  # listed, and cleaned of our own servers' files
SHARED_FAMILIES = (
    "sglang_",
    "sgl_shm_",
    "multi_tokenizer_args_",
    "sem.mp-",
    "psm_",
    "nccl-",
    "cuda.shm.",
)
"""Name prefixes of shared memory that a killed server and its libraries leave behind; the trainer
uses others.
"""
SCAN_S = 10.0
"""Interval in which the guard records the shared memory of its server."""


def members(group: int, ancestor: int | None = None) -> list[int]:
    """Live processes of the process group, and all descendants of `ancestor`."""
    table: dict[int, tuple[int, int]] = {}
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        fields = stat_fields(int(entry))
        if fields is not None:
            table[int(entry)] = int(fields[2]), int(fields[1])
    ours = {pid for pid, (pgrp, _) in table.items() if pgrp == group}
    frontier = {ancestor} if ancestor is not None else set()
    while frontier:
        children = {
            pid for pid, (_, parent) in table.items() if parent in frontier and pid not in ours
        }
        ours |= children
        frontier = children
    return sorted(ours - {os.getpid()})


def shared_inodes(pids: list[int]) -> set[int]:
    """Inodes of the shared-memory files that these processes have mapped; glibc maps a semaphore
    before it names it.
    """
    found: set[int] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                fields = line.split(maxsplit=5)
                if len(fields) == 6 and fields[5].startswith(SHARED):
                    found.add(int(fields[4]))
    return found


def remove_shared(inodes: set[int]) -> None:
    """Unlinks the files of these inodes whose name is in SHARED_FAMILIES. tmpfs does not reuse
    inodes.
    """
    with contextlib.suppress(OSError), os.scandir(SHARED) as entries:
        for entry in entries:
            if entry.name.startswith(SHARED_FAMILIES) and entry.inode() in inodes:
                Path(entry.path).unlink(missing_ok=True)


def end_all(server: subprocess.Popen[bytes], grace_s: float) -> None:
    """Sends SIGTERM, and SIGKILL after `grace_s`, to the server's group and all descendants;
    returns when all ended.
    """
    group = server.pid
    guard = os.getpid()
    for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 10.0)):
        deadline = time.monotonic() + wait_s
        for pid in members(group, guard):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
                os.kill(pid, signal.SIGCONT)  # a stopped process handles SIGKILL only
        while time.monotonic() < deadline:
            reap_orphans(server)
            if not members(group, guard):
                return
            time.sleep(0.05)


def reap_orphans(server: subprocess.Popen[bytes]) -> None:
    """Reaps finished children (the guard adopts orphans), so that no zombies remain."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if ended.si_pid == server.pid:
                server.wait()
            else:
                os.waitpid(ended.si_pid, 0)


def write_pid_file(path: Path, server: int, store: Path, shared: set[int]) -> None:
    record = {
        "boot_id": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "guard": os.getpid(),
        "guard_start": start_ticks(os.getpid()),
        "server": server,
        "server_start": start_ticks(server),
        "store": str(store),
        "shared": sorted(shared),
    }
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record))
    partial.replace(path)


def main(argv: list[str]) -> int:
    pid_file = Path(argv[1])
    grace_s = float(argv[2])
    store = Path(argv[3])
    command = argv[4:]
    launcher = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)
    stop = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: stop.append(True))
    server = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=die_with_parent
    )
    shared: set[int] = set()
    write_pid_file(pid_file, server.pid, store, shared)
    scan_at = time.monotonic() + SCAN_S
    # A forked sibling of the launcher may keep the pipe open. A changed parent pid shows that the
    # launcher ended.
    while not stop and server.poll() is None and os.getppid() == launcher:
        if select.select([sys.stdin], [], [], POLL_S)[0]:
            break
        if time.monotonic() > scan_at:
            scan_at = time.monotonic() + SCAN_S
            known = shared
            shared = shared | shared_inodes(members(server.pid, os.getpid()))
            if shared != known:
                write_pid_file(pid_file, server.pid, store, shared)
    shared |= shared_inodes(members(server.pid, os.getpid()))
    end_all(server, grace_s)
    remove_shared(shared)
    store.unlink(missing_ok=True)
    pid_file.unlink(missing_ok=True)
    status = server.wait()
    return status if status >= 0 else 128 - status  # the shell's convention: 137 for SIGKILL


if __name__ == "__main__":
    sys.exit(main(sys.argv))
