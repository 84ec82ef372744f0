from dataclasses import replace

import pytest

from pacs_megatron.config.reward_options import FormatReward
from pacs_megatron.rewards.format import build


def test_whole_response_must_match(make_prompt):
    judge = build(FormatReward(name="format", pattern=r"<think>.*</think>\s*\S.*"))
    assert judge(make_prompt("1"), "<think>a\nb</think>\n5") == 1.0
    assert judge(make_prompt("1"), "well <think>a</think> 5") == 0.0
    assert judge(make_prompt("1"), "<think>a</think>") == 0.0


@pytest.mark.parametrize(
    ("prompt", "response", "reward"),
    [
        ("Q<think>\n", "steps</think> \\boxed{5}", 1.0),
        ("Q<think>", "steps</think> \\boxed{5}", 1.0),
        ("Q<think>\n", "<think>steps</think> \\boxed{5}", 1.0),
        ("Q<think>\n", "steps \\boxed{5}", 0.0),
        ("Q", "steps</think> \\boxed{5}", 0.0),
        ("Q</think>\n", "steps</think> \\boxed{5}", 0.0),
        ("<think> Q", "steps</think> \\boxed{5}", 0.0),
        ("Q<|im_start|>", "steps</think> \\boxed{5}", 0.0),
    ],
)
def test_a_tag_that_the_template_opened_belongs_to_the_form(make_prompt, prompt, response, reward):
    judge = build(FormatReward(name="format", pattern="<think>.*</think>.*"))
    assert judge(replace(make_prompt("5"), text=prompt), response) == reward


def test_a_pattern_of_the_response_alone_still_matches(make_prompt):
    judge = build(FormatReward(name="format", pattern="[^<]*</think>.*"))
    assert judge(replace(make_prompt("5"), text="Q<think>\n"), "steps</think> 5") == 1.0
