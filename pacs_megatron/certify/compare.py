"""Compares what the ranks of a certified run wrote with what the reference wrote. numpy only."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

_EXACT = 0.0
TOLERANCES: Mapping[str, tuple[float, float, str]] = {
    # quantity: (tolerance in fp32, tolerance in bf16, unit of the deviation)
    "samples of an update": (_EXACT, _EXACT, "samples"),
    "log-probs at the step's start": (1e-4, 0.2, "nats"),
    "log-probs of the frozen reference": (1e-4, 0.2, "nats"),
    "log-probs of the update": (1e-4, 0.2, "nats"),
    "derivative of the loss by each log-prob": (1e-4, 0.2, "of the update's largest"),
    "gradient norm": (1e-4, 0.1, "of the value"),
    "clipped or not, weight version": (_EXACT, _EXACT, "difference"),
    "learning rate": (1e-9, 1e-9, "of the value"),
    "metrics of an update": (1e-3, 0.5, "of the value, at least of 0.01"),
    "denominators of the metrics": (1e-9, 1e-9, "of the value"),
    "score drift": (1e-4, 0.2, "nats"),
    "weights after an update": (2e-2, 2.0, "of the learning rate"),
    "weights of the ranks": (_EXACT, _EXACT, "versions"),
    "metrics of a step": (1e-3, 0.5, "of the value, at least of 0.01"),
    "weights after the resume": (_EXACT, _EXACT, "difference from the saved ones"),
    "Adam's first moment": (1e-3, 0.2, "of the tensor's largest"),
    "Adam's second moment": (1e-3, 0.2, "of the tensor's largest"),
    "exported and converted weights": (_EXACT, _EXACT, "difference from the last ones"),
}
_SCORE_DRIFT = "/score_drift_max"


@dataclass(slots=True, kw_only=True)
class Quantity:
    """The largest deviation of one quantity over all updates and ranks."""

    name: str
    tolerance: float
    unit: str
    compared: int = 0
    """numbers"""
    largest: float = 0.0
    where: str = ""


@dataclass(slots=True, kw_only=True)
class Comparison:
    """All quantities. `first` is the first deviation above its tolerance, in the order of the computation."""

    is_bf16: bool
    quantities: dict[str, Quantity] = field(default_factory=dict)
    first: str = ""
    not_compared: set[str] = field(default_factory=set)
    """metrics that the reference does not compute"""

    def check(self, name: str, where: str, found: Any, expected: Any, scale: float = 1.0) -> None:
        """Compares two arrays or numbers; the deviation is in units of `scale`."""
        fp32, bf16, unit = TOLERANCES[name]
        quantity = self.quantities.setdefault(
            name, Quantity(name=name, tolerance=bf16 if self.is_bf16 else fp32, unit=unit)
        )
        left, right = np.asarray(found, np.float64), np.asarray(expected, np.float64)
        deviation = np.inf
        if left.shape == right.shape:
            deviation = float(np.max(np.abs(left - right), initial=0.0)) / (scale or 1.0)
            deviation = np.inf if np.isnan(deviation) else deviation
        quantity.compared += right.size
        if deviation > quantity.largest:
            quantity.largest, quantity.where = deviation, where
        if deviation > quantity.tolerance:
            self.fail(f"{where}: {name} differ by {deviation:.3g} ({unit}; tolerance {quantity.tolerance:g})")

    def fail(self, line: str) -> None:
        """A deviation without a number."""
        self.first = self.first or line


def compare(folder: Path, *, updates_before_resume: int, is_bf16: bool) -> Comparison:
    """All files of `folder/product` against those of `folder/reference`."""
    found = Comparison(is_bf16=is_bf16)
    product, reference = folder / "product", folder / "reference"
    updates = json.loads((reference / "updates.json").read_text())
    first_weights = np.load(product / "start_0.npz")
    for name, value in _arrays(product / "weights_1.npz"):
        if name not in first_weights or value.shape != first_weights[name].shape:
            found.fail(f"start: weight {name} is missing or has another shape")
    for number, expected in enumerate(updates, start=1):
        where = f"step {expected['step']}, update {number}"
        if number == updates_before_resume + 1:
            _exact(found, "weights after the resume", product / f"weights_{number - 1}.npz", product / "start_1.npz")
        _compare_update(found, where, number, expected, product, reference)
    _compare_rows(found, product, updates)
    for name, file in (("Adam's first moment", "exp_avg.npz"), ("Adam's second moment", "exp_avg_sq.npz")):
        _compare_tensors(found, name, "last update", dict(_arrays(product / file)), dict(_arrays(reference / file)))
    last = product / f"weights_{len(updates)}.npz"
    for kind in ("export", "convert to-hf", "convert to-megatron"):
        _exact(found, "exported and converted weights", last, product / f"{kind}.npz")
    return found


def _compare_update(
    found: Comparison, where: str, number: int, expected: dict[str, Any], product: Path, reference: Path
) -> None:
    arrays = dict(_arrays(reference / f"update_{number}.npz"))
    ends = np.cumsum(expected["lens"])[:-1]
    lr = expected["lr"]
    wanted = {sample for sample, is_skipped in zip(expected["ids"], expected["skipped"], strict=True) if not is_skipped}
    seen: set[str] = set()
    files = sorted(product.glob(f"update_{number}.*.npz"))
    for file in files:
        rank = f"{where}, rank {file.name.split('.')[1]}"
        own = dict(_arrays(file))
        seen |= {key.split(" ", 1)[1] for key in own if key.startswith("update ")}
        for kind, name in (
            ("start", "log-probs at the step's start"),
            ("reference", "log-probs of the frozen reference"),
            ("update", "log-probs of the update"),
            ("coefficient", "derivative of the loss by each log-prob"),
        ):
            scale = float(np.abs(arrays[kind]).max()) if kind == "coefficient" else 1.0
            for sample, value in zip(expected["ids"], np.split(arrays[kind], ends), strict=True):
                if f"{kind} {sample}" in own:
                    found.check(name, f"{rank}, sample {sample}", own[f"{kind} {sample}"], value, scale)
    found.check("samples of an update", where, len(seen ^ wanted), 0)
    for file in sorted(product.glob(f"update_{number}.*.json")):
        _compare_report(
            found, f"{where}, rank {file.name.split('.')[1]}", json.loads(file.read_text()), expected, number
        )
    weights = {key.removeprefix("weight "): value for key, value in arrays.items() if key.startswith("weight ")}
    digests = {file.read_text() for file in product.glob(f"weights_{number}.*.digest")}
    found.check("weights of the ranks", where, len(digests), 1)
    _compare_tensors(
        found, "weights after an update", where, dict(_arrays(product / f"weights_{number}.npz")), weights, lr
    )


def _compare_report(
    found: Comparison, where: str, report: dict[str, Any], expected: dict[str, Any], number: int
) -> None:
    found.check("gradient norm", where, report["grad_norm"], expected["grad_norm"], expected["grad_norm"])
    found.check("clipped or not, weight version", where, report["is_clipped"], expected["is_clipped"])
    found.check("clipped or not, weight version", where, report["version"], number)
    found.check("learning rate", where, report["lr"], expected["lr"], expected["lr"])
    for name, (value, count) in report["metrics"].items():
        if name.endswith(_SCORE_DRIFT):
            found.check("score drift", where, value, 0.0)
        elif name not in expected["metrics"]:
            found.not_compared.add(name)
        else:
            right, denominator = expected["metrics"][name]
            found.check("metrics of an update", f"{where}, {name}", value, right, max(abs(right), 1e-2))
            if not name.endswith("_max"):
                found.check("denominators of the metrics", f"{where}, {name}", count, denominator, denominator)
    missing = [name for name, (_, count) in expected["metrics"].items() if count and name not in report["metrics"]]
    if missing:
        found.fail(f"{where}: metric {missing[0]} is missing")


def _compare_rows(found: Comparison, product: Path, updates: list[dict[str, Any]]) -> None:
    """The step's rows: means over updates by their denominators, extremes, mismatch of the first update."""
    rows = {step: row for k in (0, 1) for step, row in json.loads((product / f"rows_{k}.json").read_text()).items()}
    for step in sorted({update["step"] for update in updates}):
        own = [update for update in updates if update["step"] == step]
        sums: dict[str, list[tuple[float, float]]] = {}
        for index, update in enumerate(own):
            optimizer = {"grad_norm": update["grad_norm"], "clipped_frac": update["is_clipped"], "lr": update["lr"]}
            metrics = update["metrics"] | {f"optimizer/{name}": (float(v), 1.0) for name, v in optimizer.items()}
            for name, pair in metrics.items():
                if pair[1] and (index == 0 or not name.startswith("mismatch/")):
                    sums.setdefault(name, []).append(pair)
        sums["admission/num_samples"] = [(float(sum(len(update["ids"]) for update in own)), 1.0)]
        for name, pairs in sums.items():
            value = rows.get(str(step), {}).get(name)
            expected = max(v for v, _ in pairs) if name.endswith("_max") else _mean(pairs)
            if value is None:
                found.fail(f"step {step}: metric {name} is missing")
            else:
                scale = max(abs(expected), 1e-12 if name == "optimizer/lr" else 1e-2)
                found.check("metrics of a step", f"step {step}, {name}", value, expected, scale)


def _mean(pairs: list[tuple[float, float]]) -> float:
    return sum(value * count for value, count in pairs) / sum(count for _, count in pairs)


def _compare_tensors(
    found: Comparison,
    name: str,
    where: str,
    own: Mapping[str, np.ndarray],
    expected: Mapping[str, np.ndarray],
    scale: float | None = None,
) -> None:
    if own.keys() != expected.keys():
        found.fail(f"{where}: {name} have other names: {sorted(own.keys() ^ expected.keys())[:3]}")
    for key in sorted(own.keys() & expected.keys()):
        size = float(np.abs(expected[key]).max()) if scale is None else scale
        found.check(name, f"{where}, {key}", own[key], expected[key], size)


def _exact(found: Comparison, name: str, left: Path, right: Path) -> None:
    _compare_tensors(found, name, right.stem, dict(_arrays(right)), dict(_arrays(left)), 1.0)


def _arrays(file: Path) -> Iterator[tuple[str, np.ndarray]]:
    with np.load(file) as stored:
        yield from ((name, stored[name]) for name in stored.files)
