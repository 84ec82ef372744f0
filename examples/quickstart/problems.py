"""Writes the quickstart's arithmetic problems: sums of two three-digit numbers, worked column by
column.

The demonstrations are a careless pupil's. The pupil adds every column right, but takes a wrong
carry into the second and the third column with probability `carry_slip_prob`: a carry of 1 is
forgotten, or a carry of 0 becomes 1. Supervised training therefore yields a policy that knows
addition but is unreliable at it, about equally for every seed; training on rewards has to make the
right carry certain. The slips are deliberate: the rise of the quickstart's curve shows that the
loop works, not what PACS gains on a real task.
"""

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path

NUM_COLUMNS = 3
Problem = tuple[int, int]


def worked_solution(problem: Problem, *, carry_slip_prob: float, rng: random.Random) -> str:
    r"""Returns the column-wise solution of `problem`, lowest column first, ending in `\boxed{}`.

    A column reads `a+b+carry=total`; the total has two digits so that its first one is the next
    column's carry. All that follows a wrong carry is consistent with it, so the boxed number is the
    pupil's own result, right or not.

    Args:
        problem: two numbers.
        carry_slip_prob: probability that a carry after the first column is wrong.
        rng: of the draws.
    """
    columns: list[str] = []
    carry = 0
    result = 0
    for place in range(NUM_COLUMNS):
        first = problem[0] // 10**place % 10
        second = problem[1] // 10**place % 10
        if place > 0 and rng.random() < carry_slip_prob:
            carry = 1 - carry
        total = first + second + carry
        columns.append(f"{first}+{second}+{carry}={total:02d}")
        result += total % 10 * 10**place
        carry = total // 10
    result += carry * 10**NUM_COLUMNS
    return f"{', '.join(columns)}. \\boxed{{{result}}}"


def as_record(problem: Problem, *, carry_slip_prob: float, rng: random.Random) -> dict[str, str]:
    """Returns one record of DeepScaleR's schema; `answer` is always the right one, `solution` the
    pupil's.
    """
    return {
        "problem": f"What is {problem[0]} + {problem[1]}?",
        "answer": str(sum(problem)),
        "solution": worked_solution(problem, carry_slip_prob=carry_slip_prob, rng=rng),
    }


def sample_problems(num: int, rng: random.Random) -> list[Problem]:
    """Returns `num` distinct problems in random order; operands have exactly `NUM_COLUMNS` digits.

    Raises ValueError if fewer than `num` such problems exist.
    """
    lowest = 10 ** (NUM_COLUMNS - 1)
    highest = 10**NUM_COLUMNS - 1
    side = highest - lowest + 1
    picks = rng.sample(range(side * side), num)
    return [(lowest + pick // side, lowest + pick % side) for pick in picks]


def write_records(path: Path, records: Sequence[dict[str, str]]) -> None:
    """Writes a JSON list with one record a line, so that the file reads and diffs well."""
    lines = ",\n".join(json.dumps(record) for record in records)
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def write_problems(
    out_dir: Path,
    seed: int,
    *,
    num_train: int = 1000,
    num_test: int = 96,
    num_demonstrations: int = 2000,
    carry_slip_prob: float = 0.4,
) -> None:
    """Writes `train.json`, `test.json` and `demonstrations.json` to `out_dir`; the three share no
    problem.

    Only the demonstrations have slips. The solutions of `train.json` and `test.json` are right and
    nothing trains on them. The files depend on the arguments alone.
    """
    rng = random.Random(seed)
    problems = sample_problems(num_test + num_train + num_demonstrations, rng)
    splits = {
        "test.json": (problems[:num_test], 0.0),
        "train.json": (problems[num_test : num_test + num_train], 0.0),
        "demonstrations.json": (problems[num_test + num_train :], carry_slip_prob),
    }
    out_dir.mkdir(parents=True, exist_ok=True)
    for name, (split, slip_prob) in splits.items():
        records = [as_record(problem, carry_slip_prob=slip_prob, rng=rng) for problem in split]
        write_records(out_dir / name, records)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Write the quickstart's problems and demonstrations."
    )
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write_problems(args.out_dir, args.seed)
    print(f"wrote train.json, test.json and demonstrations.json to {args.out_dir}")


if __name__ == "__main__":
    main()
