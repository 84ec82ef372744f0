"""The states of a request in progress."""

from __future__ import annotations

import numpy as np
import pytest

from pacs_megatron.contracts import Prompt, SampleRequest, SamplingOptions
from pacs_megatron.errors import RolloutError
from pacs_megatron.rollout import open_request
from pacs_megatron.rollout.open_request import OpenRequest
from pacs_megatron.rollout.sample_arrays import Message
from pacs_megatron.rollout.step_rollouts import StepRollouts

PARAMS = SamplingOptions(temperature=1.0, top_p=1.0, top_k=0, max_response_tokens=8)


def rollouts(step: int) -> StepRollouts:
    prompt = Prompt(
        id="d/0", text="", token_ids=np.arange(3, dtype=np.int32), answer="1", problem=""
    )
    requests = tuple(
        SampleRequest(
            id=f"{step}:d/0#{k}", prompt_id="d/0", token_ids=prompt.token_ids, seed=k, params=PARAMS
        )
        for k in range(2)
    )
    return StepRollouts(step=step, prompts=(prompt,), requests=requests)


def respond(done: StepRollouts) -> Message:
    return {"kind": "groups", "step": done.step}, {}


@pytest.fixture(autouse=True)
def report_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_request, "PROGRESS_INTERVAL_S", 0.0)


def kind(message: Message | None) -> str | None:
    return None if message is None else message[0]["kind"]


def sampled(step: StepRollouts, count: int) -> None:
    step.sampled = {request.id: None for request in step.requests[:count]}  # type: ignore[misc]


def test_the_ranks_sample_every_step_before_the_response() -> None:
    steps = [rollouts(1), rollouts(2)]
    request = OpenRequest(7, steps[0], respond, steps)
    for step in steps:
        message = request.advance()
        assert message is not None and (kind(message), message[0]["step"]) == (
            "generate",
            step.step,
        )
        assert message[0]["ids"] == [r.id for r in step.requests]
        assert request.advance() is None, "one `generate` at a time"
        assert request.take_in_ranks() is step
    sampled(steps[0], 2)
    assert request.advance() is not None and not request.is_closed
    steps[0].judged = set(steps[0].sampled)
    assert kind(request.advance()) == "groups" and request.is_closed


def test_progress_is_sent_after_a_change_and_names_the_wait_for_rewards() -> None:
    step = rollouts(1)
    request = OpenRequest(7, step, respond)
    messages = []
    for num_sampled, num_judged in [(0, 0), (1, 0), (1, 1), (1, 1), (2, 1)]:
        sampled(step, num_sampled)
        step.judged = {r.id for r in step.requests[:num_judged]}
        messages.append(request.advance())
    found = [
        None if m is None else (m[0]["done"], m[0]["total"], m[0]["waits_for_rewards"])
        for m in messages
    ]
    assert found == [(0, 2, False), None, (1, 2, False), None, (1, 2, True)]


def test_an_error_of_the_rollouts_is_raised() -> None:
    step = rollouts(1)
    step.error = RolloutError("lost")
    with pytest.raises(RolloutError, match="lost"):
        OpenRequest(7, step, respond).advance()
