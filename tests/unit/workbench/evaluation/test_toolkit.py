"""The letter of a multiple-choice response, as zai-org/glm-simple-evals reads it."""

from __future__ import annotations

import numpy as np
import pytest

from pacs_megatron.contracts import Prompt
from pacs_megatron.workbench.evaluation.toolkit import gpqa_letter, gpqa_letter_or_random


def prompt(answer: str = "C", number: int = 0) -> Prompt:
    return Prompt(
        id=f"gpqa/{number}",
        text="",
        token_ids=np.empty(0, np.int32),
        answer=answer,
        problem=f"Question {number}",
    )


@pytest.mark.parametrize(
    ("response", "wanted"),
    [
        ("Thus\nANSWER: C", 1.0),
        ("answer : c", 1.0),
        ("ANSWER: B", 0.0),
        ("ANSWER: A\nNo, ANSWER: C", 0.0),  # the first one of the part that is read
        ("ANSWER: A" + "." * 1024 + "ANSWER: C", 1.0),  # which is the last 1,024 characters
        ("ANSWER: C" + "." * 1015, 1.0),
        ("ANSWER: C" + "." * 1016, 0.0),
        (r"\boxed{C}", 0.0),
        ("", 0.0),
    ],
)
def test_the_letter(response: str, wanted: float) -> None:
    assert gpqa_letter(prompt(), response) == wanted


def test_a_response_without_a_letter_gets_a_random_one_that_stays() -> None:
    rewards = [gpqa_letter_or_random(prompt(number=number), "no idea") for number in range(400)]
    assert np.mean(rewards) == pytest.approx(0.25, abs=0.07)
    assert rewards[:50] == [
        gpqa_letter_or_random(prompt(number=number), "no idea") for number in range(50)
    ]
    assert gpqa_letter_or_random(prompt(), "ANSWER: C") == 1.0
    assert gpqa_letter_or_random(prompt(), "ANSWER: D") == 0.0
