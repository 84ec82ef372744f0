"""Documents: links and paths exist, text wraps at 100 columns, the README's file loads, every
metric is described, and the logs of measurements are those that the pages name.
"""

import ast
import re
import zipfile
from pathlib import Path

import pytest

from pacs_megatron.config import load_config

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(ROOT.glob("*.md"))
for _folder in ("docs", "conversion", "examples", "slurm"):
    DOCUMENTS += sorted((ROOT / _folder).rglob("*.md"))
MEASUREMENTS = ROOT / "docs" / "measurements"
COLUMNS = 100
PATH = re.compile(
    r"`((?:pacs_megatron|tests|benchmarks|configs|docs|slurm|tools|requirements)/[\w./*-]+)`"
)
METRIC = re.compile(
    r"(reward|response|admission|data|staleness|objective|optimizer|policy|mismatch|pacs|grpo|sft)/[a-z0-9_]*[a-z]"
)


def lines_of_text(path: Path) -> list[str]:
    """The lines outside code blocks."""
    blocks = re.split(r"^```.*$", path.read_text(encoding="utf-8"), flags=re.M)
    result = []
    for block in blocks[::2]:
        for line in block.splitlines():
            result.append(line)
    return result


def anchors(path: Path) -> set[str]:
    """The anchors of the headings, as GitHub and the site make them."""
    headings = [line.lstrip("# ") for line in lines_of_text(path) if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_columns(path: Path) -> None:
    lines = lines_of_text(path)
    too_long = [line for line in lines if len(line) > COLUMNS and not line.startswith(("|", "!["))]
    assert not too_long, too_long
    for target in re.findall(r"\]\(([^)\s]+)\)", "\n".join(lines)):
        if target.startswith(("https://", "mailto:")):
            continue
        file, _, anchor = target.partition("#")
        linked = (path.parent / file).resolve() if file else path
        assert linked.exists(), f"{target}: no such file"
        assert not anchor or anchor in anchors(linked), f"{target}: no such heading"
    missing = [
        name for name in PATH.findall("\n".join(lines)) if not list(ROOT.glob(name.rstrip("/")))
    ]
    assert not missing, f"no such file: {missing}"


def test_archives_have_the_logs_that_pages_name() -> None:
    """A link `[`first.jsonl`](kills.zip)` names a file of the archive, and each file has one."""
    named: dict[Path, set[str]] = {}
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        for label, target in re.findall(r"\[([^\]]*)\]\(([^)\s]+\.zip)\)", text):
            names = re.findall(r"`([^`]+)`", label)
            assert names, f"{path}: a link to {target} names no file of it"
            named.setdefault((path.parent / target).resolve(), set()).update(names)

    archives = sorted(MEASUREMENTS.rglob("*.zip"))
    assert archives == sorted(named)
    for archive in archives:
        with zipfile.ZipFile(archive) as logs:
            assert logs.testzip() is None
            assert sorted(logs.namelist()) == sorted(named[archive]), archive.name


def test_few_files_beside_the_pages_of_measurements() -> None:
    files = []
    for path in MEASUREMENTS.rglob("*"):
        if path.is_file() and path.suffix != ".md":
            files.append(path)
    assert len(files) < 60

    logs = [path for path in files if path.suffix not in (".zip", ".png", ".svg")]
    assert {path.parent.name for path in logs} == {"detection"}, "logs belong into an archive"


def test_the_configuration_of_the_readme_loads(tmp_path: Path) -> None:
    [text] = re.findall(
        r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL
    )
    (tmp_path / "my-run.yaml").write_text(text)
    assert load_config(tmp_path / "my-run.yaml").config.run.name == "my-run"


def test_every_metric_is_described() -> None:
    described = set(
        re.findall(r"`([^`]+)`", (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8"))
    )
    trees = [
        ast.parse(path.read_text(encoding="utf-8"))
        for path in (ROOT / "pacs_megatron").rglob("*.py")
    ]
    texts = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant):
                texts.add(node.value)
    metrics = {text for text in texts if isinstance(text, str) and METRIC.fullmatch(text)}
    assert len(metrics) > 25
    assert not metrics - described
