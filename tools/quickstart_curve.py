"""Draws `docs/measurements/quickstart/curve.svg`, the picture of the README, from the committed
metrics of each seed.

`python tools/quickstart_curve.py` reads `metrics-0.jsonl`, `metrics-1.jsonl`, ... of
`docs/measurements/quickstart.zip`.
"""

import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from pacs_megatron.observability.charts import Chart, Series  # noqa: E402
from pacs_megatron.observability.metrics import MetricsRow, read_metrics  # noqa: E402
from pacs_megatron.observability.picture import picture  # noqa: E402

MEASUREMENTS = ROOT / "docs" / "measurements"
PANELS = (
    ("pass@1 on 96 held-out problems", "eval/test/pass@1"),
    ("distance to the label, mean |σ(ψ) − y|", "pacs/residual_mean"),
)


def chart(title: str, key: str, runs: dict[str, list[MetricsRow]]) -> Chart:
    """The curves of metric `key`, one a seed."""
    series = []
    for name, rows in runs.items():
        points = []
        for row in rows:
            value = row.get(key)
            if value is not None:
                points.append((int(row["step"] or 0), float(value)))
        series.append(Series(name=name, points=points))
    return Chart(title=title, series=series)


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
    runs = committed_runs()
    drawing = picture([chart(title, key, runs) for title, key in PANELS])
    (MEASUREMENTS / "quickstart" / "curve.svg").write_text(drawing, encoding="utf-8")


if __name__ == "__main__":
    main()
