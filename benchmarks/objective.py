"""Time of the objective's `prepare`: 1,024 groups of 8 samples, float64, one thread.

    python benchmarks/objective.py

Prints the median over repeated calls for every score, with samples in the trainer's order and
shuffled. In the same run it times a direct computation of the same coefficients: one loop over the
groups, differentiated by autograd. Exits with 1 if the default setting misses the target.
"""

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from pacs_megatron.contracts import SampleFacts
from pacs_megatron.objectives.pacs import PacsOptions
from pacs_megatron.objectives.registry import build_objective

NUM_GROUPS = 1024
GROUP_SIZE = 8
SCORES = ("rloo", "dr_grpo", "grpo", "naive")
TARGET_MS = 20.0
REPEATS = 50


def make_batch() -> tuple[SampleFacts, torch.Tensor]:
    """Facts in the trainer's order (by group, then id) and a reward proxy for each sample."""
    rng = np.random.default_rng(0)
    num_samples = NUM_GROUPS * GROUP_SIZE
    ids = []
    for row in range(num_samples):
        problem = row // GROUP_SIZE * 37
        ids.append(f"12:deepscaler/{problem}#{row % GROUP_SIZE}")
    facts = SampleFacts(
        ids=tuple(ids),
        groups=np.repeat(np.arange(NUM_GROUPS), GROUP_SIZE),
        labels=rng.integers(0, 2, num_samples).astype(np.float64),
        rewards=np.zeros(num_samples),
        prompt_lens=np.full(num_samples, 200),
        response_lens=rng.integers(100, 8192, num_samples),
        environment_lens=np.zeros(num_samples, dtype=np.int64),
        truncated=rng.random(num_samples) < 0.1,
    )
    return facts, torch.from_numpy(rng.normal(0, 1, num_samples))


def by_autograd(facts: SampleFacts, proxy: torch.Tensor) -> torch.Tensor:
    """dL/dr with rloo scores and question weights, one group after the other.

    Args:
        facts: of n samples.
        proxy: [n], fp64, the reward proxy r.

    Returns:
        [n], fp64.
    """
    r = proxy.clone().requires_grad_(True)
    labels = torch.from_numpy(facts.labels)
    total = torch.zeros((), dtype=torch.float64)
    for group in range(facts.num_groups):
        rows = torch.from_numpy(np.flatnonzero(facts.groups == group))
        size = len(rows)
        y = labels[rows]
        psi = (r[rows] - r[rows].mean()) * size / (size - 1)
        positives = float(y.sum())
        own_class = torch.where(y == 1, positives, size - positives).double()
        weights = torch.where(own_class == size, 1.0, size / (2 * own_class))
        losses = F.binary_cross_entropy_with_logits(psi, y, reduction="none")
        total = total + (weights * losses).sum()
    (total / facts.num_samples).backward()  # type: ignore[no-untyped-call]
    if r.grad is None:
        raise RuntimeError("autograd left no gradient")
    return r.grad


def median_ms(call: Callable[[], object], repeats: int) -> float:
    """Median milliseconds of a call."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def options_of(score: str) -> PacsOptions:
    """PACS with this score; `grpo` divides by a standard deviation, which needs a lower bound."""
    options: dict[str, Any] = {"name": "pacs", "score": score, "reference": "frozen"}
    if score == "grpo":
        options["score_std_floor"] = 0.1
    return PacsOptions.model_validate(options)


def main() -> int:
    torch.set_num_threads(1)
    facts, proxy = make_batch()
    order = np.random.default_rng(1).permutation(facts.num_samples)
    shuffled = facts.select(order)
    shuffled_proxy = proxy[order]

    print(f"prepare, {NUM_GROUPS} x {GROUP_SIZE} samples, 1 thread, median of {REPEATS} calls, ms")
    print(f"{'score':<12}{'ordered':>10}{'shuffled':>10}")
    default_ms = 0.0
    for score in SCORES:
        objective = build_objective(options_of(score), updates_per_step=1)
        ordered_ms = median_ms(partial(objective.prepare, proxy, facts, None), REPEATS)
        shuffled_ms = median_ms(partial(objective.prepare, shuffled_proxy, shuffled, None), REPEATS)
        print(f"{score:<12}{ordered_ms:>10.2f}{shuffled_ms:>10.2f}")
        if score == "rloo":
            default_ms = ordered_ms
            closed = objective.prepare(proxy, facts, None).per_sample["coefficient"]

    alternative_ms = median_ms(partial(by_autograd, facts, proxy), 3)
    largest_difference = (closed - by_autograd(facts, proxy)).abs().max()
    difference = float(largest_difference / closed.abs().max())
    print(
        f"loop over groups + autograd (rloo): {alternative_ms:.1f} ms, "
        f"{alternative_ms / default_ms:.0f} times as long"
    )
    print(f"largest difference between the two: {difference:.1e} of the largest coefficient")
    is_met = default_ms <= TARGET_MS
    print(f"target {TARGET_MS:.0f} ms: {'met' if is_met else 'MISSED'}")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
