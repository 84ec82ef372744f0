"""Demonstrations: their tokens, and which of them are too long."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pacs_megatron.config import load_config
from pacs_megatron.data import load_tokenizer
from pacs_megatron.errors import DataError
from pacs_megatron.rollout.train_data import TrainData
from tests.support.tiny_models import save_tokenizer
from tests.support.tiny_run import write_tiny_run

OVERRIDES = (
    "objective={name: sft}",
    "reward=null",
    "batch.updates_per_step=1",
    "batch.samples_per_prompt=1",
    "data.train.columns={problem: problem, answer: answer, solution: solution}",
)


@pytest.fixture
def train_data(tmp_path: Path) -> Callable[..., TrainData]:
    save_tokenizer(tmp_path / "model")

    def make(*solutions: str, max_tokens: int = 64, overrides: tuple[str, ...] = ()) -> TrainData:
        path = write_tiny_run(tmp_path, tmp_path / "model")
        rows: list[dict[str, Any]] = []
        for number, solution in enumerate(solutions):
            rows.append({"problem": f"{number} + 1 = ?", "answer": "2", "solution": solution})
        lines = [json.dumps(row) + "\n" for row in rows]
        (tmp_path / "train.jsonl").write_text("".join(lines))
        rollout = f"rollout={{engine: demonstrations, max_response_tokens: {max_tokens}}}"
        steps = f"batch.prompts_per_step={len(solutions)}"
        config = load_config(path, (*OVERRIDES, rollout, steps, *overrides)).config
        tokenizer = load_tokenizer(str(tmp_path / "model"))
        return TrainData(config, tmp_path / "model", tokenizer)

    return make


def test_a_demonstration_has_its_tokens_and_one_end(train_data: Callable[..., TrainData]) -> None:
    solution = "it is <|im_start|> 2"
    data = train_data(solution)
    [sample] = data.take(1).sampled.values()
    # One token a byte; <|im_start|> is one token, as the policy samples it.
    expected = [*map(_token, "it is "), 257, *map(_token, " 2"), 258]
    assert sample.response_ids.tolist() == expected
    assert sample.sampler_logprobs.shape == (len(expected),)
    assert np.array_equal(sample.token_ids[: sample.prompt_len], data.prompts[0].token_ids)


def _token(letter: str) -> int:
    """The id in the tiny vocabulary, which is sorted by the letters that stand for bytes."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return alphabet.index("\u0120" if letter == " " else letter)


def test_a_stop_token_inside_a_solution_is_an_error(train_data: Callable[..., TrainData]) -> None:
    with pytest.raises(DataError, match=r"solution of train/0 has the stop token '<\|im_end\|>'"):
        train_data("it is<|im_end|> 2")


@pytest.mark.parametrize(("length", "is_kept"), [(7, True), (8, False)])
def test_the_limit_counts_the_end_token(
    train_data: Callable[..., TrainData], length: int, is_kept: bool
) -> None:
    """A limit of 8 tokens: 7 letters and the end token."""
    data = train_data("x", "y" * length, max_tokens=8, overrides=("data.max_dropped_frac=0.5",))
    assert [prompt.id for prompt in data.prompts] == ["train/0", "train/1"][: 1 + is_kept]
    assert data.sets[0].num_dropped == (not is_kept)


def test_too_many_long_demonstrations_are_an_error(train_data: Callable[..., TrainData]) -> None:
    solutions = ["x"] * 8 + ["y" * 9] * 2
    with pytest.raises(
        DataError,
        match=r"train: 2 of 10 rows are dropped: 2 demonstrations above "
        r"rollout\.max_response_tokens=8, more than data\.max_dropped_frac=0\.1",
    ):
        train_data(*solutions, max_tokens=8)


def test_no_solution(train_data: Callable[..., TrainData]) -> None:
    with pytest.raises(DataError, match="prompt train/1 has no solution to train on"):
        train_data("x", "")


def test_a_mixture_has_its_shares_and_resumes(tmp_path: Path) -> None:
    """Weights 3 : 1 and 4 prompts a step: three of the first set and one of the second."""
    path = write_tiny_run(tmp_path, tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    rows = [json.dumps({"q": f"{n} + 2 = ?", "a": str(n + 2)}) + "\n" for n in range(3)]
    (tmp_path / "other.jsonl").write_text("".join(rows))
    words = (
        f"data.mix=[{{path: {tmp_path}/other.jsonl, columns: {{problem: q, answer: a}}}}]",
        "data.train.weight=3",
        "batch.prompts_per_step=4",
    )
    config = load_config(path, words).config
    tokenizer = load_tokenizer(str(tmp_path / "model"))

    def make() -> TrainData:
        return TrainData(config, tmp_path / "model", tokenizer)

    undisturbed = make()
    steps = [[prompt.id for prompt in undisturbed.take(step).prompts] for step in range(1, 9)]
    sources = [sorted(prompt_id.partition("/")[0] for prompt_id in step) for step in steps]
    assert sources == [["other", "train", "train", "train"]] * 8

    first = make()
    for step in range(1, 4):
        first.take(step)
    resumed = make()
    resumed.order.load_state_dict(json.loads(json.dumps(first.order.state_dict())))
    later = [[prompt.id for prompt in resumed.take(step).prompts] for step in range(4, 9)]
    assert later == steps[3:]


def test_a_refill_has_other_prompts_of_the_mixture(tmp_path: Path) -> None:
    path = write_tiny_run(tmp_path, tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    (tmp_path / "other.jsonl").write_text('{"q": "9 + 2 = ?", "a": 11}\n')
    words = (
        f"data.mix=[{{path: {tmp_path}/other.jsonl, columns: {{problem: q, answer: a}}}}]",
        "batch.prompts_per_step=2",
    )
    config = load_config(path, words).config
    data = TrainData(config, tmp_path / "model", load_tokenizer(str(tmp_path / "model")))
    rollouts = data.take(1)
    assert sorted(prompt.source for prompt in rollouts.prompts) == ["other", "train"]
    # The second set has one prompt, which the step has.
    new = data.refill(rollouts, 5)
    assert [prompt.source for prompt in new] == ["train"] * 5
    assert not {prompt.id for prompt in new} & set(rollouts.by_id)
