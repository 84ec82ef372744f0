"""Runs one hostile command of a user and judges it: one clear line, a non-zero exit, no traceback,
no silence.

`PACS_HOSTILE_LOG=FILE` records every case.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import resource
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pacs_megatron.cli import main
from tests.support.tiny_models import make_tiny_qwen3
from tests.support.tiny_run import write_tiny_run

ROOT = Path(__file__).parents[2]
LIMIT_S = 240.0
"""So that a hang ends."""
MEMORY_BYTES = 2 << 30
"""Data of each process of a command, beyond what it begins with.

A command that needs half of it fails its case.
"""
IMPORTS_BYTES = 1 << 29
"""Limit of the imports of a new process.

A fork begins with the resident set of the test process instead.
"""
SILENCE_S = 10.0
_ERROR = re.compile(r"^(\w+Error: |fail  )", re.MULTILINE)
_LOG_LINE = re.compile(r"\d{4}-\d\d-\d\d |.*\r|waiting for ")
LOG = os.environ.get("PACS_HOSTILE_LOG")


# -------------------------------------------------------------------------------------------------------------
# a world
@dataclass(frozen=True)
class World:
    """A model, its conversion, a data set and a run that would start."""

    folder: Path
    server: str = ""
    """URL of a server that responds with garbage"""

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    @property
    def run(self) -> Path:
        return self.folder / "tiny.yaml"

    def config(self, **changes: Any) -> Path:
        """The run's file with keys `a__b` replaced; None removes."""
        tree = yaml.safe_load(self.run.read_text())
        for key, value in changes.items():
            *parents, last = key.split("__")
            node = tree
            for parent in parents:
                node = node.setdefault(parent, {})
            node[last] = value
        self.run.write_text(yaml.safe_dump(tree))
        return self.run

    def text(self, name: str, content: str | bytes) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(
            content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
        )
        return path

    def model_json(self, name: str, **changes: Any) -> None:
        path = self.model / name
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    def header(self, change: Callable[[dict[str, Any]], Any]) -> None:
        """The header of the model's weights, changed in place or replaced by the returned value."""
        path = self.model / "model.safetensors"
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        header = change(header) or header
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])

    def flip(self, name: str) -> None:
        path = next(self.checkpoint.glob(name))
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 0x40
        path.write_bytes(bytes(data))


_IMPORTED = (
    *(
        "config.load",
        "config.schema",
        "config.checks",
        "convert.convert",
        "data.prompts",
        "data.tokenizer",
    ),
    *("launch.submit", "launch.train", "workbench.compare.command", "workbench.diversity"),
    *("workbench.paper.command", "workbench.evaluation.command", "workbench.preflight.command"),
    *("workbench.preflight.doctor", "workbench.certify.command"),
)
"""Modules of the package that most commands import: a fork of this process has them."""


def make_world(folder: Path) -> World:
    """A model, its conversion, a data set and a run below `folder`."""
    import torch

    torch.set_num_threads(1)  # a fork has no OpenMP threads
    for name in _IMPORTED:
        importlib.import_module(f"pacs_megatron.{name}")
    world = World(folder)
    make_tiny_qwen3(world.model)
    found = write_tiny_run(world.folder, world.model)
    found.rename(world.run)
    done = run(
        ["convert", "to-megatron", "--hf", world.model, "--out", world.checkpoint], world.folder, {}
    )
    assert done.code == 0, done.text
    return world


def copy_world(original: World, folder: Path) -> World:
    """A copy, for one case."""
    shutil.copytree(original.folder, folder, symlinks=True)
    run_file = folder / "tiny.yaml"
    run_file.write_text(run_file.read_text().replace(str(original.folder), str(folder)))
    return World(folder)


@dataclass
class Outcome:
    """How one command ended."""

    code: int | None
    """None: it did not end."""
    text: str
    silence_s: float
    starved_s: float
    """time in which the process was runnable and a busy host did not run it"""
    cpu_s: float
    wall_s: float
    memory_bytes: int
    """largest resident set of a process, beyond what it began with"""


_ONE_LINE = (
    "compare",
    "diversity",
    "paper",
    "data",
    "convert",
    "config",
    "plan",
    "status",
    "logs",
    "cancel",
    "submit",
    "export",
)
"""Verbs that print an error and nothing else."""
_FORKED = (*_ONE_LINE, "eval", "preflight", "certify", "doctor", "fetch", "train")
PROGRAM = [sys.executable, "-m", "pacs_megatron"]


def _limit_memory() -> None:
    """MEMORY_BYTES more than this process has: a fork begins with what earlier tests left in it."""
    limit = _held_bytes("VmData") + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _held_bytes(kind: str) -> int:
    """VmData or VmRSS of this process."""
    [kib] = re.findall(rf"{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(kib) << 10


def _start(
    command: list[str | Path | bytes], folder: Path, environ: dict[str, str], output: int
) -> tuple[int, int]:
    """The process of a command, and the bytes with which it begins.

    Verbs without variables of their own run in a fork, which has the imports already.

    `sh` as first word starts a shell with the program as `$P`.
    """
    words = [os.fsdecode(word) for word in command]
    if environ or not words or words[0] not in _FORKED or any("some/" in word for word in words):
        process = subprocess.Popen(
            command if words[:1] == ["sh"] else [*PROGRAM, *command],
            cwd=folder,
            env=os.environ
            | {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder), "P": " ".join(PROGRAM)}
            | environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=_limit_memory,
        )
        process.returncode = 0  # `run` waits for it
        return process.pid, IMPORTS_BYTES
    held = _held_bytes("VmRSS")
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            _limit_memory()
            os.chdir(folder)
            os.environ |= {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
            logging.getLogger().handlers.clear()  # pytest's
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            sys.stdin = os.fdopen(0)
            sys.stdout = os.fdopen(1, "w", buffering=1)
            sys.stderr = os.fdopen(2, "w", buffering=1)
            code: Any = 70
            try:
                code = main(words)
            except SystemExit as ended:
                code = ended.code
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(int(code or 0))
    return pid, held


def run(command: list[str | Path | bytes], folder: Path, environ: dict[str, str]) -> Outcome:
    """Runs a command to its end, or kills it after LIMIT_S."""
    begin = time.monotonic()
    reader, writer = os.pipe()
    pid, held = _start(command, folder, environ, writer)
    os.close(writer)
    timer = threading.Timer(LIMIT_S, lambda: os.killpg(pid, 9))
    timer.start()
    last = begin
    silence = 0.0
    parts: list[bytes] = []
    while part := os.read(reader, 65536):
        now = time.monotonic()
        if not parts or not re.search(
            rb"waiting |in phase |rewards \d+/", parts[-1]
        ):  # the wait is known; its reports become rarer
            silence = max(silence, now - last)
        last = now
        parts.append(part)
    os.close(reader)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    starved_s = int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    _, status, usage = os.wait4(pid, 0)
    end = time.monotonic()
    hung = not timer.is_alive()
    timer.cancel()
    text = b"".join(parts).decode(errors="replace")
    cpu_s = usage.ru_utime + usage.ru_stime
    return Outcome(
        None if hung else os.waitstatus_to_exitcode(status),
        text,
        max(silence, end - last),
        starved_s,
        cpu_s,
        end - begin,
        usage.ru_maxrss * 1024 - held,
    )


def serve(reply: bytes, stop: threading.Event, server: socket.socket) -> None:
    """Sends `reply` to every connection until `stop` is set."""
    while not stop.is_set():
        try:
            connection, _ = server.accept()
        except OSError:
            continue
        with connection:
            connection.settimeout(2)
            try:
                connection.recv(65536)
                connection.sendall(reply)
            except OSError:
                continue


Arrange = Callable[[World], Any]
Case = tuple[Arrange, tuple[str, ...], dict[str, str]]
"""(arranges the world, words of the command with {m}, {c}, {r} and {w}, environment)"""


class Cases(dict[str, Case]):
    """The cases of one file by name."""

    def add(
        self,
        name: str,
        *command: str,
        arrange: Arrange = lambda world: None,
        environ: dict[str, str] | None = None,
    ) -> None:
        """`command` may contain {m}odel, {c}heckpoint, {r}un, {w}orld."""
        assert name not in self, name
        self[name] = (arrange, command, environ or {})


def check_case(
    name: str, case: Case, original: World, folder: Path, *, may_work: bool = False
) -> None:
    """Runs a case in its own copy of the world; {m}, {c}, {r}, {w}: its model, checkpoint, run and
    folder.
    """
    world = copy_world(original, folder / "world")
    arrange, words, environ = case
    arrange(world)
    places = {"m": world.model, "c": world.checkpoint, "r": world.run, "w": world.folder}
    try:
        check(name, world, [word.format(**places) for word in words], environ, may_work=may_work)
    finally:
        shutil.rmtree(world.folder, ignore_errors=True)


def _contents(folder: Path) -> dict[Path, tuple[int, bytes]]:
    """Size and first 64 MiB of every regular file, outside of the folders that runs write."""
    found = {}
    for path in folder.rglob("*"):
        if (
            path.is_file()
            and not path.is_symlink()
            and path.relative_to(folder).parts[:2] != ("runs", "tiny")
        ):
            with path.open("rb") as file:
                found[path] = path.stat().st_size, file.read(64 << 20)
    return found


def check(
    name: str,
    world: World,
    command: list[str | Path | bytes],
    environ: dict[str, str],
    *,
    may_work: bool = False,
) -> Outcome:
    """Runs `command` and asserts that it ends as it should; `may_work`: without an error, or with
    one clear line.
    """
    before = set(world.folder.rglob("*"))
    contents = _contents(world.folder)
    outcome = run(command, world.folder, environ)
    errors = _ERROR.findall(outcome.text)
    faults = []
    if outcome.code is None:
        faults.append("hangs")
    elif outcome.code == 0 and not may_work:
        faults.append("accepted")
    elif outcome.code < 0:
        faults.append(f"ended by signal {-outcome.code}")
    if "Traceback" in outcome.text or "InternalError" in outcome.text:
        faults.append("traceback")
    if (not errors and outcome.code) or (len(errors) > 1 and command[0] != "preflight"):
        faults.append(f"{len(errors)} errors")
    lines = [
        line for line in outcome.text.split("\n") if line.strip() and not _LOG_LINE.match(line)
    ]
    if len(lines) > 1 and command[0] in _ONE_LINE and outcome.code:
        faults.append(f"{len(lines)} lines")
    if outcome.silence_s - outcome.starved_s > SILENCE_S:
        faults.append(f"silent for {outcome.silence_s:.0f} s")
    if outcome.memory_bytes > MEMORY_BYTES // 2 or "MemoryError" in outcome.text:
        faults.append(f"{outcome.memory_bytes >> 20} MiB of memory")
    if (world.folder / "canary").exists() or (outcome.code and (world.folder / "o").exists()):
        faults.append("left something behind")
    after = _contents(world.folder)
    given = (
        path for path in contents if outcome.code or path.parent != world.folder / "e"
    )  # results of a command
    faults += [f"lost {path.name}" for path in given if after.get(path) != contents[path]]
    half = [path for path in set(world.folder.rglob("*")) - before if ".partial" in path.name]
    if half:
        faults.append(f"half-written {half[0].name}")
    if LOG:
        line = next(
            (line for line in outcome.text.splitlines() if _ERROR.match(line)), outcome.text[-200:]
        )
        with Path(LOG).open("a") as file:
            verdict = ", ".join(faults) or "ok"
            file.write(
                f"{verdict} | {name} | code {outcome.code}, {outcome.wall_s:.1f} s, cpu "
                f"{outcome.cpu_s:.1f} s, "
                f"{outcome.memory_bytes >> 20} MiB, starved "
                f"{outcome.starved_s:.1f} s, longest silence {outcome.silence_s:.1f} s | "
                f"{line.replace(str(world.folder), '.')[:300]!r}\n"
            )
    assert not faults, f"{faults}\n{outcome.text[-3000:]}"
    return outcome
