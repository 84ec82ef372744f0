"""Draws `docs/measurements/quickstart/curve.svg`, the picture of the README, from the committed
metrics of each seed.

`python tools/quickstart_curve.py` reads `metrics-0.jsonl`, `metrics-1.jsonl`, ... of
`docs/measurements/quickstart.zip`.
"""

import re
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from pacs_megatron.observability.charts import (  # noqa: E402
    HEIGHT,
    WIDTH,
    Chart,
    Series,
    line_chart,
)
from pacs_megatron.observability.metrics import MetricsRow, read_metrics  # noqa: E402

MEASUREMENTS = ROOT / "docs" / "measurements"
PANELS = (
    ("pass@1 on 96 held-out problems", "eval/test/pass@1"),
    ("distance to the label, mean |σ(ψ) − y|", "pacs/residual_mean"),
)
TITLE_HEIGHT = 24
LEGEND_HEIGHT = 22
# An image in a page has no style sheet but its own. The colours work on white and on dark.
COLOURS = ("#2f74e0", "#d9660d", "#12876a")
STYLE = """
text{font:11px system-ui,sans-serif;fill:#7a8494}
.title{font-size:13px;font-weight:600}
.y{text-anchor:end}
.x{text-anchor:middle}
.grid{stroke:#8b95a5;stroke-opacity:.25}
.cursor{display:none}
.curve{fill:none;stroke-width:1.8}
.faint{opacity:.28;stroke-width:1}
"""


def panel(title: str, key: str, runs: dict[str, list[MetricsRow]]) -> str:
    """The chart of metric `key`, one curve a seed, as the inside of an <svg>."""
    series = []
    for name, rows in runs.items():
        points = []
        for row in rows:
            value = row.get(key)
            if value is not None:
                points.append((int(row["step"] or 0), float(value)))
        series.append(Series(name=name, points=points))

    drawing = re.search(r"<svg[^>]*>(.*)</svg>", line_chart(Chart(title=title, series=series)))
    assert drawing is not None
    return (
        f'<text class="title" x="48" y="14">{title}</text><g transform="translate(0 '
        f'{TITLE_HEIGHT})">{drawing[1]}</g>'
    )


def picture(runs: dict[str, list[MetricsRow]]) -> str:
    """All panels side by side over one legend."""
    panels = []
    for number, (title, key) in enumerate(PANELS):
        drawing = panel(title, key, runs)
        panels.append(f'<g transform="translate({number * WIDTH} 0)">{drawing}</g>')
    top = TITLE_HEIGHT + HEIGHT
    legend = [
        f'<g transform="translate({48 + 90 * number} {top})"><rect class="dot s{number}" '
        f'width="10" height="10" rx="3"/><text x="15" y="9">{name}</text></g>'
        for number, name in enumerate(runs)
    ]
    colours = "".join(
        f".curve.s{number}{{stroke:{colour}}}.dot.s{number}{{fill:{colour}}}"
        for number, colour in enumerate(COLOURS)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH * len(PANELS)} '
        f'{top + LEGEND_HEIGHT}">'
        f"<style>{STYLE}{colours}</style>{''.join(panels)}{''.join(legend)}</svg>\n"
    )


def committed_runs() -> dict[str, list[MetricsRow]]:
    """`seed N` -> rows of metrics, of each seed in the archive."""
    runs = {}
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(MEASUREMENTS / "quickstart.zip") as archive:
            archive.extractall(folder)
        for path in sorted(Path(folder).glob("metrics-[0-9].jsonl")):
            seed = path.stem.removeprefix("metrics-")
            runs[f"seed {seed}"] = read_metrics(path)
    return runs


def main() -> None:
    """Writes the picture."""
    drawing = picture(committed_runs())
    (MEASUREMENTS / "quickstart" / "curve.svg").write_text(drawing, encoding="utf-8")


if __name__ == "__main__":
    main()
