"""Compares the records of a certified run's ranks with those of the reference. numpy only."""

import json
from collections.abc import Iterable, Mapping
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
    # Cancellation of large terms in float64 reaches 1.4e-9.
    "loss at drawn log-probs": (1e-8, 1e-8, "of the value, at least of 0.001"),
    "derivative at drawn log-probs": (1e-8, 1e-8, "of the sample's largest"),
    "exported and converted weights": (0, 0, "difference from the last ones"),
    "config.json of the exported and converted folders": (0, 0, "keys that differ"),
}
_TOKENS = {
    "start": "log-probs at the step's start",
    "reference": "log-probs of the frozen reference",
    "update": "log-probs of the update",
    "coefficient": "derivative of the loss by each log-prob",
}
"""kind of the arrays [response] of a sample in a rank's file -> quantity"""
_METRIC_FLOOR = 1e-2
_RATE_FLOOR = 1e-12
"""Metrics, and the learning rate among them, below these values are compared absolutely."""


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
class Deviations:
    """All quantities, and metrics that the reference does not compute."""

    is_bf16: bool
    quantities: dict[str, Quantity] = field(default_factory=dict)
    first: str = ""
    """the first deviation above its tolerance, or without a number; empty: none"""
    not_compared: set[str] = field(default_factory=set)

    def check(self, name: str, where: str, actual: Any, expected: Any, scale: float = 1.0) -> None:
        """Compares two arrays or numbers.

        Args:
            name: of a quantity in TOLERANCES.
            where: update, rank and sample, for the message.
            actual: of the product.
            expected: of the reference.
            scale: unit of the deviation; 0 counts as 1.
        """
        quantity = self._quantity(name)
        left = np.asarray(actual, np.float64)
        right = np.asarray(expected, np.float64)

        # A number that is not finite, or another shape, has no difference: it is infinite.
        deviation = np.inf
        is_finite = np.isfinite(left).all() and np.isfinite(right).all() and np.isfinite(scale)
        if left.shape == right.shape and is_finite:
            deviation = float(np.max(np.abs(left - right), initial=0.0)) / (scale or 1.0)

        quantity.compared += right.size
        if deviation > quantity.largest:
            quantity.largest = deviation
            quantity.where = where
        if deviation > quantity.tolerance:
            self.fail(
                f"{where}: {name} differ by {deviation:.3g} ({quantity.unit}; tolerance "
                f"{quantity.tolerance:g})"
            )

    def tensors(
        self, name: str, where: str, file: Path, expected: Mapping[str, Any], scale: float = 0.0
    ) -> None:
        """Compares a file of tensors by name; `scale` 0: each tensor's largest."""
        actual = _arrays(file)
        if actual.keys() != expected.keys():
            other_names = sorted(actual.keys() ^ expected.keys())
            self.fail(f"{where}: {name} have other names: {other_names[:3]}")
        for key in sorted(actual.keys() & expected.keys()):
            key_scale = scale or float(np.abs(expected[key]).max())
            self.check(name, f"{where}, {key}", actual[key], expected[key], key_scale)

    def metrics(
        self, name: str, where: str, actual: Mapping[str, Any], expected: Mapping[str, float]
    ) -> None:
        """Compares metrics by name."""
        for key, value in expected.items():
            if actual.get(key) is None:
                self.fail(f"{where}: metric {key} is missing")
                continue
            floor = _RATE_FLOOR if key == "optimizer/lr" else _METRIC_FLOOR
            self.check(name, f"{where}, {key}", actual[key], value, max(abs(value), floor))

    def fail(self, line: str) -> None:
        """Records a deviation; `check` calls it for numbers."""
        self.first = self.first or line

    def _quantity(self, name: str) -> Quantity:
        if name not in self.quantities:
            fp32, bf16, unit = TOLERANCES[name]
            self.quantities[name] = Quantity(name, bf16 if self.is_bf16 else fp32, unit)
        return self.quantities[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Update:
    """The files of one update."""

    number: int
    """in the run, from 1"""
    where: str
    """for messages"""
    product: Path
    """folder of the ranks' files"""
    expected: Mapping[str, Any]
    """the reference's numbers"""
    arrays: Mapping[str, Any]
    """the reference's arrays"""
    largest_lr: float
    """of the updates so far, whose differences stay in the weights"""

    def files_of_ranks(self, suffix: str) -> list[tuple[str, Path]]:
        """(place for messages, file) of each rank."""
        files = []
        for file in sorted(self.product.glob(f"update_{self.number}.*.{suffix}")):
            rank = file.name.split(".")[1]
            files.append((f"{self.where}, rank {rank}", file))
        return files


def compare(folder: Path, *, updates_before_resume: int, is_bf16: bool) -> Deviations:
    """Compares all files of `folder/product` with those of `folder/reference`, in the order of the
    computation.
    """
    deviations = Deviations(is_bf16=is_bf16)
    product = folder / "product"
    updates = _read_updates(folder)
    for update in updates:
        if update.number == updates_before_resume + 1:
            _compare_resumed_weights(deviations, update)
        _compare_samples(deviations, update)
        _compare_reports(deviations, update)
        _compare_weights(deviations, update)
        if update.expected["critic"]:
            _compare_critic(deviations, update)

    _compare_rows(deviations, product, [update.expected for update in updates])
    _compare_moments(deviations, folder)
    _compare_probes(deviations, folder)
    _compare_exports(deviations, product, len(updates))
    _compare_configs(deviations, product, folder / "model" / "config.json")
    _compare_exported_critic(deviations, product, len(updates))
    return deviations


def _read_updates(folder: Path) -> list[_Update]:
    updates = []
    largest_lr = 0.0
    numbers = json.loads((folder / "reference" / "updates.json").read_text())
    for number, expected in enumerate(numbers, start=1):
        largest_lr = max(largest_lr, expected["lr"])
        updates.append(
            _Update(
                number=number,
                where=f"step {expected['step']}, update {number}",
                product=folder / "product",
                expected=expected,
                arrays=_arrays(folder / "reference" / f"update_{number}.npz"),
                largest_lr=largest_lr,
            )
        )
    return updates


def _compare_resumed_weights(deviations: Deviations, update: _Update) -> None:
    saved = _arrays(update.product / f"weights_{update.number - 1}.npz")
    resumed = update.product / "start_1.npz"
    deviations.tensors("weights after the resume", update.where, resumed, saved, 1.0)


def _compare_samples(deviations: Deviations, update: _Update) -> None:
    """The log-probs of an update and the derivatives by them, and which samples it trained."""
    ids = update.expected["ids"]
    ends = np.cumsum(update.expected["lens"])[:-1]
    trained: set[str] = set()
    for place, file in update.files_of_ranks("npz"):
        of_rank = _arrays(file)
        trained.update(_with_prefix(of_rank, "update "))
        for kind, name in _TOKENS.items():
            values = update.arrays[kind]
            scale = float(np.abs(values).max()) if kind == "coefficient" else 1.0
            expected = dict(zip(ids, np.split(values, ends), strict=True))
            for sample, actual in _with_prefix(of_rank, f"{kind} ").items():
                if sample in expected:
                    where = f"{place}, sample {sample}"
                    deviations.check(name, where, actual, expected[sample], scale)

    samples = zip(ids, update.expected["skipped"], strict=True)
    to_train = {sample for sample, is_skipped in samples if not is_skipped}
    deviations.check("samples of an update", update.where, len(trained ^ to_train), 0)


def _compare_reports(deviations: Deviations, update: _Update) -> None:
    """Norm, rate and metrics of an update, which every rank reports, and whether all ranks have
    the same weights.
    """
    expected = update.expected
    norm = expected["grad_norm"]
    lr = expected["lr"]
    expected_state = (expected["is_clipped"], update.number)
    for place, file in update.files_of_ranks("json"):
        report = json.loads(file.read_text())
        state = (report["is_clipped"], report["version"])
        deviations.check("gradient norm", place, report["grad_norm"], norm, norm)
        deviations.check("clipped or not, weight version", place, state, expected_state)
        deviations.check("learning rate", place, report["lr"], lr, lr)
        _compare_metrics(deviations, place, report["metrics"], expected["metrics"])

    digest_files = update.product.glob(f"weights_{update.number}.*.digest")
    digests = {file.read_text() for file in digest_files}
    deviations.check("weights of the ranks", update.where, len(digests), 1)


def _compare_metrics(
    deviations: Deviations, where: str, actual: Mapping[str, Any], expected: Mapping[str, Any]
) -> None:
    """Metrics with their denominators: name -> (value, denominator)."""
    # A mean over nothing has no value.
    expected_means = {name: pair for name, pair in expected.items() if pair[1]}
    values = {name: value for name, (value, _) in actual.items()}
    expected_values = {name: value for name, (value, _) in expected_means.items()}
    deviations.metrics("metrics of an update", where, values, expected_values)

    for name, (_, count) in expected_means.items():
        has_count = name in actual and not name.endswith("_max")
        if has_count:
            place = f"{where}, {name}"
            deviations.check("denominators of the metrics", place, actual[name][1], count, count)

    for name in actual.keys() - expected.keys():
        if name.endswith("/score_drift_max"):
            deviations.check("score drift", where, values[name], 0.0)
        else:
            deviations.not_compared.add(name)


def _compare_weights(deviations: Deviations, update: _Update) -> None:
    weights = _with_prefix(update.arrays, "weight ")
    file = update.product / f"weights_{update.number}.npz"
    name = "weights after an update"
    deviations.tensors(name, update.where, file, weights, update.largest_lr)


def _compare_critic(deviations: Deviations, update: _Update) -> None:
    weights = _with_prefix(update.arrays, "critic ")
    file = update.product / f"critic_{update.number}.npz"
    lr, _ = update.expected["critic"]["critic/lr"]
    deviations.tensors("critic's weights after an update", update.where, file, weights, lr)


def _compare_rows(
    deviations: Deviations, product: Path, updates: Iterable[Mapping[str, Any]]
) -> None:
    """The steps' rows: means over updates by their denominators, extremes, and mismatch of the
    first update.
    """
    rows: dict[str, Any] = {}
    for attempt in (0, 1):
        rows |= json.loads((product / f"rows_{attempt}.json").read_text())

    updates_of_step: dict[int, list[Mapping[str, Any]]] = {}
    for update in updates:
        updates_of_step.setdefault(update["step"], []).append(update)
    for step in sorted(updates_of_step):
        expected = _expected_row(updates_of_step[step])
        row = rows.get(str(step), {})
        deviations.metrics("metrics of a step", f"step {step}", row, expected)


def _expected_row(updates: list[Mapping[str, Any]]) -> dict[str, float]:
    """The row of a step from its updates."""
    pairs_by_name: dict[str, list[tuple[float, float]]] = {}
    for index, update in enumerate(updates):
        pairs = update["metrics"] | update["critic"]
        if index == 0:
            pairs |= update["of_step"]
        pairs["optimizer/grad_norm"] = (update["grad_norm"], 1.0)
        pairs["optimizer/clipped_frac"] = (float(update["is_clipped"]), 1.0)
        pairs["optimizer/lr"] = (update["lr"], 1.0)
        for name, (value, count) in pairs.items():
            is_of_row = index == 0 or not name.startswith("mismatch/")
            if count and is_of_row:
                pairs_by_name.setdefault(name, []).append((value, count))

    row = {}
    for name, row_pairs in pairs_by_name.items():
        if name.endswith("_max"):
            row[name] = max(value for value, _ in row_pairs)
        else:
            total = sum(count for _, count in row_pairs)
            row[name] = sum(value * count for value, count in row_pairs) / total

    samples: set[str] = set()
    for update in updates:
        samples.update(update["ids"])
    row["admission/num_samples"] = float(len(samples))
    return row


def _compare_moments(deviations: Deviations, folder: Path) -> None:
    """Adam's moments after the last update."""
    stems = {"Adam's first moment": "exp_avg", "Adam's second moment": "exp_avg_sq"}
    for name, stem in stems.items():
        expected = _arrays(folder / "reference" / f"{stem}.npz")
        deviations.tensors(name, "last update", folder / "product" / f"{stem}.npz", expected)


def _compare_probes(deviations: Deviations, folder: Path) -> None:
    """The objective alone, at log-probs that the run does not reach."""
    found = _arrays(folder / "product" / "probes.npz")
    for place, values in _arrays(folder / "probes.npz").items():
        is_loss = place.endswith("loss")
        name = "loss at drawn log-probs" if is_loss else "derivative at drawn log-probs"
        largest = float(np.abs(values).max())
        # Where a sample's advantage nearly cancels, rounding of rewards near 1 is all that differs.
        scale = largest + (1e-3 if is_loss else 1e-5)
        deviations.check(name, place, found[place], values, scale)


def _compare_exports(deviations: Deviations, product: Path, num_updates: int) -> None:
    """The exported and converted weights against the last ones, bit for bit."""
    last = _arrays(product / f"weights_{num_updates}.npz")
    for kind in ("export", "convert to-hf", "convert to-megatron"):
        file = product / f"{kind}.npz"
        deviations.tensors("exported and converted weights", kind, file, last, 1.0)


def _compare_exported_critic(deviations: Deviations, product: Path, num_updates: int) -> None:
    file = product / "critic to-hf.npz"
    if file.is_file():
        last = _arrays(product / f"critic_{num_updates}.npz")
        deviations.tensors("exported and converted weights", "critic", file, last, 1.0)


def _compare_configs(deviations: Deviations, product: Path, model_config: Path) -> None:
    """config.json of the exported and converted folders against the model's."""
    model = json.loads(model_config.read_text())
    for folder in ("hf", "to_hf", "to_megatron/hf"):
        exported = json.loads((product / folder / "config.json").read_text())
        # The type is that of the written weights.
        keys = (exported.keys() | model.keys()) - {"dtype", "torch_dtype"}
        num_other = sum(exported.get(key) != model.get(key) for key in keys)
        name = "config.json of the exported and converted folders"
        deviations.check(name, folder, num_other, 0)


def _with_prefix(arrays: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The arrays whose name starts with `prefix`, without it."""
    return {
        name.removeprefix(prefix): values
        for name, values in arrays.items()
        if name.startswith(prefix)
    }


def _arrays(file: Path) -> dict[str, Any]:
    with np.load(file) as stored:
        return {name: stored[name] for name in stored.files}
