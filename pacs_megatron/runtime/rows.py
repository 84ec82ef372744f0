"""Files of JSON lines, possibly damaged by the loss of a node."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from pacs_megatron.errors import DataError
from pacs_megatron.runtime.json_reader import parse_json


def read_rows(path: Path, keys: Collection[str] = ()) -> list[dict[str, Any]]:
    """The objects that have all `keys`; none if there is no file. Skips incomplete lines."""
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = parse_json(line, str(path))
        except DataError:
            continue
        if isinstance(row, dict) and all(key in row for key in keys):
            rows.append(row)
    return rows
