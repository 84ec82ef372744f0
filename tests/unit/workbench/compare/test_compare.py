"""`compare` on run folders with known scores: grouping, figures, every output; the page in a real
browser (full).
"""

from __future__ import annotations

import csv
import io
import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from pacs_megatron.cli import main
from pacs_megatron.errors import DataError
from pacs_megatron.observability.metrics import MetricsWriter
from pacs_megatron.workbench.compare.compare import compare
from pacs_megatron.workbench.compare.page import (
    compare_csv,
    compare_html,
    compare_json,
    compare_latex,
    progress_rows,
)
from tests.support.browser import BROWSER, open_in_browser
from tests.support.reports import HOSTILE, Page


def write_run(
    folder: Path, method: str, seed: int, final: float, *, results: bool = False, steps: int = 40
) -> Path:
    """A run whose pass@1 rises to `final`."""
    rng = np.random.default_rng([seed, len(method)])
    config = {
        "run": {"name": folder.name, "seed": seed},
        "objective": {"name": method},
        "optimizer": {"lr": 1e-6},
    }
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    with MetricsWriter(folder) as writer:
        for step in range(steps + 1):
            share = 1 - np.exp(-4 * step / steps)
            row = {
                "step": step,
                "reward/mean": final * share + 0.02 * rng.normal(),
                "policy/entropy": 0.4 + 2 * (1 - share),
            }
            row |= {
                "optimizer/grad_norm": 3 * np.exp(0.2 * rng.normal()),
                "response/len_mean": 300 + 900 * share,
            }
            row |= {"time/step_s": 11.0 + seed, "tokens_per_s": 5000.0}
            if step % 10 == 0:
                value = final if step == steps else final * share
                row |= {"eval/aime24/pass@1": value, "eval/aime24/pass@4": min(1.0, 1.4 * value)}
                row |= {"eval/math500/pass@1": min(1.0, value + 0.3)}
            writer.append(row)
    if results:
        (folder / "eval").mkdir()
        metrics = {
            "eval/aime24/pass@1": final + 0.01,
            "eval/aime24/pass@16": 0.9,
            "eval/math500/pass@1": final,
        }
        (folder / "eval" / "results.json").write_text(json.dumps({"metrics": metrics}))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    finals = {"pacs": [0.52, 0.55, 0.53, 0.56], "grpo": [0.41, 0.44, 0.40, 0.46]}
    result = []
    for method, found in finals.items():
        for seed, final in enumerate(found):
            result.append(write_run(tmp_path / f"{method}-s{seed}", method, seed, final))
    return result


def test_methods_scores_and_statistics(runs: list[Path]) -> None:
    found = compare(runs)
    assert [(m.label, len(m.runs)) for m in found.methods] == [("pacs", 4), ("grpo", 4)]
    assert found.tasks == ("aime24", "math500")
    assert found.differences == {"objective.name": ["pacs", "grpo"]}
    np.testing.assert_allclose(found.methods[0].scores[:, 0], [0.52, 0.55, 0.53, 0.56])
    np.testing.assert_allclose(found.methods[0].scores[:, 1], [0.82, 0.85, 0.83, 0.86])
    ordered = np.sort(found.methods[0].scores.ravel())
    assert found.methods[0].iqm.value == pytest.approx(ordered[2:6].mean())
    assert found.improvements["pacs", "grpo"] == (1.0, 1.0, 1.0)
    [sentence] = found.sentences()
    assert "A run of pacs is better than one of grpo with probability 1.00" in sentence
    assert (
        "is significant (p = 0.029 by permutation of seeds" in sentence
    )  # 2 of C(8, 4) splits are as extreme


def test_equal_methods_and_few_seeds_are_not_significant(tmp_path: Path) -> None:
    runs = []
    for m in ("pacs", "grpo"):
        for s in range(4):
            runs.append(write_run(tmp_path / f"{m}{s}", m, s, 0.5 + 0.01 * s))
    assert "not significant" in compare(runs).sentences()[0]
    assert "fewer than 4 seeds (3)" in compare([*runs[:4], *runs[4:7]]).sentences()[0]
    assert compare(runs[:4]).sentences() == []


def test_the_evaluation_of_a_run_counts_before_its_last_step(tmp_path: Path) -> None:
    found = compare([write_run(tmp_path / "a", "pacs", 0, 0.5, results=True)])
    assert found.methods[0].scores.tolist() == [[0.51, 0.5]]


def test_every_output_has_the_same_figures(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {form: tmp_path / f"out.{form}" for form in ("json", "csv", "latex")}
    words = []
    for form, path in files.items():
        for word in (f"--{form}", str(path)):
            words.append(word)
    assert main(["compare", *map(str, runs), "--out", str(tmp_path / "out.html"), *words]) == 0
    assert "is significant" in capsys.readouterr().out
    found = json.loads(files["json"].read_text())
    rows = list(csv.DictReader(io.StringIO(files["csv"].read_text())))
    assert len(rows) == 8 * 2
    for row in rows:
        method = found["methods"][row["method"]]
        scores = method["scores"][method["seeds"].index(int(row["seed"]))]
        assert float(row["score"]) == scores[found["tasks"].index(row["task"])]
    latex = files["latex"].read_text()
    assert latex.count(r"\\") == 3 and r"pacs & 4 & $0.540 \pm 0.009$" in latex
    page = (tmp_path / "out.html").read_text()
    Page(page)
    for text in (
        "pass@1",
        "performance profile",
        "aime24 pass@1 by tokens",
        "aime24 pass@1 by seconds",
        "objective.name",
        "entropy",
    ):
        assert text in page
    assert not re.search(r"https?://", page.replace("http://www.w3.org", ""))


def test_the_terminal_and_the_page_name_runs_and_show_start_and_rise(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *map(str, runs), "--out", str(tmp_path / "out.html")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "pacs: pacs-s0, pacs-s1, pacs-s2, pacs-s3"
    assert lines[3].split() == ["method", "runs", "task", "start", "end", "rise"]
    # aime24 starts at 0 and ends at 0.52, 0.55, 0.53, 0.56; math500 is 0.3 above it.
    assert lines[4].split() == ["pacs", "4", "aime24", "0.000", "0.540", "+0.540"]
    assert lines[5].split() == ["pacs", "4", "math500", "0.300", "0.840", "+0.540"]
    assert lines[6].split() == ["grpo", "4", "aime24", "0.000", "0.427", "+0.427"]
    text = (tmp_path / "out.html").read_text()
    for cell in ("+0.540", "grpo-s3", "last step"):
        assert f">{cell}</" in text


def test_an_option_that_changed_during_a_run_is_named(tmp_path: Path) -> None:
    """Its configuration has the last value only."""
    runs = [write_run(tmp_path / f"r{seed}", "pacs", seed, 0.5) for seed in range(2)]
    change = {"step": 20, "key": "optimizer.lr", "before": "1e-06", "after": "1e-05"}
    other = {**change, "key": "logging.tensorboard"}
    (runs[1] / "changes.jsonl").write_text(f"{json.dumps(other)}\n{json.dumps(change)}\n")
    found = compare(runs)
    sentence = "r1 changed optimizer.lr from 1e-06 to 1e-05 after step 20."
    assert found.sentences() == [sentence]
    assert f"<p>{sentence}</p>" in compare_html(found)


def test_a_start_that_no_row_has(tmp_path: Path) -> None:
    """Only the evaluation has this benchmark."""
    run = write_run(tmp_path / "a", "pacs", 0, 0.5, results=True)
    drop_benchmark(run, "math500")
    assert progress_rows(compare([run]))[2] == ["a", "1", "math500", "-", "0.500", "-"]


def test_hostile_names_and_bad_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", "pacs", 0, 0.5)
    other = write_run(tmp_path / "other", "pacs", 1, 0.5)
    config = yaml.safe_load((run / "config.yaml").read_text()) | {
        "data": {"prompt_suffix": HOSTILE.replace("\udc80", "")}
    }
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    found = compare([run, other])
    for text in (
        compare_html(found),
        compare_json(found),
        compare_csv(found),
        compare_latex(found),
    ):
        assert "<script>alert" not in text or text[0] != "<"
    Page(compare_html(found))
    (tmp_path / "empty").mkdir()
    assert main(["compare", str(tmp_path / "empty"), "--out", str(tmp_path / "x.html")]) == 2
    assert "at least one step" in capsys.readouterr().err
    assert not (tmp_path / "x.html").exists()


def change_config(run: Path, **parts: Any) -> Path:
    (run / "config.yaml").write_text(
        yaml.safe_dump(yaml.safe_load((run / "config.yaml").read_text()) | parts)
    )
    return run


def drop_benchmark(run: Path, name: str) -> Path:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    rows = [{key: value for key, value in row.items() if f"/{name}/" not in key} for row in lines]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def test_runs_without_a_common_benchmark_are_compared_by_reward_in_any_order(
    tmp_path: Path,
) -> None:
    one = drop_benchmark(write_run(tmp_path / "one", "pacs", 0, 0.5), "aime24")
    other = drop_benchmark(write_run(tmp_path / "other", "pacs", 1, 0.5), "math500")
    for runs in ([one, other], [other, one]):
        assert compare(runs).tasks == ("reward/mean",)


def test_an_absent_option_and_null_are_one_method(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"r{seed}", "pacs", seed, 0.5) for seed in range(3)]
    change_config(runs[1], data={"prompt_suffix": None})
    change_config(runs[2], optimizer={"lr": 1e-5})
    assert [(m.label, len(m.runs)) for m in compare(runs).methods] == [
        ("lr=1e-06", 2),
        ("lr=1e-05", 1),
    ]


def test_a_seed_counts_once(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, "pacs", 7, 0.5) for name in ("a", "b")]
    with pytest.raises(
        DataError, match="a and b have the same configuration and seed; leave one out"
    ):
        compare(runs)


def test_one_seed_has_no_standard_error(tmp_path: Path) -> None:
    found = compare([write_run(tmp_path / "a", "pacs", 0, 0.5)])
    assert r"pacs & 1" not in compare_latex(
        found
    ) and "a & 1 & 0.500 & 0.800 & 0.650 \\\\" in compare_latex(found)
    assert "±" not in compare_html(found)


def test_the_evaluation_of_another_model_is_not_the_run_s(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", "pacs", 0, 0.5, results=True)
    results = run / "eval" / "results.json"
    metrics = json.loads(results.read_text())["metrics"]
    results.write_text(json.dumps({"model": "/models/base", "metrics": metrics}))
    with pytest.raises(
        DataError, match="is of /models/base, not of this run; evaluate again with --model"
    ):
        compare([run])
    results.write_text(json.dumps({"model": str(run / "hf"), "metrics": metrics}))
    assert compare([run]).methods[0].scores.tolist() == [[0.51, 0.5]]


def test_runs_of_different_lengths(tmp_path: Path) -> None:
    """A fast, long run and a slow, short one: the places on the axis of seconds rise."""
    runs = [
        write_run(tmp_path / "short", "pacs", 200, 0.5, steps=20),
        write_run(tmp_path / "long", "pacs", 0, 0.5),
    ]
    found = compare(runs)
    assert found.sentences() == [
        "The runs end at different steps (20 to 40); a score is a run's last one."
    ]
    for data in re.findall(r'<script type="application/json">(.*?)</script>', compare_html(found)):
        chart = json.loads(data)
        for series in chart["series"]:
            places = [place for place, _ in series["points"]]
            assert places == sorted(places), chart["x"]


def test_pass_at_k_is_of_one_source(tmp_path: Path) -> None:
    """Of the evaluation (k = 1, 16), not also of the last step (k = 1, 4)."""
    page = compare_html(compare([write_run(tmp_path / "a", "pacs", 0, 0.5, results=True)]))
    charts = map(json.loads, re.findall(r'<script type="application/json">(.*?)</script>', page))
    [chart] = [chart for chart in charts if chart["x"] == "k"]
    assert chart["series"][0]["points"] == [[1, 0.51], [16, 0.9]]


def test_latex_of_hostile_labels(tmp_path: Path) -> None:
    latex = compare_latex(compare([write_run(tmp_path / "[a_b&c]\n~x", "pacs", 0, 0.5)]))
    assert "\n{[}a\\_b\\&c] \\~{}x & 1 &" in latex


@pytest.mark.full
@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is installed")
def test_the_page_in_a_browser(runs: list[Path], tmp_path: Path) -> None:
    page = tmp_path / "compare.html"
    page.write_text(compare_html(compare(runs)))
    dom = open_in_browser(page, tmp_path)
    assert dom.count("<polyline") > 10 and dom.count('class="tip"') == dom.count("<figure")


def test_a_long_comparison_is_reported(
    runs: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def slow(folders: list[Path]) -> Any:
        time.sleep(0.5)
        return compare(folders)

    monkeypatch.setattr("pacs_megatron.runtime.waiting.NOTICE_S", 0.1)
    monkeypatch.setattr("pacs_megatron.workbench.compare.compare.compare", slow)
    assert main(["compare", *map(str, runs), "--out", str(tmp_path / "out.html")]) == 0
    assert caplog.records[0].getMessage().startswith("waiting for the runs to be compared: ")
