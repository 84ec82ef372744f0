"""Seconds in which `reward.name: math` judges the answers of a step, and what they get.

    python benchmarks/math_rewards.py [--answers 8192] [--workers 2] [--words 3000] [--log FILE]

Answers are long texts (`--words` words with formulas) that end in the boxed answers of the rated
pairs of tests/data/mathematics, judged through the reward pool. `--hang SHARE` replaces this share
of them by numbers that sympy could not compute in hours. Prints one JSON object; exits with 1 if an
answer gets no verdict.
"""

import argparse
import json
import os
import platform
import random
import resource
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from pacs_megatron.config.reward_options import MathReward  # noqa: E402
from pacs_megatron.contracts import Prompt  # noqa: E402
from tests.support.rewards import CollectingPool  # noqa: E402

PAIRS = ("development.jsonl", "unseen.jsonl")
SENTENCES = (
    "We first rewrite the expression as $\\frac{a^2-b^2}{a-b}=a+b$ and compare both sides.",
    "Hence $x_{n+1} = 2x_n + \\{1, 2\\}$, and \\[ \\sum_{k=1}^{n} k = \\frac{n(n+1)}{2}. \\]",
    "Wait, let me check this step again, because the sign could be wrong.",
    "So far the answer could be \\boxed{0}, but this is only the first case.",
)
HANG = r"10^{10^{10^{10}}}"


def pairs() -> list[tuple[str, str]]:
    """(gold answer, boxed answer) of the rated pairs."""
    found = []
    for name in PAIRS:
        for line in (ROOT / "tests/data/mathematics" / name).read_text("utf-8").splitlines():
            row = json.loads(line)
            if "answer" in row:
                found.append((row["gold"], row["answer"]))
    return found


def response(source: random.Random, num_words: int, answer: str) -> str:
    """A long text that ends in a boxed answer."""
    sentences = []
    left = num_words
    while left > 0:
        sentence = source.choice(SENTENCES)
        sentences.append(sentence)
        left -= len(sentence.split())
    return f"{' '.join(sentences)}\n\nThe final answer is $\\boxed{{{answer}}}$."


def workers_cpu_s() -> float:
    """CPU seconds of the processes that have ended: the reward workers, their imports included."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--answers", type=int, default=8192)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--words", type=int, default=3000)
    parser.add_argument("--hang", type=float, default=0.0)
    parser.add_argument("--log", type=Path)
    args = parser.parse_args()

    source = random.Random(0)
    rated = pairs()
    rows = []
    for number in range(args.answers):
        gold, answer = rated[number % len(rated)]
        if source.random() < args.hang:
            answer = HANG
        rows.append((gold, response(source, args.words, answer)))

    workers_cpu_started_s = workers_cpu_s()
    with CollectingPool(MathReward(name="math", workers=args.workers)) as pool:
        started = time.perf_counter()
        cpu_started = time.process_time()
        for number, (gold, text) in enumerate(rows):
            prompt = Prompt(
                id=f"own/{number}",
                text="",
                token_ids=np.zeros(1, np.int32),
                answer=gold,
                problem="",
            )
            pool.submit(str(number), prompt, text)
        verdicts = list(pool.results())
        wall_s = time.perf_counter() - started

    failures = [verdict.failure for verdict in verdicts if verdict.failure is not None]
    report = {
        "answers": len(verdicts),
        "workers": args.workers,
        "mean_chars": round(sum(len(text) for _, text in rows) / len(rows)),
        "wall_s": wall_s,
        "cpu_s_of_this_process": time.process_time() - cpu_started,
        "cpu_s_of_workers": workers_cpu_s() - workers_cpu_started_s,
        "right": sum(verdict.reward == 1.0 for verdict in verdicts),
        "failures": failures[:10],
        "load": os.getloadavg(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
    }
    text = json.dumps(report, indent=2)
    print(text)
    if args.log is not None:
        args.log.write_text(text + "\n", encoding="utf-8")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
