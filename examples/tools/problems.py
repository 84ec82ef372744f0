"""Writes the products of the tools example: two three-digit numbers each.

The demonstrations are right: the factors, the product, the answer. A few of them write the factors
as a call of the calculator (`<calc>347*581</calc>`), which then gives the product. All others work
by hand (`<hand>347*581</hand>`) and write the product themselves, which a model of this size does
not learn. Supervised training therefore yields a policy that can make a call and use its result,
but rarely makes one, and is wrong without it.
"""

import random
from pathlib import Path

from examples.quickstart.problems import Problem, sample_problems, write_records


def demonstration(problem: Problem, *, uses_tool: bool) -> str:
    r"""A response of three lines that ends in `\boxed{}` with the product.

    The second line is the product: the calculator's, or the pupil's own.
    """
    product = problem[0] * problem[1]
    # Both words have three tokens: a copy at the same positions is learned from all demonstrations.
    word = "calc" if uses_tool else "hand"
    # The calculator's line is that of `turn_markers` in train.yaml.
    return f"<{word}>{problem[0]}*{problem[1]}</{word}>\n{product}\n\\boxed{{{product}}}"


def write_products(
    out_dir: Path,
    seed: int,
    *,
    num_train: int = 1000,
    num_test: int = 96,
    num_demonstrations: int = 6000,
    tool_prob: float = 0.15,
) -> None:
    """Writes `train.json`, `test.json` and `demonstrations.json` to `out_dir`; the three share no
    problem.

    Args:
        out_dir: for the files, which depend on the other arguments alone.
        seed: of the problems and demonstrations.
        num_train: problems of the run.
        num_test: held-out problems.
        num_demonstrations: problems of the warm start.
        tool_prob: probability that a demonstration has a call.
    """
    rng = random.Random(seed)
    problems = sample_problems(num_test + num_train + num_demonstrations, rng)
    splits = {
        "test.json": problems[:num_test],
        "train.json": problems[num_test : num_test + num_train],
        "demonstrations.json": problems[num_test + num_train :],
    }
    out_dir.mkdir(parents=True, exist_ok=True)
    for name, split in splits.items():
        records = []
        for problem in split:
            records.append(
                {
                    "problem": f"What is {problem[0]} * {problem[1]}?",
                    "answer": str(problem[0] * problem[1]),
                    "solution": demonstration(problem, uses_tool=rng.random() < tool_prob),
                }
            )
        write_records(out_dir / name, records)
