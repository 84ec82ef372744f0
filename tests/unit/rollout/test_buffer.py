"""Parts of asynchronous training: rollout buffer, staleness, the judge's threads, responses to
abandoned requests.
"""

from __future__ import annotations

import itertools
import json
import queue
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pacs_megatron.config.reward_options import CustomReward
from pacs_megatron.config.schema import AdmissionOptions
from pacs_megatron.contracts import (
    Group,
    Prompt,
    Sample,
    SampleRequest,
    SamplingOptions,
    Span,
    Stop,
)
from pacs_megatron.errors import CheckpointError, RewardError, RolloutError
from pacs_megatron.rewards.pool import received
from pacs_megatron.rollout.admission import admit
from pacs_megatron.rollout.buffer import RolloutBuffer
from pacs_megatron.rollout.driver_client import DriverClient
from pacs_megatron.rollout.judging import Judge
from pacs_megatron.rollout.step_rollouts import (
    SentWeights,
    StepRollouts,
    rollouts_from_message,
    rollouts_to_message,
    staleness_metrics,
)
from pacs_megatron.rollout.wire import Connection

PARAMS = SamplingOptions(temperature=1.0, top_p=1.0, top_k=0, max_response_tokens=8)


def prompt(number: int) -> Prompt:
    return Prompt(
        id=f"d/{number}", text="", token_ids=np.arange(3, dtype=np.int32), answer="1", problem=""
    )


def requests_of(prompts: object, step: int, extra: object = None) -> list[SampleRequest]:
    assert isinstance(prompts, list | tuple)
    result = []
    for p in prompts:
        for k in range(2):
            result.append(
                SampleRequest(
                    id=f"{step}:{p.id}#{k}",
                    prompt_id=p.id,
                    token_ids=p.token_ids,
                    seed=k,
                    params=PARAMS,
                )
            )
    return result


def sample(request: SampleRequest, *digests: str, **changes: object) -> Sample:
    spans = tuple(Span(version=k, digest=d, start=k, end=k + 1) for k, d in enumerate(digests))
    values: dict[str, object] = {
        "id": request.id,
        "prompt_id": request.prompt_id,
        "token_ids": np.arange(3 + len(digests), dtype=np.int32),
        "prompt_len": 3,
        "sampler_logprobs": -np.ones(len(digests), dtype=np.float32),
        "spans": spans,
        "stop": Stop.EOS,
    }
    return Sample(**(values | changes))  # type: ignore[arg-type]


def rollouts(step: int, first: int, count: int = 2) -> StepRollouts:
    prompts = tuple(prompt(first + k) for k in range(count))
    return StepRollouts(
        step=step, prompts=prompts, requests=tuple(requests_of(prompts, step)), epoch=step
    )


# --------------------------------------------------------------------------------------------------
# staleness
def test_staleness_counts_steps_from_the_oldest_weights() -> None:
    sent = SentWeights()
    for step, digest in enumerate(["a", "b", "c"]):
        sent.add(digest, step)
    [request] = requests_of([prompt(0)], 4)[:1]
    assert sent.staleness(sample(request, "c"), 4) == 1
    assert sent.staleness(sample(request, "a", "c"), 4) == 3
    assert sent.staleness(sample(request), 4) == 0
    with pytest.raises(RolloutError, match="never sent"):
        sent.check(sample(request, "a", "x"))
    assert sent.state_dict([sample(request, "a", "c")]) == {"a": 0, "c": 2}
    sent.add("a", 3)  # equal weights again: they count as new
    assert sent.staleness(sample(request, "a"), 4) == 0
    mixed = sample(request, "a", "c")
    plain = sample(request, "c")
    metrics = staleness_metrics([mixed, plain], [3, 1])
    assert metrics == {
        "staleness/mean": 2.0,
        "staleness/max": 3.0,
        "staleness/multi_version_frac": 0.5,
    }


def test_stale_groups_are_dropped_whole_and_counted() -> None:
    requests = requests_of([prompt(0), prompt(1)], 1)
    samples = [sample(r, "a", reward=1.0, label=1) for r in requests]
    groups = [
        Group(prompt_id=f"d/{k}", samples=tuple(samples[2 * k : 2 * k + 2])) for k in range(2)
    ]
    kept = admit(groups, AdmissionOptions(), min_group_size=2, stale={samples[0].id})
    assert [group.prompt_id for group in kept.groups] == ["d/1"]
    assert kept.counts["stale_groups"] == 1
    assert "stale_groups" not in admit(groups, AdmissionOptions(), min_group_size=2).counts


# --------------------------------------------------------------------------------------------------
# buffer
@settings(max_examples=25, deadline=None)
@given(
    states=st.lists(
        st.sampled_from(["missing", "sampled", "judged", "failed"]), min_size=8, max_size=8
    )
)
def test_the_buffer_keeps_every_sample_and_every_verdict(states: list[str]) -> None:
    steps = [rollouts(3, 0), rollouts(4, 2)]
    requests = list(itertools.chain.from_iterable(step.requests for step in steps))
    for number, (request, state) in enumerate(zip(requests, states, strict=True)):
        owner = steps[number // 4]
        found = sample(request, "a", "b")
        if state == "judged":
            found = replace(found, reward=0.1 * number, label=number % 2)
        if state == "failed":
            found = replace(found, failure="timeout")
        if state != "missing":
            owner.sampled[request.id] = found
        if state in ("judged", "failed"):
            owner.judged.add(request.id)
    header, arrays = rollouts_to_message(steps)
    prompts = {f"d/{k}": prompt(k) for k in range(4)}
    again = rollouts_from_message(json.loads(json.dumps(header)), arrays, prompts, requests_of)
    for mine, theirs in zip(steps, again, strict=True):
        assert (theirs.step, theirs.epoch) == (mine.step, mine.epoch)
        assert [p.id for p in theirs.prompts] == [p.id for p in mine.prompts]
        assert list(theirs.sampled) == list(mine.sampled)
        # A sample whose verifier failed is judged again.
        assert theirs.judged == {i for i in mine.judged if mine.sampled[i].failure is None}
        assert [r.id for r in theirs.missing] == [r.id for r in mine.missing]
        for sample_id, got in theirs.sampled.items():
            expected = mine.sampled[sample_id]
            assert (got.reward, got.label, got.failure) == (expected.reward, expected.label, None)
            assert got.spans == expected.spans
            np.testing.assert_array_equal(got.token_ids, expected.token_ids)
    if requests:
        with pytest.raises(CheckpointError, match="d/3, which the data no longer has"):
            rollouts_from_message(
                header, arrays, {k: v for k, v in prompts.items() if k != "d/3"}, requests_of
            )


def test_cancelled_requests_stay_cancelled_in_a_checkpoint() -> None:
    one = rollouts(3, 0)
    one.enough = 1
    for request in one.requests[:3]:
        one.sampled[request.id] = sample(
            request, "a", reward=1.0, label=1, reward_details={"of": request.id}
        )
    one.judged = {request.id for request in one.requests[:2]}
    assert one.whole_group("d/1") is None
    group = one.whole_group("d/0")
    assert group is not None and len(group.samples) == 2
    assert not one.is_done
    assert one.cancel_rest() == [one.requests[3].id]
    assert one.is_done and one.unfinished == ["d/1"]
    one.is_returned = True
    header, arrays = rollouts_to_message([one])
    prompts = {f"d/{k}": prompt(k) for k in range(2)}
    [again] = rollouts_from_message(json.loads(json.dumps(header)), arrays, prompts, requests_of)
    assert again.step == one.step
    assert (again.cancelled, again.enough, again.is_returned) == (one.cancelled, 1, True)
    assert [g.prompt_id for g in again.groups()] == ["d/0"] and not again.missing
    assert all(again.sampled[key].reward_details == {"of": key} for key in again.judged)


# --------------------------------------------------------------------------------------------------
# judge
@pytest.fixture
def judge(tmp_path: Path) -> Iterator[Judge]:
    file = tmp_path / "reward.py"
    file.write_text("def reward(prompt, response):\n    return float(response)\n")
    options = CustomReward(
        name="custom", function=f"{file}:reward", workers=2, max_failure_frac=0.5
    )
    texts = {4: "1", 5: "0", 6: "0.5", 7: "no number"}
    with Judge(options, lambda ids: texts[len(ids) + 3], truncated="label0") as judge:
        yield judge


def test_concurrent_streams_receive_their_own_verdicts(judge: Judge) -> None:
    prompts = {f"d/{k}": prompt(k) for k in range(40)}
    found: dict[int, list[Sample]] = {}

    def stream(step: int) -> None:
        requests = requests_of(list(prompts.values()), step)
        samples = [sample(r, *"ab"[: 1 + k % 2]) for k, r in enumerate(requests)]
        answers: queue.SimpleQueue[Sample | RewardError] = queue.SimpleQueue()
        for one in samples:
            judge.submit(one, prompts[one.prompt_id], answers.put)
        judged = {one.id: one for one in received(answers, len(samples))}
        found[step] = [judged[one.id] for one in samples]

    threads = [threading.Thread(target=stream, args=(step,)) for step in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    for step in range(3):
        assert [s.id for s in found[step]] == [
            r.id for r in requests_of(list(prompts.values()), step)
        ]
        assert [s.label for s in found[step]] == [1, 0] * 40


def test_a_sample_may_be_submitted_again_before_its_verdict(judge: Judge) -> None:
    [request] = requests_of([prompt(0)], 1)[:1]
    verdicts: queue.SimpleQueue[Sample | RewardError] = queue.SimpleQueue()
    for _ in range(20):
        judge.submit(sample(request, "a"), prompt(0), verdicts.put)
    found = [verdicts.get(timeout=600) for _ in range(20)]
    assert all(
        isinstance(verdict, Sample) and verdict.id == request.id and verdict.label == 1
        for verdict in found
    )
    # Decoded once: the rollout file has the text that was judged.
    assert {verdict.text for verdict in found if isinstance(verdict, Sample)} == {"1"}


def test_a_closed_judge_has_returned_every_verdict_and_starts_no_job(tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text(
        "import time\nfrom pathlib import Path\ncalls = Path(__file__).with_name('calls')\n\n\n"
        "def reward(prompt, response):\n    with calls.open('a') as file:\n        "
        "file.write('x')\n"
        "    time.sleep(3600 if calls.stat().st_size == 4 else 0)\n    return 1.0\n"
    )
    options = CustomReward(
        name="custom", function=f"{file}:reward", workers=1, timeout_s=3600, max_failure_frac=0.5
    )
    judge = Judge(options, lambda _ids: "", truncated="label0")
    verdicts: list[Sample | RewardError] = []
    for request in requests_of([prompt(k) for k in range(4)], 1):
        judge.submit(sample(request, "a"), prompt(0), verdicts.append)
    calls = tmp_path / "calls"
    while not calls.exists() or calls.stat().st_size < 4:
        time.sleep(0.01)
    judge.close()
    assert [isinstance(verdict, RewardError) for verdict in verdicts] == [False] * 3 + [True] * 5
    assert calls.stat().st_size == 4


def test_a_reward_that_is_no_label_fails_its_step_only(judge: Judge) -> None:
    woken = threading.Event()
    buffer = RolloutBuffer(judge, None, lambda step: rollouts(step, step), woken.set)
    buffer.sent.add("a", 0)
    bad, good = buffer.dispatch(1, 2)
    buffer.arrived(bad, [sample(bad.requests[0], "a", "a", "a")])
    buffer.arrived(good, [sample(request, "a") for request in good.requests])
    with pytest.raises(RewardError, match="expected 0 or 1"):
        while not bad.is_done:
            assert woken.wait(600)
            woken.clear()
    while not good.is_done:
        assert woken.wait(600)
        woken.clear()
    assert [s.label for s in good.in_order()] == [1] * 4
    with pytest.raises(RolloutError, match="never sent"):
        buffer.arrived(good, [sample(good.requests[0], "unknown")])
    buffer.forget(1)
    assert [saved["step"] for saved in buffer.state()[0]["steps"]] == [2]


@pytest.mark.parametrize("judge_again", [False, True])
def test_after_a_change_of_the_reward_open_steps_are_judged_again(
    judge: Judge, judge_again: bool
) -> None:
    """Otherwise the verdicts of two rewards would be in one group. A step that the ranks have
    received keeps its labels.
    """
    saved = [rollouts(1, 0), rollouts(2, 2)]
    saved[0].is_returned = True
    for step in saved:
        for request in step.requests[:3]:  # this reward judges their text as right
            step.sampled[request.id] = sample(request, "a", reward=0.0, label=0)
            step.judged.add(request.id)
    buffer = RolloutBuffer(judge, None, lambda step: rollouts(step, step), lambda: None)
    header, arrays = rollouts_to_message(saved)
    header["sent"] = {"a": 0}
    prompts = {f"d/{k}": prompt(k) for k in range(4)}
    buffer.load_state((header, arrays), prompts, requests_of, judge_again=judge_again)
    first, second = buffer.dispatch(1, 2)
    while len(second.judged) < 3:
        time.sleep(0.01)
    assert [s.label for s in first.in_order()] == [0] * 3
    assert [s.label for s in second.in_order()] == [int(judge_again)] * 3


def test_a_sample_that_arrives_twice_counts_once(judge: Judge) -> None:
    buffer = RolloutBuffer(judge, None, lambda step: rollouts(step, step), lambda: None)
    buffer.sent.add("a", 0)
    [one] = buffer.dispatch(1, 1)
    for _ in range(2):
        buffer.arrived(one, [sample(one.requests[0], "a")])
    assert len(one.sampled) == 1 and len(one.missing) == 3


def test_only_the_last_verdict_of_a_step_wakes_the_driver(judge: Judge) -> None:
    """A wake-up for each verdict doubles the time that the verdicts of a step take."""
    woken: queue.SimpleQueue[None] = queue.SimpleQueue()
    buffer = RolloutBuffer(judge, None, lambda step: rollouts(step, step), lambda: woken.put(None))
    buffer.sent.add("a", 0)
    [step] = buffer.dispatch(1, 1)
    samples = [sample(request, "a") for request in step.requests]
    buffer.arrived(step, samples[:-1])
    while len(step.judged) < len(samples) - 1:
        time.sleep(0.01)
    assert woken.empty()
    buffer.arrived(step, samples[-1:])
    woken.get(timeout=600)
    assert step.is_done and woken.empty()


class RecordedEngine:
    """The client of the servers, of which the buffer cancels requests."""

    def __init__(self) -> None:
        self.cancelled: list[str] = []

    def cancel(self, request_ids: Sequence[str]) -> None:
        self.cancelled += request_ids


def test_over_sampling_counts_the_admitted_groups_of_a_checkpoint(judge: Judge) -> None:
    """Two of three groups are enough, and the checkpoint has one: the next one cancels the rest."""
    prompts = {f"d/{number}": prompt(number) for number in range(3)}
    before = RolloutBuffer(judge, None, lambda step: rollouts(step, 0, count=3), lambda: None)
    before.sent.add("a", 0)
    [step] = before.dispatch(1, 1)
    step.enough = 2
    first_group = step.requests[:2]
    for request in first_group:
        step.sampled[request.id] = sample(request, "a", reward=1.0, label=1)
        step.judged.add(request.id)

    engine = RecordedEngine()
    woken = threading.Event()
    after = RolloutBuffer(judge, engine, lambda _step: step, woken.set)  # type: ignore[arg-type]
    after.load_state(before.state(), prompts, requests_of)
    [resumed] = after.dispatch(1, 1)
    assert resumed.num_admitted == 1

    after.arrived(resumed, [sample(request, "a") for request in resumed.requests[2:4]])
    assert woken.wait(600)
    assert resumed.num_admitted == 2 and resumed.is_done
    assert engine.cancelled == [request.id for request in resumed.requests[4:]]


# --------------------------------------------------------------------------------------------------
# driver
def test_responses_to_abandoned_requests_are_discarded(tmp_path: Path) -> None:
    client = DriverClient(tmp_path, tmp_path, timeout_s=600.0)
    client._process.kill()
    client._connection.close()
    ours, theirs = socket.socketpair()
    client._connection = Connection(ours, "rollout driver")
    driver = Connection(theirs, "trainer")
    reported: list[tuple[int, int, bool]] = []
    client.on_progress = lambda *counts: reported.append(counts)
    client.send({"op": "rollout", "step": 1})
    client.abandon()
    driver.send({"kind": "groups", "request": 1})  # already in flight
    driver.send(
        {"kind": "progress", "request": 2, "done": 3, "total": 8, "waits_for_rewards": True}
    )
    driver.send({"kind": "state", "request": 2, "order": {}})
    assert client.call({"op": "state", "trained": 0, "final": False})[0]["kind"] == "state"
    assert reported == [(3, 8, True)]
    requests = [driver.receive()[0] for _ in range(3)]
    assert [(r["op"], r["request"]) for r in requests] == [
        ("rollout", 1),
        ("abandon", 1),
        ("state", 2),
    ]
    driver.close()
    assert not client.is_lost
    with pytest.raises(RolloutError, match="ended unexpectedly"):
        client.receive()
    assert client.is_lost
    client.close()
