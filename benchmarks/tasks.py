"""Tasks of the study besides the quickstart's.

`partial`: three-digit sums whose demonstrations are all right. Pupils differ in how much of the
working they write: after every column one goes on with probability `WORKED`, or stops and writes
the whole sum. With all three columns written the model of the quickstart's size is nearly always
right; from fewer it has to add the rest in one go, and is often wrong. Training on rewards has to
make it work on, at three places; the demonstrations have no errors.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from examples.quickstart import problems

WORKED = 0.65
NUM_TEST = 96
NUM_TRAIN = 1000
NUM_DEMONSTRATIONS = 4000


@dataclass(frozen=True)
class Task:
    """Writes a seed's problems to a folder; the changes to the warm start and to every run."""

    write: Callable[[Path, int], None]
    warm: tuple[str, ...] = ()


def partial_solution(problem: problems.Problem, *, worked: float, rng: random.Random) -> str:
    """The first columns as in the quickstart, lowest first, and then the right sum.

    Args:
        problem: two numbers.
        worked: probability of each further column.
        rng: of the draws.
    """
    solution = problems.worked_solution(problem, carry_slip_prob=0.0, rng=rng)
    columns = solution.split(". ")[0].split(", ")
    num_written = 0
    while num_written < len(columns) and rng.random() < worked:
        num_written += 1
    working = f"{', '.join(columns[:num_written])}. " if num_written else ""
    return f"{working}\\boxed{{{sum(problem)}}}"


def write_partial(out_dir: Path, seed: int) -> None:
    """`train.json`, `test.json` and `demonstrations.json` without a common problem; they depend on
    the seed alone.
    """
    rng = random.Random(seed)
    drawn = problems.sample_problems(NUM_TEST + NUM_TRAIN + NUM_DEMONSTRATIONS, rng)
    splits = {
        "test.json": drawn[:NUM_TEST],
        "train.json": drawn[NUM_TEST : NUM_TEST + NUM_TRAIN],
        "demonstrations.json": drawn[NUM_TEST + NUM_TRAIN :],
    }
    out_dir.mkdir(parents=True, exist_ok=True)
    for name, split in splits.items():
        records = []
        for problem in split:
            record = problems.as_record(problem, carry_slip_prob=0.0, rng=rng)
            record["solution"] = partial_solution(problem, worked=WORKED, rng=rng)
            records.append(record)
        problems.write_records(out_dir / name, records)


TASKS = {
    "quickstart": Task(problems.write_problems),
    "partial": Task(write_partial, ("run.steps=700",)),
}
