from pacs_megatron.config.reward_options import FormatReward
from pacs_megatron.rewards.format import build


def test_whole_response_must_match(make_prompt):
    judge = build(FormatReward(name="format", pattern=r"<think>.*</think>\s*\S.*"))
    assert judge(make_prompt("1"), "<think>a\nb</think>\n5") == 1.0
    assert judge(make_prompt("1"), "well <think>a</think> 5") == 0.0
    assert judge(make_prompt("1"), "<think>a</think>") == 0.0
