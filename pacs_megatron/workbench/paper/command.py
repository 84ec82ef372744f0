"""`paper`: runs and prints tables and figures of the PACS paper."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pacs_megatron.workbench.paper.study import Study, run_study


def run_paper(
    *, overrides: list[str], scale: str, dir: Path | None, seeds: int | None, **options: Any
) -> Iterable[str]:
    """Lines to print. `overrides` has names of tables and figures, and `key=value` for all runs."""
    names = [word for word in overrides if "=" not in word]
    changes = [word for word in overrides if "=" in word]
    base = dir or Path("runs", f"paper-{scale}")
    return run_study(Study(scale, base.absolute(), changes, seeds), names, **options)
