"""The one judge of wrong inputs: runs a case and asserts how a command may end.

Every case must end with one clear line and an exit code, without a traceback, a silence, a control
character in the terminal, a file that is lost, half-written or left, or a process that stays. The
case adds its own expectations. `PACS_INPUTS_LOG=FILE` records every case.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
from itertools import chain
from pathlib import Path
from typing import Any

from tests.support.inputs import checks, servers, setup
from tests.support.inputs.cases import Case
from tests.support.inputs.process import LIMIT_S, MEMORY_BYTES, ONE_LINE, Outcome, run
from tests.support.inputs.world import Prepared, World

SILENCE_S = 10.0
VIOLATION = 9
"""Exit code of a script that found something lost or half-written."""
PRELUDE = Path(__file__).with_name("prelude.sh")
"""Functions of the scripts."""
LOG = os.environ.get("PACS_INPUTS_LOG")
_ERROR = re.compile(r"^(?:\w+Error: |fail  ).*", re.MULTILINE)
_LOG_LINE = re.compile(
    r"\d{4}-\d\d-\d\d |.*\r|waiting for |[\w ]+ [\d.]+\w?/[\d.]+\w?, |removed |another process is "
    r"writing |\S+ was complete; "
)
"""Lines of a run, and those of `convert` and `export`, whose log is the text alone"""
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_WRONG = (
    *("Traceback", "InternalError", "Exception ignored", "BrokenPipe", "Fatal Python"),
    *("core dumped", "MemoryError"),
)
_WRITTEN = (
    *("logs", "heartbeats", "run.lock", "exit_code", "report.html", "environment.json"),
    *("config.yaml", "STOP"),
)
"""Names that a run may write before it fails."""
_LARGE = 64 << 20
"""Larger files are not read."""


def judge(case: Case, prepared: Prepared) -> None:
    """Runs a case in a fresh world and asserts that it ends as it should."""
    world = prepared.restore(case.state)
    with servers.serving(case.server) if case.server else contextlib.nullcontext("") as address:
        world = World(world.folder, address or "")
        setup.arrange(case.setup, world)
        before = _files(world)
        names = set(world.folder.rglob("*"))
        outcome, left = _run(case, world)
        faults = _faults_of_the_end(case, outcome)
        faults += _faults_of_the_text(case, outcome)
        faults += _faults_of_the_files(case, world, outcome, before, names)
        if left:
            faults.append(f"processes {left} stay")
        if not faults:
            faults = checks.faults_of(case, world, outcome)
    if LOG:
        _record(case, world, outcome, faults)
    assert not faults, (
        f"{'; '.join(faults)}\ncase: {case.name}\nreason: {case.reason}\n{outcome.text[-4000:]}"
    )


def _run(case: Case, world: World) -> tuple[Outcome, list[int]]:
    """The outcome, and the processes that stay."""
    if case.shell:
        command = ["sh", "-c", PRELUDE.read_text() + world.place(case.shell)]
    else:
        command = [*chain.from_iterable(_words(given, world) for given in case.command)]
    environ = {name: _words(value, world)[0] for name, value in case.env.items()}
    rescue = threading.Timer(LIMIT_S + 20, _end, (world,))
    rescue.start()
    outcome = run(command, world.folder, environ)
    rescue.cancel()

    end = time.monotonic() + 45
    left = _left(world)
    while left and time.monotonic() < end:
        time.sleep(0.5)
        left = _left(world)
    _end(world)
    return outcome, left


def _words(given: Any, world: World) -> list[str]:
    """A word of a command, or several.

    Args:
        given: text; {text: [text, [text, times]]}; {list: "key=", from: 1, to: 9} for
            "key=1,2,..."; {numbers: "key=%d", count: 9} for nine words.
        world: replaces {w}, {m}, {c}, {r} and {s}.
    """
    if not isinstance(given, dict):
        return [world.place(str(given))]
    if "text" in given:
        return [os.fsdecode(setup.content(given["text"], world))]
    if "list" in given:
        numbers = range(given["from"], given["to"] + 1)
        return [given["list"] + ",".join(map(str, numbers))]
    return [given["numbers"] % number for number in range(given["count"])]


def _left(world: World) -> list[int]:
    """Processes that still run and have the world in a variable."""
    found = []
    mark = str(world.folder).encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            is_dead = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            if not is_dead and mark in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def _end(world: World) -> None:
    for pid in _left(world):
        with contextlib.suppress(OSError):
            os.kill(pid, 9)


# -------------------------------------------------------------------------------- general contract
def _faults_of_the_end(case: Case, outcome: Outcome) -> list[str]:
    code = outcome.code
    errors = _ERROR.findall(outcome.text)
    faults = []
    if code is None:
        return ["hangs"]
    if code == VIOLATION and VIOLATION not in case.also:
        faults.append("the script found a violation")
    if isinstance(case.ends, list):
        if code not in case.ends:
            faults.append(f"exit code {code}, expected one of {case.ends}")
    elif code in case.also:
        pass
    elif code == 0:
        if case.ends == "error":
            faults.append("accepted")
    elif case.ends == "works":
        faults.append(f"failed with {code}")
    elif code < 0 or code >= 128:
        faults.append(f"ended by signal {abs(code) % 128}")
    elif not errors:
        faults.append("no error line")
    return faults


def _faults_of_the_text(case: Case, outcome: Outcome) -> list[str]:
    faults = [word for word in _WRONG if word in outcome.text]
    verb = "sh" if case.shell or not case.command else case.command[0]
    is_list = "preflight" in (case.shell or verb)
    errors = _ERROR.findall(outcome.text)
    if len(errors) > 1 and not is_list:
        faults.append(f"{len(errors)} errors")
    lines = [line for line in outcome.text.split("\n") if line.strip()]
    lines = [line for line in lines if not _LOG_LINE.match(line)]
    if outcome.code and verb in ONE_LINE and len(lines) > 1:
        faults.append(f"{len(lines)} lines")
    control = _CONTROL.search(outcome.text)
    if control is not None:
        faults.append(f"control character {control[0]!r}")
    if outcome.silence_s - outcome.starved_s > SILENCE_S:
        faults.append(f"silent for {outcome.silence_s:.0f} s")
    if outcome.memory_bytes > MEMORY_BYTES // 2:
        faults.append(f"{outcome.memory_bytes >> 20} MiB of memory")
    return faults + _missing_texts(case, outcome, errors)


def _missing_texts(case: Case, outcome: Outcome, errors: list[str]) -> list[str]:
    """Faults of the texts that this case expects."""
    faults = []
    classes = [case.error] if isinstance(case.error, str) else case.error
    if outcome.code and case.error:
        starts = tuple(f"{name}: " for name in classes)
        if not any(line.startswith(starts) for line in errors):
            faults.append(f"the error is no {' or '.join(classes)}")
    lines = [line for line in errors if all(text in line for text in case.contains)]
    if outcome.code and case.contains and not lines:
        faults.append(f"no line of the error has {case.contains}")
    if case.matches and not re.search(case.matches, outcome.text):
        faults.append(f"no {case.matches!r} in the output")
    if case.mentions and not any(text in outcome.text for text in case.mentions):
        faults.append(f"none of {case.mentions} in the output")
    if not outcome.code:
        faults += [f"{text!r} is not shown" for text in case.shows if text not in outcome.text]
    return faults + [f"{text!r} is shown" for text in case.hides if text in outcome.text]


def _files(world: World) -> dict[Path, bytes]:
    """Every regular file that no failing command may change."""
    runs = world.folder / "runs"
    found = {}
    for path in world.folder.rglob("*"):
        if not path.is_file() or path.is_symlink() or path.stat().st_size >= _LARGE:
            continue
        is_of_run = runs in path.parents
        if not is_of_run or not set(_WRITTEN) & set(path.relative_to(runs).parts):
            found[path] = path.read_bytes()
    return found


def _faults_of_the_files(
    case: Case, world: World, outcome: Outcome, before: dict[Path, bytes], names: set[Path]
) -> list[str]:
    faults = []
    if (world.folder / "canary").exists():
        faults.append("a command in the input was executed")
    if outcome.code and (world.folder / "o").exists():
        faults.append("the output of a failed command exists")
    has_failed = outcome.code and outcome.code not in case.also and isinstance(case.ends, str)
    after = _files(world)
    for path, data in before.items():
        part = path.relative_to(world.folder).parts[0]
        may_change = not has_failed and part in ("runs", "e")
        if not may_change and after.get(path) != data:
            faults.append(f"lost {path.relative_to(world.folder)}")
    for path in set(world.folder.rglob("*")) - names:
        if ".partial" in path.name:
            faults.append(f"half-written {path.name}")
    return faults


def _record(case: Case, world: World, outcome: Outcome, faults: list[str]) -> None:
    errors = _ERROR.findall(outcome.text)
    line = {
        "case": case.name,
        "faults": faults,
        "code": outcome.code,
        "wall_s": round(outcome.wall_s, 1),
        "cpu_s": round(outcome.cpu_s, 1),
        "memory_mib": outcome.memory_bytes >> 20,
        "silence_s": round(outcome.silence_s - outcome.starved_s, 1),
        "lines": [error.replace(str(world.folder), ".")[:400] for error in errors[:30]],
    }
    with Path(str(LOG)).open("a") as file:
        file.write(json.dumps(line) + "\n")
