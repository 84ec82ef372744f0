"""Responses that no SGLang sends: each a BadResponseError."""

from __future__ import annotations

import json

import pytest

from pacs_megatron.sglang.decode import BadResponseError, decode, request_body
from tests.support.servers.client import answer, requests


def test_a_request_has_the_stop_tokens_of_the_run() -> None:
    [request] = requests(1)
    params = json.loads(request_body(request, "r", stops=(256, 258)))["sampling_params"]
    assert params["stop_token_ids"] == [256, 258] and params["no_stop_trim"] is True
    assert "stop_token_ids" not in json.loads(request_body(request, "r"))["sampling_params"]


@pytest.mark.parametrize(
    "body",
    [
        json.dumps({"output_ids": [1], "meta_info": None}).encode(),
        json.dumps({"meta_info": json.loads(answer())["meta_info"]}).encode(),
        answer(output_ids=None),
        answer(output_ids=3),
        answer(output_ids={"7": 1}),
        answer(output_ids="789"),
        answer(output_ids=[7.5, 8, 9], output_token_logprobs=[[-1.0, 7.5], [-1.0, 8], [-1.0, 9]]),
        answer(
            output_ids=["7", "8", "9"],
            output_token_logprobs=[[-1.0, "7"], [-1.0, "8"], [-1.0, "9"]],
        ),
        answer(output_ids=[True, 8, 9], output_token_logprobs=[[-1.0, True], [-1.0, 8], [-1.0, 9]]),
        answer(output_ids=[[7], 8, 9], output_token_logprobs=[[-1.0, [7]], [-1.0, 8], [-1.0, 9]]),
        answer(
            output_ids=[7, 8, 2**70], output_token_logprobs=[[-1.0, 7], [-1.0, 8], [-1.0, 2**70]]
        ),
        answer(
            output_ids=[7, 8, 2**63], output_token_logprobs=[[-1.0, 7], [-1.0, 8], [-1.0, 2**63]]
        ),
        answer(output_ids=[7, 8, -1], output_token_logprobs=[[-1.0, 7], [-1.0, 8], [-1.0, -1]]),
        answer(output_token_logprobs=[[[-1.0], 7], [[-1.0], 8], [[-1.0], 9]]),
        answer(output_token_logprobs=[[], [], []]),
        answer(output_token_logprobs=[-1.0, -1.0, -1.0]),
        answer(output_token_logprobs={}),
        answer(output_token_logprobs=[["x", 7], [-1.0, 8], [-1.0, 9]]),
        answer(finish_reason=None),
        answer(finish_reason="length"),
        answer(finish_reason={"type": ["length"]}),
        answer(finish_reason={}),
        answer(weight_versions=None),
        answer(weight_versions=[]),
        answer(weight_versions=[{"start": 0, "end": 3}]),
        answer(weight_versions=[{"version": "1:a", "start": 0, "end": "x"}]),
        answer(
            weight_versions=[
                {"version": "1:a", "start": 0, "end": 2},
                {"version": "1:a", "start": 1, "end": 3},
            ]
        ),
        answer(
            weight_versions=[
                {"version": "1:a", "start": 0, "end": 4},
                {"version": "1:a", "start": 4, "end": 3},
            ]
        ),
        answer(id=None),
        # more than was requested, with any stop reason
        answer(
            finish_reason={"type": "stop"},
            output_ids=[7] * 4,
            output_token_logprobs=[[-1.0, 7]] * 4,
        ),
        b"\xff\xfe",
        b"-",
    ],
)
def test_every_wrong_response_is_a_bad_response(body: bytes) -> None:
    """Any other exception would end the driver."""
    with pytest.raises(BadResponseError):
        decode(body, "r/1", 3)


def test_a_response_cut_by_a_server_limit_names_the_limit() -> None:
    with pytest.raises(
        BadResponseError, match=r"3 tokens with finish reason length, expected 9.*context_length"
    ):
        decode(answer(), "r/1", 9)
