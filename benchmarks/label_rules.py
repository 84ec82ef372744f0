"""Where `reward.label_rule: last_box` and `authors` differ, on answers as models write them.

    python benchmarks/label_rules.py FOLDER [--authors reward_function.py] [--problems 60]

FOLDER has problems of real data sets as .json or .jsonl (`problem`, `answer`, some with a worked
`solution`). Each problem is answered in the forms below, rightly and with another problem's answer.
Rows with a `response` (and `answer`) are samples of a model, and are judged as they are.
`--authors` names `src/reward_function.py` of ritzz-ai/PACS, whose verdicts have to be those of
`authors`. Prints a Markdown table.
"""

import argparse
import importlib.util
import json
import logging
import re
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import numpy as np

from pacs_megatron.contracts import Prompt
from pacs_megatron.errors import RewardError
from pacs_megatron.rewards.boxed import last_boxed
from pacs_megatron.rewards.math import authors_rule, last_box

# {a}: the answer, {o}: another problem's answer.
FORMS = {
    "boxed at the end": r"We simplify. Therefore the answer is $\boxed{{{a}}}$.",
    "boxed, then prose": r"So $\boxed{{{a}}}$. This matches the condition in the problem.",
    "boxed, then a check with another number": r"So $\boxed{{{a}}}$. Check: $2 + 2 = 4$, as "
    r"required.",
    "boxed without dollars": r"Hence \boxed{{{a}}}",
    "two boxes, the last is meant": r"First guess: $\boxed{{{o}}}$. This is wrong. The answer is "
    r"$\boxed{{{a}}}$.",
    "box cut off at the limit": r"So the answer is $\boxed{{{a}",
    "inline LaTeX, no box": r"Therefore the answer is ${a}$.",
    "display LaTeX, no box": "Therefore\n\\[ x = {a} \\]",
    "final answer, no box": r"The final answer is ${a}$. I hope it is correct.",
    "plain text, no box": "The answer is {a}.",
    "bold, no box": "**Answer: {a}**",
    "in the steps, cut off": r"We obtain ${a}$ for the first part. Now we look at the second part "
    r"and",
    "wrong box, right prose": r"So $\boxed{{{o}}}$. The answer is ${a}$.",
    "right box, wrong prose after": r"So $\boxed{{{a}}}$. The final answer is ${o}$.",
}


PAIRS = ("1 1", "0 0", "0 1", "1 0")
"""verdicts of `last_box` and of `authors`"""


def read(folder: Path, limit: int) -> Iterator[tuple[str, dict]]:
    """(data set, row) of the first rows of each data set."""
    for path in sorted(folder.glob("*.json*")):
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            rows = json.loads(text)
        else:
            rows = [json.loads(line) for line in text.split("\n") if line]
        for row in rows[:limit]:
            yield path.stem, {key.lower(): value for key, value in row.items()}


def problems(folder: Path, limit: int) -> Iterator[tuple[str, str, str | None]]:
    """(data set, answer, solution) of the rows without a response."""
    for name, row in read(folder, limit):
        if "response" in row:
            continue
        text = str(row["answer"])
        answer = text.rpartition("####")[2].strip()
        if "####" in text:  # GSM8K has thousands separators
            answer = answer.replace(",", "")
        yield name, answer, row.get("solution") or None


def cases(folder: Path, limit: int) -> Iterator[tuple[str, str, str, str]]:
    """(form, which answer it states, gold answer, response)."""
    for name, row in read(folder, limit):
        if "response" in row:
            yield name, "its own", str(row["answer"]), row["response"]

    rows = list(problems(folder, limit))
    for number, (name, gold, solution) in enumerate(rows):
        others = [answer for _, answer, _ in rows[number + 1 :] + rows if answer != gold]
        other = others[0]
        for form, text in FORMS.items():
            yield form, "the right one", gold, text.format(a=gold, o=other)
            yield form, "another's", gold, text.format(a=other, o=gold)
        if solution and last_boxed(solution) is not None:
            yield from solution_cases(name, gold, solution)


def solution_cases(name: str, gold: str, solution: str) -> Iterator[tuple[str, str, str, str]]:
    """A worked solution with a box: as it is, cut, and without the box."""
    right = "the right one"
    yield f"worked solution of {name}", right, gold, solution
    before_box = solution[: solution.rindex(r"\boxed")]
    yield "worked solution, cut before the box", right, gold, before_box
    without_box = re.sub(r"\\boxed\s*", "", solution)
    yield "worked solution, box removed", right, gold, without_box


def verdict(judge, gold: str, response: str) -> str:
    """`1`, `0`, or `none` if the judge gives no verdict."""
    prompt = Prompt(id="x", text="", token_ids=np.zeros(1, np.int32), answer=gold, problem="")
    try:
        return str(int(judge(prompt, response)))
    except RewardError:
        return "none"


def load_authors(path: Path):
    """The module of the authors' reward function."""
    spec = importlib.util.spec_from_file_location("authors_reward", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def table(counts: dict[tuple[str, str], dict[str, int]]) -> str:
    """Markdown; `counts`: (form, which answer) -> pair of verdicts -> responses."""
    lines = [
        "| response | answer | responses | 1 by both | 0 by both | 1 by `authors` only | 1 by "
        "`last_box` only | no verdict |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (form, states), count in counts.items():
        shown = [count.get(pair, 0) for pair in PAIRS]
        total = sum(count.values())
        cells = [form, states, str(total), *map(str, shown), str(total - sum(shown))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--authors", type=Path)
    parser.add_argument("--problems", type=int, default=60, help="of each data set, from the first")
    args = parser.parse_args()
    logging.disable(logging.ERROR)
    authors = None if args.authors is None else load_authors(args.authors)

    counts: dict[tuple[str, str], dict[str, int]] = {}
    num_unequal = 0
    for form, states, gold, response in cases(args.folder, args.problems):
        ours = verdict(last_box, gold, response)
        theirs = verdict(authors_rule, gold, response)
        count = counts.setdefault((form, states), {})
        pair = f"{ours} {theirs}"
        count[pair] = count.get(pair, 0) + 1
        if authors is not None:
            label = str(int(authors.compute_score("x", response, gold)["score"]))
            num_unequal += label != theirs.replace("none", "0")

    print(table(counts))
    total = sum(sum(count.values()) for count in counts.values())
    remark = "" if authors is not None else " (not compared: --authors)"
    print(
        f"\n{total} responses, math-verify {version('math-verify')}, {num_unequal} differ from "
        f"the authors' file{remark}"
    )
    sys.exit(num_unequal > 0)


if __name__ == "__main__":
    main()
