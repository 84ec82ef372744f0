"""examples/rewards loads, and its server judges."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from pacs_megatron.config import load_config
from pacs_megatron.config.explain import show
from pacs_megatron.config.schema import ModelOptions
from pacs_megatron.errors import ConfigError
from pacs_megatron.launch.train import check_files_are_here
from pacs_megatron.rewards import build_reward
from pacs_megatron.rewards.judging import JudgeInput
from tests.support.rewards import CollectingPool

EXAMPLES = Path(__file__).parents[4] / "examples" / "rewards"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_loads_and_resolves_to_itself(path, tmp_path) -> None:
    loaded = load_config(path)
    assert loaded.config.reward.name == path.stem
    assert f'reward.name = "{path.stem}"' in show(path)
    again = type(loaded.config).model_validate_json(loaded.config.model_dump_json())
    assert again == loaded.config


def test_the_server_of_the_example_judges(make_prompt) -> None:
    command = [sys.executable, str(EXAMPLES / "server.py"), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            url = server.stdout.readline().strip()
            options = load_config(EXAMPLES / "http.yaml").config.reward.model_copy(
                update={"url": url}
            )
            responses = {r"\boxed{5}": 1.0, r"\boxed{6}": 0.0, "x" * 300 + r"\boxed{5}": 0.5}
            with CollectingPool(options) as pool:
                for response in responses:
                    pool.submit(response, make_prompt("5"), response)
                assert {verdict.key: verdict.reward for verdict in pool.results()} == responses
        finally:
            server.kill()


def test_the_weighted_example_judges(make_prompt) -> None:
    judge = build_reward(load_config(EXAMPLES / "weighted.yaml").config.reward)
    (found,) = judge.judge_batch([JudgeInput(make_prompt("5"), r"\boxed{5}")])
    assert found["reward"] == 1.0


def test_the_file_of_a_component_is_missed_before_a_run_starts() -> None:
    own = '{weight: 0.2, reward: {name: custom, function: "nothere.py:judge"}}'
    loaded = load_config(
        EXAMPLES / "weighted.yaml",
        [f"reward.components=[{{weight: 0.8, reward: {{name: math}}}}, {own}]"],
    )
    loaded = replace(
        loaded, config=loaded.config.model_copy(update={"model": ModelOptions(path=str(EXAMPLES))})
    )
    with (
        patch("pacs_megatron.data.sources.find_source"),
        pytest.raises(ConfigError, match=r"no file .*nothere.py"),
    ):
        check_files_are_here(loaded)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("reward.components.1.reward.patern=x", "unknown key `reward.components.1.reward.patern`"),
        (
            "reward.components.1.reward.name=mth",
            "reward.components.1.reward.name='mth': expected one of math",
        ),
        (
            "reward.components.0.reward.workers=2",
            "reward.components.0.reward.workers is not used by a component",
        ),
        ("reward.components=[3, 4]", "reward.components.0=3: expected a mapping"),
        (
            "reward.components=[{weight: 1.0, reward: {pattern: x}}, {weight: 1.0, reward: {name: "
            "math}}]",
            "`reward.components.0.reward.name` is missing",
        ),
    ],
)
def test_a_mistake_in_a_component_names_its_key(override: str, line: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(EXAMPLES / "weighted.yaml", [override])
    assert line in str(error.value)
