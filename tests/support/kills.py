"""A seeded plan of `kill -9`: when, and of which processes of a run; and the log of what was hit."""

import contextlib
import json
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil

TARGETS = ("all ranks", "one rank", "driver", "reward worker")
MOMENTS = ("start", "step", "save")
WAIT_S = 600.0


def kill_at(
    process: subprocess.Popen[str], run_dir: Path, moment: str, target: str, rng: random.Random
) -> dict[str, object]:
    """Waits for the moment and kills the target. Returns the log's entry; `hit` is the number of killed processes."""
    begin = time.monotonic()
    _wait(process, run_dir, moment, rng)
    waited_s = time.monotonic() - begin
    rows = _rows(run_dir)
    saving = _is_saving(run_dir)
    victims = _find(process, target, rng) if process.poll() is None else []
    for victim in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()
    return {
        "moment": moment,
        "target": target,
        "hit": len(victims),
        "rows": rows,
        "saving": saving,
        "after_s": round(waited_s, 2),
    }


def _wait(process: subprocess.Popen[str], run_dir: Path, moment: str, rng: random.Random) -> None:
    first, deadline = _rows(run_dir), time.monotonic() + WAIT_S
    while process.poll() is None and time.monotonic() < deadline:
        if (
            moment == "start"
            or (moment == "save" and _is_saving(run_dir))
            or (moment == "step" and _rows(run_dir) > first)
        ):
            break
        time.sleep(0.002)
    # `start` is inside imports, process groups, loading or the first rollouts; `step` in any phase of the next steps.
    limit_s = {"start": 15.0, "step": 4.0, "save": 0.03}[moment]
    end = time.monotonic() + rng.uniform(0, limit_s)
    while process.poll() is None and time.monotonic() < end:
        time.sleep(0.002)


def _rows(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def _is_saving(run_dir: Path) -> bool:
    return any((run_dir / "checkpoints").glob("*.partial"))


def _find(process: subprocess.Popen[str], target: str, rng: random.Random) -> list[psutil.Process]:
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    if target == "all ranks":
        return family
    found = []
    word = {"one rank": "pacs_megatron.training.main", "driver": "pacs_megatron.rollout.driver"}.get(target, "rewards")
    for member in family:
        try:
            line = member.cmdline()
        except psutil.Error:
            continue
        if any(word in part for part in line) and not any("launch.agent" in part for part in line):
            found.append(member)
    return [rng.choice(found)] if found else []


def table(log: Path) -> str:
    """A Markdown table of the log: kills by layout and target, and the runs that ended with other bits."""
    cases = [json.loads(line) for line in log.read_text().splitlines()]
    kills = Counter((case["layout"], kill["target"]) for case in cases for kill in case["kills"] if kill["hit"])
    layouts = sorted({case["layout"] for case in cases})
    lines = ["| layout | " + " | ".join(TARGETS) + " | runs | same bits |", "|---" * (len(TARGETS) + 3) + "|"]
    for layout in layouts:
        mine = [case for case in cases if case["layout"] == layout]
        counts = " | ".join(str(kills[layout, target]) for target in TARGETS)
        lines.append(f"| {layout} | {counts} | {len(mine)} | {sum(case['same_bits'] for case in mine)} |")
    hits = [kill for case in cases for kill in case["kills"] if kill["hit"]]
    while_saving = sum(bool(kill["saving"]) for kill in hits)
    lines.append(f"\n{len(hits)} kills, {while_saving} of them while a checkpoint was written.")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(Path(sys.argv[1])))
