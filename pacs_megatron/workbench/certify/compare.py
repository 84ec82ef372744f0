"""Compares the records of a certified run's ranks with those of the reference. numpy only."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

TOLERANCES: Mapping[str, tuple[float, float, str]] = {
    # quantity: (tolerance in fp32, tolerance in bf16, unit of the deviation)
    "samples of an update": (0, 0, "samples"),
    "log-probs at the step's start": (3e-5, 0.2, "nats"),
    "log-probs of the frozen reference": (3e-5, 0.2, "nats"),
    "log-probs of the update": (3e-5, 0.2, "nats"),
    "derivative of the loss by each log-prob": (1e-5, 1e-3, "of the update's largest"),
    "gradient norm": (2e-5, 0.1, "of the value"),
    "clipped or not, weight version": (0, 0, "difference"),
    "learning rate": (1e-9, 1e-9, "of the value"),
    "metrics of an update": (2e-4, 0.5, "of the value, at least of 0.01"),
    "denominators of the metrics": (1e-9, 1e-9, "of the value"),
    "score drift": (3e-5, 0.2, "nats"),
    "weights of the ranks": (0, 0, "versions"),
    "weights after an update": (1e-2, 2.0, "of the largest learning rate so far"),
    "critic's weights after an update": (1e-2, 2.0, "of its learning rate"),
    "metrics of a step": (2e-4, 0.5, "of the value, at least of 0.01"),
    "weights after the resume": (0, 0, "difference from the saved ones"),
    "Adam's first moment": (1e-4, 0.2, "of the tensor's largest"),
    "Adam's second moment": (1e-4, 0.2, "of the tensor's largest"),
    "exported and converted weights": (0, 0, "difference from the last ones"),
    "config.json of the exported and converted folders": (0, 0, "keys that differ"),
}
_TOKENS = {
    "start": "log-probs at the step's start",
    "reference": "log-probs of the frozen reference",
    "update": "log-probs of the update",
    "coefficient": "derivative of the loss by each log-prob",
}


@dataclass(slots=True)
class Quantity:
    """The largest deviation of one quantity over all updates and ranks, and the count of compared
    numbers.
    """

    name: str
    tolerance: float
    unit: str
    compared: int = 0
    largest: float = 0.0
    where: str = ""


@dataclass(slots=True, kw_only=True)
class Comparison:
    """All quantities, and metrics that the reference does not compute.

    `first`: the first deviation above its tolerance.
    """

    is_bf16: bool
    quantities: dict[str, Quantity] = field(default_factory=dict)
    first: str = ""
    not_compared: set[str] = field(default_factory=set)

    def check(self, name: str, where: str, found: Any, expected: Any, scale: float = 1.0) -> None:
        """Compares two arrays or numbers; the deviation is in units of `scale`."""
        fp32, bf16, unit = TOLERANCES[name]
        quantity = self.quantities.setdefault(
            name, Quantity(name, bf16 if self.is_bf16 else fp32, unit)
        )
        left = np.asarray(found, np.float64)
        right = np.asarray(expected, np.float64)
        deviation = np.inf
        if left.shape == right.shape and all(
            np.isfinite(values).all() for values in (left, right, scale)
        ):
            deviation = float(np.max(np.abs(left - right), initial=0.0)) / (scale or 1.0)
        quantity.compared += right.size
        if deviation > quantity.largest:
            quantity.largest = deviation
            quantity.where = where
        if deviation > quantity.tolerance:
            self.fail(
                f"{where}: {name} differ by {deviation:.3g} ({unit}; tolerance "
                f"{quantity.tolerance:g})"
            )

    def tensors(
        self, name: str, where: str, found: Path, expected: Mapping[str, Any], scale: float = 0.0
    ) -> None:
        """Compares a file of tensors by name; `scale` 0: each tensor's largest."""
        own = _arrays(found)
        if own.keys() != expected.keys():
            self.fail(
                f"{where}: {name} have other names: {sorted(own.keys() ^ expected.keys())[:3]}"
            )
        for key in sorted(own.keys() & expected.keys()):
            self.check(
                name,
                f"{where}, {key}",
                own[key],
                expected[key],
                scale or float(np.abs(expected[key]).max()),
            )

    def metrics(
        self, name: str, where: str, found: Mapping[str, Any], expected: Mapping[str, float]
    ) -> None:
        """Compares metrics by name."""
        for key, value in expected.items():
            if found.get(key) is None:
                self.fail(f"{where}: metric {key} is missing")
            else:
                floor = (
                    1e-12 if key == "optimizer/lr" else 1e-2
                )  # metrics below it are compared absolutely
                self.check(name, f"{where}, {key}", found[key], value, max(abs(value), floor))

    def fail(self, line: str) -> None:
        """Records a deviation that has no number."""
        self.first = self.first or line


def compare(folder: Path, *, updates_before_resume: int, is_bf16: bool) -> Comparison:
    """Compares all files of `folder/product` with those of `folder/reference`."""
    found = Comparison(is_bf16=is_bf16)
    product = folder / "product"
    reference = folder / "reference"
    updates = json.loads((reference / "updates.json").read_text())
    for number, expected in enumerate(updates, start=1):
        expected["largest_lr"] = max(
            update["lr"] for update in updates[:number]
        )  # earlier differences stay
        where = f"step {expected['step']}, update {number}"
        if number == updates_before_resume + 1:
            saved = _arrays(product / f"weights_{number - 1}.npz")
            found.tensors("weights after the resume", where, product / "start_1.npz", saved, 1.0)
        _compare_update(
            found, where, number, expected, product, _arrays(reference / f"update_{number}.npz")
        )
    _compare_rows(found, product, updates)
    for name, file in (
        ("Adam's first moment", "exp_avg.npz"),
        ("Adam's second moment", "exp_avg_sq.npz"),
    ):
        found.tensors(name, "last update", product / file, _arrays(reference / file))
    last = _arrays(product / f"weights_{len(updates)}.npz")
    for kind in ("export", "convert to-hf", "convert to-megatron"):
        found.tensors("exported and converted weights", kind, product / f"{kind}.npz", last, 1.0)
    model = json.loads((folder / "model" / "config.json").read_text())
    for name in ("hf", "to_hf", "to_megatron/hf"):
        own = json.loads((product / name / "config.json").read_text())
        # The type is that of the written weights.
        keys = sum(
            own.get(key) != model.get(key) for key in {*own, *model} - {"dtype", "torch_dtype"}
        )
        found.check("config.json of the exported and converted folders", name, keys, 0)
    if (product / "critic to-hf.npz").is_file():
        of_critic = _arrays(product / f"critic_{len(updates)}.npz")
        found.tensors(
            "exported and converted weights", "critic", product / "critic to-hf.npz", of_critic, 1.0
        )
    return found


def _compare_update(
    found: Comparison,
    where: str,
    number: int,
    expected: dict[str, Any],
    product: Path,
    arrays: Mapping[str, Any],
) -> None:
    ends = np.cumsum(expected["lens"])[:-1]
    by_sample = {
        kind: dict(zip(expected["ids"], np.split(arrays[kind], ends), strict=True))
        for kind in _TOKENS
    }
    wanted = {
        sample
        for sample, skipped in zip(expected["ids"], expected["skipped"], strict=True)
        if not skipped
    }
    seen: set[str] = set()
    for file in sorted(product.glob(f"update_{number}.*.npz")):
        own = _arrays(file)
        seen |= {key.removeprefix("update ") for key in own if key.startswith("update ")}
        for kind, name in _TOKENS.items():
            scale = float(np.abs(arrays[kind]).max()) if kind == "coefficient" else 1.0
            for key in own:
                sample = key.removeprefix(f"{kind} ")
                if sample != key and sample in by_sample[kind]:
                    place = f"{where}, rank {file.name.split('.')[1]}, sample {sample}"
                    found.check(name, place, own[key], by_sample[kind][sample], scale)
    found.check("samples of an update", where, len(seen ^ wanted), 0)
    for file in sorted(product.glob(f"update_{number}.*.json")):
        place = f"{where}, rank {file.name.split('.')[1]}"
        _compare_report(found, place, json.loads(file.read_text()), expected, number)
    digests = {file.read_text() for file in product.glob(f"weights_{number}.*.digest")}
    found.check("weights of the ranks", where, len(digests), 1)
    models = [("weight ", "weights", "weights after an update", expected["largest_lr"])]
    if expected["critic"]:
        models += [
            (
                "critic ",
                "critic",
                "critic's weights after an update",
                expected["critic"]["critic/lr"][0],
            )
        ]
    for prefix, stem, quantity, lr in models:
        weights = {
            key.removeprefix(prefix): value
            for key, value in arrays.items()
            if key.startswith(prefix)
        }
        found.tensors(quantity, where, product / f"{stem}_{number}.npz", weights, lr)


def _compare_report(
    found: Comparison, where: str, report: dict[str, Any], expected: dict[str, Any], number: int
) -> None:
    found.check(
        "gradient norm", where, report["grad_norm"], expected["grad_norm"], expected["grad_norm"]
    )
    state = (expected["is_clipped"], number)
    own_state = (report["is_clipped"], report["version"])
    found.check("clipped or not, weight version", where, own_state, state)
    found.check("learning rate", where, report["lr"], expected["lr"], expected["lr"])
    known = {name: pair for name, pair in expected["metrics"].items() if pair[1]}
    own = report["metrics"]
    values = {name: pair[0] for name, pair in own.items()}
    found.metrics(
        "metrics of an update", where, values, {name: value for name, (value, _) in known.items()}
    )
    for name, (_, count) in known.items():
        if name in own and not name.endswith("_max"):
            found.check(
                "denominators of the metrics", f"{where}, {name}", own[name][1], count, count
            )
    for name in own.keys() - expected["metrics"].keys():
        if name.endswith("/score_drift_max"):
            found.check("score drift", where, values[name], 0.0)
        else:
            found.not_compared.add(name)


def _compare_rows(found: Comparison, product: Path, updates: list[dict[str, Any]]) -> None:
    """Compares the steps' rows: means over updates by their denominators, extremes, and mismatch of
    the first update.
    """
    rows = {
        step: row
        for k in (0, 1)
        for step, row in json.loads((product / f"rows_{k}.json").read_text()).items()
    }
    for step in sorted({update["step"] for update in updates}):
        own = [update for update in updates if update["step"] == step]
        sums: dict[str, list[tuple[float, float]]] = {}
        for index, update in enumerate(own):
            names = {
                "optimizer/grad_norm": "grad_norm",
                "optimizer/clipped_frac": "is_clipped",
                "optimizer/lr": "lr",
            }
            optimizer = {name: (float(update[key]), 1.0) for name, key in names.items()}
            for name, pair in (update["metrics"] | update["critic"] | optimizer).items():
                if pair[1] and (index == 0 or not name.startswith("mismatch/")):
                    sums.setdefault(name, []).append(pair)
        expected = {
            name: max(v for v, _ in pairs)
            if name.endswith("_max")
            else sum(v * count for v, count in pairs) / sum(count for _, count in pairs)
            for name, pairs in sums.items()
        }
        expected["admission/num_samples"] = float(
            len({row for update in own for row in update["ids"]})
        )
        found.metrics("metrics of a step", f"step {step}", rows.get(str(step), {}), expected)


def _arrays(file: Path) -> dict[str, Any]:
    with np.load(file) as stored:
        return {name: stored[name] for name in stored.files}
