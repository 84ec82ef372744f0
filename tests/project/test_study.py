"""The second task of the study, and the figures of its log."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from benchmarks.defaults import best, differences, diversity, reached, speeds, table
from benchmarks.tasks import TASKS, partial_solution


def test_partial_demonstrations_are_right_and_stop_at_every_column(tmp_path: Path) -> None:
    TASKS["partial"].write(tmp_path / "a", 3)
    TASKS["partial"].write(tmp_path / "b", 3)
    seen: set[str] = set()
    total = 0
    stops: dict[int, int] = {}
    for name in ("test.json", "train.json", "demonstrations.json"):
        text = (tmp_path / "a" / name).read_text()
        assert text == (tmp_path / "b" / name).read_text()
        records = json.loads(text)
        total += len(records)
        seen |= {record["problem"] for record in records}
        for record in records:
            first, second = (int(number) for number in re.findall(r"\d+", record["problem"]))
            assert record["answer"] == str(first + second)
            assert record["solution"].endswith(f"\\boxed{{{first + second}}}")
            columns = re.findall(r"(\d)\+(\d)\+(\d)=(\d\d)", record["solution"])
            assert all(int(a) + int(b) + int(carry) == int(sum_) for a, b, carry, sum_ in columns)
            stops[len(columns)] = stops.get(len(columns), 0) + 1
    assert len(seen) == total == 5096
    shares = [stops[written] / total for written in range(4)]
    expected = [0.35, 0.2275, 0.1479, 0.2746]
    assert all(abs(share - want) < 0.03 for share, want in zip(shares, expected, strict=True)), (
        shares
    )


def test_a_partial_solution_writes_all_columns_or_none() -> None:
    rng = random.Random(0)
    whole = "6+8+0=14, 5+2+1=08, 3+1+0=04. \\boxed{484}"
    assert partial_solution((356, 128), worked=1.0, rng=rng) == whole
    assert partial_solution((356, 128), worked=0.0, rng=rng) == "\\boxed{484}"


def test_the_best_setting_is_that_of_the_best_mean(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    figures = (
        ("ppo", 1e-4, 0.5),
        ("ppo", 1e-4, 0.7),
        ("ppo", 2e-4, 0.9),
        ("ppo", 2e-4, 0.4),
        ("real", 4e-4, 1.0),
    )
    log.write_text(
        "".join(
            json.dumps({"objective": o, "lr": lr, "pass@1": at}) + "\n" for o, lr, at in figures
        )
    )
    assert best("examples/objectives/ppo.yaml", log) == {"lr": 2e-4}
    with pytest.raises(SystemExit, match="no run of pacs"):
        best("pacs", log)


def test_a_run_that_does_not_reach_the_target_is_censored_not_dropped() -> None:
    fast = {
        "objective": "a",
        "seed": 0,
        "pass@1": 1.0,
        "rewards": [0.3, 0.8, 1.0, 1.0, 1.0],
        "tokens": [1000] * 5,
    }
    slow = fast | {"objective": "b", "pass@1": 0.4, "rewards": [0.3, 0.3, 0.4, 0.4, 0.4]}
    assert reached(fast, 0.9) == (4, 4000)
    assert reached(slow, 0.9) is None
    lines = speeds([fast, slow])
    assert lines[1].startswith("| objective | setting | steps to 0.900 ")
    assert lines[3:] == ["| a | {} | 4 | 4 |", "| b | {} | >5 | >5 |"]
    assert (
        speeds([{"objective": "pacs", "seed": 0, "pass@1": 0.9}]) == []
    )  # a log of the first task


def test_the_diversity_is_that_of_correct_responses(tmp_path: Path) -> None:
    path = tmp_path / "eval-000000.jsonl"

    def write(*responses: tuple[str, str, int]) -> None:
        path.write_text(
            "".join(
                json.dumps({"prompt_id": q, "response": text, "label": label}) + "\n"
                for q, text, label in responses
            )
        )

    write(
        ("a", "abcd", 1),
        ("a", "wxyz", 1),
        ("a", "abcd", 0),
        ("b", "abcd", 1),
        ("b", "abcd", 1),
        ("c", "wxyz", 1),
    )
    assert diversity(path) == pytest.approx(0.5)  # 1 for a, 0 for b, and c has no pair
    write(("a", "abcd", 1), ("a", "wxyz", 0))
    assert diversity(path) is None


def test_the_tables_are_those_of_a_count_by_hand() -> None:
    def row(
        objective: str, seed: int, start: float, end: float, diversity: list[float | None]
    ) -> dict[str, object]:
        figures = {
            "start": start,
            "pass@1": end,
            "pass@8": [0.9, 1.0],
            "entropy": [0.2, 0.1],
            "norm": [1.0, 2.0, 3.0],
        }
        return {"objective": objective, "lr": 1e-4, "seed": seed, "diversity": diversity, **figures}

    rows = [
        *(row("pacs", 0, 0.25, 0.5, [0.5, 0.25]), row("pacs", 1, 0.25, 0.75, [0.5, 0.25])),
        *(row("nsr", 0, 0.25, 0.75, [0.5, None]), row("nsr", 1, 0.25, 0.5, [0.5, 0.25])),
    ]
    # Two values: the half width is 12.706 * standard deviation / sqrt(2), for 0.5 and 0.75 that is
    # 1.588.
    assert table(rows)[2:] == [
        '| pacs | {"lr": 0.0001} | 2 | 0.250 | 0.625 | -0.963 to 2.213 | -1.213 to +1.963 | 1.000 '
        "[1.000, 1.000] | 0.100 [0.100, 0.100] "
        "| 2 [2, 2] | 0.500 -> 0.250 [0.250, 0.250] |",
        '| nsr | {"lr": 0.0001} | 2 | 0.250 | 0.625 | -0.963 to 2.213 | -1.213 to +1.963 | 1.000 '
        "[1.000, 1.000] | 0.100 [0.100, 0.100] "
        "| 2 [2, 2] |  |",
    ]
    assert differences(rows)[3:] == ["| nsr | 2 | +0.000 | -3.176 to +3.176 |"]
