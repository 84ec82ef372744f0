"""The client against servers that answer what no SGLang would: each a named error or another try,
never a wrong sample.
"""

from __future__ import annotations

import json
import logging
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from pacs_megatron.contracts import Sample
from pacs_megatron.errors import RolloutError
from pacs_megatron.sglang import client as sglang_client
from pacs_megatron.sglang import fleet
from pacs_megatron.sglang.api import (
    BadControlResponseError,
    ServerRejectedError,
    ServerUnreachableError,
    SglangApi,
)
from pacs_megatron.sglang.decode import BadResponseError, decode
from pacs_megatron.sglang.fleet import Health
from tests.support.hostile import serve
from tests.support.servers.fake_sglang import FakeSglang
from tests.unit.sglang.test_client import answer, check_all_there, engine, requests, until

VERSION = "1:aa"


@pytest.fixture
def fake() -> Iterator[FakeSglang]:
    with FakeSglang() as made:
        made.weight_version = VERSION
        yield made


@pytest.fixture
def other() -> Iterator[FakeSglang]:
    with FakeSglang() as made:
        made.weight_version = VERSION
        yield made


def http(body: bytes, *headers: str, status: str = "200 OK", length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {size}", "Connection: close", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


HTML = b"<html><body><h1>502 Bad Gateway</h1>\n<hr>nginx</body></html>"
RAW = {
    "html": (http(HTML), "malformed response .*<html><body><h1>502 Bad Gateway</h1> <hr>nginx"),
    "html 502": (http(HTML, status="502 Bad Gateway"), "HTTP 502: <html>"),
    "empty": (http(b""), "malformed response of 0 bytes"),
    "null": (http(b"null"), "malformed response of 4 bytes"),
    "a list": (http(b"[]"), "malformed response of 2 bytes"),
    "no JSON": (http(b"{" * 5000), "malformed response of 5000 bytes"),
    "forbidden": (
        http(b"no", status="403 Forbidden"),
        "HTTP 403: no; the server expects another key: see rollout.api_key_env",
    ),
    "closed at once": (b"", "Server disconnected|Connection reset|Broken pipe"),
    "closed in the head": (
        b"HTTP/1.1 200 OK\r\nContent-Le",
        "Server disconnected|Connection reset|ClientPayloadError|Error",
    ),
    "closed in the body": (http(answer()[:50], length=5000), "ClientPayloadError"),
    "no HTTP": (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "Bad status line|Expected HTTP"),
    "huge head": (http(b"", "X-Filler: " + "x" * 200_000), "[Gg]ot more than|too long|exceeds"),
    "not compressed": (
        http(b"\x1f\x8bnonsense", "Content-Encoding: gzip"),
        "the response is compressed",
    ),
}


@pytest.mark.parametrize("what", RAW)
def test_a_malformed_response_is_quoted_in_the_error(fake: FakeSglang, what: str) -> None:
    raw, reason = RAW[what]
    fake.raw["/generate"] = raw
    with engine([fake], retries=1, max_failures=100) as client:
        with pytest.raises(RolloutError, match=f"failed 2 times: (?s:.*){reason}") as caught:
            list(client.stream(requests(1)))
        assert "\n" not in str(caught.value)
        fake.raw.clear()
        again = requests(4, tag="2")
        check_all_there(list(client.stream(again)), again)


@pytest.mark.parametrize(
    "status", ["301 Moved", "302 Found", "307 Temporary Redirect", "308 Permanent Redirect"]
)
def test_a_redirect_is_not_followed(fake: FakeSglang, other: FakeSglang, status: str) -> None:
    """The prompts and, to the same origin, the key would follow a redirect."""
    fake.raw["/generate"] = http(b"", f"Location: {other.url}/generate", status=status)
    with (
        engine([fake], retries=0) as client,
        pytest.raises(RolloutError, match="redirects are not followed"),
    ):
        list(client.stream(requests(1)))
    assert not other.asked


def test_an_endless_response_is_cut_off(fake: FakeSglang, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_client, "RESPONSE_BYTES", 10_000)
    fake.raw["/generate"] = http(b" " * 100_000)
    with (
        engine([fake], retries=0) as client,
        pytest.raises(RolloutError, match="response longer than 18192 bytes"),
    ):
        list(client.stream(requests(1)))


@pytest.mark.parametrize(
    "body", [b"[]", b"null", b'{"weight_version"', HTML, b"", b'{"model_path": "x"}']
)
def test_a_probe_that_is_answered_with_nonsense_makes_no_server_usable(
    fake: FakeSglang, body: bytes
) -> None:
    """... and does not end the watch: the server comes back when it answers."""
    fake.raw["/model_info"] = http(body)
    with engine([fake]) as client:
        [status] = client.status()
        assert status.health is Health.SUSPECT and "is it SGLang?" in status.reason
        fake.raw.clear()
        assert until(lambda: client.status()[0].health is Health.HEALTHY)


def test_a_bug_in_the_fleet_ends_the_streams_at_once(
    fake: FakeSglang, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine([fake], probe_timeout_s=0.3) as client:
        fake.fault = "hang"
        threading.Timer(0.3, setattr, (client._fleet, "_query_version", None)).start()
        with pytest.raises(TypeError, match="not callable"):
            list(client.stream(requests(2)))


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


def test_thousands_of_requests_at_once(fake: FakeSglang) -> None:
    """As many connections; each answer once."""
    fake.held_until = 3000
    asked = requests(3000, tokens=2)
    limits = {"probe_timeout_s": 600.0, "dead_after_s": 1200.0, "request_timeout_s": 600.0}
    with engine([fake], max_in_flight=3000, **limits) as client:
        check_all_there(list(client.stream(asked)), asked)
    assert fake.most_in_flight == 3000


def test_the_limit_of_open_files_is_raised_as_far_as_it_goes(
    fake: FakeSglang, caplog: pytest.LogCaptureFixture
) -> None:
    """If the limit is too low, the error names it; otherwise requests would fail like faults of the
    servers.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        with engine([fake], max_in_flight=4000):
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(hard, 1 << 20)
        with caplog.at_level(logging.WARNING), engine([fake], max_in_flight=10_000_000):
            assert f"more files than the {hard} that this host allows" in caplog.text
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_answers_are_decoded_outside_of_the_loop(
    fake: FakeSglang, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def note(*args: Any) -> Any:
        threads.append(threading.current_thread().name)
        return decode(*args)

    monkeypatch.setattr(sglang_client, "decode", note)
    with engine([fake], max_in_flight=48) as client:
        assert len(list(client.stream(requests(48, tokens=6000)))) == 48
        assert len(threads) == 48 and client._thread.name not in threads


# ----------------------------------------------------------------------------------------------------------------
# fleet
def test_requests_on_a_server_that_missed_an_update_start_over_elsewhere(
    fake: FakeSglang, other: FakeSglang
) -> None:
    """An update that failed half-way leaves it paused for good: what it works on would be waited
    for an hour.
    """
    with engine([fake, other], max_in_flight=4) as client:
        fake.paused = other.paused = True  # `retract` or `in_place`: requests wait
        got: list[Sample] = []
        asked = requests(8)
        reader = threading.Thread(target=lambda: got.extend(client.stream(asked)))
        reader.start()
        assert until(lambda: fake.most_in_flight == 4 and other.most_in_flight == 4)
        client.begin_update()
        fake.weight_version = "2:updating"
        other.weight_version = "2:bb"
        other.paused = False
        client.set_current(2, "bb")
        reader.join(600)
        assert not reader.is_alive() and len(got) == 8
        assert {span.digest for sample in got for span in sample.spans} == {"bb"}
        assert client.status()[0].health is Health.STALE and client.status()[0].in_flight == 0
        assert until(lambda: len(fake.aborted) == 4)  # it listens still


def test_requests_on_a_server_with_complete_older_weights_may_finish(
    fake: FakeSglang, other: FakeSglang
) -> None:
    """It did not take part in the update and is not paused."""
    fake.latency_s = other.latency_s = lambda _: 1.0
    with engine([fake, other], max_in_flight=4) as client:
        got: list[Sample] = []
        asked = requests(8)
        reader = threading.Thread(target=lambda: got.extend(client.stream(asked)))
        reader.start()
        assert until(lambda: fake.most_in_flight == 4 and other.most_in_flight == 4)
        client.begin_update()
        other.weight_version = "2:bb"
        client.set_current(2, "bb")
        reader.join(600)
        assert len(got) == 8 and sum(fake.asked.values()) == 4


def test_a_silent_server_is_dead_although_updates_come_more_often_than_that(
    fake: FakeSglang, other: FakeSglang
) -> None:
    """Each update waits for a server that is not DEAD; its silence counts over updates."""
    with engine([fake, other], dead_after_s=1.5, probe_timeout_s=0.2) as client:
        fake.fault = "hang"
        began = time.monotonic()
        while client.status()[0].health is not Health.DEAD and time.monotonic() - began < 600:
            time.sleep(0.4)
            client.begin_update()
            client.set_current(1, "aa")
        assert client.status()[0].health is Health.DEAD
        assert until(lambda: client.status()[1].health is Health.HEALTHY)


def test_silence_during_an_update_marks_no_server_dead(
    fake: FakeSglang, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No probe runs then, and a server that loads weights does not respond."""
    passed_s = [0.0]
    monkeypatch.setattr(
        fleet, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + passed_s[0])
    )
    with engine([fake], dead_after_s=600.0, probe_timeout_s=0.3) as client:
        client.begin_update()
        fake.fault = "hang"
        passed_s[0] = 3600.0
        assert client.status()[0].health is Health.STALE
        client.set_current(1, "aa")
        assert client.status()[0].health is Health.SUSPECT
        fake.fault = "none"
        assert until(lambda: client.status()[0].health is Health.HEALTHY)


def test_a_dead_server_of_others_that_comes_back_is_found_during_an_update(
    fake: FakeSglang,
) -> None:
    """Its owner restarts it while the trainer steps: the update that then begins must not end the
    run.
    """
    with engine([fake], dead_after_s=0.5, probe_timeout_s=0.3) as client:
        fake.refuse()
        assert until(lambda: client.status()[0].health is Health.DEAD)
        client.begin_update()
        [status] = client.status()
        assert status.health is Health.DEAD and status.returning
        fake.weight_version = "default"
        fake.accept()
        assert until(lambda: client.status()[0].health is Health.STALE)
        assert client.status()[0].reason == "responds again"
        fake.weight_version = "2:bb"
        client.set_current(2, "bb")
        assert until(lambda: client.status()[0].health is Health.HEALTHY)


def test_two_clients_of_one_run_use_different_ids(fake: FakeSglang) -> None:
    """A run that was killed and goes on: the server may still be at work on the first client's
    requests.
    """
    fake.latency_s = lambda _: 0.5
    asked = requests(8)
    got: list[Sample] = []
    with engine([fake]) as killed, engine([fake]) as client:
        reader = threading.Thread(target=lambda: got.extend(killed.stream(asked)))
        reader.start()
        assert until(lambda: fake.most_in_flight == 8)
        check_all_there(list(client.stream(asked)), asked)
        reader.join(600)
    assert len(got) == 8 and len({body["rid"] for body in fake.bodies}) == 16


def test_calls_after_close_raise(fake: FakeSglang) -> None:
    with engine([fake]) as client:
        pass
    with pytest.raises(RolloutError, match="was closed"):
        list(client.stream(requests(1)))
    with pytest.raises(RolloutError, match="was closed"):
        client.begin_update()


# --------------------------------------------------------------------------------------------------------------
# control
@pytest.mark.parametrize("body", [b"", b"[]", b"null", HTML, b"{}"])
def test_control_answers_that_are_none_are_named_errors(fake: FakeSglang, body: bytes) -> None:
    api = SglangApi(url=fake.url, timeout_s=5.0)
    calls: dict[str, Callable[[], Any]] = {
        "/model_info": api.weight_version,
        "/server_info": api.placement,
        "/weights_checker": api.checksums,
    }
    for path, call in calls.items():
        fake.raw[path] = http(body)
        with pytest.raises(
            BadControlResponseError, match=rf"{path}: unexpected response .*; is it SGLang\?"
        ):
            call()


def test_a_control_call_ends_in_time_though_the_server_sends_a_byte_now_and_then() -> None:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()

    def trickle() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            try:
                while True:
                    connection.sendall(b" ")
                    time.sleep(0.1)
            except OSError:
                return

    thread = threading.Thread(target=trickle, daemon=True)
    thread.start()
    began = time.monotonic()
    with pytest.raises(ServerUnreachableError, match=r"response within 0\.5 s"):
        SglangApi(url=f"http://127.0.0.1:{listener.getsockname()[1]}").call("/x", timeout_s=0.5)
    assert time.monotonic() - began < 600  # the server never ends its response
    thread.join(600)
    listener.close()


def test_an_announced_terabyte_takes_no_memory() -> None:
    stop = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0.2)
    thread = threading.Thread(target=serve, args=(http(b"{", length=10**12), stop, listener))
    thread.start()
    try:
        with pytest.raises(ServerUnreachableError, match=r"no response .*payload is not completed"):
            SglangApi(url=f"http://127.0.0.1:{listener.getsockname()[1]}").weight_version()
    finally:
        stop.set()
        thread.join()
        listener.close()


def test_a_wrong_key_names_the_option() -> None:
    with FakeSglang(api_key="sesame") as fake:
        for key in (None, "open"):
            with pytest.raises(
                ServerRejectedError, match=r"HTTP 401.*see rollout\.api_key_env"
            ) as caught:
                SglangApi(url=fake.url, api_key=key).weight_version()
            assert "open" not in str(caught.value)
