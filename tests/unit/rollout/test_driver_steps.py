"""The driver's response to `rollout` for samples of several versions: a real driver object, no
ranks, no sampling.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from pacs_megatron.batching.tables import FACTS
from pacs_megatron.config import load_config
from pacs_megatron.contracts import Sample, SampleFacts, SampleRequest, Span, Stop
from pacs_megatron.parallel.transfer import pack_arrays, unpack_arrays
from pacs_megatron.rollout.driver import Driver
from pacs_megatron.rollout.step_rollouts import StepRollouts
from pacs_megatron.rollout.wire import Connection
from tests.support.tiny_models import make_tiny_qwen3
from tests.support.tiny_run import write_tiny_run


def facts_of(header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> SampleFacts:
    return SampleFacts(ids=tuple(header["ids"]), **{name: arrays[name] for name in FACTS})


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_groups_beyond_max_staleness_are_not_trained(tmp_path: Path, max_staleness: int) -> None:
    model = make_tiny_qwen3(tmp_path / "model", num_hidden_layers=1, vocab_size=262)
    config = load_config(
        write_tiny_run(tmp_path, model), ("run.steps=9", f"rollout.max_staleness={max_staleness}")
    ).config
    ours, theirs = socket.socketpair()
    driver = Driver(config, tmp_path, model, Connection(ours, "trainer"))
    try:
        for trained in range(3):
            driver.set_current(trained, f"weights{trained}", trained)
        [rollouts] = driver._buffer.dispatch(3, 3)
        ages = dict(zip([prompt.id for prompt in rollouts.prompts], [0, 1, 2, 2], strict=True))
        for number, request in enumerate(rollouts.requests):
            # One token of one sibling makes its group stale.
            made_at = ages[request.prompt_id] if number % 4 == 0 else 2
            sample = Sample(
                id=request.id,
                prompt_id=request.prompt_id,
                token_ids=np.concatenate([request.token_ids, np.array([97, 98], dtype=np.int32)]),
                prompt_len=len(request.token_ids),
                sampler_logprobs=np.zeros(2, dtype=np.float32),
                spans=(
                    Span(version=made_at, digest=f"weights{made_at}", start=0, end=1),
                    Span(version=2, digest="weights2", start=1, end=2),
                ),
                stop=Stop.EOS,
                reward=1.0,
                label=number % 2,
            )
            rollouts.sampled[sample.id] = sample
            rollouts.judged.add(sample.id)
        header, arrays = driver._results.step(rollouts, driver._buffer.sent)
    finally:
        driver.close()
        ours.close()
        theirs.close()
    metrics = header["metrics"]
    facts = facts_of(header, arrays)
    # Weights 2 belong to step 3; max_staleness=1 also allows weights 1, and neither allows weights
    # 0.
    assert metrics["admission/dropped_stale_groups"] == 2 - max_staleness
    assert facts.num_groups == 2 + max_staleness and facts.num_samples == 4 * facts.num_groups
    assert ("staleness/max" in metrics) == (max_staleness > 0)
    if max_staleness:
        assert metrics["staleness/max"] == 1.0 and metrics["staleness/mean"] == pytest.approx(
            1 / 12
        )
        assert metrics["staleness/multi_version_frac"] == pytest.approx(1 / 12)


def test_over_sampling_trains_the_first_groups_that_are_admitted(tmp_path: Path) -> None:
    """Embedded engine: all requests are sampled, so the order of the prompts decides which groups
    are trained.
    """
    model = make_tiny_qwen3(tmp_path / "model", num_hidden_layers=1, vocab_size=262)
    path = write_tiny_run(tmp_path, model)
    config = load_config(
        path, ("admission={drop_one_class_groups: true, oversample: 1.75}",)
    ).config
    ours, theirs = socket.socketpair()
    driver = Driver(config, tmp_path, model, Connection(ours, "trainer"))
    try:
        driver.set_current(0, "weights0", 0)
        [rollouts] = driver._buffer.dispatch(1, 1)
        assert len(rollouts.prompts) == 7
        one_class = {rollouts.prompts[1].id, rollouts.prompts[3].id}
        judge_all(rollouts, one_class=one_class)
        header, arrays = driver._results.step(rollouts, driver._buffer.sent)
    finally:
        driver.close()
        ours.close()
        theirs.close()
    facts = facts_of(header, arrays)
    kept = [sample_id.split(":", 1)[1].partition("#")[0] for sample_id in facts.ids[::4]]
    assert kept == [rollouts.prompts[k].id for k in (0, 2, 4, 5)]
    assert header["metrics"]["admission/dropped_surplus_groups"] == 1
    assert header["metrics"]["admission/dropped_one_class_groups"] == 2
    assert driver._data.order.state_dict()["skipped"] == []


def add_judged(rollouts: StepRollouts, request: SampleRequest, label: int) -> None:
    """A judged sample of one token for a request."""
    rollouts.sampled[request.id] = Sample(
        id=request.id,
        prompt_id=request.prompt_id,
        token_ids=np.concatenate([request.token_ids, np.array([97], dtype=np.int32)]),
        prompt_len=len(request.token_ids),
        sampler_logprobs=np.zeros(1, dtype=np.float32),
        spans=(Span(version=0, digest="weights0", start=0, end=1),),
        stop=Stop.EOS,
        reward=float(label),
        label=label,
    )
    rollouts.judged.add(request.id)


def judge_all(rollouts: StepRollouts, *, one_class: Collection[str]) -> None:
    """Every request has a judged sample, the last first.

    Groups of `one_class` have label 1 only.
    """
    for number, request in reversed(list(enumerate(rollouts.requests))):
        label = 1 if request.prompt_id in one_class else number % 2
        add_judged(rollouts, request, label)


@pytest.mark.parametrize("resumes", [False, True])
def test_refill_requests_prompts_until_the_batch_is_full(tmp_path: Path, resumes: bool) -> None:
    """DAPO's dynamic sampling,
    also where the step comes from a checkpoint after its first round.
    """
    model = make_tiny_qwen3(tmp_path / "model", num_hidden_layers=1, vocab_size=262)
    settings = "admission={drop_one_class_groups: true, oversample: 1.5, refill_rounds: 3}"
    config = load_config(
        write_tiny_run(tmp_path, model), (settings, "batch.prompts_per_step=2")
    ).config
    ours, theirs = socket.socketpair()
    drivers = [
        Driver(config, tmp_path, model, Connection(ours, "trainer")) for _ in range(1 + resumes)
    ]
    driver = drivers[0]
    try:
        driver.set_current(0, "weights0", 0)
        driver.rollout(1, 1)
        assert driver._request is not None
        generate = driver._request.advance()
        rollouts = driver._request.take_in_ranks()
        assert generate is not None and len(rollouts.prompts) == 3
        one_class = {prompt.id for prompt in rollouts.prompts[1:]}
        judge_all(rollouts, one_class=one_class)
        if resumes:
            saved, arrays = driver.state(0, final=False)
            driver = drivers[1]
            driver.load_state(saved, arrays)
            driver.set_current(0, "weights0", 0)
            driver.rollout(1, 1)
        assert driver._request is not None
        again = driver._request.advance()  # one group is missing: two more prompts
        rollouts = driver._request.take_in_ranks()
        assert again is not None and again[0]["kind"] == "generate" and len(rollouts.prompts) == 5
        assert len(rollouts.missing) == 8 and len({prompt.id for prompt in rollouts.prompts}) == 5
        judge_all(rollouts, one_class=one_class)
        response = driver._request.advance()
        assert response is not None
        header, arrays = response
    finally:
        for each in drivers:
            each.close()
        ours.close()
        theirs.close()
    facts = facts_of(header, arrays)
    kept = [sample_id.split(":", 1)[1].partition("#")[0] for sample_id in facts.ids[::4]]
    assert kept == [rollouts.prompts[k].id for k in (0, 3)]
    assert (
        header["metrics"]["admission/refills"] == 1
        and header["metrics"]["admission/dropped_one_class_groups"] == 2
    )


@pytest.mark.parametrize("resumes", [False, True])
def test_difficult_prompts_get_further_samples_once(tmp_path: Path, resumes: bool) -> None:
    """DARS: of four samples 0, 1, 2 and 4 are correct, which gives 4 (6 are more than max_samples
    leaves), 2, 0 and 0 further ones; also where the step comes from a checkpoint between them.
    """
    model = make_tiny_qwen3(tmp_path / "model", num_hidden_layers=1, vocab_size=262)
    settings = "admission={resample: {schedule: equal, max_samples: 8}}"
    config = load_config(write_tiny_run(tmp_path, model), (settings,)).config
    ours, theirs = socket.socketpair()
    drivers = [
        Driver(config, tmp_path, model, Connection(ours, "trainer")) for _ in range(1 + resumes)
    ]
    driver = drivers[0]
    try:
        driver.set_current(0, "weights0", 0)
        driver.rollout(1, 1)
        assert driver._request is not None and driver._request.advance() is not None
        rollouts = driver._request.take_in_ranks()
        ids = [prompt.id for prompt in rollouts.prompts]
        num_correct = dict(zip(ids, (0, 1, 2, 4), strict=True))
        judge_first(rollouts, num_correct)
        again = driver._request.advance()
        assert again is not None and again[0]["kind"] == "generate"
        if resumes:
            saved, arrays = driver.state(0, final=False)
            driver = drivers[1]
            driver.load_state(saved, arrays)
            driver.set_current(0, "weights0", 0)
            driver.rollout(1, 1)
            assert driver._request is not None and driver._request.advance() is not None
        rollouts = driver._request.take_in_ranks()
        missing = [request.id for request in rollouts.missing]
        expected = [f"1:{ids[0]}#{number}" for number in range(4, 8)]
        expected += [f"1:{ids[1]}#{number}" for number in range(4, 6)]
        assert missing == expected
        assert len({request.seed for request in rollouts.requests}) == 22

        judge_first(rollouts, dict.fromkeys(ids, 1))
        response = driver._request.advance()
        assert response is not None
        header, arrays = response
    finally:
        for each in drivers:
            each.close()
        ours.close()
        theirs.close()
    facts = facts_of(header, arrays)
    assert np.bincount(facts.groups).tolist() == [8, 6, 4, 4]
    assert header["metrics"]["admission/extra_samples"] == 6
    assert header["metrics"]["admission/rescued_groups"] == 1


class Streams:
    """SGLang's client without servers: the first sample of a prompt is correct, no other one."""

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        self.requests: list[SampleRequest] = []
        self._encode = encode

    def stream(self, requests: Sequence[SampleRequest], *, urgent: bool) -> Iterator[Sample]:
        assert not urgent
        self.requests += requests
        for request in requests:
            # The reward of the run is the parity of the text's bytes.
            [token] = self._encode("a" if request.id.endswith("#0") else "b")
            yield Sample(
                id=request.id,
                prompt_id=request.prompt_id,
                token_ids=np.concatenate([request.token_ids, np.array([token], dtype=np.int32)]),
                prompt_len=len(request.token_ids),
                sampler_logprobs=np.zeros(1, dtype=np.float32),
                spans=(Span(version=0, digest="weights0", start=0, end=1),),
                stop=Stop.EOS,
            )


def test_difficult_prompts_get_further_samples_from_servers(tmp_path: Path) -> None:
    """One of four samples is correct: two further ones for each of the four prompts."""
    model = make_tiny_qwen3(tmp_path / "model", num_hidden_layers=1, vocab_size=262)
    settings = "admission={resample: {schedule: equal, max_samples: 8}}"
    config = load_config(write_tiny_run(tmp_path, model), (settings,)).config
    ours, theirs = socket.socketpair()
    driver = Driver(config, tmp_path, model, Connection(ours, "trainer"))
    streams = Streams(lambda text: driver._tokenizer.encode(text, add_special_tokens=False))
    engine = cast("Any", streams)
    driver._buffer._engine = engine
    try:
        driver.set_current(0, "weights0", 0)
        driver._engine = engine
        driver.rollout(1, 1)
        response = None
        while response is None or response[0]["kind"] == "progress":
            assert driver._request is not None
            response = driver._request.advance()
            time.sleep(0.01)
        header, arrays = response
    finally:
        driver._engine = None
        driver.close()
        ours.close()
        theirs.close()
    assert len(streams.requests) == len({request.id for request in streams.requests}) == 24
    numbers = [int(request.id.rpartition("#")[2]) for request in streams.requests[16:]]
    assert numbers == [4, 5] * 4
    assert np.bincount(facts_of(header, arrays).groups).tolist() == [6] * 4
    assert header["metrics"]["admission/extra_samples"] == 8
    assert header["metrics"]["admission/rescued_groups"] == 0


def judge_first(rollouts: StepRollouts, num_correct: Mapping[str, int]) -> None:
    """Every missing request has a judged sample, the first ones of each prompt with label 1."""
    left = dict(num_correct)
    for request in rollouts.missing:
        left[request.prompt_id] -= 1
        label = int(left[request.prompt_id] >= 0)
        add_judged(rollouts, request, label)


@pytest.mark.parametrize(
    ("rounds", "reason"),
    [(2, "after admission.refill_rounds=2"), (9, "the data has no other prompts")],
)
def test_refill_ends_with_the_reason(
    tmp_path: Path, rounds: int, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_tiny_qwen3(tmp_path / "model", num_hidden_layers=1, vocab_size=262)
    settings = f"admission={{drop_one_class_groups: true, refill_rounds: {rounds}}}"
    config = load_config(write_tiny_run(tmp_path, model), (settings,)).config
    ours, theirs = socket.socketpair()
    driver = Driver(config, tmp_path, model, Connection(ours, "trainer"))
    try:
        driver.set_current(0, "weights0", 0)
        driver.rollout(1, 1)
        header = {"kind": "generate"}
        while header["kind"] == "generate":
            assert driver._request is not None
            [header, _] = driver._request.advance() or pytest.fail("no message")
            if header["kind"] == "generate":
                rollouts = driver._request.take_in_ranks()
                judge_all(rollouts, one_class={prompt.id for prompt in rollouts.prompts})
    finally:
        driver.close()
        ours.close()
        theirs.close()
    assert header["metrics"]["admission/refills"] == min(rounds, 3) and len(
        rollouts.prompts
    ) == 4 * (1 + min(rounds, 3))
    assert f"step 1: 0 of 4 groups are admitted; it trains on them: {reason}" in caplog.text


def test_a_step_of_demonstrations_continues_from_a_checkpoint(tmp_path: Path) -> None:
    """A stop between rollout and update: the checkpoint has the step, and its prompts are not taken
    twice.
    """
    model = make_tiny_qwen3(tmp_path / "model", num_hidden_layers=1, vocab_size=262)
    path = write_tiny_run(tmp_path, model)
    rows = [
        {"problem": f"{a} + 1 = ?", "answer": str(a + 1), "solution": f"it is {a + 1}"}
        for a in range(12)
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = (
        "run.steps=5",
        "objective={name: sft}",
        "rollout={engine: demonstrations, max_response_tokens: 32}",
        "reward=null",
    )
    columns = "data.train.columns={problem: problem, answer: answer, solution: solution}"
    config = load_config(path, (*overrides, columns)).config
    ours, theirs = socket.socketpair()
    answers = []
    first, second, undisturbed = (
        Driver(config, tmp_path, model, Connection(ours, "trainer")) for _ in range(3)
    )
    for step in (1, 2, 3):
        undisturbed.rollout(step, step)
        answers.append(
            undisturbed._results.step(
                undisturbed._buffer.dispatch(step, step)[0], undisturbed._buffer.sent
            )
        )
    first.rollout(1, 1)
    first.rollout(2, 2)
    header, arrays = first.state(1, final=False)
    assert [saved["step"] for saved in header["buffer"]["steps"]] == [2]
    second.load_state(json.loads(json.dumps(header)), arrays)
    for step in (2, 3):
        second.rollout(step, step)
        metrics, found = second._results.step(
            second._buffer.dispatch(step, step)[0], second._buffer.sent
        )
        assert metrics == answers[step - 1][0]
        assert not any(key.startswith("reward/") for key in metrics["metrics"])
        expected = unpack_arrays(pack_arrays(answers[step - 1][1]))
        for name, values in unpack_arrays(pack_arrays(found)).items():
            np.testing.assert_array_equal(values, expected[name])
    ours.close()
    theirs.close()
