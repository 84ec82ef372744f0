"""The decoding step of `plan` against published figures.

    python benchmarks/published_decode.py

FIT rows gave DECODE_BANDWIDTH_FRAC, DECODE_MFU, DECODE_OVERHEAD_S and DECODE_SEQUENCE_S; the other
rows are held out. All rows: ml-energy/leaderboard, commit 0cd52dab, public/data/tasks, H100, bf16,
vLLM.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pacs_megatron.models import ModelSpec, read_spec
from pacs_megatron.runtime.gpus import GPUS
from pacs_megatron.workbench.plan.known_models import KNOWN_MODELS
from pacs_megatron.workbench.plan.memory import kv_bytes_per_token
from pacs_megatron.workbench.plan.state import num_parameters
from pacs_megatron.workbench.plan.timing import (
    decode_step_s,
    forward_flops,
    read_expert_frac,
)

GPU = GPUS["h100"]
PROMPT_TOKENS = {"lm-arena-chat": 100, "gpqa": 300}
"""Assumed; the table has none."""
LENGTH_SPREAD = 1.25
"""Assumed: mean of the squared lengths over the squared mean: long responses are in more steps."""


class Row(NamedTuple):
    """One published figure."""

    task: str
    model: str
    num_gpus: int
    """tensor-parallel, or expert-parallel for the model with experts"""
    sequences: float
    """of a step, on average"""
    output_tokens: float
    published_ms: float
    """median time between two tokens"""
    is_fitted: bool = False

    @property
    def mean_context(self) -> float:
        return PROMPT_TOKENS[self.task] + self.output_tokens / 2 * LENGTH_SPREAD


FIT = True
ROWS = [
    Row("gpqa", "Qwen3-14B", 1, 8.0, 6930, 14.42),
    Row("gpqa", "Qwen3-14B", 1, 16.0, 7432, 17.34),
    Row("gpqa", "Qwen3-14B", 1, 32.0, 6939, 21.55),
    Row("gpqa", "Qwen3-14B", 1, 59.0, 6711, 28.07),
    Row("gpqa", "Qwen3-30B-A3B", 1, 8.0, 8162, 12.31),
    Row("gpqa", "Qwen3-30B-A3B", 1, 16.0, 8243, 16.75),
    Row("gpqa", "Qwen3-30B-A3B", 2, 8.0, 8309, 9.37),
    Row("gpqa", "Qwen3-30B-A3B", 2, 16.0, 7950, 11.97),
    Row("gpqa", "Qwen3-30B-A3B", 2, 32.0, 8110, 16.40),
    Row("gpqa", "Qwen3-30B-A3B", 2, 64.0, 8117, 21.54),
    Row("gpqa", "Qwen3-30B-A3B", 2, 96.0, 8283, 27.71),
    Row("gpqa", "Qwen3-30B-A3B", 2, 128.0, 8058, 28.59),
    Row("gpqa", "Qwen3-32B", 2, 8.0, 6936, 16.72),
    Row("gpqa", "Qwen3-32B", 2, 16.0, 6906, 19.32),
    Row("gpqa", "Qwen3-32B", 2, 32.0, 7176, 25.27),
    Row("gpqa", "Qwen3-32B", 2, 63.8, 7058, 32.28),
    Row("gpqa", "Qwen3-8B", 1, 8.0, 7854, 9.70),
    Row("gpqa", "Qwen3-8B", 1, 16.0, 7861, 11.91),
    Row("gpqa", "Qwen3-8B", 1, 32.0, 8170, 16.87),
    Row("gpqa", "Qwen3-8B", 1, 63.3, 8367, 26.64),
    Row("gpqa", "Qwen3-8B", 1, 82.0, 8052, 27.88),
    Row("lm-arena-chat", "Qwen3-14B", 1, 8.0, 620, 12.54, FIT),
    Row("lm-arena-chat", "Qwen3-14B", 1, 16.0, 622, 13.34, FIT),
    Row("lm-arena-chat", "Qwen3-14B", 1, 31.9, 611, 15.01, FIT),
    Row("lm-arena-chat", "Qwen3-14B", 1, 63.8, 617, 18.94, FIT),
    Row("lm-arena-chat", "Qwen3-14B", 1, 95.9, 623, 23.50, FIT),
    Row("lm-arena-chat", "Qwen3-14B", 1, 127.7, 614, 26.16, FIT),
    Row("lm-arena-chat", "Qwen3-14B", 1, 191.7, 613, 33.37, FIT),
    Row("lm-arena-chat", "Qwen3-14B", 1, 253.4, 625, 38.40, FIT),
    Row("lm-arena-chat", "Qwen3-30B-A3B", 1, 8.0, 927, 12.85),
    Row("lm-arena-chat", "Qwen3-30B-A3B", 1, 16.0, 925, 17.55),
    Row("lm-arena-chat", "Qwen3-30B-A3B", 1, 31.9, 922, 22.57),
    Row("lm-arena-chat", "Qwen3-30B-A3B", 1, 63.9, 919, 28.94),
    Row("lm-arena-chat", "Qwen3-30B-A3B", 1, 88.5, 931, 32.07),
    Row("lm-arena-chat", "Qwen3-30B-A3B", 2, 8.0, 901, 9.36),
    Row("lm-arena-chat", "Qwen3-30B-A3B", 2, 16.0, 926, 12.55),
    Row("lm-arena-chat", "Qwen3-30B-A3B", 2, 32.0, 927, 15.39),
    Row("lm-arena-chat", "Qwen3-30B-A3B", 2, 63.9, 918, 18.70),
    Row("lm-arena-chat", "Qwen3-30B-A3B", 2, 95.9, 921, 24.59),
    Row("lm-arena-chat", "Qwen3-30B-A3B", 2, 127.9, 919, 27.42),
    Row("lm-arena-chat", "Qwen3-30B-A3B", 2, 191.8, 915, 31.26),
    Row("lm-arena-chat", "Qwen3-30B-A3B", 2, 255.7, 918, 33.66),
    Row("lm-arena-chat", "Qwen3-30B-A3B", 2, 255.8, 920, 34.58),
    Row("lm-arena-chat", "Qwen3-30B-A3B", 2, 383.5, 940, 42.93),
    Row("lm-arena-chat", "Qwen3-30B-A3B", 2, 511.1, 927, 47.39),
    Row("lm-arena-chat", "Qwen3-30B-A3B", 2, 511.3, 926, 50.20),
    Row("lm-arena-chat", "Qwen3-30B-A3B", 2, 767.2, 924, 65.00),
    Row("lm-arena-chat", "Qwen3-30B-A3B", 2, 1018.8, 920, 74.82),
    Row("lm-arena-chat", "Qwen3-32B", 1, 8.0, 638, 25.21),
    Row("lm-arena-chat", "Qwen3-32B", 1, 16.0, 626, 26.35),
    Row("lm-arena-chat", "Qwen3-32B", 1, 29.3, 629, 28.81),
    Row("lm-arena-chat", "Qwen3-32B", 2, 8.0, 631, 15.06),
    Row("lm-arena-chat", "Qwen3-32B", 2, 16.0, 626, 16.04),
    Row("lm-arena-chat", "Qwen3-32B", 2, 31.9, 642, 17.91),
    Row("lm-arena-chat", "Qwen3-32B", 2, 63.9, 635, 22.45),
    Row("lm-arena-chat", "Qwen3-32B", 2, 95.8, 635, 26.10),
    Row("lm-arena-chat", "Qwen3-32B", 2, 127.8, 624, 29.66),
    Row("lm-arena-chat", "Qwen3-32B", 2, 191.7, 632, 37.02),
    Row("lm-arena-chat", "Qwen3-32B", 2, 255.6, 634, 44.45),
    Row("lm-arena-chat", "Qwen3-32B", 2, 340.2, 628, 54.90),
    Row("lm-arena-chat", "Qwen3-8B", 1, 8.0, 647, 8.20, FIT),
    Row("lm-arena-chat", "Qwen3-8B", 1, 16.0, 660, 8.90, FIT),
    Row("lm-arena-chat", "Qwen3-8B", 1, 31.9, 647, 10.57, FIT),
    Row("lm-arena-chat", "Qwen3-8B", 1, 63.9, 645, 13.95, FIT),
    Row("lm-arena-chat", "Qwen3-8B", 1, 95.8, 642, 17.80, FIT),
    Row("lm-arena-chat", "Qwen3-8B", 1, 127.8, 641, 20.70, FIT),
    Row("lm-arena-chat", "Qwen3-8B", 1, 191.7, 659, 26.35, FIT),
    Row("lm-arena-chat", "Qwen3-8B", 1, 255.5, 654, 31.36, FIT),
    Row("lm-arena-chat", "Qwen3-8B", 1, 383.0, 648, 42.68, FIT),
    Row("lm-arena-chat", "Qwen3-8B", 1, 474.4, 645, 47.16, FIT),
]


def spec_of(row: Row) -> ModelSpec:
    return read_spec(KNOWN_MODELS[f"Qwen/{row.model}"])


def read_bytes(row: Row) -> float:
    """Weights and cache that each GPU reads in a step."""
    spec = spec_of(row)
    weight_bytes = 2 * num_parameters(spec) / row.num_gpus
    weight_bytes *= read_expert_frac(spec, row.sequences)
    cache_bytes = kv_bytes_per_token(spec, row.num_gpus, 2) * row.sequences * row.mean_context
    return weight_bytes + cache_bytes


def planned_ms(row: Row) -> float:
    """Milliseconds of a decoding step by `plan`."""
    seconds = decode_step_s(
        spec_of(row), GPU, row.num_gpus, read_bytes(row), row.sequences, row.mean_context
    )
    return 1000 * seconds


def fitted() -> np.ndarray:
    """[4], overhead and time of a sequence in s, and the inverse shares of bandwidth and peak:
    least squares of the relative errors of the fitted rows, none below 0.
    """
    factors = []
    for row in ROWS:
        if not row.is_fitted:
            continue
        flops = forward_flops(spec_of(row), row.sequences, 2 * row.mean_context, row.sequences)
        memory_s = read_bytes(row) / (GPU.memory_gb_s * 1e9)
        compute_s = flops / row.num_gpus / GPU.bf16_flops_s
        seconds = np.array([1.0, row.sequences, memory_s, compute_s])
        factors.append(seconds / (row.published_ms / 1000))
    return _least_squares(np.array(factors), np.ones(len(factors)))


def _least_squares(factors: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Least squares without a negative value, by trying each choice of zeros."""
    best = np.zeros(factors.shape[1])
    columns: Sequence[int] = range(factors.shape[1])
    for size in range(1, len(columns) + 1):
        for chosen in itertools.combinations(columns, size):
            found = np.zeros(len(columns))
            found[list(chosen)] = np.linalg.lstsq(factors[:, chosen], target, rcond=None)[0]
            is_better = _error(factors, found, target) < _error(factors, best, target)
            if (found >= 0).all() and is_better:
                best = found
    return best


def _error(factors: np.ndarray, values: np.ndarray, target: np.ndarray) -> float:
    return float(((factors @ values - target) ** 2).sum())


def main() -> None:
    """Prints the table, the fit and the median errors."""
    errors: dict[bool, list[float]] = {True: [], False: []}
    print("task           model          GPUs  sequences  output  published ms  plan ms  error")
    for row in ROWS:
        planned = planned_ms(row)
        error = planned / row.published_ms - 1
        errors[row.is_fitted].append(abs(error))
        kind = "fitted" if row.is_fitted else "held out"
        print(
            f"{row.task:14} {row.model:14} {row.num_gpus:4d} {row.sequences:10.0f} "
            f"{row.output_tokens:7.0f} {row.published_ms:13.1f} {planned:8.1f} {error:+6.0%}  "
            f"{kind}"
        )
    overhead, sequence, memory, compute = fitted()
    print(
        f"fit: {1000 * overhead:.2f} ms a step, {1e6 * sequence:.0f} us a sequence, "
        f"{1 / memory:.2f} of the bandwidth, {1 / compute:.2f} of the peak"
    )
    for is_fitted, values in errors.items():
        kind = "fitted" if is_fitted else "held out"
        print(f"{kind}: median {statistics.median(values):.1%}, largest {max(values):.1%}")


if __name__ == "__main__":
    main()
