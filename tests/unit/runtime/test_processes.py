"""Processes that end with their parent."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

import pacs_megatron
from pacs_megatron.runtime.processes import AGENT_PID

ROOT = Path(pacs_megatron.__file__).parent
CHILD = (
    "import time; from pacs_megatron.runtime.processes import die_with_parent; die_with_parent(); "
    "time.sleep(600)"
)
PARENT = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}])
time.sleep(1)
print(child.pid, flush=True)
time.sleep(600)
"""


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_killed_parent_takes_its_child_along() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    time.sleep(1)  # the child may be importing
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 60
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_alive(child)


def test_every_program_that_the_package_starts_ends_with_its_parent() -> None:
    """The class: modules of this package that other modules start by name, the batch script's
    excepted.
    """
    sources = {path: path.read_text() for path in ROOT.rglob("*.py")}
    started = set()
    for text in sources.values():
        if ".Popen(" in text:
            for node in ast.walk(ast.parse(text)):
                if (
                    isinstance(node, ast.Constant)
                    and isinstance(node.value, str)
                    and node.value.startswith("pacs_megatron.")
                ) and (ROOT.parent / (node.value.replace(".", "/") + ".py")).is_file():
                    started.add(node.value)
    assert {"pacs_megatron.launch.agent", "pacs_megatron.rollout.driver"} <= started
    own = {"pacs_megatron.launch.serve"}  # its starter sets the signal, before the program begins
    silent = [
        name
        for name in started - own
        if "die_with_parent(" not in sources[ROOT.parent / (name.replace(".", "/") + ".py")]
    ]
    assert not silent


def test_a_rank_whose_torchrun_has_already_ended_does_not_start(tmp_path: Path) -> None:
    """The signal of the kernel comes only for a parent that ends later."""
    command = [sys.executable, "-m", "pacs_megatron.training.main", str(tmp_path / "run.yaml")]
    done = subprocess.run(
        command, env={**os.environ, AGENT_PID: "1"}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (1, "")
