"""Runs one program on its tests inside the sandbox.

A script that uses the standard library only; no module imports it.

It receives the inputs of the tests without the expected outputs, so a program that controls this
process gains nothing. Standard input: the job as JSON. Standard output: a line `{"ready": true}`,
then one line for each test.
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
BOTH = "string re datetime collections heapq bisect copy math random statistics itertools functools operator io sys json"
STAR = [*BOTH.split(), "typing", "builtins"]
PLAIN = [*BOTH.split(), "time", "fractions"]


def main() -> None:
    """Writes a result for every test of the job; a fork that has run a program does not return."""
    job = json.loads(sys.stdin.buffer.read())
    frames = os.dup(1)
    if job["uid"] is not None:
        os.setgroups([])
        os.setresgid(job["uid"], job["uid"], job["uid"])
        os.setresuid(job["uid"], job["uid"], job["uid"])
    if os.path.isdir("/packages"):
        sys.path.append("/packages")
    names: dict[str, Any] = {}
    for name in STAR:
        exec(f"from {name} import *", names)
    for name in PLAIN:
        names[name] = __import__(name)
    _send(frames, {"ready": True})
    for test in job["inputs"]:
        _send(frames, _run(job, names, test, frames))


def _send(frames: int, message: dict[str, Any]) -> None:
    line = memoryview(json.dumps(message).encode() + b"\n")
    while line:
        line = line[os.write(frames, line) :]


def _run(job: dict[str, Any], names: dict[str, Any], test: Any, frames: int) -> dict[str, Any]:
    """`{"output": text}`, or `{"error": reason}`."""
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
        # In a process namespace: every process except this one. Otherwise the program's session.
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL) if job["isolated"] else os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _collect(pid: int, source: int, deadline: float) -> dict[str, Any]:
    output = bytearray()
    end = os.pidfd_open(pid)
    try:
        os.set_blocking(source, False)
        while True:
            ready, _, _ = select.select(
                [source, end], [], [], max(0.0, deadline - time.monotonic())
            )
            if not ready:
                return {"error": "time limit"}
            with contextlib.suppress(BlockingIOError):
                while piece := os.read(source, 1 << 16):
                    output += piece
                    if len(output) > OUTPUT_BYTES:
                        return {"error": "output limit"}
                select.select(
                    [end], [], [], max(0.0, deadline - time.monotonic())
                )  # it has closed its output
            if end in ready:
                break
    finally:
        os.close(end)
    state = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if state is None:
        return {"error": "time limit"}
    if state.si_status != 0 or state.si_code != os.CLD_EXITED:
        kind = "exit code" if state.si_code == os.CLD_EXITED else "signal"
        return {"error": f"{kind} {state.si_status}"}
    return {"output": output.decode("utf-8", "replace")}


def _child(job: dict[str, Any], names: dict[str, Any], test: Any, target: int) -> int:
    """Sets limits and standard streams in the fork, runs the program, returns the exit code."""
    os.setsid()
    text = test if job["function"] is None else ""
    if text:
        with open(".input", "w+b") as file:
            os.unlink(".input")
            file.write(text.encode("utf-8", "surrogatepass"))
            file.flush()
            file.seek(0)
            os.dup2(file.fileno(), 0)
    else:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    result = os.dup2(target, 3 if target != 3 else 4)
    os.dup2(os.open(os.devnull, os.O_WRONLY) if job["function"] is not None else result, 1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.closerange(5, 256)
    _limit(job)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
    sys.setrecursionlimit(50_000)
    program = sys.modules["__main__"] = types.ModuleType("__main__")
    own = program.__dict__
    own.update(names, __name__="__main__" if job["function"] is None else "program")
    with contextlib.suppress(SystemExit) if job["function"] is None else contextlib.nullcontext():
        exec(compile(job["code"], "program", "exec"), own)
    if job["function"] is None:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        return 0
    called = own["Solution"]() if "Solution" in own else None
    function = getattr(called, job["function"]) if called is not None else own[job["function"]]
    report = json.dumps(function(*test)).encode()
    while report:
        report = report[os.write(result, report) :]
    return 0


def _limit(job: dict[str, Any]) -> None:
    limits = {
        resource.RLIMIT_CPU: int(job["seconds"]) + 1,
        resource.RLIMIT_AS: job["memory_bytes"],
        resource.RLIMIT_FSIZE: FILE_BYTES,
        resource.RLIMIT_NOFILE: NUM_FILES,
        resource.RLIMIT_CORE: 0,
    }
    if job[
        "isolated"
    ]:  # the kernel counts the processes of a user, which without a sandbox has others
        limits[resource.RLIMIT_NPROC] = NUM_PROCESSES
    for kind, limit in limits.items():
        resource.setrlimit(kind, (limit, limit))


main()
