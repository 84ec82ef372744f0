"""Functions that check the world after a case, beyond the general contract of judge.py."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from pacs_megatron.checkpoint.run_checkpoint import latest_checkpoint
from tests.support.inputs import setup
from tests.support.inputs.cases import Case
from tests.support.inputs.process import Outcome, run
from tests.support.inputs.world import World

Check = Callable[..., None]
_WAITING = re.compile(r"^waiting .*\n", re.MULTILINE)


def faults_of(case: Case, world: World, outcome: Outcome) -> list[str]:
    """Faults of the files that a case names, and of its checks."""
    faults = [f"{name} is missing" for name in case.exists if not (world.folder / name).exists()]
    faults += [f"{name} exists" for name in case.absent if (world.folder / name).exists()]
    for name, value in case.keeps.items():
        path = world.folder / name
        if not path.is_file() or path.read_bytes() != setup.content(value, world):
            faults.append(f"{name} is lost")
    if not outcome.code or outcome.code in case.also:
        faults += _faults_of_the_steps(case, world)
    checks = {case.check: {}} if isinstance(case.check, str) else case.check or {}
    for name, options in checks.items():
        try:
            CHECKS[re.sub(r"\W", "_", name.lower())](world, outcome, **options)
        except AssertionError as error:
            faults.append(f"{name}: {str(error)[:300]}")
    return faults


def _faults_of_the_steps(case: Case, world: World) -> list[str]:
    expected = {"runs/tiny": case.steps} if isinstance(case.steps, list) else case.steps
    faults = []
    for name, steps in expected.items():
        path = world.folder / name
        found = _steps(path / "metrics.jsonl" if path.is_dir() else path)
        if steps and found != steps:
            faults.append(f"the metrics of {name} have the steps {found}, expected {steps}")
    return faults


def _steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


# ------------------------------------------------------------------------------------------- checks
def whole_rows(world: World, outcome: Outcome) -> None:
    """Every row of the metrics is whole, in order, and none is there twice."""
    path = world.folder / "runs/tiny/metrics.jsonl"
    found = _steps(path) if path.exists() else []
    assert found == list(range(1, len(found) + 1)), found


def last_step(world: World, outcome: Outcome, step: int) -> None:
    """A run that worked has reached `step`."""
    if not outcome.code:
        found = _steps(world.folder / "runs/tiny/metrics.jsonl")
        assert found[-1] == step, found


def one_run_of_12_steps(world: World, outcome: Outcome) -> None:
    """The run that was renamed has all its rows."""
    if not outcome.code:
        path = next((world.folder / "runs").glob("*/metrics.jsonl"))
        assert _steps(path) == list(range(1, 13)), _steps(path)


def three_rows_behind_a_byte_order_mark(world: World, outcome: Outcome) -> None:
    """A run that worked kept the rows, and the mark that was there."""
    if not outcome.code:
        text = (world.folder / "runs/tiny/metrics.jsonl").read_text(encoding="utf-8-sig")
        assert [json.loads(row)["step"] for row in text.splitlines()] == [1, 2, 3]


def no_time_below_0(world: World, outcome: Outcome) -> None:
    """No duration in the metrics is negative."""
    for line in (world.folder / "runs/tiny/metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert not [key for key, value in row.items() if key.startswith("time") and value < 0]


def the_checkpoint_stays(world: World, outcome: Outcome) -> None:
    """The checkpoint of the first run is whole, or a later one has replaced it."""
    manifest = world.folder / "runs/tiny/checkpoints/step_000002/manifest.json"
    assert not manifest.exists() or json.loads(manifest.read_text())["step"] == 2
    for line in (world.folder / "runs/tiny/metrics.jsonl").read_text().splitlines():
        json.loads(line)


def a_checkpoint_or_a_model(world: World, outcome: Outcome) -> None:
    """The folder `x` is a whole checkpoint or a whole model."""
    names = {path.name for path in (world.folder / "x").iterdir()}
    assert ("manifest.json" in names) != ("config.json" in names), names


def json_in(world: World, outcome: Outcome, file: str) -> None:
    """A file is JSON, or empty."""
    text = (world.folder / file).read_text()
    try:
        assert not text or json.loads(text) is not None
    except ValueError:
        raise AssertionError(f"no JSON: {text[:200]}") from None


def the_newest_checkpoint_was_saved(world: World, outcome: Outcome) -> None:
    """The run saved its newest checkpoint when it was stopped."""
    newest = latest_checkpoint(world.folder / "runs/tiny")
    assert f"saved {newest}" in outcome.text, newest


def text_in(world: World, outcome: Outcome, file: str, text: str) -> None:
    """A file has a text."""
    assert text in (world.folder / file).read_text()


def the_certificate_names___no_verify(world: World, outcome: Outcome) -> None:
    """The certificate states that the digests were not compared."""
    certificate = world.folder / "x/certificate.json"
    assert outcome.code or "--no-verify" in certificate.read_text()


def a_short_error(world: World, outcome: Outcome) -> None:
    """The user's message is cut."""
    assert len(outcome.text) < 20_000, f"an error of {len(outcome.text)} letters"


def a_report_without_markup(world: World, outcome: Outcome) -> None:
    """The report shows a problem's text and does not run it."""
    page = (world.folder / "runs/tiny/report.html").read_text()
    assert "<script>alert(1)" not in page and "<img src=x" not in page


def page_lacks(world: World, outcome: Outcome, text: str, file: str = "page") -> None:
    """An output lacks a text that would be executed."""
    assert outcome.code or text not in (world.folder / file).read_text(), text


def a_whole_page_in_runs_h(world: World, outcome: Outcome) -> None:
    """The last page is not lost."""
    assert "</html>" in (world.folder / "runs/h").read_text()


def a_name_for_every_run(world: World, outcome: Outcome) -> None:
    """Every run of a dry submission has a name of its own."""
    found = re.findall(r"^# (\S+): resolved configuration", outcome.text, re.MULTILINE)
    assert outcome.code or (found and len(found) == len(set(found))), found


def no_pattern_of_slurm(world: World, outcome: Outcome) -> None:
    """No output of a job has a pattern that Slurm would replace."""
    found = re.findall(r"#SBATCH --(?:output|error|chdir)=(.*)", outcome.text)
    assert outcome.code or not [name for name in found if re.search(r"(?<!%)%u", name)], found


def one_job(world: World, outcome: Outcome) -> None:
    """Exactly one job is in the queue."""
    path = world.folder / "count"
    assert path.exists() and len(path.read_text().split()) == 1


def two_results(world: World, outcome: Outcome) -> None:
    """Two models have two results."""
    assert outcome.code or len(list((world.folder / "e").rglob("results.json"))) == 2


def no_label_of_1(world: World, outcome: Outcome) -> None:
    """Every reward of the server was 0."""
    path = next((world.folder / "runs/e").glob("samples*.jsonl"))
    labels = [json.loads(line)["label"] for line in path.read_text().splitlines()[1:]]
    assert outcome.code or not any(labels), labels


def no_canary_above(world: World, outcome: Outcome) -> None:
    """No file was written in the world or above it."""
    found = list(world.folder.rglob("canary"))
    found += [parent for parent in world.folder.parents if (parent / "canary").exists()]
    assert not found, found


def same_preview_without(world: World, outcome: Outcome, key: str) -> None:
    """The preview is that of the tokenizer without `key`."""
    setup.VERBS["json"](world, {"model/tokenizer.json": {key: None}})
    other = run(["data", "preview", str(world.run)], world.folder, {})
    first, second = (_WAITING.sub("", text) for text in (outcome.text, other.text))
    assert outcome.code or first == second, second[-400:]


def the_tensor_of_the_index(world: World, outcome: Outcome) -> None:
    """The converted model has the values of the shard that the index names."""
    if outcome.code:
        return
    words = ["convert", "to-hf", "--checkpoint", "x", "--out", "y"]
    ended = run(words, world.folder, {})
    assert ended.code == 0, ended.text
    found = load_file(world.folder / "y/model.safetensors")["model.norm.weight"]
    given = load_file(world.model / "b.safetensors")["model.norm.weight"]
    assert np.array_equal(found, given), "the other shard's"


CHECKS: dict[str, Check] = {
    name: function
    for name, function in list(globals().items())
    if getattr(function, "__module__", None) == __name__ and not name.startswith("_")
}
