"""The layers of docs/architecture.md, held by the source itself:
function-local imports count too.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.imports import imports

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "pacs_megatron"
ROWS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("contracts",),
    ("objectives",),
    ("config",),
    ("runtime",),
    ("observability",),
    ("parallel",),
    ("rewards", "data", "models"),
    ("batching", "checkpoint", "agents"),
    ("policy", "embedded", "sglang"),
    ("rollout",),
    ("convert",),
    ("training",),
    ("launch",),
    ("workbench.statistics", "workbench.plan"),
    ("workbench.evaluation", "workbench.trace"),
    ("workbench.compare", "workbench.diversity", "workbench.preflight", "workbench.certify"),
    ("workbench.paper",),
    ("cli",),
)
HEIGHT: dict[str, int] = {}
for _row, _names in enumerate(ROWS):
    HEIGHT |= dict.fromkeys(_names, _row)
LIGHT = {
    *("errors", "contracts", "objectives", "config", "runtime", "models", "launch", "cli"),
    *("workbench.plan", "workbench.preflight"),
}
"""No torch and no Megatron at module level."""
ONLY_IMPORTERS = {
    "megatron": {"policy", "parallel", "checkpoint", "workbench.trace"},
    "transformer_engine": {"policy", "parallel", "checkpoint", "workbench.trace"},
    "nemo_run": {"launch"},
}


def layer_of(path: Path) -> str:
    """`config` for config/load.py, `cli` for cli.py, `workbench.plan` for workbench/plan/memory.py.

    `__init__` and `__main__` of the package are their own names.
    """
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return layer_name(parts) if len(parts) > 1 else parts[0]


def layer_name(parts: Sequence[str]) -> str:
    """The layer of a module, from its path below the package."""
    return ".".join(parts[:2]) if parts[0] == "workbench" else parts[0]


def broken_rules(path: Path, source: str) -> list[str]:
    """Imports of this file that the layers forbid, one line each."""
    layer = layer_of(path)
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    found = []
    for name, line, at_start in imports(ast.parse(source), module):
        where = f"{path.relative_to(ROOT)}:{line}"
        top, *rest = name.split(".")
        target = layer_name(rest) if top == "pacs_megatron" and rest else ""
        if target in HEIGHT and layer in HEIGHT and target != layer:
            if HEIGHT[target] >= HEIGHT[layer]:
                found.append(
                    f"{where}: {layer} may not import {target} (a sibling or a higher layer)"
                )
        elif top in ONLY_IMPORTERS and layer not in ONLY_IMPORTERS[top]:
            found.append(f"{where}: only {', '.join(sorted(ONLY_IMPORTERS[top]))} import {top}")
        if top in ("torch", "megatron") and at_start and layer in LIGHT:
            found.append(f"{where}: {layer} may not import {top} at module level")
        if top in ("tests", "conversion", "examples", "benchmarks"):
            found.append(f"{where}: the package may not import {top}")
    return found


def package_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def test_every_file_has_a_layer() -> None:
    unknown = (
        {layer_of(path) for path in package_files()}
        - set(HEIGHT)
        - {"__init__", "__main__", "workbench.__init__"}
    )
    assert not unknown, f"not in the table of layers: {unknown}"


@pytest.mark.parametrize("layer", [*HEIGHT, "__init__", "__main__"])
def test_layers(layer: str) -> None:
    files = [path for path in package_files() if layer_of(path) == layer]
    assert files, f"{layer} has no file; take it out of the table"
    broken = []
    for path in files:
        for rule in broken_rules(path, path.read_text(encoding="utf-8")):
            broken.append(rule)
    assert not broken, "\n".join(broken)


def test_core_names_the_workbench_only_in_the_table_of_verbs() -> None:
    named = [
        str(path.relative_to(PACKAGE))
        for path in package_files()
        if "workbench." in path.read_text(encoding="utf-8")
        and layer_of(path).split(".")[0] != "workbench"
    ]
    assert named == ["launch/verbs.py"]


@pytest.mark.parametrize(
    ("file", "source", "expected"),
    [
        (
            "training/x.py",
            "from pacs_megatron.workbench.evaluation import results",
            "may not import workbench.evaluation",
        ),
        (
            "config/x.py",
            "from pacs_megatron.models import ModelSpec",
            "config may not import models",
        ),
        (
            "config/x.py",
            "def f():\n    import pacs_megatron.workbench.plan.plan",
            "config may not import workbench.plan",
        ),
        ("config/x.py", "from ..training import loop", "config may not import training"),
        (
            "objectives/x.py",
            "from pacs_megatron import rewards",
            "objectives may not import rewards",
        ),
        ("models/x.py", "import torch.nn as nn", "models may not import torch at module level"),
        (
            "rollout/x.py",
            "def f():\n    from megatron.core import x",
            "only checkpoint, parallel, policy, workbench.trace import megatron",
        ),
        ("training/x.py", "import nemo_run", "only launch import nemo_run"),
        (
            "launch/x.py",
            "import importlib\nimportlib.import_module('pacs_megatron.cli')",
            "launch may not import cli",
        ),
        ("policy/x.py", "from tests.support import ranks", "the package may not import tests"),
    ],
)
def test_the_rules_catch(file: str, source: str, expected: str) -> None:
    assert any(expected in rule for rule in broken_rules(PACKAGE / file, source))


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("models/x.py", "def f():\n    import torch"),
        ("models/x.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("policy/x.py", "import megatron.core\nfrom pacs_megatron.models import ModelSpec"),
        ("policy/x.py", "from .engine import Engine\nfrom pacs_megatron.policy.model import build"),
    ],
)
def test_the_rules_allow(file: str, source: str) -> None:
    assert broken_rules(PACKAGE / file, source) == []


@pytest.mark.parametrize(
    "code",
    [
        "import pacs_megatron.config",
        "import pacs_megatron.contracts, pacs_megatron.models",
        "import pacs_megatron.launch.train",
        "import pacs_megatron.cli\ntry:\n    pacs_megatron.cli.main(['--help'])\nexcept "
        "SystemExit:\n    pass",
    ],
)
def test_light_imports_leave_out_what_is_slow(code: str) -> None:
    check = "\nimport sys\nprint(sorted({'torch', 'megatron', 'transformers'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code + check], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.splitlines()[-1] == "[]"
