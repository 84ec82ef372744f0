"""Every file and command of docs/own-task.md, in their order, with a tiny model and few steps."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from examples.quickstart.model import build_model
from pacs_megatron.config import load_config

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
SMALLER = {
    r"steps: \d+": "steps: 2",
    r"every: \d+": "every: 1",
    r'\("train", 400\), \("test", 32\)': '("train", 64), ("test", 2)',
}


def page() -> list[tuple[str, str]]:
    """(language, content) of each block."""
    text = (ROOT / "docs" / "own-task.md").read_text()
    return [(match[1], match[2]) for match in BLOCK.finditer(text)]


def write_file(folder: Path, content: str) -> None:
    first, _, body = content.partition("\n")
    (folder / first.removeprefix("# file: ")).write_text(body)


def test_the_files_of_the_page_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for language, content in page():
        if language != "bash":
            write_file(tmp_path, content)
    for name in ("sft.yaml", "rl.yaml"):
        config = load_config(Path(name)).config
        assert not config.data.prompt_suffix, "own data has no default suffix"


@pytest.mark.full
def test_the_commands_of_the_page_run(tmp_path: Path) -> None:
    build_model(tmp_path / "model", seed=0)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    output = ""
    for language, content in page():
        if language != "bash":
            for pattern, text in SMALLER.items():
                content = re.sub(pattern, text, content)
            write_file(tmp_path, content.replace("Qwen/Qwen3-0.6B", "model"))
            continue
        for line in content.splitlines():
            program, *words = shlex.split(line)
            module = ["-m", "pacs_megatron"] if program == "pacs-megatron" else []
            done = subprocess.run(
                [sys.executable, *module, *words],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
            output += f"$ {line}\n{done.stdout}{done.stderr}"

    assert output.count("report     runs/") == 3
    assert "state      done" in output
    for folder in ("runs/pacs/hf", "runs/grpo/hf", "runs/pacs/hf_exports/step_000002"):
        assert (tmp_path / folder / "model.safetensors").is_file()
    assert (tmp_path / "compare.html").is_file()
