"""Control calls to servers that misbehave: each a named error, in time and in bounds."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from pacs_megatron.sglang.api import (
    BadControlResponseError,
    ServerRejectedError,
    ServerUnreachableError,
    SglangApi,
)
from tests.support.inputs.servers import serving
from tests.support.servers.client import http
from tests.support.servers.fake_sglang import FakeSglang

HTML = b"<html><body><h1>502 Bad Gateway</h1>\n<hr>nginx</body></html>"


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
    with (
        serving({"raw": http(b"{", length=10**12).decode()}) as url,
        pytest.raises(ServerUnreachableError, match=r"no response .*payload is not completed"),
    ):
        SglangApi(url=url).weight_version()


def test_a_wrong_key_names_the_option() -> None:
    with FakeSglang(api_key="sesame") as fake:
        for key in (None, "open"):
            with pytest.raises(
                ServerRejectedError, match=r"HTTP 401.*see rollout\.api_key_env"
            ) as caught:
                SglangApi(url=fake.url, api_key=key).weight_version()
            assert "open" not in str(caught.value)
