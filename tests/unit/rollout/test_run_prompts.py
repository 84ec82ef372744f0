"""The prompts of a run's later attempts, and the notices about data and reward."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from pacs_megatron.config import load_config
from pacs_megatron.data import load_tokenizer
from pacs_megatron.data.prompts import digest_of
from pacs_megatron.errors import CheckpointError, DataError
from pacs_megatron.launch.runs import status
from pacs_megatron.rollout import run_prompts
from pacs_megatron.rollout.run_prompts import RunPrompts, first_time
from pacs_megatron.runtime.run_folder import PROMPTS_FILE
from tests.support.tiny_models import CHAT_TEMPLATE, qwen3_config, save_tokenizer
from tests.support.tiny_run import write_tiny_run

DATED = "Today: {{ strftime_now('%d %b %Y %H:%M') }}\n" + CHAT_TEMPLATE
BENCHMARK = (
    "evaluation={benchmarks: [{path: '%s', name: bench, columns: {problem: problem, answer: "
    "answer}}], sampling: {max_response_tokens: 4}}"
)
Make = Callable[..., RunPrompts]


class Midnight(datetime):
    """A clock that is a day later."""

    @classmethod
    def now(cls, tz: object = None) -> Midnight:
        return cls(2031, 5, 6, 0, 1)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


@pytest.fixture
def make(tmp_path: Path, run_dir: Path) -> Make:
    """One attempt of the tiny run in `run_dir`."""
    model = tmp_path / "model"

    def make(*overrides: str, template: str = DATED, benchmark: str | None = None) -> RunPrompts:
        if not model.exists():
            qwen3_config(tied=False).save_pretrained(model)
        save_tokenizer(model, chat_template=template)
        path = tmp_path / "run.yaml"
        if not path.exists():
            write_tiny_run(tmp_path, model)
        if benchmark is not None:
            file = tmp_path / "bench.jsonl"
            file.write_text(benchmark)
            overrides = (*overrides, BENCHMARK % file)
        config = load_config(path, overrides).config
        return RunPrompts(config, run_dir, model, load_tokenizer(str(model)))

    return make


def row(problem: str, answer: str = "1") -> str:
    return json.dumps({"problem": problem, "answer": answer}) + "\n"


def test_a_later_attempt_has_the_prompts_of_the_first(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that is requeued after midnight, with a template that prints the date."""
    bench = row("new")
    first = make(benchmark=bench)
    monkeypatch.setattr(run_prompts, "datetime", Midnight)
    second = make(benchmark=bench)
    assert digest_of(second.train.prompts) == digest_of(first.train.prompts)
    assert second.benchmarks[0].prompts[0].text == first.benchmarks[0].prompts[0].text
    assert second.load_position(json.loads(json.dumps(first.position()))) == []
    [line] = second.notices
    assert "prints the time; every attempt of a run prints that of its first one" in line


def test_a_run_of_an_earlier_release_has_no_time_and_continues(make: Make, run_dir: Path) -> None:
    first = make(template=CHAT_TEMPLATE)
    saved = {
        key: value for key, value in first.position().items() if key not in ("reward", "benchmarks")
    }
    (run_dir / PROMPTS_FILE).unlink()
    assert make(template=CHAT_TEMPLATE).load_position(saved) == []


def test_another_template_is_still_an_error(make: Make) -> None:
    saved = make(template=CHAT_TEMPLATE).position()
    with pytest.raises(CheckpointError, match=r"digest=.*chat template"):
        make(template="Hello. " + CHAT_TEMPLATE).load_position(saved)


@pytest.mark.parametrize("text", ["{", '{"time": "yesterday"}', '{"time": 5}', "{}", "[]"])
def test_a_damaged_file_is_one_line(run_dir: Path, text: str) -> None:
    (run_dir / PROMPTS_FILE).write_text(text)
    with pytest.raises(DataError, match=r"prompts\.json") as caught:
        first_time(run_dir)
    assert "\n" not in str(caught.value)


def test_a_changed_reward_file_is_reported(make: Make, tmp_path: Path) -> None:
    first = make(template=CHAT_TEMPLATE)
    saved = first.position()
    (tmp_path / "reward.py").write_text("def reward(prompt, response):\n    return 1.0\n")
    second = make(template=CHAT_TEMPLATE)
    [line] = second.load_position(saved)
    assert line.startswith("the reward changed since the checkpoint")
    assert second.has_other_reward(saved) and not second.has_other_reward(second.position())


def test_a_changed_module_beside_the_reward_file_is_reported(make: Make, tmp_path: Path) -> None:
    make(template=CHAT_TEMPLATE)
    (tmp_path / "points.py").write_text("SCALE = 1.0\n")
    text = "from points import SCALE\n\n\ndef reward(sample):\n    return SCALE\n"
    (tmp_path / "reward.py").write_text(text)
    saved = make(template=CHAT_TEMPLATE).position()
    (tmp_path / "other.py").write_text("not imported\n")
    assert make(template=CHAT_TEMPLATE).load_position(saved) == []
    (tmp_path / "points.py").write_text("SCALE = 0.5\n")
    [line] = make(template=CHAT_TEMPLATE).load_position(saved)
    assert line.startswith("the reward changed since the checkpoint")


@pytest.mark.parametrize(
    ("override", "is_reported"),
    [
        ("reward.label_threshold=0.5", True),
        ("reward.workers=2", False),
        ("reward.timeout_s=3", False),
    ],
)
def test_a_changed_option_of_the_reward_is_reported(
    make: Make, override: str, is_reported: bool
) -> None:
    saved = make(template=CHAT_TEMPLATE).position()
    lines = make(override, template=CHAT_TEMPLATE).load_position(saved)
    assert bool(lines) == is_reported


def test_a_changed_benchmark_is_reported(make: Make) -> None:
    saved = make(benchmark=row("new"), template=CHAT_TEMPLATE).position()
    [line] = make(benchmark=row("newer"), template=CHAT_TEMPLATE).load_position(saved)
    assert line.startswith("bench: the problems, the chat template or the tokenizer changed")


def test_notices_are_in_the_status_of_the_run(make: Make, run_dir: Path) -> None:
    """The tiny run trains on sums from 0 + 0 to 3 + 3."""
    prompts = make(benchmark=row("1 + 2 = ?", "3") + row("new"), template=CHAT_TEMPLATE)
    [line] = prompts.notices
    assert line.startswith("bench: 1 of 2 problems are in the training data train too")
    (run_dir / "config.yaml").write_text("")
    assert f"notice     {line}" in status(run_dir)


def test_a_long_problem_of_a_benchmark_is_evaluated(make: Make) -> None:
    """data.max_prompt_tokens=128 is a limit of training; the context is 1,024 tokens."""
    prompts = make(benchmark=row("a" * 300) + row("b"), template=CHAT_TEMPLATE)
    assert [len(each.prompts) for each in prompts.benchmarks] == [2]
    with pytest.raises(DataError, match="bench: 1 of 2 rows are dropped: 1 prompts above 1020"):
        make(benchmark=row("a" * 1200) + row("b"), template=CHAT_TEMPLATE)
