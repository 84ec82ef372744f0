"""The contract of every RewardFn, custom functions included."""

import numpy as np
import pytest

from pacs_megatron.config.reward_options import (
    ArithmeticReward,
    CustomReward,
    FormatReward,
    MathReward,
)
from pacs_megatron.contracts import Judgement, Prompt
from pacs_megatron.errors import RewardError
from pacs_megatron.rewards import build_reward, label_of
from tests.support.rewards import CollectingPool

OWN = """
from pacs_megatron.errors import RewardError
def judge(prompt, response):
    if not prompt.answer.isdigit():
        raise RewardError(f"no number: {prompt.answer}")
    return 1.0 if f"{{{prompt.answer}}}" in response else 0.0
"""


def make_prompt(answer: str) -> Prompt:
    return Prompt(id="own/0", text="t", token_ids=np.zeros(1, np.int32), answer=answer, problem="p")


@pytest.fixture(params=["math", "arithmetic", "format", "custom"])
def options(request, tmp_path):
    match request.param:
        case "math":
            return MathReward(name="math")
        case "arithmetic":
            return ArithmeticReward(name="arithmetic")
        case "format":
            return FormatReward(name="format", pattern=r".*\\boxed\{5\}.*")
        case _:
            file = tmp_path / "own.py"
            file.write_text(OWN)
            return CustomReward(name="custom", function=f"{file}:judge")


def test_right_and_wrong_answers_get_labels(options):
    judge = build_reward(options)
    assert callable(judge)
    for response, label in [
        (r"so \boxed{5}.", 1),
        (r"so \boxed{6}.", 0),
        ("no answer", 0),
        ("", 0),
    ]:
        judged = judge(make_prompt("5"), response)
        reward = judged.reward if isinstance(judged, Judgement) else judged
        assert isinstance(reward, float)
        assert label_of(reward, None) == label


def test_judging_is_repeatable(options):
    judge = build_reward(options)
    first = [judge(make_prompt("5"), f"so \\boxed{{{n}}}.") for n in range(8)]
    assert first == [judge(make_prompt("5"), f"so \\boxed{{{n}}}.") for n in range(8)]


def test_unreadable_gold_raises_and_the_pool_reports_it(options):
    if options.name == "format":
        pytest.skip("format does not read the gold answer")
    with pytest.raises(RewardError):
        build_reward(options)(make_prompt("???"), r"so \boxed{5}.")
    with CollectingPool(options) as pool:
        pool.submit("a", make_prompt("???"), r"so \boxed{5}.")
        pool.submit("b", make_prompt("5"), r"so \boxed{5}.")
        verdicts = {verdict.key: verdict for verdict in pool.results()}
    assert verdicts["a"].reward is None
    assert verdicts["a"].failure
    assert verdicts["b"][:3] == ("b", 1.0, None)
