"""The reward function of examples/rewards/custom.yaml."""

from pathlib import Path

import pytest

from pacs_megatron.config import load_config
from pacs_megatron.rewards.custom import Custom

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        (r"so \boxed{125}", 1.0),
        (r"\boxed{125} or \boxed{725}", 0.5 * 2 / 3),
        (r"\boxed{5}", 0.5 / 3),
        (r"\boxed{9990125}", 0.5),
        ("125", 0.0),
    ],
)
def test_the_example_judges(make_prompt, monkeypatch, response, reward) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config(Path("examples/rewards/custom.yaml")).config
    judged = Custom(config.reward.function)(make_prompt("125"), response)
    assert (judged if isinstance(judged, float) else judged.reward) == reward
