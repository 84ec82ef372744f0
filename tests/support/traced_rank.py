"""Traced ranks and worlds, also with a changed line in the product, and the reviewed list of the
places where a step may wait for the GPU.

`python -m tests.support.traced_rank rank REQUEST MODULE OLD NEW` is
`python -m pacs_megatron.workbench.trace.rank REQUEST` with OLD replaced by NEW in the source of
MODULE; `world` instead of `rank` is the same for `workbench.trace.world`.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from pacs_megatron.workbench.trace import rank, world
from pacs_megatron.workbench.trace.rank import TraceRequest, to_argument

ROOT = Path(__file__).parents[2]
LIMIT_S = 900.0
HOST_SYNCS = ROOT / "tests" / "fake_cuda" / "host_syncs.yaml"
_OUTSIDE_OF_STEPS = (
    *("build", "take reference", "off-load", "export", "step/sync"),
    *("checkpoint", "critic: checkpoint"),
)
"""phases that copy whole weights, where a wait does not matter"""
Change = tuple[str, str, str]
"""module, old text, new text"""


class _ChangedSource(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads one module from its source with a changed line."""

    def __init__(self, module: str, old: str, new: str) -> None:
        self._module = module
        self._old = old
        self._new = new

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        assert spec is not None and spec.origin is not None
        return importlib.util.spec_from_file_location(fullname, spec.origin, loader=self)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__file__ is not None
        source = Path(module.__file__).read_text()
        assert source.count(self._old) == 1, f"{self._module}: {self._old!r} is not there once"
        code = compile(source.replace(self._old, self._new), module.__file__, "exec")
        exec(code, vars(module))  # noqa: S102  (the product's own source)


def trace(request: TraceRequest, change: Change | None = None) -> dict[str, Any]:
    """The result of a rank.

    Args:
        request: what it runs.
        change: of the product; None: the product as it is.

    Raises:
        AssertionError: with the last lines of its standard error, if it fails.
    """
    argument = to_argument(replace(request, config=str(ROOT / request.config)))
    traced: dict[str, Any] = _run("rank", argument, change)
    return traced


def trace_worlds(
    requests: Iterable[TraceRequest], change: Change | None = None
) -> list[dict[str, Any]]:
    """The results of all ranks of worlds whose runs have GPUs of one kind, as `trace`."""
    absolute = [replace(each, config=str(ROOT / each.config)) for each in requests]
    argument = json.dumps([asdict(each) for each in absolute])
    traced: list[dict[str, Any]] = _run("world", argument, change)
    return traced


def _run(kind: str, argument: str, change: Change | None) -> Any:
    command = [sys.executable, "-m", f"pacs_megatron.workbench.trace.{kind}", argument]
    if change is not None:
        command = [sys.executable, "-m", "tests.support.traced_rank", kind, argument, *change]
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert result.returncode == 0, result.stderr[-10_000:]
    return json.loads(result.stdout)


def unreviewed_waits(syncs: Iterable[Mapping[str, Any]]) -> list[str]:
    """The places where the host waits for the GPU and that tests/fake_cuda/host_syncs.yaml lacks.

    Args:
        syncs: `host_syncs` of a trace.
    """
    reviewed = yaml.safe_load(HOST_SYNCS.read_text())
    places = set()
    for sync in syncs:
        is_in_step = not sync["phase"].startswith(_OUTSIDE_OF_STEPS)
        if is_in_step and sync["function"] not in reviewed:
            line = sync["place"].rpartition(":")[2]
            places.add(f"{sync['operation']} in {sync['function']}, line {line}")
    return sorted(places)


if __name__ == "__main__":
    kind, argument, *change = sys.argv[1:]
    sys.meta_path.insert(0, _ChangedSource(*change))
    sys.argv = [sys.argv[0], argument]
    sys.exit(rank.main() if kind == "rank" else world.main())
