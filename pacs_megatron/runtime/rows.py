"""Files of JSON lines, possibly damaged by the loss of a node."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any


def read_rows(path: Path, keys: Collection[str] = ()) -> list[dict[str, Any]]:
    """The objects that have all `keys`; none if there is no file. Skips incomplete lines."""
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and all(key in row for key in keys):
            rows.append(row)
    return rows
