"""Runs programs of the policy in a bubblewrap sandbox.

The sandbox has separate namespaces for processes, network, IPC and host name; a read-only root with
only Python, its libraries and numpy; a /tmp in memory; a separate user; a filter of system calls;
and limits of CPU, memory, processes, files, output and time. The kernel kills all processes in it
when this process ends. `sandbox_runner.py` runs inside.
"""

import contextlib
import importlib.util
import json
import logging
import os
import platform
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import psutil

from pacs_megatron.errors import ConfigError, RewardError
from pacs_megatron.runtime.waiting import report_wait
from pacs_megatron.runtime.worker_process import WORKER_MARK

RUNNER = Path(__file__).with_name("sandbox_runner.py")
logger = logging.getLogger(__name__)
_NOT_ISOLATED = "read and write your files, use the network, and end your processes"
_START_LIMIT_S = 20.0
_GRACE_S = 1.0
"""Seconds for the runner's own work in a test"""
_MEMORY_POLL_S = 0.2
_FRAME_BYTES = 50 << 20
"""The runner's limit of output, escaped as JSON"""
_TMP_BYTES = 64 << 20

# Classic BPF. Every rule is (operation, steps if true, steps if false, operand).
_LOAD = 0x20
_IF_EQUAL = 0x15
_IF_AT_LEAST = 0x35
_IF_ANY_BIT = 0x45
_RETURN = 0x06
_NUMBER = 0
"""Place of the system call's number in the data of a filter"""
_ARCHITECTURE = 4
_FIRST_ARGUMENT = 16

# Results of a filter (linux/seccomp.h).
_ALLOW = 0x7FFF0000
_KILL = 0x80000000
_NO_ACCESS = 0x00050000 | 1
"""SECCOMP_RET_ERRNO with EPERM"""
_NOT_THERE = 0x00050000 | 38
"""SECCOMP_RET_ERRNO with ENOSYS: the C library then calls clone, whose flags a filter can read"""
_NAMESPACES = 0x7E020080
"""The clone flags CLONE_NEW*"""
_X32_BIT = 0x40000000
"""Set in the numbers of the x32 system calls, which a filter of 64-bit numbers would miss"""

_MACHINES = ("x86_64", "aarch64")
_AUDIT_ARCH = (0xC000003E, 0xC00000B7)
"""Number of the architecture, by machine"""
_CLONE = (56, 220)
_CLONE3 = (435, 435)
_DENIED = {
    # Memory outside of the limits
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "io_uring_setup": (425, 425),
    "userfaultfd": (323, 282),
    # Other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    # Namespaces and mounts
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "mount_setattr": (442, 442),
    # Keys
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # Interfaces of the kernel
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "open_by_handle_at": (304, 265),
}
"""System calls that no program of a test needs -> numbers, by machine"""


class Program(NamedTuple):
    """A program and its tests.

    `inputs` are standard input as text, or with `function` lists of its arguments.
    """

    code: str
    inputs: Sequence[Any]
    function: str | None


class Limits(NamedTuple):
    """`deadline` is a time of `time.monotonic`; `test_s` is wall-clock and CPU time of one test;
    `memory_gib` counts all processes of the program.
    """

    deadline: float
    test_s: float
    memory_gib: float


def check(sandbox: str) -> None:
    """Raises ConfigError if `sandbox` does not work on this host; there is no silent fallback."""
    if sandbox == "none":
        logger.warning("reward.sandbox=none: programs of the policy can %s", _NOT_ISOLATED)
        return
    problem = find_problem()
    if problem is not None:
        raise ConfigError(
            f"reward.sandbox={sandbox} does not work on this host: {problem}; install it or allow "
            "user namespaces, or set reward.sandbox=none, with which programs of the policy can "
            f"{_NOT_ISOLATED}"
        )


def find_problem() -> str | None:
    """Runs a program in bubblewrap; returns the reason why it is not isolated on this host, or
    None.
    """
    if shutil.which("bwrap") is None:
        return "bwrap is not installed (Debian, Ubuntu: apt-get install bubblewrap)"
    machine = platform.machine()
    if machine not in _MACHINES:
        return f"no filter of system calls for {machine}; expected {' or '.join(_MACHINES)}"

    program = Program("print(input())", ["ok"], None)
    limits = Limits(time.monotonic() + _START_LIMIT_S, 5.0, 1.0)
    try:
        with report_wait("for a program in bubblewrap"):
            results = list(run_tests(program, limits, "bubblewrap"))
    except RewardError as error:
        return str(error)
    if results != [{"output": "ok\n"}]:
        return f"a program that prints `ok` gave {results}"
    return None


def run_tests(program: Program, limits: Limits, sandbox: str) -> Iterator[dict[str, Any]]:
    """Runs a program on its tests, in order, until the first error.

    Closing the iterator ends the sandbox.

    Args:
        program: the program and the inputs.
        limits: of time and memory.
        sandbox: `reward.sandbox`, "bubblewrap" or "none".

    Yields:
        One result for each input, `{"output": text}` or `{"error": reason}`.

    Raises:
        RewardError: if the sandbox does not start.
    """
    is_isolated = sandbox != "none"
    memory_bytes = int(limits.memory_gib * 2**30)
    # Every worker has its own user, because the kernel counts processes by user. Root only; others
    # use a user namespace.
    uid = 60_000 + os.getpid() % 5_000 if is_isolated and os.geteuid() == 0 else None
    job = {
        **program._asdict(),
        "uid": uid,
        "isolated": is_isolated,
        "seconds": limits.test_s,
        "memory_bytes": memory_bytes,
    }
    with _running(job, is_isolated=is_isolated) as (process, errors):
        read = _reader(process, memory_bytes)
        ready = read(min(limits.deadline, time.monotonic() + _START_LIMIT_S))
        if ready != {"ready": True}:
            errors.seek(0)
            text = errors.read(2000).decode("utf-8", "replace")
            reason = " ".join(text.split()) or ready.get("error")
            raise RewardError(f"the sandbox ({sandbox}) does not start: {reason}")

        for _ in program.inputs:
            result = read(min(limits.deadline, time.monotonic() + limits.test_s + _GRACE_S))
            yield result
            if "output" not in result:
                return


@contextlib.contextmanager
def _running(
    job: dict[str, Any], *, is_isolated: bool
) -> Iterator[tuple["subprocess.Popen[bytes]", IO[bytes]]]:
    """Starts the runner with `job`; yields its process and its error output, and ends it."""
    options = ["-I", "-S", "-B"]
    descriptors: tuple[int, ...] = ()
    inherited = ("PATH", WORKER_MARK)
    with contextlib.ExitStack() as stack:
        stdin = stack.enter_context(tempfile.TemporaryFile())
        stdin.write(json.dumps(job).encode())
        stdin.seek(0)
        errors = stack.enter_context(tempfile.TemporaryFile())
        if is_isolated:
            rules = stack.enter_context(tempfile.TemporaryFile())
            rules.write(_filter())
            rules.seek(0)
            descriptors = (rules.fileno(),)
            command = [*_bubblewrap(rules.fileno()), _interpreter(), *options, "/runner.py"]
            folder = "/"
        else:
            command = [sys.executable, *options, str(RUNNER)]
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pacs-code-"))

        process = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=errors,
            pass_fds=descriptors,
            cwd=folder,
            env={name: os.environ[name] for name in inherited if name in os.environ},
            start_new_session=True,
        )
        try:
            yield process, errors
        finally:
            _end(process)


def _reader(
    process: "subprocess.Popen[bytes]", memory_bytes: int
) -> Callable[[float], dict[str, Any]]:
    """A function that reads the runner's next line until a deadline; it returns a dict, or
    `{"error": reason}`.
    """
    assert process.stdout is not None
    source = process.stdout.fileno()
    os.set_blocking(source, False)
    buffer = bytearray()

    def read(deadline: float) -> dict[str, Any]:
        while b"\n" not in buffer:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return {"error": "time limit"}
            readable, _, _ = select.select([source], [], [], min(left_s, _MEMORY_POLL_S))
            if not readable:
                if _memory_bytes(process.pid) > memory_bytes:
                    return {"error": "memory limit"}
                continue
            piece = os.read(source, 1 << 20)
            if not piece:
                return {"error": "the program ended the sandbox"}
            buffer.extend(piece)
            if len(buffer) > _FRAME_BYTES:
                return {"error": "output limit"}

        line, _, remainder = buffer.partition(b"\n")
        buffer[:] = remainder
        try:
            return {**json.loads(line)}
        except (ValueError, RecursionError, TypeError):
            return {"error": "no valid response of the sandbox"}

    return read


def _descendants(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return list(psutil.Process(pid).children(recursive=True))
    return []


def _memory_bytes(pid: int) -> int:
    """Resident bytes of all descendants."""
    total = 0
    for child in _descendants(pid):
        with contextlib.suppress(psutil.Error):
            total += child.memory_info().rss
    return total


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kills bubblewrap and with it all processes inside; without a sandbox all descendants."""
    for child in [*_descendants(process.pid), process]:
        with contextlib.suppress(psutil.Error):
            child.kill()
    assert process.stdout is not None
    process.stdout.close()
    process.wait()


def _interpreter() -> str:
    """The interpreter behind a virtual environment's link."""
    return str(Path(getattr(sys, "_base_executable", sys.executable)).resolve())


def _bubblewrap(rules: int) -> list[str]:
    """The command up to the program in the sandbox; `rules` is the descriptor of the filter."""
    command = ["bwrap", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    command += ["--unshare-cgroup-try"]
    if os.geteuid() == 0:
        # The runner changes its user itself, because root's processes are not counted.
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        command += ["--unshare-user", "--uid", "65534", "--gid", "65534"]
    command += _python_mounts()
    command += _numpy_mounts()
    for device in ("null", "zero", "urandom"):
        command += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    command += ["--ro-bind", str(RUNNER), "/runner.py"]
    command += ["--perms", "1777", "--size", str(_TMP_BYTES), "--tmpfs", "/tmp"]  # noqa: S108
    command += ["--remount-ro", "/", "--chdir", "/tmp"]  # noqa: S108
    command += ["--clearenv", "--setenv", "OPENBLAS_NUM_THREADS", "1"]
    command += ["--die-with-parent", "--new-session", "--seccomp", str(rules)]
    return command


def _python_mounts() -> list[str]:
    """Options that mount the interpreter with its libraries, and those of the system."""
    options: list[str] = []
    prefix = str(Path(sys.base_prefix).resolve())
    source = _interpreter() if prefix == "/usr" else prefix
    parents = [str(parent) for parent in reversed(Path(source).parents[:-1])]
    for folder in ("/usr", "/packages", "/dev", *parents):
        # bubblewrap's default is readable by root only.
        options += ["--perms", "0755", "--dir", folder]
    for name in ("/usr/lib", "/usr/lib64", "/lib", "/lib64"):
        path = Path(name)
        if path.is_symlink():
            options += ["--symlink", os.readlink(path), name]
        elif path.is_dir():
            options += ["--ro-bind", name, name]
    return [*options, "--ro-bind", source, source]


def _numpy_mounts() -> list[str]:
    """Options that mount numpy, if it is installed."""
    numpy = importlib.util.find_spec("numpy")
    if numpy is None or numpy.origin is None:
        return []
    options: list[str] = []
    packages = Path(numpy.origin).parents[1]
    for name in ("numpy", "numpy.libs"):
        if (packages / name).is_dir():
            options += ["--ro-bind", str(packages / name), f"/packages/{name}"]
    return options


def _filter() -> bytes:
    """The seccomp program (classic BPF) for this machine.

    EPERM for the denied calls and for namespaces; another architecture is killed.
    """
    machine = _MACHINES.index(platform.machine())
    rules = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_IF_EQUAL, 1, 0, _AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_IF_AT_LEAST, 0, 1, _X32_BIT),
        (_RETURN, 0, 0, _NO_ACCESS),
    ]
    for numbers in _DENIED.values():
        rules += [
            (_IF_EQUAL, 0, 1, numbers[machine]),
            (_RETURN, 0, 0, _NO_ACCESS),
        ]
    rules += [
        (_IF_EQUAL, 0, 1, _CLONE3[machine]),
        (_RETURN, 0, 0, _NOT_THERE),
        # All calls except clone go to the end.
        (_IF_EQUAL, 0, 3, _CLONE[machine]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_IF_ANY_BIT, 0, 1, _NAMESPACES),
        (_RETURN, 0, 0, _NO_ACCESS),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *rule) for rule in rules)
