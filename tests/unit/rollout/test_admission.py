"""Pieces between driver and ranks: wire, arrays, admission, shuffled labels, and how a dead driver
shows.
"""

from __future__ import annotations

import os
import signal
import socket
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
from pacs_megatron.errors import CheckpointError, ExitCode, PacsError, RolloutError, named_error
from pacs_megatron.rollout.admission import admit, shuffle_labels
from pacs_megatron.rollout.driver_client import DriverClient
from pacs_megatron.rollout.judging import label_sample
from pacs_megatron.rollout.sample_arrays import (
    requests_from_message,
    requests_to_message,
    samples_from_message,
    samples_to_message,
)
from pacs_megatron.rollout.wire import Connection


def sample(number: int, *, prompt: str = "p/0", length: int = 3, **changes: object) -> Sample:
    values: dict[str, object] = {
        "id": f"1:{prompt}#{number}",
        "prompt_id": prompt,
        "token_ids": np.arange(4 + length, dtype=np.int32) + number,
        "prompt_len": 4,
        "sampler_logprobs": -np.arange(length, dtype=np.float32),
        "spans": (Span(version=2, digest="ab", start=0, end=length),),
        "stop": Stop.EOS,
        "reward": 1.0,
        "label": number % 2,
    }
    return Sample(**(values | changes))  # type: ignore[arg-type]


def assert_same(a: Sample, b: Sample) -> None:
    assert (a.id, a.prompt_id, a.prompt_len, a.spans, a.stop) == (
        b.id,
        b.prompt_id,
        b.prompt_len,
        b.spans,
        b.stop,
    )
    np.testing.assert_array_equal(a.token_ids, b.token_ids)
    np.testing.assert_array_equal(a.sampler_logprobs, b.sampler_logprobs)
    assert (a.routes is None) == (b.routes is None)
    np.testing.assert_array_equal(a.routes, b.routes)


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(0, 9), min_size=0, max_size=6), seed=st.integers(0, 5))
def test_samples_survive_the_wire(lengths: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    samples = []
    for number, length in enumerate(lengths):
        cut = int(rng.integers(0, length + 1))
        spans = (
            Span(version=1, digest="a", start=0, end=cut),
            Span(version=2, digest="b", start=cut, end=length),
        )
        stop = [Stop.EOS, Stop.LENGTH, Stop.ABORTED][number % 3]
        routes = rng.integers(0, 9, (3 + length, 2, 3)).astype(np.int16) if number % 2 else None
        samples.append(sample(number, length=length, spans=spans, stop=stop, routes=routes))
    ours, theirs = socket.socketpair()
    left = Connection(ours, "left")
    right = Connection(theirs, "right")
    left.send(*samples_to_message(samples))
    for got, expected in zip(samples_from_message(*right.receive()), samples, strict=True):
        assert_same(got, expected)
    left.close()
    with pytest.raises(RolloutError, match="right has ended"):
        right.receive()
    right.close()


def test_a_peer_that_stops_in_the_middle_of_a_message_causes_a_timeout() -> None:
    ours, theirs = socket.socketpair()
    rank = Connection(ours, "rollout driver", timeout_s=0.3)
    theirs.sendall(
        (100).to_bytes(8, "little") + bytes(8) + b"{"
    )  # a header of 100 bytes of which one comes
    with pytest.raises(
        RolloutError, match=r"rollout driver stopped in the middle of a message for 0\.3 s"
    ):
        rank.receive()
    with pytest.raises(RolloutError, match="stopped in the middle"):
        rank.send({}, {"tokens": np.zeros(1 << 22, dtype=np.int32)})  # the peer does not read
    rank.close()
    theirs.close()


def test_requests_survive_the_wire() -> None:
    prompts = [
        Prompt(
            id=f"d/{k}", text="", token_ids=np.arange(k + 1, dtype=np.int32), answer="", problem=""
        )
        for k in range(3)
    ]
    params = SamplingOptions(
        temperature=0.5, top_p=0.9, top_k=3, max_response_tokens=7, stop=("\n", "##")
    )
    requests = []
    for p in prompts:
        for i in range(2):
            requests.append(
                SampleRequest(
                    id=f"{p.id}#{i}",
                    prompt_id=p.id,
                    token_ids=p.token_ids,
                    seed=2**62 + i,
                    params=params,
                )
            )
    for got, expected in zip(
        requests_from_message(*requests_to_message(prompts, requests)), requests, strict=True
    ):
        assert (got.id, got.prompt_id, got.seed, got.params) == (
            expected.id,
            expected.prompt_id,
            expected.seed,
            expected.params,
        )
        np.testing.assert_array_equal(got.token_ids, expected.token_ids)


def group(*samples: Sample) -> Group:
    return Group(prompt_id=samples[0].prompt_id, samples=samples)


def test_admission_drops_and_counts() -> None:
    groups = [
        group(sample(0), sample(1), sample(2, failure="time-out", reward=None, label=None)),
        group(sample(0), sample(1, stop=Stop.ABORTED)),
        group(sample(0, length=0), sample(1), sample(3)),
        group(sample(1), sample(3)),
        group(sample(0, stop=Stop.LENGTH, label=0), sample(1)),
    ]
    default = AdmissionOptions()
    kept = admit(groups, default, min_group_size=2)
    assert [len(g.samples) for g in kept.groups] == [2, 2, 2, 2]
    assert kept.counts == {
        "unjudged": 1,
        "truncated": 0,
        "aborted": 2,
        "small_groups": 1,
        "one_class_groups": 0,
    }
    dropping = AdmissionOptions(truncated="drop", drop_one_class_groups=True)
    kept = admit(groups, dropping, min_group_size=2)
    assert [len(g.samples) for g in kept.groups] == [2]
    assert (
        kept.counts["truncated"] == 1
        and kept.counts["one_class_groups"] == 2
        and kept.counts["small_groups"] == 2
    )
    assert admit([group(sample(0))], default, min_group_size=1).counts["small_groups"] == 0


def test_a_truncated_response_has_label_0_for_every_verdict() -> None:
    assert label_sample(sample(0, stop=Stop.LENGTH), 1.0, 1).label == 0
    assert label_sample(sample(0), 1.0, 1).label == 1
    judged = [
        label_sample(sample(0, stop=Stop.LENGTH), float(y), y, judge_truncated=True).label
        for y in (0, 1)
    ]
    assert judged == [0, 1]


def labels_of(groups) -> list[int | None]:
    labels = []
    for group in groups:
        labels += [sample.label for sample in group.samples]
    return labels


def test_shuffled_labels_keep_their_number_and_their_rewards_and_change_with_the_step() -> None:
    """Objectives that train on rewards need shuffled rewards."""
    groups = [
        group(*(sample(k, prompt=f"p/{g}", label=int(g < 4)) for k in range(8))) for g in range(8)
    ]
    groups = [
        replace(g, samples=tuple(replace(s, reward=s.label - 0.5) for s in g.samples))
        for g in groups
    ]
    shuffled = []
    for g in shuffle_labels(groups, seed=1, step=1):
        for s in g.samples:
            shuffled.append(s)
    assert all(s.reward == s.label - 0.5 for s in shuffled)
    labels = [labels_of(shuffle_labels(groups, seed=1, step=step)) for step in (1, 1, 2)]
    assert labels[0] == labels[1] != labels[2]
    assert sum(labels[0]) == 32
    assert labels[0] != labels_of(groups)


def test_errors_keep_their_name_and_exit_code_across_processes() -> None:
    assert isinstance(named_error("CheckpointError", "x"), CheckpointError)
    assert named_error("DataError", "x").exit_code == ExitCode.MISCONFIGURED
    assert type(named_error("no such error", "x")) is PacsError
    from pacs_megatron.sglang.api import ServerRejectedError

    assert type(named_error(ServerRejectedError.__name__, "x")) is RolloutError


def test_a_driver_that_dies_is_named_with_its_log(tmp_path: Path) -> None:
    client = DriverClient(tmp_path, tmp_path, timeout_s=600.0)
    os.kill(client._process.pid, signal.SIGKILL)
    with pytest.raises(RolloutError, match="driver has ended unexpectedly; see its log"):
        client.receive()
    client.close()
    assert (tmp_path / "logs" / "driver.log").is_file()


def test_a_silent_driver_runs_into_the_time_limit(tmp_path: Path) -> None:
    client = DriverClient(tmp_path, tmp_path, timeout_s=1.5)
    os.kill(client._process.pid, signal.SIGSTOP)
    waits = []
    with pytest.raises(RolloutError, match=r"control_timeout_s=1\.5"):
        client.receive(on_wait=lambda: waits.append(1))
    assert waits
    os.kill(client._process.pid, signal.SIGKILL)
    client.close()
