"""Every shipped sample, through tokenizer, template and real reward workers."""

import pytest

from pacs_megatron.config.reward_options import ArithmeticReward, CustomReward, FormatReward, MathReward
from pacs_megatron.config.schema import DataOptions, DatasetOptions
from pacs_megatron.evaluation.preview import preview
from pacs_megatron.launch.preview import render
from tests.support.problem_files import PRESET_OF_FILE, SAMPLES, problem_folder
from tests.support.tiny_models import save_tokenizer

MATH = MathReward(name="math", workers=2)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def report_of(path, preset, reward, tokenizer):
    dataset = DatasetOptions(path=str(path), preset=preset)
    return preview(dataset, DataOptions(train=dataset, max_prompt_tokens=100_000), tokenizer, reward)


@pytest.mark.parametrize("file", sorted(SAMPLES.glob("*.json*")), ids=lambda file: file.name)
def test_shipped_samples_verify_against_themselves(file, tokenizer):
    report = report_of(file, file.stem, MATH, tokenizer)
    assert report.num_checked == report.num_rows > 0
    assert report.unverified == ()


def test_unverifiable_gold_is_reported(tmp_path, tokenizer):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"problem": "p", "answer": "5"}\n{"problem": "q", "answer": "x+1"}\n')
    report = report_of(file, "deepscaler", ArithmeticReward(name="arithmetic"), tokenizer)
    assert (report.num_checked, report.num_verified) == (2, 1)
    assert report.unverified[0].prompt_id == "deepscaler/1"
    assert "is not an integer" in report.unverified[0].reason


def test_format_reward_judges_the_gold_response_as_written(tokenizer):
    reward = FormatReward(name="format", pattern=r"The answer is \\boxed\{\d+\}\.")
    report = report_of(SAMPLES / "amc23.json", "amc23", reward, tokenizer)
    assert [bad.answer for bad in report.unverified] == ["-4", "2.5"]


def test_counts_lengths_and_reasons(tmp_path, tokenizer):
    file = tmp_path / "verifier.py"
    file.write_text(
        "def judge(prompt, response):\n"
        "    assert response == f'The answer is \\\\boxed{{{prompt.answer}}}.'\n"
        "    if prompt.answer == '-4':\n        raise ValueError('broke')\n"
        "    return float(prompt.answer == '18')\n"
    )
    report = report_of(
        SAMPLES / "gsm8k.jsonl", "gsm8k", CustomReward(name="custom", function=f"{file}:judge"), tokenizer
    )
    assert (report.num_rows, report.num_kept, report.num_too_long, report.num_duplicates) == (3, 3, 0, 0)
    assert (report.num_checked, report.num_verified) == (3, 1)
    assert [(bad.prompt_id, bad.answer, bad.reason, bad.failed) for bad in report.unverified] == [
        ("gsm8k/1", "1500", "reward 0.0", False),
        ("gsm8k/2", "-4", f"reward.function={file}:judge raised ValueError: broke", True),
    ]
    lens = sorted(len(prompt.token_ids) for prompt in report.examples)
    assert (report.tokens.min, report.tokens.p50, report.tokens.max) == tuple(lens)


def test_without_reward_nothing_is_checked(tokenizer):
    report = report_of(SAMPLES / "amc23.json", "amc23", None, tokenizer)
    assert report.num_checked == 0
    assert "verify" not in render(report)


FOLDER = problem_folder()


@pytest.mark.skipif(FOLDER is None, reason="no folder of real problems: set PACS_PROBLEMS")
@pytest.mark.parametrize("name", PRESET_OF_FILE)
def test_real_problems_verify_against_themselves(name, tokenizer):
    file = FOLDER / name
    if not file.is_file():
        pytest.skip(f"{FOLDER} has no {name}")
    report = report_of(file, PRESET_OF_FILE[name], MATH, tokenizer)
    assert report.num_checked == report.num_rows > 0
    assert report.unverified == ()
