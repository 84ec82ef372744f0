"""Programs a second that `reward.name: code` judges in the sandbox, beside a plain subprocess for
each test.

    python benchmarks/rewards.py [--programs 1000] [--workers 2] [--log FILE]

Both judge the same programs (right, wrong and failing ones, five tests each) with the same number
of workers, in alternating rounds of 100. Plain subprocess: `python -I -c program` with the test as
its standard input, no isolation and no limit but time. Both verdicts have to be the known ones. A
last round mixes attacks (tests/support) with right programs: every right one has to be accepted, no
attack. Prints one JSON object; exits with 1 for a wrong verdict.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from pacs_megatron.config.reward_options import CodeReward  # noqa: E402
from pacs_megatron.contracts import Prompt  # noqa: E402
from tests.support.rewards import CollectingPool  # noqa: E402
from tests.support.sandbox_programs import PROGRAMS, Attack  # noqa: E402

ROUND = 100
TESTS = 5
# Input of test k, and a program with the right answer.
TASKS = (
    (lambda k: f"{k} {k * 7}\n", "a, b = map(int, input().split())\nprint(a + b)"),
    (
        lambda k: " ".join(str(k * n % 17) for n in range(30)),
        "print(*sorted(map(int, input().split())))",
    ),
    (
        lambda k: f"{k + 10}\n",
        "n = int(input())\nprint(sum(all(p % d for d in range(2, p)) for p in range(2, n)))",
    ),
    (
        lambda k: f"{k * 12} {k * 18 + 6}",
        "from math import gcd\nprint(gcd(*map(int, input().split())))",
    ),
    (
        lambda k: "\n".join("ab" * n for n in range(1, k + 3)),
        "import sys\nprint(max(map(len, sys.stdin.read().split())))",
    ),
    (
        lambda k: "the cat the dog " * (k + 1),
        "c = Counter(input().split())\nprint(c.most_common(1)[0][1])",
    ),
    (
        lambda k: f"{k + 15}",
        "@lru_cache(None)\ndef f(n): return n if n < 2 else f(n - 1) + f(n - "
        "2)\nprint(f(int(input())))",
    ),
)
PRELUDE = "from collections import *\nfrom functools import *\n"
KINDS = {"right": "", "wrong": "\nprint('more')", "failing": "\nraise ValueError"}
"""kind of a program -> what is appended to the right one"""
ORDER = ("right", "wrong", "right", "failing")


@dataclass(frozen=True)
class Program:
    """A program, its tests and the reward that it must get."""

    code: str
    inputs: list[str]
    outputs: list[str]
    reward: float

    @property
    def answer(self) -> str:
        """The tests in the form of a data set's answer."""
        tests = {"inputs": self.inputs, "outputs": self.outputs, "fn_name": None}
        return json.dumps(tests)


def programs(count: int) -> list[Program]:
    """Programs of all tasks and kinds in turn."""
    outputs: dict[tuple[int, int], str] = {}  # (task, k) -> output of the right program
    made = []
    for number in range(count):
        task = number % len(TASKS)
        kind = ORDER[number // len(TASKS) % len(ORDER)]
        input_of, code = TASKS[task]
        tests = range(number % 5, number % 5 + TESTS)
        for k in tests:
            if (task, k) not in outputs:
                outputs[task, k] = plain_run(code, input_of(k))[1]
        made.append(
            Program(
                # The number makes every program another one.
                code=f"{code}{KINDS[kind]}\n# {number}",
                inputs=[input_of(k) for k in tests],
                outputs=[outputs[task, k] for k in tests],
                reward=float(kind == "right"),
            )
        )
    return made


# ---------------------------------------------------------------------------------- the two judges
def plain_run(code: str, text: str) -> tuple[int, str]:
    """(exit code, standard output) of a program without isolation."""
    command = [sys.executable, "-I", "-c", PRELUDE + code]
    done = subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=6, check=False
    )
    return done.returncode, done.stdout


def plain_rewards(rows: list[Program], workers: int) -> list[float]:
    """1 for each program that prints the expected output of all tests."""

    def judge(row: Program) -> float:
        for text, output in zip(row.inputs, row.outputs, strict=True):
            if plain_run(row.code, text) != (0, output):
                return 0.0
        return 1.0

    with ThreadPoolExecutor(workers) as threads:
        return list(threads.map(judge, rows))


def sandbox_rewards(rows: list[Program], pool: CollectingPool) -> list[float | None]:
    """The rewards of `reward.name: code`."""
    for number, row in enumerate(rows):
        submit(pool, str(number), row.answer, row.code)
    verdicts = {verdict.key: verdict.reward for verdict in pool.results()}
    return [verdicts[str(number)] for number in range(len(rows))]


def submit(pool: CollectingPool, key: str, answer: str, code: str) -> None:
    """Submits a program as a response."""
    prompt = Prompt(id="own/0", text="", token_ids=np.zeros(1, np.int32), answer=answer, problem="")
    pool.submit(key, prompt, f"```python\n{code}\n```")


def attack_round(rows: list[Program], workers: int) -> dict:
    """Judges attacks among right programs."""
    options = CodeReward(name="code", workers=workers, test_timeout_s=1.0, test_memory_gib=0.5)
    right = [row for row in rows if row.reward == 1.0][: 2 * len(PROGRAMS)]
    wrong = []
    with CollectingPool(options) as pool:
        for name, case in PROGRAMS.items():
            submit(pool, f"hostile {name}", json.dumps(case.tests), code_of(case))
        for number, row in enumerate(right):
            submit(pool, f"right {number}", row.answer, row.code)

        started = time.perf_counter()
        for verdict in pool.results():
            kind, name = verdict.key.split()
            expected = 1.0 if kind == "right" else PROGRAMS[name].reward
            if verdict.reward != expected:
                reason = verdict.failure or verdict.details
                wrong.append(f"{verdict.key}: {verdict.reward} ({reason})")
    return {
        "hostile": len(PROGRAMS),
        "right": len(right),
        "wall_s": time.perf_counter() - started,
        "wrong": wrong,
    }


def code_of(case: Attack) -> str:
    """The code of an attack on this machine."""
    code = case.code.replace("FOLDER", str(ROOT))
    return code.replace("PORT", "22").replace("PARENT", str(os.getpid()))


# -------------------------------------------------------------------------------------------- main
def timed_rounds(rows: list[Program], workers: int) -> tuple[dict[str, list[float]], list[str]]:
    """Both judges in alternating order.

    Returns:
        Judge -> seconds of each round.
        The programs that got another reward.
    """
    seconds: dict[str, list[float]] = {"sandbox": [], "plain": []}
    wrong = []
    with CollectingPool(CodeReward(name="code", workers=workers)) as pool:
        for start in range(0, len(rows), ROUND):
            batch = rows[start : start + ROUND]
            order = ("sandbox", "plain") if start // ROUND % 2 else ("plain", "sandbox")
            for name in order:
                before = time.perf_counter()
                if name == "sandbox":
                    rewards = sandbox_rewards(batch, pool)
                else:
                    rewards = plain_rewards(batch, workers)
                seconds[name].append(time.perf_counter() - before)
                for row, reward in zip(batch, rewards, strict=True):
                    if reward != row.reward:
                        wrong.append(f"{name}: {row.code!r}")
    return seconds, wrong


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--log", type=Path)
    args = parser.parse_args()
    rows = programs(args.programs)
    seconds, wrong = timed_rounds(rows, args.workers)
    ratios = [
        round(plain_s / sandbox_s, 2)
        for plain_s, sandbox_s in zip(seconds["plain"], seconds["sandbox"], strict=True)
    ]
    bwrap = subprocess.run(["bwrap", "--version"], capture_output=True, text=True, check=True)
    report = {
        "programs": len(rows),
        "tests_a_program": TESTS,
        "workers": args.workers,
        "programs_per_s": {name: len(rows) / sum(rounds) for name, rounds in seconds.items()},
        "rounds_ratio": sorted(ratios),
        "wrong": wrong,
        "hostile_round": attack_round(rows, args.workers),
        "load": os.getloadavg(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "bubblewrap": bwrap.stdout.strip(),
        "median_ratio": statistics.median(ratios),
    }
    text = json.dumps(report, indent=2)
    print(text)
    if args.log is not None:
        args.log.write_text(text + "\n", encoding="utf-8")
    sys.exit(bool(wrong or report["hostile_round"]["wrong"]))


if __name__ == "__main__":
    main()
