"""Inputs of a call, as a line between pool and worker."""

import json

import numpy as np

from pacs_megatron.contracts import Prompt, ToolCall, Turn
from pacs_megatron.rewards.judging import JudgeInput
from pacs_megatron.rewards.worker import decode_inputs, encode_inputs

PROMPT = Prompt(
    id="toy/0",
    text="What is 1 + 1?\n",
    token_ids=np.array([0, 1, 2**31 - 1], np.int32),
    answer="2",
    problem="What is 1 + 1?",
    solution=None,
    source="toy",
    extra={"level": 3, "tags": ["a"]},
)


def test_a_function_receives_the_whole_prompt() -> None:
    line = encode_inputs([JudgeInput(PROMPT, "it is \udc80 2")], with_token_ids=True)
    [(prompt, response, _)] = decode_inputs(line.decode())
    assert response == "it is \udc80 2"
    np.testing.assert_array_equal(prompt.token_ids, PROMPT.token_ids)
    for name in ("id", "text", "answer", "problem", "solution", "source", "extra"):
        assert getattr(prompt, name) == getattr(PROMPT, name)


def test_other_rewards_receive_no_token_ids() -> None:
    line = encode_inputs([JudgeInput(PROMPT, "2")], with_token_ids=False)
    [[fields, _, _]] = json.loads(line)
    assert fields["token_ids"] == ""
    [(prompt, _, _)] = decode_inputs(line.decode())
    assert len(prompt.token_ids) == 0 and prompt.text == PROMPT.text


def test_turns_with_their_calls_arrive() -> None:
    call = ToolCall(tool="sum", arguments="{}", failure="slow", seconds=2.5, turn=1, timed_out=True)
    turns = (Turn(role="assistant", text="a", calls=(call,)), Turn(role="environment", text="<4>"))
    line = encode_inputs([JudgeInput(PROMPT, "a", turns)], with_token_ids=False)
    [found] = decode_inputs(line.decode())
    assert found.turns == turns
