"""The client against servers that answer what no SGLang would: each a named error or another try,
never a wrong sample.
"""

from __future__ import annotations

import logging
import resource
import threading
from typing import Any

import pytest

from pacs_megatron.contracts import Sample
from pacs_megatron.errors import RolloutError
from pacs_megatron.sglang import client as sglang_client
from pacs_megatron.sglang.decode import decode
from tests.support.servers.client import answer, check_all_there, engine, http, requests, until
from tests.support.servers.fake_sglang import FakeSglang

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
