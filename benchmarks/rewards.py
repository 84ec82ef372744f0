"""Programs a second that `reward.name: code` judges in the sandbox, beside a plain subprocess for
each test.

    python benchmarks/rewards.py [--programs 1000] [--workers 2] [--log FILE]

Both judge the same programs (right, wrong and failing ones, five tests each) with the same number
of workers, in alternating rounds of 100. Plain subprocess: `python -I -c program` with the test as
its standard input, no isolation and no limit but time. Both verdicts have to be the known ones. A
last round mixes hostile programs (tests/support) with right ones: every right one has to be
accepted, no hostile one. Prints one JSON object; exits with 1 for a wrong verdict.
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


def programs(count: int) -> list[tuple[str, list[str], list[str], float]]:
    """Program, inputs, expected outputs, known reward."""
    made = []
    for number in range(count):
        given, code = TASKS[number % len(TASKS)]
        kind = ("right", "wrong", "right", "failing")[number // len(TASKS) % 4]
        inputs = [given(k) for k in range(number % 5, number % 5 + TESTS)]
        made.append((code + KINDS[kind] + f"\n# {number}", inputs, float(kind == "right")))
    cache: dict[tuple[str, str], str] = {}

    def answer(code: str, text: str) -> str:
        if (code, text) not in cache:
            cache[code, text] = plain_run(
                code.split("\nprint('more')")[0].split("\nraise")[0].split("\n#")[0], text
            )[1]
        return cache[code, text]

    return [
        (code, inputs, [answer(code.rsplit("\n#", 1)[0], text) for text in inputs], y)
        for code, inputs, y in made
    ]


def plain_run(code: str, text: str) -> tuple[int, str]:
    command = [sys.executable, "-I", "-c", PRELUDE + code]
    done = subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=6, check=False
    )
    return done.returncode, done.stdout


def plain(rows: list, workers: int) -> list[float]:
    def judge(row) -> float:
        code, inputs, outputs, _ = row
        return float(
            all(
                plain_run(code, text) == (0, output)
                for text, output in zip(inputs, outputs, strict=True)
            )
        )

    with ThreadPoolExecutor(workers) as threads:
        return list(threads.map(judge, rows))


def sandboxed(rows: list, pool: CollectingPool) -> list[float | None]:
    for number, (code, inputs, outputs, _) in enumerate(rows):
        answer = json.dumps({"inputs": inputs, "outputs": outputs, "fn_name": None})
        pool.submit(str(number), prompt(answer), f"```python\n{code}\n```")
    verdicts = {verdict.key: verdict.reward for verdict in pool.results()}
    return [verdicts[str(number)] for number in range(len(rows))]


def prompt(answer: str) -> Prompt:
    return Prompt(id="own/0", text="", token_ids=np.zeros(1, np.int32), answer=answer, problem="")


def hostile_round(rows: list, workers: int) -> dict:
    options = CodeReward(name="code", workers=workers, test_timeout_s=1.0, test_memory_gib=0.5)
    right = [row for row in rows if row[3] == 1.0][: 2 * len(PROGRAMS)]
    wrong = []
    with CollectingPool(options) as pool:
        for name, case in PROGRAMS.items():
            pool.submit(
                f"hostile {name}",
                prompt(json.dumps(case.tests)),
                f"```python\n{code_of(case)}\n```",
            )
        for number, (code, inputs, outputs, _) in enumerate(right):
            answer = json.dumps({"inputs": inputs, "outputs": outputs, "fn_name": None})
            pool.submit(f"right {number}", prompt(answer), f"```python\n{code}\n```")
        started = time.perf_counter()
        for verdict in pool.results():
            expected = (
                1.0 if verdict.key.startswith("right") else PROGRAMS[verdict.key.split()[1]].reward
            )
            if verdict.reward != expected:
                wrong.append(
                    f"{verdict.key}: {verdict.reward} ({verdict.failure or verdict.details})"
                )
    return {
        "hostile": len(PROGRAMS),
        "right": len(right),
        "wall_s": time.perf_counter() - started,
        "wrong": wrong,
    }


def code_of(case: Attack) -> str:
    return (
        case.code.replace("FOLDER", str(ROOT))
        .replace("PORT", "22")
        .replace("PARENT", str(os.getpid()))
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--log", type=Path)
    args = parser.parse_args()
    rows = programs(args.programs)
    walls: dict[str, list[float]] = {"sandbox": [], "plain": []}
    wrong = []
    with CollectingPool(CodeReward(name="code", workers=args.workers)) as pool:
        for start in range(0, len(rows), ROUND):
            part = rows[start : start + ROUND]
            for name in ("sandbox", "plain") if start // ROUND % 2 else ("plain", "sandbox"):
                before = time.perf_counter()
                found = sandboxed(part, pool) if name == "sandbox" else plain(part, args.workers)
                walls[name].append(time.perf_counter() - before)
                wrong += [
                    f"{name}: {row[0]!r}" for row, y in zip(part, found, strict=True) if y != row[3]
                ]
    report = {
        "programs": len(rows),
        "tests_a_program": TESTS,
        "workers": args.workers,
        "programs_per_s": {name: len(rows) / sum(wall) for name, wall in walls.items()},
        "rounds_ratio": sorted(
            round(p / s, 2) for p, s in zip(walls["plain"], walls["sandbox"], strict=True)
        ),
        "wrong": wrong,
        "hostile_round": hostile_round(rows, args.workers),
        "load": os.getloadavg(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "bubblewrap": subprocess.run(
            ["bwrap", "--version"], capture_output=True, text=True, check=True
        ).stdout.strip(),
    }
    report["median_ratio"] = statistics.median(report["rounds_ratio"])
    text = json.dumps(report, indent=2)
    print(text)
    if args.log is not None:
        args.log.write_text(text + "\n", encoding="utf-8")
    sys.exit(bool(wrong or report["hostile_round"]["wrong"]))


if __name__ == "__main__":
    main()
