"""report.html is self-contained, complete and safe for runs of any length."""

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pacs_megatron.errors import PacsError
from pacs_megatron.observability.charts import (
    BOTTOM,
    HEIGHT,
    MAX_POINTS,
    TOP,
    Chart,
    Series,
    format_number,
    line_chart,
)
from pacs_megatron.observability.metrics import MetricsWriter
from pacs_megatron.observability.report import write_report
from pacs_megatron.observability.rollout_log import rollout_path
from pacs_megatron.runtime.run_folder import write_environment
from tests.support.reports import HOSTILE, Page, step_row, write_samples


def report(run_dir: Path, rows: list[dict[str, Any]], num_samples: int = 8) -> tuple[str, Page]:
    with MetricsWriter(run_dir) as writer:
        for row in rows:
            writer.append(row)
    html = write_report(run_dir, num_samples=num_samples).read_text(encoding="utf-8")
    return html, Page(html)


def test_report_has_every_curve(tmp_path: Path) -> None:
    rows = [step_row(step) for step in range(1, 11)]
    rows[4] |= {"eval/toy/pass@1": 0.3, "eval/toy/pass@1_se": 0.05, "eval/toy/pass@8": 0.8}
    rows[9] |= {"eval/toy/pass@1": 0.9, "eval/toy/pass@1_se": 0.02, "eval/toy/pass@8": 1.0}
    (tmp_path / "config.yaml").write_text(
        "model: {path: some/model}\nobjective: {name: pacs, score: rloo}\n"
    )
    write_environment(tmp_path, {"device": "two <CPU> cores"})
    _, page = report(tmp_path, rows)
    titles = [
        "reward",
        "toy",
        "loss",
        "distance to the label",
        "gradient norm",
        "entropy",
        "response length",
        "mean ψ by label",
        "time of each phase",
        "tokens/s",
        "custom/thing",
        "time/update/forward_s",
    ]
    for title in titles:
        assert title in page.text, title
    assert page.count("figure") == len(titles)
    for row in rows:
        for key in row:
            group = key if "pass@" not in key else "eval/toy/pass@k"
            is_shown = key == "step" or re.fullmatch("time/[a-z]+_s", key)
            assert is_shown or group in page.text, "the key of each chart, as in TensorBoard"
    labels = [attrs["aria-label"] or "" for tag, attrs in page.elements if tag == "svg"]
    assert "toy: pass@1 0.9, pass@8 1" in labels
    assert "time of each phase: update 2, rollout 1, other 0.5" in labels
    assert "0.30 → 0.90" in page.text, "the rise of pass@1, at the top"
    for fact in ("some/model", "score: rloo", "two <CPU> cores", f"numpy {np.__version__}"):
        assert fact in page.text


@pytest.mark.parametrize("objective", ["pacs", "grpo"])
def test_the_curves_of_pacs_are_explained_in_its_runs_only(tmp_path: Path, objective: str) -> None:
    rows = [
        {
            name: value
            for name, value in step_row(1).items()
            if objective == "pacs" or "pacs/" not in name
        }
    ]
    _, page = report(tmp_path, rows)
    assert ("log 2 = 0.693" in page.text) == (objective == "pacs")
    assert ("ψ of right answers (pos) should be above 0" in page.text) == (objective == "pacs")


def test_report_loads_nothing(tmp_path: Path) -> None:
    write_samples(tmp_path, 1, "see https://example.org/x.js")
    html, page = report(tmp_path, [step_row(1), step_row(2)])
    for tag, attrs in page.elements:
        assert tag not in {"link", "iframe", "img", "object", "embed", "base"}
        assert not {"src", "href", "xlink:href", "action", "srcset"} & set(attrs), (tag, attrs)
    assert "url(" not in html
    assert "@import" not in html
    policies = [
        a["content"] or ""
        for tag, a in page.elements
        if a.get("http-equiv") == "Content-Security-Policy"
    ]
    assert len(policies) == 1
    assert policies[0].startswith("default-src 'none'")
    assert "script-src 'sha256-" in policies[0]


def test_hostile_text_stays_text_everywhere(tmp_path: Path) -> None:
    run_dir = tmp_path / "run<script>"
    run_dir.mkdir()
    clean = tmp_path / "clean"
    clean.mkdir()
    for folder, text in ((run_dir, HOSTILE), (clean, "text")):
        write_samples(folder, 1, text)
        (folder / "config.yaml").write_text("model: {path: '</pre><script>alert(3)</script>'}\n")
        write_environment(folder, {"device": "</p><script>alert(4)</script>"})
    name = "eval/</script><script>alert(5)</script>/pass@1"
    html, page = report(run_dir, [{**step_row(1), name: 0.5}, {**step_row(2), name: 0.5}])
    _, reference = report(
        clean, [{**step_row(1), "eval/b/pass@1": 0.5}, {**step_row(2), "eval/b/pass@1": 0.5}]
    )
    assert page.count("script") == reference.count("script")
    assert page.count("img") == 0
    assert not re.search(r"<script[^>]*>\s*alert", html)
    assert page.text.count("<img src=x onerror=alert(2)>") >= 8 * 3, "it is shown, as text"
    assert "\x1b" not in html
    assert "\u202e" not in html
    assert r"\u001b[31m\u202e&amp;" in page.text


def test_every_svg_is_well_formed_and_finite(tmp_path: Path) -> None:
    html, page = report(tmp_path, [step_row(step) for step in range(1, 400)])
    drawings = re.findall(r"<svg.*?</svg>", html, flags=re.S)
    assert len(drawings) == page.count("figure") > 8
    for drawing in drawings:
        ET.fromstring(drawing)  # noqa: S314  (trusted text)
        assert not re.search(r"\b(nan|inf)\b", drawing)


def test_an_empty_run_and_a_run_of_one_step(tmp_path: Path) -> None:
    _, page = report(tmp_path / "empty", [])
    assert "No step has been recorded yet." in page.text
    assert page.count("figure") == 0
    _, page = report(tmp_path / "one", [step_row(1)])
    assert page.count("figure") > 8
    assert "1:p" not in page.text
    _, page = report(tmp_path / "zero", [{"step": 0, "eval/toy/pass@1": 0.0, "time/step_s": 0.0}])
    assert page.count("figure") == 2


def test_report_of_an_empty_folder(tmp_path: Path) -> None:
    page = Page(write_report(tmp_path, num_samples=8).read_text())
    assert "No step has been recorded yet." in page.text


def test_samples_of_first_and_last_step_with_their_verdicts(tmp_path: Path) -> None:
    for step in (1, 2, 30):
        write_samples(tmp_path, step, f"answer of {step} " + "x" * 9000)
    html, page = report(tmp_path, [step_row(1)], num_samples=3)
    assert "Answers of step 1" in page.text
    assert "Answers of step 30" in page.text
    assert "answer of 2 " not in page.text
    assert html.count('class="card sample"') == 6
    assert "characters left out" in page.text
    _, page = report(tmp_path, [], num_samples=8)
    assert page.text.count("✗ wrong") == 8, "0, 2, 4, 6 of both steps"
    assert page.text.count("✓ correct") == 6
    assert page.text.count("not judged: answer of") == 2
    assert "Answers of" not in report(tmp_path, [], num_samples=0)[1].text


def test_what_the_verifier_read_is_shown(tmp_path: Path) -> None:
    details = {"gold": "number: 40", "answer": 'number: 30"<b>"'}
    write_samples(tmp_path, 1, "a", num=2, details=details)
    html, page = report(tmp_path, [])
    assert 'gold: number: 40\nanswer: number: 30"<b>"' in page.text
    assert "<b>" not in html

    write_samples(tmp_path, 1, "a", num=2, details={"answer": "other"})
    assert "Read as" not in report(tmp_path, [])[1].text


def test_turns_are_folded_and_text_of_the_environment_is_marked(tmp_path: Path) -> None:
    write_samples(tmp_path, 1, "a", num=2)
    path = rollout_path(tmp_path, 1)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    records[0]["turns"] = [
        {"role": "assistant", "text": "6 * 7", "calls": [{"tool": "sum", "failure": None}]},
        {"role": "environment", "text": "<b>42", "calls": []},
        {"role": "assistant", "text": "so 42", "calls": [{"tool": "sum", "failure": "slow"}]},
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    html, page = report(tmp_path, [])
    assert html.count('<details class="turn') == 3
    assert html.count('<details class="turn environment">') == 1
    for text in ("policy · sum: done", "environment, not trained", "<b>42", "policy · sum: slow"):
        assert text in page.text
    assert "<b>42" not in html


def test_one_file_of_samples_is_shown_once(tmp_path: Path) -> None:
    write_samples(tmp_path, 1, "a", num=2)
    html, _ = report(tmp_path, [])
    assert html.count("Answers of step 1") == 1
    assert html.count('class="card sample"') == 2


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("config.yaml", "a: [", "not valid YAML"),
        (
            "config.yaml",
            "- a",
            "config.yaml: expected a mapping (`key: value` lines) at the top, got a list",
        ),
        ("environment.json", "{", "environment.json:1: malformed JSON"),
        ("metrics.jsonl", "x\n", "metrics.jsonl:1: malformed JSON"),
        ("rollouts/step_000001.jsonl", '{"id": 1}\n', "a sample lacks answer"),
    ],
)
def test_malformed_input_is_reported_and_the_old_report_is_kept(
    tmp_path: Path, name: str, content: str, complaint: str
) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    (tmp_path / "report.html").write_text("old")
    with pytest.raises(PacsError) as raised:
        write_report(tmp_path, num_samples=8)
    assert complaint in str(raised.value)
    assert "\n" not in str(raised.value)
    assert (tmp_path / "report.html").read_text() == "old"


def test_the_same_folder_gives_the_same_bytes(tmp_path: Path) -> None:
    write_samples(tmp_path, 1, "a")
    first, _ = report(tmp_path, [step_row(step) for step in range(1, 50)])
    assert write_report(tmp_path, num_samples=8).read_text() == first


# --------------------------------------------------------------------------------------------------
# charts
def curve_places(figure: str) -> list[tuple[float, float]]:
    points = re.findall(r'<polyline class="curve s0" points="([^"]*)"', figure)[0]
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in points.split())]


def test_curve_has_the_positions_of_its_values() -> None:
    figure = line_chart(
        Chart(title="t", series=[Series(name="x", points=[(0, 0.0), (5, 1.0), (10, 0.5)])])
    )
    (x0, y0), (x1, y1), (x2, y2) = curve_places(figure)
    assert x1 - x0 == pytest.approx(x2 - x1)
    assert y0 - y1 == pytest.approx(2 * (y0 - y2), abs=0.2)
    ticks = {
        text: float(y)
        for y, text in re.findall(r'<text class="y" x="[\d.]+" y="([\d.]+)">([^<]+)</text>', figure)
    }
    assert ticks["0"] - 3.5 == pytest.approx(y0, abs=0.1)
    assert ticks["1.0"] - 3.5 == pytest.approx(y1, abs=0.1)


def test_a_spike_survives_thinning() -> None:
    points = [(step, 1.0) for step in range(20_000)]
    points[12_345] = (12_345, 9.0)
    figure = line_chart(Chart(title="t", series=[Series(name="x", points=points)]))
    assert "[12345,9.0]" in figure
    assert "[19999,1.0]" in figure
    assert len(re.findall(r"\[\d+,", figure)) <= MAX_POINTS + 1


@pytest.mark.parametrize(
    "values",
    [
        [0.0, 0.0],
        [5.0, 5.0],
        [0.6931471805599453, 0.6931471805599454],
        [-3.0, -2.0],
        [1e-9, 3e-9],
        [1e12, 5e12],
        [0.0, 1e-30],
    ],
)
def test_axes_of_any_range_have_distinct_labels(values: list[float]) -> None:
    figure = line_chart(Chart(title="t", series=[Series(name="x", points=list(enumerate(values)))]))
    labels = re.findall(r'<text class="y"[^>]*>([^<]+)</text>', figure)
    assert len(labels) >= 2
    assert len(set(labels)) == len(labels), labels
    assert all(0 <= y <= 220 for _, y in curve_places(figure))


def test_logarithmic_axis_only_if_allowed() -> None:
    series = [Series(name="x", points=[(1, 0.01), (2, 1.0), (3, 100.0)])]
    (_, a), (_, b), (_, c) = curve_places(
        line_chart(Chart(title="t", series=series, may_be_log=True))
    )
    assert a - b == pytest.approx(b - c, abs=0.2)
    (_, a), (_, b), (_, c) = curve_places(line_chart(Chart(title="t", series=series)))
    assert a - b < 0.02 * (b - c)


@pytest.mark.parametrize(
    ("values", "widths"),
    [
        ([0.001, 0.01, 0.5], [0.0, 0.02, 0.1]),  # shares: the band ends at 0
        ([0.001, 0.01, 0.5], [0.0009, 0.0, 0.1]),  # shares: the band ends above 0
        ([0.01, 1.0, 100.0], [0.01, 0.1, 1.0]),  # the band reaches 0
        ([0.01, 1.0, 100.0], [0.02, 0.1, 1.0]),  # the band is below 0
        ([0.01, 1.0, 100.0], [0.0099, 0.1, 50.0]),
    ],
)
@pytest.mark.parametrize("may_be_log", [True, False])
def test_a_band_stays_on_the_axis(
    values: list[float], widths: list[float], may_be_log: bool
) -> None:
    """A logarithmic axis has no 0, so a band that reaches it gets a linear one."""
    series = Series(name="x", points=list(enumerate(values)), half_width=widths)
    figure = line_chart(Chart(title="t", series=[series], may_be_log=may_be_log))
    band = re.search(r'class="band s0" points="([^"]+)"', figure)
    assert band is not None
    heights = [float(pair.partition(",")[2]) for pair in band[1].split()]
    assert len(heights) == 2 * len(values)
    assert min(heights) >= TOP - 0.1 and max(heights) <= HEIGHT - BOTTOM + 0.1


def test_both_axes_have_titles_and_a_long_note_stands_beside_the_title() -> None:
    series = [Series(name="x", points=[(0, 1.0), (5, 2.0)])]
    figure = line_chart(Chart(title="t", series=series, note="nats a token", x="seconds"))
    titles = re.findall(r'<text class="x"[^>]*>([a-z ]+)</text>', figure)
    assert titles == ["seconds", "nats a token"] and "<small>" not in figure
    long_note = "share of runs and tasks above the score"
    figure = line_chart(Chart(title="t", series=series, note=long_note))
    assert f"<small>{long_note}</small>" in figure
    assert re.findall(r'<text class="x"[^>]*>([a-z ]+)</text>', figure) == ["step"]


def places_of(figure: str, element: str) -> list[list[tuple[float, float]]]:
    found = []
    for points in re.findall(rf'{element} points="([^"]*)"', figure):
        pairs = [pair.split(",") for pair in points.split()]
        found.append([(float(x), float(y)) for x, y in pairs])
    return found


def test_a_curve_of_many_points_is_faint_behind_its_moving_mean() -> None:
    """The window is a twelfth of the points; at the ends it has one side only."""
    values = np.random.default_rng(0).random(48)
    figure = line_chart(
        Chart(title="t", series=[Series(name="x", points=list(enumerate(values.tolist())))])
    )
    [raw] = places_of(figure, '<polyline class="curve faint s0"')
    [smooth] = places_of(figure, '<polyline class="curve s0"')
    raw_y = np.array(raw)[:, 1]
    wanted = []
    for number in range(48):
        wanted.append(raw_y[max(0, number - 2) : number + 3].mean())
    # The axis is linear, so a mean of values is a mean of places.
    np.testing.assert_allclose(np.array(smooth)[:, 1], wanted, atol=0.11)
    np.testing.assert_allclose(np.array(smooth)[:, 0], np.array(raw)[:, 0], atol=0.11)
    short = line_chart(
        Chart(title="t", series=[Series(name="x", points=list(enumerate(values[:19].tolist())))])
    )
    assert "faint" not in short


def test_stacked_areas_lie_on_top_of_each_other() -> None:
    series = [
        Series(name="a", points=[(0, 1.0), (1, 2.0), (2, 1.0)]),
        Series(name="b", points=[(0, 3.0), (1, 2.0), (2, 0.0)]),
    ]
    figure = line_chart(Chart(title="t", series=series, is_stacked=True))
    [first] = places_of(figure, '<polygon class="area s0"')
    [second] = places_of(figure, '<polygon class="area s1"')
    ticks = {
        float(text): float(y) - 3.5
        for y, text in re.findall(r'<text class="y" x="[\d.]+" y="([\d.]+)">([\d.]+)<', figure)
    }
    zero = ticks[0.0]
    pixels = (zero - ticks[4.0]) / 4
    heights = [round((zero - y) / pixels, 1) for _, y in first]
    assert heights == [1.0, 2.0, 1.0, 0.0, 0.0, 0.0]
    heights = [round((zero - y) / pixels, 1) for _, y in second]
    assert heights == [4.0, 4.0, 1.0, 1.0, 2.0, 1.0]
    assert second[3:] == first[2::-1]  # its lower edge is the upper edge of the first


def test_a_tile_has_means_of_windows(tmp_path: Path) -> None:
    """The first and the last single step are far from the mean of their tenth."""
    rows = []
    for step in range(1, 41):
        row = step_row(step) | {"reward/mean": 0.4 if step <= 20 else 0.8}
        row["reward/mean"] += {1: 0.4, 40: -0.4}.get(step, 0.0)
        rows.append(row)
    _, page = report(tmp_path, rows)
    assert "reward, mean of 4 steps" in page.text and "0.50 → 0.70" in page.text


def test_numbers() -> None:
    values = [0, 0.693147, 12.34, 123.456, 1234.5, 23456, 5e6, 2e10, 1.2e-5, -0.5]
    texts = ["0", "0.693", "12.3", "123.5", "1,234", "23.46k", "5M", "2.00e+10", "1.2e-05", "-0.5"]
    assert [format_number(value) for value in values] == texts


def test_the_strong_line_stays_a_mean_at_its_ends() -> None:
    """Values 0 and 1 in turn: the line is near the middle of the curve at both ends too."""
    points = [(step, float(step % 2)) for step in range(120)]
    drawing = line_chart(Chart(title="x", series=[Series(name="x", points=points)]))
    faint, strong = re.findall(r'<polyline class="curve[^"]*" points="([^"]*)"', drawing)
    heights = [float(point.partition(",")[2]) for point in faint.split()]
    middle = (min(heights) + max(heights)) / 2
    spread = max(heights) - min(heights)
    means = [float(point.partition(",")[2]) for point in strong.split()]
    assert all(abs(mean - middle) < 0.15 * spread for mean in (means[0], means[-1]))
