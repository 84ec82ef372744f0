"""A traced rank with a changed line in the product.

`python -m tests.support.traced_rank REQUEST MODULE OLD NEW` is
`python -m pacs_megatron.workbench.trace.rank REQUEST` with OLD replaced by NEW in the source of
MODULE.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from pacs_megatron.workbench.trace.rank import TraceRequest, main, to_argument

ROOT = Path(__file__).parents[2]
LIMIT_S = 600.0


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


def trace(request: TraceRequest, change: tuple[str, str, str] | None = None) -> dict[str, Any]:
    """The result of a rank.

    Args:
        request: what it runs.
        change: module, old text and new text; None: the product as it is.

    Raises:
        AssertionError: with the last lines of its standard error, if it fails.
    """
    module = "pacs_megatron.workbench.trace.rank"
    if change is not None:
        module = "tests.support.traced_rank"
    request = replace(request, config=str(ROOT / request.config))
    command = [sys.executable, "-m", module, to_argument(request), *(change or ())]
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    traced: dict[str, Any] = json.loads(result.stdout)
    return traced


if __name__ == "__main__":
    sys.meta_path.insert(0, _ChangedSource(*sys.argv[2:5]))
    sys.exit(main())
