"""SGLang's control endpoints (version 0.5.23; sessions are probed for older ones), one blocking call each.

Generation is in `sglang_client`. Every call opens its own connection, so an instance may be used by several threads.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from pacs_megatron.errors import ConfigError, RolloutError

PauseMode = Literal["abort", "in_place", "retract"]
"""`abort`: running requests return what they have. `retract`: they wait, and their KV cache is computed anew by the
new weights. `in_place`: they wait and go on with the old KV cache."""
MemoryTag = Literal["kv_cache", "weights", "cuda_graph"]
T = TypeVar("T")
FRESH_VERSION = "default"
"""The `weight_version` of a server that was just started."""


class ServerUnreachableError(RolloutError):
    """No answer: connection refused or broken, or the time limit passed."""


class BadControlAnswerError(RolloutError):
    """An answer of status 200 that is not what SGLang answers."""


class ServerRefusedError(RolloutError):
    """An answer other than 200; `status` is the HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """What a server says it holds: `version` counts from 0, `digest` is `WeightDigest`'s of that export."""

    version: int
    digest: str

    def __str__(self) -> str:
        """The `weight_version` that a server is given and that comes back with every token span."""
        return f"{self.version}:{self.digest}"

    @classmethod
    def parse(cls, text: str) -> WeightVersion | None:
        """None for anything that is not ours: a fresh server's `default`, or an update under way."""
        number, _, digest = text.partition(":")
        if not number.isdecimal() or not digest or digest == UPDATING:
            return None
        return cls(int(number), digest)

    @staticmethod
    def is_fresh(text: str) -> bool:
        """Whether it is the version of a server that nothing was pushed to since its start."""
        return text == FRESH_VERSION


UPDATING = "updating"


def updating_version(version: int) -> str:
    """The `weight_version` of a server whose weights are mixed; `WeightVersion.parse` refuses it."""
    return f"{version}:{UPDATING}"


def check_url(url: str) -> str:
    """`url` without a trailing slash. Raises ConfigError unless it is plain http://host:port."""
    parts = urlsplit(url)
    try:
        has_port = bool(parts.port)
    except ValueError:  # no number, or beyond 65535
        has_port = False
    if "@" in parts.netloc:  # not repeated: it is a secret
        raise ConfigError("rollout.urls: an address with a user or password; name the key by rollout.api_key_env")
    if parts.scheme != "http" or not parts.hostname or not has_port or parts.path not in ("", "/"):
        raise ConfigError(f"rollout.urls: got {url!r}, expected http://<host>:<port>")
    if parts.query or parts.fragment:
        raise ConfigError(f"rollout.urls: got {url!r}, expected http://<host>:<port> and nothing behind it")
    return f"http://{parts.netloc.lower()}"


def hint(status: int) -> str:
    """What to do about an HTTP status, as the end of a message; empty where it says nothing by itself."""
    if status in (401, 403):
        return "; the server wants another key: see rollout.api_key_env"
    if 300 <= status < 400:
        return "; redirects are not followed: name the server's own address"
    return ""


def excerpt(data: bytes) -> str:
    """The begin of an answer as one line."""
    return " ".join(data[:300].decode(errors="replace").split())


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangApi:
    """One server. `timeout_s` bounds a call unless the call names its own."""

    url: str
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = 30.0

    def headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        return headers

    def call(self, path: str, body: Mapping[str, Any] | None = None, timeout_s: float | None = None) -> bytes:
        """The body of the answer: GET without `body`, else POST. Raises ServerUnreachableError, ServerRefusedError.

        The time limit is of the whole call, also where a server sends a byte now and then.
        """
        parts = urlsplit(self.url)
        limit = self.timeout_s if timeout_s is None else timeout_s
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=limit)
        overdue = threading.Event()
        timer = None
        try:
            connection.connect()
            timer = threading.Timer(limit, _break_off, (connection.sock, overdue))
            timer.daemon = True
            timer.start()
            method, payload = ("GET", None) if body is None else ("POST", json.dumps(body))
            connection.request(method, path, payload, self.headers())
            answer = connection.getresponse()
            data = answer.read()
        except (OSError, http.client.HTTPException) as error:
            reason = f"{type(error).__name__}: {error}".rstrip(": ")
            is_late = overdue.is_set() or isinstance(error, TimeoutError)
            what = f"no answer within {limit:g} s" if is_late else "no answer"
            raise ServerUnreachableError(f"{self.url}{path}: {what} ({reason})") from error
        finally:
            if timer is not None:
                timer.cancel()
            connection.close()
        if overdue.is_set():  # without a length, what came before the end looks whole
            raise ServerUnreachableError(f"{self.url}{path}: no whole answer within {limit:g} s")
        if answer.status != 200:
            message = f"{self.url}{path}: HTTP {answer.status}, expected 200: {excerpt(data)}{hint(answer.status)}"
            raise ServerRefusedError(message, answer.status)
        return data

    def order(self, path: str, body: Mapping[str, Any], timeout_s: float | None = None) -> None:
        """A call that changes something. Raises ServerRefusedError also for a status of 200 with `success: false`."""
        data = self.call(path, body, timeout_s)
        with contextlib.suppress(ValueError):  # some answer in words
            answer = json.loads(data)
            if isinstance(answer, dict) and answer.get("success") is False:
                raise ServerRefusedError(f"{self.url}{path}: HTTP 200, but no success: {excerpt(data)}", 200)

    def ask(
        self, path: str, read: Callable[[Any], T], body: Mapping[str, Any] | None = None, timeout_s: float | None = None
    ) -> T:
        """What `read` takes from the answer's JSON. Raises BadControlAnswerError where that is not there."""
        data = self.call(path, body, timeout_s)
        try:
            return read(json.loads(data))
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            raise BadControlAnswerError(
                f"{self.url}{path}: unexpected answer ({type(error).__name__}: {error}): {excerpt(data)}; is it SGLang?"
            ) from error

    def ready(self, timeout_s: float = 2.0) -> bool:
        """Whether it takes requests. Cheap; `/health` sleeps a second by design."""
        try:
            self.call("/ready", timeout_s=timeout_s)
        except (ServerUnreachableError, ServerRefusedError):
            return False
        return True

    def server_info(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Arguments and state; its scheduler has to answer, so a stuck one is noticed."""
        return self.ask("/server_info", dict, timeout_s=timeout_s)

    def placement(self, timeout_s: float | None = None) -> tuple[int, str]:
        """(tensor-parallel size, device); its scheduler has to answer."""
        return self.ask("/server_info", lambda info: (int(info["tp_size"]), str(info["device"])), timeout_s=timeout_s)

    def weight_version(self, timeout_s: float | None = None) -> str:
        return self.ask("/model_info", lambda info: str(info["weight_version"]), timeout_s=timeout_s)

    def set_weight_version(self, text: str) -> None:
        self.order("/update_weight_version", {"new_version": text, "abort_all_requests": False})

    def pause(self, mode: PauseMode, timeout_s: float | None = None) -> None:
        self.order("/pause_generation", {"mode": mode}, timeout_s)

    def resume(self) -> None:
        self.order("/continue_generation", {})

    def abort(self, rid: str | None = None) -> None:
        """Ends one request, or all of them; each returns what it has."""
        self.call("/abort_request", {"abort_all": True} if rid is None else {"rid": rid})

    def flush_cache(self) -> None:
        """Drops the KV cache. Refused (400) while requests run."""
        self.order("/flush_cache", {})

    def begin_weight_update(self) -> bool:
        """Opens a session; False when this server knows none (<= 0.5.20). One left open is closed first."""
        try:
            self.order("/begin_weight_update", {})
        except ServerRefusedError as refused:
            if refused.status == 404:
                return False
            if "already open" not in str(refused):
                raise
            self.end_weight_update()
            self.order("/begin_weight_update", {})
        return True

    def end_weight_update(self, timeout_s: float | None = None) -> None:
        self.order("/end_weight_update", {}, timeout_s)

    def checksums(self, skip: Sequence[str] = (), timeout_s: float | None = None) -> list[dict[str, str]]:
        """Hash by parameter name of SGLang's own (fused) module tree, one mapping a tensor-parallel rank.

        `skip` names parameters to leave out, so that a sample costs what a sample should.
        """
        body = {"action": "checksum", "skip_tensor_list": list(skip)}
        return self.ask(
            "/weights_checker",
            lambda answer: [{str(k): str(v) for k, v in rank["checksums"].items()} for rank in answer["ranks"]],
            body,
            timeout_s,
        )

    def release_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Gives GPU memory back to the trainer (colocated). The server must be idle or paused."""
        self.order("/release_memory_occupation", {"tags": list(tags)})

    def resume_memory(self, tags: Sequence[MemoryTag]) -> None:
        self.order("/resume_memory_occupation", {"tags": list(tags)})


def _break_off(sock: socket.socket, overdue: threading.Event) -> None:
    """Ends whatever a call waits for."""
    overdue.set()
    with contextlib.suppress(OSError):  # it has just ended
        sock.shutdown(socket.SHUT_RDWR)
