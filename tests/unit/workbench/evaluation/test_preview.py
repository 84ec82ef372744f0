"""Every shipped sample, through tokenizer, template and real reward workers."""

import json

import pytest

from pacs_megatron.config.reward_options import (
    ArithmeticReward,
    CodeReward,
    CustomReward,
    FormatReward,
    MathReward,
)
from pacs_megatron.config.schema import DataOptions, TrainOptions
from pacs_megatron.data import load_prompts
from pacs_megatron.rewards.pool import Verdict
from pacs_megatron.workbench.evaluation import preview
from pacs_megatron.workbench.evaluation.preview import check_gold, preview_text, render
from tests.support.problem_files import PRESET_OF_FILE, SAMPLES, problem_folder
from tests.support.tiny_models import save_tokenizer
from tests.support.tiny_run import write_tiny_run

MATH = MathReward(name="math", workers=2)
CODE = CodeReward(name="code", workers=2, sandbox="none")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def report_of(path, preset, reward, tokenizer):
    dataset = TrainOptions(path=str(path), preset=preset)
    found = load_prompts(dataset, DataOptions(train=dataset, max_prompt_tokens=100_000), tokenizer)
    return found, check_gold(found.prompts, reward)


@pytest.mark.parametrize("file", sorted(SAMPLES.glob("*.json*")), ids=lambda file: file.name)
def test_shipped_samples_verify_against_themselves(file, tokenizer):
    found, unverified = report_of(
        file, file.stem, CODE if file.stem in ("apps", "livecodebench") else MATH, tokenizer
    )
    assert len(found.prompts) == found.num_rows > 0
    assert unverified == []


def test_unverifiable_gold_is_reported(tmp_path, tokenizer):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"problem": "p", "answer": "5"}\n{"problem": "q", "answer": "x+1"}\n')
    found, [bad] = report_of(file, "deepscaler", ArithmeticReward(name="arithmetic"), tokenizer)
    assert len(found.prompts) == 2
    assert bad.prompt_id == "deepscaler/1"
    assert "is not an integer" in bad.reason


def test_gold_that_no_natural_answer_matches_is_reported(tmp_path, tokenizer):
    answers = ["The result is 12", "(C) 8", "n/a", "12 500", "8:15", "35°", "7.", "–3"]
    file = tmp_path / "rows.jsonl"
    rows = [json.dumps({"problem": "p", "answer": answer}) for answer in answers]
    file.write_text("\n".join(rows) + "\n")
    _, unverified = report_of(file, "deepscaler", MATH, tokenizer)
    assert [bad.answer for bad in unverified] == answers[:4]
    assert not any(bad.failed for bad in unverified)


def test_the_authors_rule_needs_a_natural_answer_too(tmp_path, tokenizer):
    """math-verify's metric accepts `The result is 12` for itself only."""
    file = tmp_path / "rows.jsonl"
    file.write_text('{"problem": "p", "answer": "12"}\n{"problem": "q", "answer": "3 500"}\n')
    authors = MATH.model_copy(update={"label_rule": "authors"})
    _, [bad] = report_of(file, "deepscaler", authors, tokenizer)
    assert bad.answer == "3 500" and not bad.failed


def test_details_that_are_no_object_are_no_reason(tmp_path, tokenizer, monkeypatch):
    """A reward server or plug-in may send any JSON value."""
    verdict = Verdict("gold deepscaler/0", 0.0, None, ["reason"])
    monkeypatch.setattr(preview, "received", lambda answers, count: [verdict])
    file = tmp_path / "rows.jsonl"
    file.write_text('{"problem": "p", "answer": "5"}\n')
    reward = ArithmeticReward(name="arithmetic")
    _, [bad] = report_of(file, "deepscaler", reward, tokenizer)
    assert bad.reason == "reward 0.0"


def test_format_reward_judges_the_gold_response_as_written(tokenizer):
    reward = FormatReward(name="format", pattern=r"The answer is \\boxed\{\d+\}\.")
    _, unverified = report_of(SAMPLES / "amc23.json", "amc23", reward, tokenizer)
    assert [bad.answer for bad in unverified] == ["-4", "2.5"]


def test_counts_lengths_and_reasons(tmp_path, tokenizer):
    file = tmp_path / "verifier.py"
    file.write_text(
        "def judge(prompt, response):\n"
        "    assert response == f'The answer is \\\\boxed{{{prompt.answer}}}.'\n"
        "    if prompt.answer == '-4':\n        raise ValueError('broke')\n"
        "    return float(prompt.answer == '18')\n"
    )
    found, unverified = report_of(
        SAMPLES / "gsm8k.jsonl",
        "gsm8k",
        CustomReward(name="custom", function=f"{file}:judge"),
        tokenizer,
    )
    assert [(bad.prompt_id, bad.answer, bad.reason, bad.failed) for bad in unverified] == [
        ("gsm8k/1", "1500", "reward 0.0", False),
        ("gsm8k/2", "-4", f"reward.function={file}:judge raised ValueError: broke", True),
    ]
    low, middle, high = sorted(len(prompt.token_ids) for prompt in found.prompts)
    text = render(found, "gsm8k.jsonl", unverified)
    assert "(gsm8k.jsonl): 3 rows, 3 kept, 0 too long" in text
    assert (
        f"min {low}, mean {(low + middle + high) / 3:.1f}, median {middle}, 95 % " in text
        and f"max {high}" in text
    )
    assert "verify against themselves: 1 of 3" in text
    assert "verify" not in render(found, "gsm8k.jsonl", None)


def test_the_preview_of_a_run_shows_what_it_drops_and_repeats(tmp_path):
    """Lengths of demonstrations, rows that are too long, and benchmarks of the training data."""
    save_tokenizer(tmp_path / "model")
    path = write_tiny_run(tmp_path, tmp_path / "model")
    rows = [
        {"problem": f"{n % 8} + 1 = ?", "answer": "9", "solution": "x" * n} for n in range(1, 11)
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = "columns: {problem: problem, answer: answer, solution: solution}"
    overrides = (
        "objective={name: sft}",
        "rollout={engine: demonstrations, max_response_tokens: 8}",
        "reward={name: arithmetic}",
        f"data.train={{path: '{tmp_path}/train.jsonl', {columns}}}",
        f"evaluation={{benchmarks: [{{path: '{tmp_path}/train.jsonl', name: same, {columns}}}], "
        "sampling: {max_response_tokens: 4}}",
    )
    train, benchmark = preview_text(path, overrides, rows=1).split("\n\n")
    assert "10 rows, 7 kept, 0 prompts and 3 demonstrations too long" in train
    assert "demonstration tokens: min 2, mean 6.5, median 6, 95 % 10, max 11, limit 8" in train
    assert "a run ends with this error: train: 3 of 10 rows are dropped" in train
    assert train.count("  --- train/") == 1 and "  --- train/0, answer '9'\n" in train
    assert train.endswith("  --- its demonstration, which is trained\n  | x<|im_end|>")
    assert benchmark.count("  --- same/") == 1 and "its demonstration" not in benchmark
    assert "same: 9 of 10 problems are in the training data train too" in benchmark
    assert "same: 2 of 10 prompts repeat an earlier one" in benchmark


FOLDER = problem_folder()


@pytest.mark.skipif(FOLDER is None, reason="no folder of real problems: set PACS_PROBLEMS")
@pytest.mark.parametrize("name", PRESET_OF_FILE)
def test_real_problems_verify_against_themselves(name, tokenizer):
    file = FOLDER / name
    if not file.is_file():
        pytest.skip(f"{FOLDER} has no {name}")
    found, unverified = report_of(file, PRESET_OF_FILE[name], MATH, tokenizer)
    assert len(found.prompts) == found.num_rows > 0
    assert unverified == []
