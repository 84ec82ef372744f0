"""The turns of a response, from tokens that are letters."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import numpy as np

from pacs_megatron.contracts import Sample, Stop, ToolCall, Turn
from pacs_megatron.contracts.conversation import (
    policy_text,
    response_text,
    turn_from_json,
    turns_of,
)


def decode(ids: np.ndarray) -> str:
    return bytes(ids.tolist()).decode()


def call(turn: int) -> ToolCall:
    return ToolCall(tool="sum", arguments="{}", failure=None, seconds=0.5, turn=turn)


def sample(text: bytes, **fields: object) -> Sample:
    return Sample(
        id="1:d/0#0",
        prompt_id="d/0",
        token_ids=np.frombuffer(b"?" + text, dtype=np.uint8).astype(np.int32),
        prompt_len=1,
        sampler_logprobs=np.zeros(len(text), dtype=np.float32),
        spans=(),
        stop=Stop.EOS,
        **fields,  # type: ignore[arg-type]
    )


def test_turns_with_their_calls() -> None:
    one = sample(b"ab<12>c<3>d", environment=((2, 6), (7, 10)), calls=(call(0), call(1), call(3)))
    turns = turns_of(one, decode)
    assert turns == [
        Turn(role="assistant", text="ab", calls=(call(0), call(1))),
        Turn(role="environment", text="<12>"),
        Turn(role="assistant", text="c"),
        Turn(role="environment", text="<3>"),
        Turn(role="assistant", text="d", calls=(call(3),)),
    ]
    assert policy_text(turns) == response_text(one, decode) == "ab\nc\nd"
    assert [turn_from_json(json.loads(json.dumps(asdict(turn)))) for turn in turns] == turns
    assert one.num_turns == 3


def test_one_turn() -> None:
    plain = sample(b"ab")
    assert turns_of(plain, decode) == [Turn(role="assistant", text="ab")]
    assert response_text(plain, decode) == "ab" and plain.num_turns == 1
    assert response_text(replace(plain, text="own"), decode) == "own"
    assert sample(b"").num_turns == 0
