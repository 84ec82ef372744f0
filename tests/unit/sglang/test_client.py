"""The client and the fleet against servers that misbehave on command: no sample lost, doubled,
stale or unchecked.
"""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from pacs_megatron.config.rollout_options import SglangRollout
from pacs_megatron.contracts import Sample, SampleRequest, SamplingOptions, Stop
from pacs_megatron.errors import RolloutError
from pacs_megatron.sglang.api import SglangApi
from pacs_megatron.sglang.client import SglangEngine
from pacs_megatron.sglang.decode import BadResponseError, RoutesShape, decode
from pacs_megatron.sglang.fleet import Health, Server
from tests.support.servers.client import (
    OPTIONS,
    VERSION,
    VOCAB,
    answer,
    check_all_there,
    engine,
    requests,
    until,
)
from tests.support.servers.fake_sglang import FakeSglang, Fault


@pytest.fixture
def fakes() -> Iterator[Callable[..., list[FakeSglang]]]:
    with ExitStack() as stack:

        def make(num: int, **options: Any) -> list[FakeSglang]:
            made = [stack.enter_context(FakeSglang(**options)) for _ in range(num)]
            for server in made:
                server.weight_version = VERSION
            return made

        yield make


def test_every_request_comes_back_once_and_groups_stay_together(
    fakes: Callable[..., list[FakeSglang]],
) -> None:
    servers = fakes(2)
    asked = requests(400)
    with engine(servers, max_in_flight=400) as client:
        check_all_there(list(client.stream(asked)), asked)
    homes = [{i.partition("#")[0] for i in server.asked} for server in servers]
    assert not homes[0] & homes[1]
    assert min(len(home) for home in homes) >= 40  # of 100 groups


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_server_needs_two_tokens_more_than_the_longest_request(
    fakes: Callable[..., list[FakeSglang]], missing: int
) -> None:
    """`config.checks.min_server_context`, by the limits that the real server shows in
    tests/integration/sglang/test_client_generation.py.
    """
    [server] = fakes(1)
    server.context = 30 + 20 + 2 - missing
    longest = requests(1, tokens=20, prompt=30)
    with engine([server], retries=0) as client:
        if not missing:
            check_all_there(list(client.stream(longest)), longest)
            return
        with pytest.raises(RolloutError, match=rf"{20 - missing} tokens with finish reason length"):
            list(client.stream(longest))


def test_the_request_contains_all_sampling_parameters(
    fakes: Callable[..., list[FakeSglang]],
) -> None:
    [server] = fakes(1)
    params = SamplingOptions(
        temperature=0.7, top_p=0.9, top_k=20, max_response_tokens=5, stop=("\n\n",)
    )
    asked = SampleRequest(
        id="a", prompt_id="p", token_ids=np.array([5, 6], np.int32), seed=2**62 + 1, params=params
    )
    with engine([server]) as client:
        list(client.stream([asked]))
    [body] = server.bodies
    assert body["input_ids"] == [5, 6]
    assert body["return_logprob"] is True
    assert body["sampling_params"] == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "max_new_tokens": 5,
        "sampling_seed": 2**62 + 1,
        "no_stop_trim": True,
        "stop": ["\n\n"],
        # Neutral values: a server may have other defaults.
        "min_p": 0.0,
        "min_new_tokens": 0,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
    }


def test_no_server_gets_more_than_its_share(fakes: Callable[..., list[FakeSglang]]) -> None:
    servers = fakes(2, latency_s=lambda _: 0.01)
    asked = requests(120)
    with engine(servers, max_in_flight=8) as client:
        check_all_there(list(client.stream(asked)), asked)
    assert [s.most_in_flight for s in servers] == [8, 8]


@pytest.mark.parametrize(
    "fault", ["http_500", "truncated", "nan", "short_logprobs", "other_id", "old_version"]
)
def test_what_one_server_spoils_the_other_delivers(
    fakes: Callable[..., list[FakeSglang]], fault: Fault
) -> None:
    bad, good = fakes(2, latency_s=lambda _: 0.005)
    bad.fault = fault
    asked = requests(80)
    with engine([bad, good], max_in_flight=8) as client:
        check_all_there(list(client.stream(asked)), asked)
    assert sum(bad.asked.values()) > 0
    assert bad.answered == 0 or fault in ("nan", "short_logprobs", "other_id", "old_version")


def test_a_server_that_dies_of_its_failures_has_no_request_started_over_twice(
    fakes: Callable[..., list[FakeSglang]],
) -> None:
    """The failure that makes it DEAD belongs to a request of its own, which must go elsewhere once,
    not twice.
    """
    bad, good = fakes(2, latency_s=lambda _: 0.02)
    bad.fault = "http_500"
    asked = requests(32)
    with engine([bad, good], max_in_flight=16, max_failures=1) as client:
        check_all_there(list(client.stream(asked)), asked)
    tries = bad.asked + good.asked
    # Each failed try costs another one; nothing else does.
    assert sum(good.asked.values()) == len(asked)
    assert max(good.asked.values()) == 1 and max(tries.values()) >= 2


@pytest.mark.parametrize("fault", ["http_500", "nan"])
def test_a_fault_everywhere_ends_in_an_error_that_names_it(
    fakes: Callable[..., list[FakeSglang]], fault: Fault
) -> None:
    servers = fakes(2)
    for server in servers:
        server.fault = fault
    reason = {"http_500": "HTTP 500", "nan": "log-prob nan at token 7"}[fault]
    with (
        engine(servers, max_failures=100) as client,
        pytest.raises(RolloutError, match=f"failed 4 times.*{reason}"),
    ):
        list(client.stream(requests(4)))


def test_servers_that_keep_failing_are_dead_and_then_all_are_down(
    fakes: Callable[..., list[FakeSglang]],
) -> None:
    servers = fakes(2)
    for server in servers:
        server.fault = "hang"
    match = r"no rollout server was usable for .* s: http.* dead: no response for .*; http"
    with (
        engine(servers, probe_timeout_s=0.3, all_down_after_s=3.0) as client,
        pytest.raises(RolloutError, match=match),
    ):
        list(client.stream(requests(4)))


def test_a_silent_server_loses_its_requests_to_the_others_and_comes_back(
    fakes: Callable[..., list[FakeSglang]],
) -> None:
    stopped, good = fakes(2, latency_s=lambda _: 0.02)
    asked = requests(64)
    with engine([stopped, good], max_in_flight=8, probe_timeout_s=0.5) as client:
        stream = client.stream(asked)
        samples = [next(stream) for _ in range(8)]
        stopped.fault = "hang"
        samples += list(stream)
        check_all_there(samples, asked)
        assert client.status()[0].health is Health.DEAD
        stopped.fault = "none"
        assert until(lambda: client.status()[0].health is Health.HEALTHY)
        before = sum(stopped.asked.values())
        again = requests(16, tag="2")
        check_all_there(list(client.stream(again)), again)
        assert sum(stopped.asked.values()) > before


def test_rejected_connections_for_a_while(fakes: Callable[..., list[FakeSglang]]) -> None:
    servers = fakes(2, latency_s=lambda _: 0.02)
    asked = requests(80)
    with engine(servers, max_in_flight=8) as client:
        stream = client.stream(asked)
        samples = [next(stream) for _ in range(8)]
        for server in servers:
            server.refuse()
        opener = threading.Timer(1.5, lambda: [server.accept() for server in servers])
        opener.start()
        samples += list(stream)
        opener.join()
        check_all_there(samples, asked)


def test_a_server_with_other_weights_gets_no_requests(
    fakes: Callable[..., list[FakeSglang]],
) -> None:
    stale, good = fakes(2)
    stale.weight_version = "0:zz"
    asked = requests(40)
    with engine([stale, good]) as client:
        check_all_there(list(client.stream(asked)), asked)
        assert sum(stale.asked.values()) == 0
        status = client.status()[0]
        assert status.health is Health.STALE
        assert "has weights '0:zz', current are '1:aa'" in status.reason
        stale.weight_version = VERSION
        assert until(lambda: client.status()[0].health is Health.HEALTHY)


def test_needs_weights_when_every_responding_server_is_stale(
    fakes: Callable[..., list[FakeSglang]],
) -> None:
    first, second = fakes(2)
    with engine([first, second]) as client:
        assert not client.needs_weights()
        first.weight_version = "default"  # as after a restart
        time.sleep(0.3)
        assert (
            not client.needs_weights()
        )  # the other one works on, the next update brings this one back
        second.refuse()
        assert until(client.needs_weights)
        assert client.status()[1].health is Health.DEAD
        client.begin_update()
        assert not client.needs_weights()
        first.weight_version = "2:bb"
        client.set_current(2, "bb")
        assert not client.needs_weights()
        asked = requests(4)
        assert len(list(client.stream(asked))) == 4
        second.accept()


def test_no_push_while_a_server_may_recover_by_itself(
    fakes: Callable[..., list[FakeSglang]],
) -> None:
    silent, stale = fakes(2)
    with engine([silent, stale], dead_after_s=1.5, probe_timeout_s=0.3) as client:
        silent.fault = "hang"
        stale.weight_version = "default"
        assert until(lambda: client.status()[0].health is Health.SUSPECT)
        assert not client.needs_weights()
        assert until(client.needs_weights)
        assert client.status()[0].health is Health.DEAD


def test_no_request_is_sent_during_an_update(fakes: Callable[..., list[FakeSglang]]) -> None:
    [server] = fakes(1)
    with engine([server]) as client:
        list(client.stream(requests(4)))
        client.begin_update()
        done: list[Sample] = []
        reader = threading.Thread(target=lambda: done.extend(client.stream(requests(8, tag="2"))))
        reader.start()
        time.sleep(0.4)
        assert sum(server.asked.values()) == 4
        server.weight_version = "2:bb"
        client.set_current(2, "bb")
        reader.join(600)
        assert all({span.version for span in sample.spans} == {2} for sample in done)
        assert len(done) == 8


def test_a_response_before_set_current_is_accepted_afterwards(
    fakes: Callable[..., list[FakeSglang]],
) -> None:
    """A server that continues (`retract`, `in_place`) may finish a request before the trainer's
    notification.
    """
    [server] = fakes(1)
    with engine([server]) as client:
        server.latency_s = lambda _: 0.3
        done: list[Sample] = []
        reader = threading.Thread(target=lambda: done.extend(client.stream(requests(8))))
        reader.start()
        assert until(lambda: sum(server.asked.values()) == 8)
        client.begin_update()
        server.weight_version = "2:bb"
        assert until(lambda: server.answered == 8)
        time.sleep(0.3)
        assert not done
        client.set_current(2, "bb")
        reader.join(600)
        assert len(done) == 8
        assert all({span.version for span in sample.spans} == {2} for sample in done)
        assert sum(server.asked.values()) == 8, "a finished response was requested again"
        assert client.status()[0].health is Health.HEALTHY


def test_a_response_with_weights_of_an_update_that_failed_is_rejected(
    fakes: Callable[..., list[FakeSglang]],
) -> None:
    broken, other = fakes(2)
    with engine([broken, other]) as client:
        broken.latency_s = other.latency_s = lambda _: 0.3
        done: list[Sample] = []
        reader = threading.Thread(target=lambda: done.extend(client.stream(requests(8))))
        reader.start()
        assert until(lambda: sum(broken.asked.values()) + sum(other.asked.values()) == 8)
        client.begin_update()
        broken.weight_version = "2:half"
        other.weight_version = "2:bb"
        assert until(lambda: broken.answered + other.answered == 8)
        client.set_current(2, "bb")
        reader.join(600)
        assert len(done) == 8
        for sample in done:
            assert {(span.version, span.digest) for span in sample.spans} == {(2, "bb")}
        assert client.status()[0].health is Health.STALE


def test_weights_that_change_behind_our_back_are_noticed(
    fakes: Callable[..., list[FakeSglang]],
) -> None:
    """A server that falls back to older weights between two probes: its response is rejected, then
    it is STALE.
    """
    [server] = fakes(1)
    with engine([server], probe_interval_s=1.0, all_down_after_s=1.5, max_failures=100) as client:
        client.set_current(0, "old")
        server.weight_version = "0:old"
        list(client.stream(requests(1, tag="0")))
        server.weight_version = VERSION
        client.set_current(1, "aa")
        list(client.stream(requests(1)))
        server.fault = "old_version"
        with pytest.raises(RolloutError, match=r"older than those at|failed 4 times"):
            list(client.stream(requests(1, tag="2")))


def test_cancelled_requests_end_here_and_on_the_server(
    fakes: Callable[..., list[FakeSglang]],
) -> None:
    [server] = fakes(1, latency_s=lambda body: 30.0 if "p1" in body["rid"] else 0.0)
    asked = requests(8)
    with engine([server], max_in_flight=6) as client:  # two of the eight wait in the queue
        stream = client.stream(asked)
        samples = [next(stream) for _ in range(4)]
        client.cancel([r.id for r in asked] + ["never-heard-of"])
        samples += list(stream)
        check_all_there(samples, asked[:4])
        assert until(lambda: len(server.aborted) == 4)
        assert until(lambda: client.status()[0].in_flight == 0)
        again = requests(4, tag="2")
        check_all_there(list(client.stream(again)), again)


def test_leaving_a_stream_early_cancels_the_rest(fakes: Callable[..., list[FakeSglang]]) -> None:
    [server] = fakes(1, latency_s=lambda body: 30.0 if "p1" in body["rid"] else 0.0)
    with engine([server]) as client:
        for sample in client.stream(requests(8)):
            assert sample.prompt_id == "p0"
            break
        assert until(lambda: client.status()[0].in_flight == 0)


def test_a_rejected_request_is_not_tried_again(fakes: Callable[..., list[FakeSglang]]) -> None:
    servers = fakes(2)
    with (
        engine(servers) as client,
        pytest.raises(RolloutError, match=r"failed 1 times.*HTTP 400.*longer than the context"),
    ):
        list(client.stream(requests(1, prompt=5000)))


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        ([3, VOCAB, 5], "prompt token id 272, expected 0 to 271: tokenizer and model"),
        ([3, -1], "prompt token id -1, expected 0 to 271"),
        ([], "the prompt has no tokens"),
    ],
)
def test_what_would_end_or_reject_the_server_is_not_sent(
    fakes: Callable[..., list[FakeSglang]], ids: list[int], reason: str
) -> None:
    """The real server crashes at a token id outside its vocabulary: not one of the stream's
    requests may go out.
    """
    [server] = fakes(1)
    params = SamplingOptions(temperature=1.0, top_p=1.0, top_k=0, max_response_tokens=4)
    bad = SampleRequest(
        id="bad", prompt_id="p", token_ids=np.array(ids, np.int32), seed=1, params=params
    )
    good = requests(4)
    with engine([server]) as client:
        with pytest.raises(RolloutError, match=f"request bad: {reason}"):
            list(client.stream([*good, bad]))
        assert sum(server.asked.values()) == 0
        check_all_there(list(client.stream(good)), good)


def test_an_answer_outside_the_vocabulary_is_rejected(
    fakes: Callable[..., list[FakeSglang]],
) -> None:
    [server] = fakes(1)
    [request] = requests(1, tokens=251)  # the fake's tokens go up to 250
    with engine([server], max_failures=100) as client:
        client._vocab_size = 250
        with pytest.raises(RolloutError, match="token id 250, expected 0 to 249"):
            list(client.stream([request]))


def test_two_streams_at_a_time_do_not_mix(fakes: Callable[..., list[FakeSglang]]) -> None:
    servers = fakes(2, latency_s=lambda _: 0.005)
    train = requests(60, tag="1")
    evaluate = requests(60, tag="eval1")
    got: dict[str, list[Sample]] = {}
    with engine(servers, max_in_flight=8) as client:
        readers = [
            threading.Thread(
                target=lambda key, asked: got.update({key: list(client.stream(asked))}), args=args
            )
            for args in (("train", train), ("evaluate", evaluate))
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(600)
    check_all_there(got["train"], train)
    check_all_there(got["evaluate"], evaluate)


def test_the_key_is_sent(fakes: Callable[..., list[FakeSglang]]) -> None:
    [server] = fakes(1, api_key="sesame")
    asked = requests(4)
    with engine([server]) as client:
        check_all_there(list(client.stream(asked)), asked)
    server.api_key = "another"
    wrong = Server(SglangApi(url=server.url, api_key="sesame"))
    options = SglangRollout.model_construct(
        **OPTIONS | {"max_failures": 1, "retries": 0, "all_down_after_s": 0.5}
    )
    with SglangEngine([wrong], options, vocab_size=VOCAB) as client:
        client.set_current(1, "aa")
        with pytest.raises(RolloutError, match="HTTP 401"):
            list(client.stream(requests(1)))


def test_closing_ends_an_open_stream(fakes: Callable[..., list[FakeSglang]]) -> None:
    [server] = fakes(1, latency_s=lambda _: 30.0)
    with engine([server]) as client:
        stream = client.stream(requests(4))
        threading.Timer(0.2, client.close).start()
        with pytest.raises(RolloutError, match="was closed"):
            next(stream)


# --------------------------------------------------------------------------------------------------
# decode


def test_decode_of_a_good_answer_with_two_versions() -> None:
    got = decode(answer(), "r/1", 3)
    assert got.token_ids.tolist() == [7, 8, 9]
    assert got.logprobs.tolist() == [-0.5, -0.25, -1.0]
    assert got.spans == (("1:a", 0, 2), ("2:b", 2, 3))
    assert got.stop is Stop.LENGTH
    assert decode(answer(finish_reason={"type": "stop", "matched": 9}), "r/1", 9).stop is Stop.EOS
    assert (
        decode(answer(finish_reason={"type": "abort", "message": ""}), "r/1", 9).stop
        is Stop.ABORTED
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"id": "r/2"}, "response to request 'r/2', expected 'r/1'"),
        ({"output_ids": [7, 8], "finish_reason": {"type": "stop"}}, "2 tokens but log-probs of 3"),
        ({"output_ids": [7, 8, 1]}, "or of other tokens"),
        (
            {"output_token_logprobs": [[-0.5, 7, None], [float("inf"), 8, None], [-1.0, 9, None]]},
            "malformed response",
        ),
        (
            {"output_token_logprobs": [[-0.5, 7, None], [0.7, 8, None], [-1.0, 9, None]]},
            "log-prob 0.69.* at token 1",
        ),
        (
            {"output_token_logprobs": [[None, 7, None], [-0.7, 8, None], [-1.0, 9, None]]},
            "log-prob nan at token 0",
        ),
        ({"output_token_logprobs": None}, "malformed response"),
        ({"weight_versions": [{"version": "1:a", "start": 0, "end": 2}]}, "spans end at 2 of 3"),
        (
            {"weight_versions": [{"version": "1:a", "start": 1, "end": 3}]},
            "expected them contiguous",
        ),
        ({"weight_versions": [{"version": "", "start": 0, "end": 3}]}, "without a weight version"),
        ({"finish_reason": {"type": "tired"}}, "finish reason"),
        (
            {"finish_reason": {"type": "length", "length": 3}, "output_ids": [7, 8, 9], "max": 4},
            "expected 4",
        ),
        (
            {
                "output_ids": [7, 8, 2**31],
                "output_token_logprobs": [[-1.0, 7], [-1.0, 8], [-1.0, 2**31]],
            },
            "out of range",
        ),
    ],
)
def test_decode_rejects(changes: dict[str, Any], reason: str) -> None:
    max_tokens = changes.pop("max", 3)
    with pytest.raises(BadResponseError, match=reason):
        decode(answer(**changes), "r/1", max_tokens)


ROUTES = np.array(
    [[[0, 3], [2, 1]], [[1, 0], [3, 2]], [[2, 3], [0, 1]], [[1, 3], [0, 2]]], dtype="<i4"
)
"""of 2 prompt tokens and 3 response tokens: all but the last"""


def encoded(routes: np.ndarray) -> str:
    return base64.b64encode(routes.astype("<i4").tobytes()).decode()


def test_decode_returns_the_experts() -> None:
    shape = RoutesShape(layers=2, top_k=2, experts=4, prompt_len=2)
    got = decode(answer(routed_experts=encoded(ROUTES)), "r/1", 3, shape).routes
    assert got is not None and got.dtype == np.int16
    np.testing.assert_array_equal(got, ROUTES)
    assert decode(answer(routed_experts=encoded(ROUTES)), "r/1", 3).routes is None
    assert len(encoded(np.tile(ROUTES, (25, 1, 1)))) <= shape.num_bytes(100)


@pytest.mark.parametrize(
    ("experts", "reason"),
    [
        (
            None,
            "no routed_experts, which policy.routing=replay_sampler needs; start the server with "
            "--enable-return",
        ),
        ("%%%", "no base64"),
        (encoded(ROUTES)[:-5], "no base64"),
        (encoded(ROUTES[:-1]), r"12 numbers, expected 16 \(4 tokens, 2 layers, top 2\)"),
        (encoded(ROUTES + 1), "1 to 4, expected 0 to 3"),
        (encoded(ROUTES - 1), "-1 to 2, expected 0 to 3"),
        (encoded(ROUTES * [[[1]], [[1]], [[0]], [[1]]]), "an expert twice at token 2"),
    ],
)
def test_decode_rejects_other_experts(experts: str | None, reason: str) -> None:
    with pytest.raises(BadResponseError, match=reason):
        decode(
            answer(routed_experts=experts),
            "r/1",
            3,
            RoutesShape(layers=2, top_k=2, experts=4, prompt_len=2),
        )


def test_decode_rejects_half_an_answer() -> None:
    with pytest.raises(BadResponseError, match="malformed response of 100 bytes"):
        decode(answer()[:100], "r/1", 3)
