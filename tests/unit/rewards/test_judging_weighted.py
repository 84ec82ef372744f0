import pytest
from pydantic import TypeAdapter, ValidationError

from pacs_megatron.config.reward_options import RewardOptions
from pacs_megatron.rewards import label_of
from tests.support.rewards import CollectingPool

READ = TypeAdapter(RewardOptions)
MATH = {"name": "math"}
FORM = {"name": "format", "pattern": r"<think>.*</think>.*"}


def given(*parts, **more):
    components = [{"weight": weight, "reward": reward} for weight, reward in parts]
    return {"name": "weighted", "components": components, "label_threshold": 0.8, **more}


def test_the_sum_its_components_and_its_label(make_prompt) -> None:
    options = READ.validate_python(given((0.8, MATH), (0.2, FORM)))
    cases = {
        r"<think>a</think>\boxed{5}": 1.0,
        r"\boxed{5}": 0.8,
        r"<think>a</think>\boxed{6}": 0.2,
        "no": 0.0,
    }
    with CollectingPool(options) as pool:
        for response in cases:
            pool.submit(response, make_prompt("5"), response)
        pool.submit("bad", make_prompt("???"), r"\boxed{5}")
        verdicts = {verdict.key: verdict for verdict in pool.results()}
    for response, reward in cases.items():
        verdict = verdicts[response]
        assert verdict.reward == pytest.approx(reward, abs=1e-15)
        assert label_of(verdict.reward, options.label_threshold) == int(reward >= 0.8)
        correct, form = verdict.details["components"]
        assert correct.pop("details")["gold"] == "number: 5"
        assert correct == {"name": "math", "weight": 0.8, "reward": float("{5}" in response)}
        assert form == {"name": "format", "weight": 0.2, "reward": float("think" in response)}
    assert verdicts["bad"].reward is None
    assert verdicts["bad"].failure.startswith("component math: ")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (given((0.8, MATH)), "at least 2"),
        (given((0.8, MATH), (0, FORM)), r"components.1.weight=0 has no effect"),
        (given((0.8, MATH), (0.2, FORM), label_threshold=None), "needs reward.label_threshold"),
        (given((0.8, MATH), (0.2, FORM), label_threshold=1.5), "the same label"),
        (given((0.8, MATH), (0.2, FORM), label_threshold=0.0), "the same label"),
        (
            given((0.8, MATH | {"workers": 2}), (0.2, FORM)),
            r"components.0.reward.workers is not used",
        ),
        (
            given((0.8, MATH | {"label_threshold": 1.0}), (0.2, FORM)),
            r"components.0.reward.label_threshold is not used",
        ),
        (given((0.8, given((1.0, MATH), (1.0, FORM))), (0.2, FORM)), "weighted"),
    ],
)
def test_bad_combinations_are_rejected_by_name(options, reason) -> None:
    with pytest.raises(ValidationError, match=reason):
        READ.validate_python(options)


def test_a_penalty_and_unbounded_rewards_are_allowed() -> None:
    READ.validate_python(given((1.0, MATH), (-0.5, FORM), label_threshold=1.0))
    READ.validate_python(
        given((1.0, MATH), (0.1, {"name": "custom", "function": "own:judge"}), label_threshold=5.0)
    )
