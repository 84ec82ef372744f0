"""Servers that misbehave: the answer of a case to every request, as data."""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

Respond = Callable[[socket.socket, bytes], None]
"""Responds to the request with this body."""


@contextmanager
def serving(behaviour: dict[str, Any] | str) -> Iterator[str]:
    """The address of a server; every connection has a thread.

    Args:
        behaviour: name of a function below, or a map: `raw` bytes; or `status`, `headers`, `body`;
            `rewards` a value for each sample of the request, in the text `form`, and `then` more
            bytes. Texts are as in `_text`.
    """
    stop = threading.Event()
    if behaviour == "closed":
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = f"http://127.0.0.1:{server.getsockname()[1]}"
        yield address
        return
    respond = BEHAVIOURS[behaviour]() if isinstance(behaviour, str) else _responder(behaviour)

    def accept() -> None:
        while not stop.is_set():
            with suppress(OSError):
                connection, _ = server.accept()
                threading.Thread(target=_serve, args=(connection, respond), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            stop.set()
            thread.join()


def _serve(connection: socket.socket, respond: Respond) -> None:
    with connection, contextlib.suppress(OSError):
        connection.settimeout(20)
        request = b""
        while b"\r\n\r\n" not in request:
            piece = connection.recv(65536)
            if not piece:
                return
            request += piece
        head, _, body = request.partition(b"\r\n\r\n")
        size = 0
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                size = int(line.partition(b":")[2])
        while len(body) < size:
            body += connection.recv(65536)
        respond(connection, body)


def reply(body: bytes, headers: list[str], status: str = "200 OK") -> bytes:
    """An HTTP response."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close"]
    return "\r\n".join([*lines, *headers, "", ""]).encode("latin-1") + body


def _text(value: Any) -> bytes:
    """Bytes of letters up to U+00FF, of pairs [text, times], or of JSON."""
    if isinstance(value, str):
        return (
            value.encode("latin-1") if value.isascii() or max(value) <= "\xff" else value.encode()
        )
    if isinstance(value, list):
        return b"".join(
            _text(part) if isinstance(part, str) else _text(part[0]) * part[1] for part in value
        )
    return json.dumps(value).encode()


def _responder(behaviour: dict[str, Any]) -> Respond:
    headers = behaviour.get("headers", [])
    status = behaviour.get("status", "200 OK")

    def respond(connection: socket.socket, request: bytes) -> None:
        if "raw" in behaviour:
            connection.sendall(_text(behaviour["raw"]))
            return
        body = behaviour.get("body", "")
        if "rewards" in behaviour:
            body = _rewards(request, behaviour)
        data = _text(body)
        if "encode" in behaviour:
            data = data.decode().encode(behaviour["encode"])
        if "gzip" in behaviour:
            data = gzip.compress(bytes(behaviour["gzip"]))
        connection.sendall(reply(data, headers, status) + _text(behaviour.get("then", "")))

    return respond


def _rewards(request: bytes, behaviour: dict[str, Any]) -> str:
    """The JSON of a reward server: `rewards` for each sample, in the text `form`."""
    number = len(json.loads(request)["samples"]) + behaviour.get("more", 0)
    reward = str(behaviour["rewards"]) * behaviour.get("digits", 1)
    rewards = ", ".join([reward] * number)
    return str(behaviour.get("form", '{"rewards": [%s]}')) % rewards


# -------------------------------------------------------------- behaviours that take their time
def _drip() -> Respond:
    def respond(connection: socket.socket, _: bytes) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        for _byte in range(1000):
            connection.sendall(b" ")
            time.sleep(0.5)

    return respond


def _endless_chunks() -> Respond:
    def respond(connection: socket.socket, _: bytes) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            connection.sendall(b"10000\r\n" + b"[" * 65536 + b"\r\n")

    return respond


def _endless_continue() -> Respond:
    def respond(connection: socket.socket, _: bytes) -> None:
        while True:
            connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            time.sleep(0.01)

    return respond


def _silent() -> Respond:
    def respond(connection: socket.socket, _: bytes) -> None:
        time.sleep(60)

    return respond


def _busy_once() -> Respond:
    """503 for the first request, then a reward of 0 for every sample."""
    seen: list[int] = []
    zeros = _responder({"rewards": 0})

    def respond(connection: socket.socket, request: bytes) -> None:
        seen.append(1)
        if len(seen) == 1:
            connection.sendall(reply(b"", [], "503 Service Unavailable"))
        else:
            zeros(connection, request)

    return respond


def _in_chunks() -> Respond:
    """A reward of 0 for every sample, in a body of three chunks."""

    def respond(connection: socket.socket, request: bytes) -> None:
        data = _rewards(request, {"rewards": 0}).encode()
        head = [
            *("HTTP/1.1 200 OK", "Content-Type: application/json", "Transfer-Encoding: chunked"),
            *("Connection: close", "", ""),
        ]
        parts = [data[:5], data[5:], b""]
        chunks = [b"%x\r\n%b\r\n" % (len(part), part) for part in parts]
        connection.sendall("\r\n".join(head).encode() + b"".join(chunks))

    return respond


BEHAVIOURS: dict[str, Callable[[], Respond]] = {
    "a byte now and then": _drip,
    "chunks without an end": _endless_chunks,
    "continue without an end": _endless_continue,
    "silent": _silent,
    "busy once": _busy_once,
    "in chunks": _in_chunks,
}
