"""Runs one program on its tests inside the sandbox.

A script that uses the standard library only; no module imports it. It receives the inputs of the
tests without the expected outputs, so a program that controls this process gains nothing.

Standard input: the job as JSON. Standard output: a line `{"ready": true}`, then one line for each
test. Each test runs in a fork, so no program changes the process of the next test.
"""

import atexit
import contextlib
import json
import os
import resource
import select
import signal
import sys
import time
import types
from typing import Any

OUTPUT_BYTES = 8 << 20
FILE_BYTES = 16 << 20
NUM_PROCESSES = 32
NUM_FILES = 64
# LiveCodeBench and APPS import these before a program (lcb_runner/evaluation/testing_util.py,
# eval/testing_util.py).
BOTH = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random"),
    *("statistics", "itertools", "functools", "operator", "io", "sys", "json"),
)
STAR = (*BOTH, "typing", "builtins")
PLAIN = (*BOTH, "time", "fractions")


def main() -> None:
    """Writes a result for every test of the job; a fork that has run a program does not return."""
    job = json.loads(sys.stdin.buffer.read())
    frames = os.dup(1)
    uid = job["uid"]
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    if os.path.isdir("/packages"):
        sys.path.append("/packages")

    names: dict[str, Any] = {}
    for name in STAR:
        exec(f"from {name} import *", names)  # noqa: S102
    for name in PLAIN:
        names[name] = __import__(name)
    _send(frames, {"ready": True})
    for test in job["inputs"]:
        _send(frames, _run(job, names, test, frames))


def _send(frames: int, message: dict[str, Any]) -> None:
    _write_all(frames, json.dumps(message).encode() + b"\n")


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        num_written = os.write(descriptor, view)
        view = view[num_written:]


def _run(job: dict[str, Any], names: dict[str, Any], test: Any, frames: int) -> dict[str, Any]:
    """Runs one test in a fork.

    Args:
        job: the fields of `sandbox.Program`, `seconds`, `memory_bytes`, `uid` and `isolated`.
        names: what the program finds imported.
        test: standard input, or with `function` its arguments.
        frames: the descriptor of the results, which the program must not have.

    Returns:
        `{"output": text}`, or `{"error": reason}`.
    """
    source, target = os.pipe()
    deadline = time.monotonic() + job["seconds"]
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(source)
            os.close(frames)
            status = _child(job, names, test, target)
        finally:
            os._exit(status)

    os.close(target)
    try:
        return _collect(pid, source, deadline)
    finally:
        os.close(source)
        with contextlib.suppress(ProcessLookupError):
            if job["isolated"]:
                os.kill(-1, signal.SIGKILL)  # every process of the namespace except this one
            else:
                os.killpg(pid, signal.SIGKILL)  # the program's session
        os.waitpid(pid, 0)


def _collect(pid: int, source: int, deadline: float) -> dict[str, Any]:
    """Reads the output of a fork until it ends, its time is over, or it writes too much."""
    output = bytearray()
    end = os.pidfd_open(pid)
    try:
        os.set_blocking(source, False)
        while True:
            ready, _, _ = select.select([source, end], [], [], _left_s(deadline))
            if not ready:
                return {"error": "time limit"}
            with contextlib.suppress(BlockingIOError):
                while piece := os.read(source, 1 << 16):
                    output += piece
                    if len(output) > OUTPUT_BYTES:
                        return {"error": "output limit"}
                # The program has closed its output.
                select.select([end], [], [], _left_s(deadline))
            if end in ready:
                break
    finally:
        os.close(end)

    state = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if state is None:
        return {"error": "time limit"}
    has_exited = state.si_code == os.CLD_EXITED
    if state.si_status != 0 or not has_exited:
        kind = "exit code" if has_exited else "signal"
        return {"error": f"{kind} {state.si_status}"}
    return {"output": output.decode("utf-8", "replace")}


def _left_s(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _child(job: dict[str, Any], names: dict[str, Any], test: Any, target: int) -> int:
    """The body of a fork: runs the program and writes its result; returns the exit code.

    Without `function` the result is standard output, otherwise the returned value as JSON.
    """
    os.setsid()
    function_name = job["function"]
    result = _redirect(test, target, is_call=function_name is not None)
    _limit(job)
    _open_streams()
    sys.setrecursionlimit(50_000)

    program = types.ModuleType("__main__")
    sys.modules["__main__"] = program
    namespace = program.__dict__
    if function_name is None:
        namespace.update(names, __name__="__main__")
        with contextlib.suppress(SystemExit):
            exec(compile(job["code"], "program", "exec"), namespace)  # noqa: S102
        atexit._run_exitfuncs()
        sys.stdout.flush()
        return 0

    namespace.update(names, __name__="program")
    exec(compile(job["code"], "program", "exec"), namespace)  # noqa: S102
    solution = namespace["Solution"]() if "Solution" in namespace else None
    function = namespace[function_name] if solution is None else getattr(solution, function_name)
    _write_all(result, json.dumps(function(*test)).encode())
    return 0


def _redirect(test: Any, target: int, *, is_call: bool) -> int:
    """Sets the descriptors 0 to 2 and closes those from 5 on; returns the one for the result."""
    if is_call or not test:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    else:
        with open(".input", "w+b") as file:
            os.unlink(".input")
            file.write(test.encode("utf-8", "surrogatepass"))
            file.flush()
            file.seek(0)
            os.dup2(file.fileno(), 0)
    result = os.dup2(target, 3 if target != 3 else 4)
    os.dup2(os.open(os.devnull, os.O_WRONLY) if is_call else result, 1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.closerange(5, 256)
    return result


def _open_streams() -> None:
    """Python's standard streams over the new descriptors."""
    sys.stdin = open(0)  # noqa: SIM115
    sys.stdout = open(1, "w")  # noqa: SIM115
    sys.stderr = open(2, "w")  # noqa: SIM115
    sys.__stdin__ = sys.stdin  # type: ignore[misc]
    sys.__stdout__ = sys.stdout  # type: ignore[misc]
    sys.__stderr__ = sys.stderr  # type: ignore[misc]


def _limit(job: dict[str, Any]) -> None:
    """Limits CPU, memory, files and processes of the fork."""
    limits = {
        resource.RLIMIT_CPU: int(job["seconds"]) + 1,
        resource.RLIMIT_AS: job["memory_bytes"],
        resource.RLIMIT_FSIZE: FILE_BYTES,
        resource.RLIMIT_NOFILE: NUM_FILES,
        resource.RLIMIT_CORE: 0,
    }
    # The kernel counts the processes of a user, which without a sandbox has others.
    if job["isolated"]:
        limits[resource.RLIMIT_NPROC] = NUM_PROCESSES
    for kind, limit in limits.items():
        resource.setrlimit(kind, (limit, limit))


main()
