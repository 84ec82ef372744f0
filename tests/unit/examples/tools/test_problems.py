"""Products of the tools example; its demonstrations have the tokens of trajectories."""

import json
from pathlib import Path

import numpy as np

from examples.quickstart.model import build_tokenizer
from examples.tools.problems import demonstration, write_products
from pacs_megatron.config import load_config
from pacs_megatron.data.turns import Message, TurnEncoder

ROOT = Path(__file__).parents[4]


def test_products_are_right_and_appear_once(tmp_path):
    write_products(tmp_path, 3, num_train=40, num_test=10, num_demonstrations=400)
    problems = []
    calls = 0
    for name in ("train", "test", "demonstrations"):
        for row in json.loads((tmp_path / f"{name}.json").read_text()):
            factors = row["problem"].removeprefix("What is ").removesuffix("?").split(" * ")
            product = int(factors[0]) * int(factors[1])
            assert row["answer"] == str(product)
            assert row["solution"].endswith(f"\n{product}\n\\boxed{{{product}}}")
            problems.append(row["problem"])
            calls += name == "demonstrations" and "<calc>" in row["solution"]
    assert len(set(problems)) == len(problems) == 450
    assert 40 <= calls <= 80


def test_a_demonstration_has_the_tokens_of_a_trajectory(monkeypatch):
    monkeypatch.chdir(ROOT)
    agent = load_config(Path("examples/tools/train.yaml")).config.rollout.agents
    assert agent is not None and agent.turn_markers is not None
    tokenizer = build_tokenizer()

    def ids_of(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    call = ids_of("<calc>347*581</calc>")
    encoder = TurnEncoder(agent.turn_markers, tokenizer)
    result = encoder.encode([Message("tool", "201607")], last_id=call[-1])
    answer = ids_of("\\boxed{201607}")
    np.testing.assert_array_equal(
        ids_of(demonstration((347, 581), uses_tool=True)), [*call, *result, *answer]
    )
    by_hand = demonstration((347, 581), uses_tool=False)
    assert by_hand == "<hand>347*581</hand>\n201607\n\\boxed{201607}"
    assert len(ids_of(by_hand)) == len(call) + len(result) + len(answer)
