"""Outputs that the user named: they replace an earlier output, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from pacs_megatron.errors import ConfigError
from pacs_megatron.runtime.files import write_outputs

OUTPUTS = {
    "json": (b'{"tasks": ["math"], "differences": []}', b'{"tasks": ["aime24"], "differences": []}'),
    "latex": (b"\\begin{tabular}{lr}\n", b"\\begin{tabular}{lrrr}\n"),
    "csv": (b"method,task,mean\npacs,math,0.5\n", b"method,task,mean\ngrpo,aime,0.1\n"),
    "archive": (b"PK\x03\x04\x14\x00\x00\x00\x08\x00\x01\x02\x99", b"PK\x03\x04\x14\x00\x00\x00\x08\x00\x01\x02\x55"),
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_another_result_replaces_an_earlier_one(tmp_path: Path, kind: str) -> None:
    first, second = OUTPUTS[kind]
    path = tmp_path / "new" / "out"
    for content in (first, second):
        write_outputs({path: content})
        assert path.read_bytes() == content


def test_no_output_is_written_if_one_would_replace_another_file(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_bytes(b'{"step": 1}\n')
    with pytest.raises(ConfigError, match=r"metrics\.jsonl exists and is no earlier output"):
        write_outputs({tmp_path / "page.html": b"<!doctype html>", metrics: OUTPUTS["json"][0]})
    assert metrics.read_bytes() == b'{"step": 1}\n'
    assert not (tmp_path / "page.html").exists()
