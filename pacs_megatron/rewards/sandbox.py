"""Runs programs of the policy in a bubblewrap sandbox: separate namespaces for processes, network,
IPC and host name; a read-only root with only Python, its libraries and numpy; a /tmp in memory; a
separate user; a filter of system calls; and limits of CPU, memory, processes, files, output and
time. The kernel kills all processes in it when this process ends.
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
from typing import Any, NamedTuple

import psutil

from pacs_megatron.errors import ConfigError, RewardError
from pacs_megatron.runtime.waiting import report_wait

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
_LOAD = 0x20
_EQUAL = 0x15
_GIVE = 0x06
"""Classic BPF: load a word of the call, jump if equal, return"""
_NO_ACCESS = 0x00050000 | 1
_NOT_THERE = 0x00050000 | 38
"""SECCOMP_RET_ERRNO with EPERM, and with ENOSYS: the C library then calls clone, whose flags a
filter can read.
"""
_NAMESPACES = 0x7E020080
"""The clone flags CLONE_NEW*"""
# Architecture, clone3, clone, and system calls that no program of a test needs: memory outside the
# limits (memfd_create, memfd_secret, System V, message queues, io_uring, userfaultfd), other
# processes (ptrace, process_vm_*, pidfd_getfd), namespaces and mounts, keys, and kernel interfaces
# (bpf, perf, kexec, modules, open_by_handle_at).
_SYSTEM_CALLS = {
    "x86_64": (
        *(0xC000003E, 435, 56),
        "319 447 29 30 31 64 68 240 425 323 101 310 311 438 272 308 165 166 155 428 429 430 431 "
        "432 442 248 249 250 321 298 246 320 175 313 304",
    ),
    "aarch64": (
        *(0xC00000B7, 435, 220),
        "279 447 194 195 196 190 186 180 425 282 117 270 271 438 97 268 40 39 41 428 429 430 431 "
        "432 442 217 218 219 280 241 104 294 105 273 265",
    ),
}


def find_problem() -> str | None:
    """Runs a program in bubblewrap; returns the reason why it is not isolated on this host, or
    None.
    """
    if shutil.which("bwrap") is None:
        return "bwrap is not installed (Debian, Ubuntu: apt-get install bubblewrap)"
    if platform.machine() not in _SYSTEM_CALLS:
        return f"no filter of system calls for {platform.machine()}; expected {' or '.join(_SYSTEM_CALLS)}"
    try:
        limits = Limits(time.monotonic() + _START_LIMIT_S, 5.0, 1.0)
        with report_wait("for a program in bubblewrap"):
            results = list(run_tests(Program("print(input())", ["ok"], None), limits, "bubblewrap"))
    except RewardError as error:
        return str(error)
    return None if results == [{"output": "ok\n"}] else f"a program that prints `ok` gave {results}"


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


class Program(NamedTuple):
    """A program and its tests:

    `inputs` are standard input as text, or with `function` lists of its arguments.
    """

    code: str
    inputs: Sequence[Any]
    function: str | None


class Limits(NamedTuple):
    """`test_s` is wall-clock and CPU time of one test; `memory_gib` counts all processes of the
    program.
    """

    deadline: float
    test_s: float
    memory_gib: float


def run_tests(program: Program, limits: Limits, sandbox: str) -> Iterator[dict[str, Any]]:
    """One result for each input, `{"output": text}` or `{"error": reason}`, until the first error.

    Raises RewardError if the sandbox does not start.
    """
    isolated = sandbox != "none"
    # Every worker has its own user, because the kernel counts processes by user. Root only; others
    # use a user namespace.
    uid = 60_000 + os.getpid() % 5_000 if isolated and os.geteuid() == 0 else None
    memory_bytes = int(limits.memory_gib * 2**30)
    job = {**program._asdict(), "uid": uid, "isolated": isolated}
    job |= {"seconds": limits.test_s, "memory_bytes": memory_bytes}
    with (
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as errors,
        contextlib.ExitStack() as stack,
    ):
        given.write(json.dumps(job).encode())
        given.seek(0)
        python = [sys.executable, "-I", "-S", "-B"]
        if isolated:
            rules = stack.enter_context(tempfile.TemporaryFile())
            rules.write(_filter())
            rules.seek(0)
            python[0] = _interpreter()
            command = [*_bubblewrap(rules.fileno()), *python, "/runner.py"]
            folder = "/"
            fds: tuple[int, ...] = (rules.fileno(),)
        else:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pacs-code-"))
            command = [*python, str(RUNNER)]
            fds = ()
        env = {
            name: os.environ[name] for name in ("PATH", "PACS_REWARD_WORKER") if name in os.environ
        }
        process = subprocess.Popen(
            command, stdin=given, stdout=subprocess.PIPE, stderr=errors, pass_fds=fds, cwd=folder, env=env,
            start_new_session=True,
        )  # fmt: skip
        try:
            read = _reader(process, memory_bytes)
            first = read(min(limits.deadline, time.monotonic() + _START_LIMIT_S))
            if first != {"ready": True}:
                errors.seek(0)
                reason = " ".join(
                    errors.read(2000).decode("utf-8", "replace").split()
                ) or first.get("error")
                raise RewardError(f"the sandbox ({sandbox}) does not start: {reason}")
            for _ in program.inputs:
                result = read(min(limits.deadline, time.monotonic() + limits.test_s + _GRACE_S))
                yield result
                if "output" not in result:
                    return
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
            left = deadline - time.monotonic()
            if left <= 0:
                return {"error": "time limit"}
            if not select.select([source], [], [], min(left, _MEMORY_POLL_S))[0]:
                if _memory(process.pid) > memory_bytes:
                    return {"error": "memory limit"}
                continue
            piece = os.read(source, 1 << 20)
            if not piece:
                return {"error": "the program ended the sandbox"}
            buffer.extend(piece)
            if len(buffer) > _FRAME_BYTES:
                return {"error": "output limit"}
        line, _, buffer[:] = buffer.partition(b"\n")
        try:
            return {**json.loads(line)}
        except (ValueError, RecursionError, TypeError):
            return {"error": "no valid response of the sandbox"}

    return read


def _descendants(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return list(psutil.Process(pid).children(recursive=True))
    return []


def _memory(pid: int) -> int:
    """Resident bytes of all descendants."""
    total = 0
    for child in _descendants(pid):
        with contextlib.suppress(psutil.Error):
            total += child.memory_info().rss
    return total


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kills bubblewrap and with it all processes inside; without a sandbox kills all descendants."""
    for child in [*_descendants(process.pid), process]:
        with contextlib.suppress(psutil.Error):
            child.kill()
    assert process.stdout is not None
    process.stdout.close()
    process.wait()


def _interpreter() -> str:
    return str(Path(getattr(sys, "_base_executable", sys.executable)).resolve())


def _bubblewrap(rules: int) -> list[str]:
    command = [
        "bwrap",
        "--unshare-ipc",
        "--unshare-pid",
        "--unshare-net",
        "--unshare-uts",
        "--unshare-cgroup-try",
    ]
    if (
        os.geteuid() == 0
    ):  # the runner changes its user itself, because root's processes are not counted
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        command += ["--unshare-user", "--uid", "65534", "--gid", "65534"]
    folder = str(Path(sys.base_prefix).resolve())
    source = _interpreter() if folder == "/usr" else folder
    for parent in ["/usr", "/packages", "/dev", *map(str, reversed(Path(source).parents[:-1]))]:
        command += [
            "--perms",
            "0755",
            "--dir",
            parent,
        ]  # bubblewrap's default is readable by root only
    for name in ("/usr/lib", "/usr/lib64", "/lib", "/lib64"):
        path = Path(name)
        if path.is_symlink():
            command += ["--symlink", os.readlink(path), name]
        elif path.is_dir():
            command += ["--ro-bind", name, name]
    command += ["--ro-bind", source, source]
    numpy = importlib.util.find_spec("numpy")
    for package in () if numpy is None or numpy.origin is None else ("numpy", "numpy.libs"):
        path = Path(numpy.origin).parents[1] / package  # type: ignore[union-attr,arg-type]
        if path.is_dir():
            command += ["--ro-bind", str(path), f"/packages/{package}"]
    for device in ("null", "zero", "urandom"):
        command += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    command += [
        "--ro-bind",
        str(RUNNER),
        "/runner.py",
        "--perms",
        "1777",
        "--size",
        str(_TMP_BYTES),
        "--tmpfs",
        "/tmp",
    ]
    command += [
        "--remount-ro",
        "/",
        "--chdir",
        "/tmp",
        "--clearenv",
        "--setenv",
        "OPENBLAS_NUM_THREADS",
        "1",
    ]
    return [*command, "--die-with-parent", "--new-session", "--seccomp", str(rules)]


def _filter() -> bytes:
    """The seccomp program (classic BPF):

    EPERM for the denied calls and for namespaces, other architectures are killed.
    """
    arch, clone3, clone, denied = _SYSTEM_CALLS[platform.machine()]
    code = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, arch), (_GIVE, 0, 0, 0x80000000), (_LOAD, 0, 0, 0)]
    code += [(0x35, 0, 1, 0x40000000), (_GIVE, 0, 0, _NO_ACCESS)]  # the x32 numbers
    for number in map(int, denied.split()):
        code += [(_EQUAL, 0, 1, number), (_GIVE, 0, 0, _NO_ACCESS)]
    code += [
        (_EQUAL, 0, 1, clone3),
        (_GIVE, 0, 0, _NOT_THERE),
        (_EQUAL, 0, 3, clone),
        (_LOAD, 0, 0, 16),
    ]
    code += [(0x45, 0, 1, _NAMESPACES), (_GIVE, 0, 0, _NO_ACCESS), (_GIVE, 0, 0, 0x7FFF0000)]
    return b"".join(struct.pack("=HBBI", *row) for row in code)
