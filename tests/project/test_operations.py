"""Every command of docs/operations.md runs, or has a mark: it needs a network, a cluster,
Transformer Engine or a GPU.

MARKED lists the commands that may have each mark. Of marked commands the tests check options,
files, and the sizes that must agree with the configuration.
"""

from __future__ import annotations

import argparse
import io
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from pacs_megatron.cli import build_parser, main
from pacs_megatron.config import load_config
from pacs_megatron.config.cluster import load_cluster
from pacs_megatron.config.explain import schema_json
from pacs_megatron.launch.job import describe
from pacs_megatron.runtime.run_lock import RunLock
from pacs_megatron.workbench.plan.plan import make_plan
from tests.support.needs import require_nemo_run
from tests.support.tiny_models import make_tiny_qwen3
from tests.support.tiny_run import write_tiny_run

ROOT = Path(__file__).parents[2]
FROZEN = "objective.reference=frozen"
TEXT = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
MARKED = {
    # A download, or a program that uses a network.
    "network": r"git clone |make install(-gpu)?$|source \.venv-gpu/|pip install |pacs-megatron "
    r"(fetch|data preview) |pacs-megatron export .* --push ",
    # The site's own file, its queue, its shared folders.
    "cluster": r"cp |export |pacs-megatron (preflight .* --cluster|cancel) ",
    # Transformer Engine, but no GPU.
    "TE": r"pacs-megatron plan .* --trace$",
    "GPU": r"sbatch |pacs-megatron (submit (?!.*--dry-run)|eval )",
}
"""mark -> pattern of the commands that may have it."""


def all_commands() -> list[tuple[str, str | None]]:
    """(command, mark) of every line in a block."""
    lines = []
    for block in re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL):
        for line in block.splitlines():
            if line:
                lines.append(line)
    assert len(lines) > 25
    found = [re.fullmatch(r"(.*?)(?:\s+# (\w+))?\s*", line) for line in lines]
    return [(match[1], match[2]) for match in found if match]


def commands() -> list[str]:
    """The documented commands without a mark."""
    return [command for command, mark in all_commands() if mark is None]


def marked(program: str) -> list[str]:
    """The documented commands of `program` that cannot be run here."""
    return [
        command
        for command, mark in all_commands()
        if mark is not None and command.startswith(program)
    ]


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder `runs/NAME` as the document calls it, with a checkpoint and an open attempt."""
    folder = tmp_path_factory.mktemp("operations")
    config = write_tiny_run(
        folder, make_tiny_qwen3(folder / "model", hidden_size=512, intermediate_size=1024)
    )
    command = [
        sys.executable,
        "-m",
        "pacs_megatron",
        "train",
        str(config),
        "run.name=NAME",
        "run.steps=1",
        FROZEN,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return folder / "runs" / "NAME"


def test_only_known_programs_are_used() -> None:
    programs = {shlex.split(command)[0] for command in commands()}
    assert programs == {"pacs-megatron", "source"}


@pytest.mark.parametrize(
    "command", [command for command in commands() if command.startswith("pacs-megatron")]
)
def test_command(
    command: str,
    finished_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = shlex.split(command, comments=True)[1:]
    if words[0] == "submit":
        require_nemo_run()
        monkeypatch.setenv("NEMORUN_HOME", str(tmp_path / "nemo"))
        monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.chdir(ROOT)
    here = {"runs/NAME": str(finished_run), "compare.html": str(tmp_path / "compare.html")}
    words = [here.get(word, word) for word in words]
    # `cancel` is for a run that goes on: the lock is what it looks at.
    with RunLock(finished_run, "train") if words[0] == "cancel" else nullcontext():
        assert main(words) == 0
    assert capsys.readouterr().out


def test_a_checkpoint_is_as_large_as_planned(finished_run: Path) -> None:
    """With a frozen reference, which is saved too."""
    plan = make_plan(load_config(finished_run / "config.yaml"))
    files = (finished_run / "checkpoints" / "step_000001" / "dist").rglob("*")
    written = sum(path.stat().st_size for path in files if path.is_file())
    assert (
        1 <= written / plan.checkpoint_bytes < 1.03
    )  # each tensor has a head of its own, about 1 KB


def test_every_block_is_read() -> None:
    """A block of another language would not be tested."""
    assert set(re.findall(r"^ *```(.*)$", TEXT, re.MULTILINE)) == {"bash", ""}
    assert "~~~" not in TEXT
    assert not [line for line in TEXT.splitlines() if line.startswith(("    ", "$ "))]


def test_only_commands_that_need_a_mark_have_one() -> None:
    for command, mark in all_commands():
        if mark is not None:
            assert re.match(MARKED[mark], command), f"{command!r} can be run here; remove its mark"


def test_the_environment_is_activated(tmp_path: Path) -> None:
    (line,) = [command for command in commands() if command.startswith("source ")]
    (tmp_path / ".venv").symlink_to(sys.prefix)
    done = subprocess.run(
        ["bash", "-ec", f"{line}; command -v pacs-megatron"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert done.stdout.strip().endswith("/bin/pacs-megatron")


def files_named(words: list[str]) -> list[str]:
    """Files of the checkout among a command's words, without those that the document creates."""
    made = [shlex.split(command)[-1] for command in marked("cp ")]
    return [word for word in words if word.startswith(("configs/", "slurm/")) and word not in made]


@pytest.mark.parametrize("command", marked("pacs-megatron"))
def test_a_marked_command_parses(command: str) -> None:
    words = shlex.split(command)[1:]
    build_parser().parse_args(words)
    for name in files_named(words):
        assert (ROOT / name).is_file(), name
    configs = [word for word in words if word.startswith("configs/runs/")]
    if configs:
        load_config(ROOT / configs[0], [word for word in words if re.match(r"[a-z_.]+=", word)])


@pytest.mark.parametrize("command", marked("sbatch"))
def test_a_marked_batch_job_requests_the_resources_of_its_configuration(command: str) -> None:
    words = shlex.split(command)[1:]
    (at,) = [index for index, word in enumerate(words) if word.endswith(".sbatch")]
    options = dict(word.removeprefix("--").split("=", 1) for word in words[:at])
    # The script checks its arguments, and then fails because it runs outside a job.
    done = subprocess.run(
        ["bash", *words[at:]], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert (done.returncode, "runs inside a job; submit it" in done.stderr) == (2, True), (
        done.stderr
    )
    if not words[at + 1].startswith("configs/"):
        return
    needs = describe(ROOT / words[at + 1], [])
    expected = {
        "train.sbatch": {
            "nodes": str(int(needs["TRAIN_NODES"]) + int(needs["ROLLOUT_NODES"])),
            "gpus-per-node": needs["GPUS_PER_NODE"],
            "time": needs["TIME_LIMIT"],
            "signal": f"B:USR1@{needs['SIGNAL_LEAD_S']}",
        },
        "preflight.sbatch": {
            "nodes": needs["TRAIN_NODES"],
            "ntasks-per-node": needs["RANKS_PER_NODE"],
            "gpus-per-node": needs["GPUS_PER_NODE"],
        },
        "eval.sbatch": {"gpus-per-node": "1"},
    }
    assert options == expected[Path(words[at]).name]


def test_the_sites_files_are_made_as_documented(tmp_path: Path) -> None:
    for folder in ("configs", "slurm"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    lines = [*marked("cp "), *marked("export "), 'source "$PACS_SITE"; env']
    done = subprocess.run(
        ["bash", "-euc", "\n".join(lines)], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert {"HF_HOME=/shared/hf", "PACS_SITE=slurm/clusters/mine.env"} <= set(
        done.stdout.splitlines()
    )
    assert load_cluster(tmp_path / "configs" / "clusters" / "mine.yaml").partition is not None


def test_options_in_the_text_are_this_programs() -> None:
    """Options and keys in the sentences exist."""
    prose = re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)
    known = set()
    for parser in parsers(build_parser()):
        for option in parser._option_string_actions:
            known.add(option)
    of_others = {"--no-index", "--find-links", "--cpu-bind"}
    written = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", prose))
    assert len(written) > 8
    assert written <= known | of_others
    keys = set(
        re.findall(
            r"`((?:batch|resources|rollout|checkpoint|objective|parallel)\.[a-z_.]+)[=`]", prose
        )
    )
    assert len(keys) > 5
    schema = schema_json()
    assert not [key for key in keys if f'"{key.rsplit(".", 1)[-1]}"' not in schema]


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """`parser` and those of all its verbs."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from parsers(below)
