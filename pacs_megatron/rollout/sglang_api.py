"""SGLang's control endpoints (version 0.5.23; sessions are probed for older ones), one blocking call each.

Generation is in `sglang_client`. Every call opens its own connection, so an instance may be used by several threads.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from pacs_megatron.errors import ConfigError, RolloutError

PauseMode = Literal["abort", "in_place", "retract"]
"""`abort`: running requests return what they have. `retract`: they wait, and their KV cache is computed anew by the
new weights. `in_place`: they wait and go on with the old KV cache."""
MemoryTag = Literal["kv_cache", "weights", "cuda_graph"]
FRESH_VERSION = "default"
"""The `weight_version` of a server that was just started."""


class ServerUnreachableError(RolloutError):
    """No answer: connection refused or broken, or the time limit passed."""


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
    if parts.scheme != "http" or not parts.hostname or not parts.port or parts.path not in ("", "/"):
        raise ConfigError(f"rollout.urls: got {url!r}, expected http://<host>:<port>")
    return f"http://{parts.netloc}"


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
        """The body of the answer: GET without `body`, else POST. Raises ServerUnreachableError, ServerRefusedError."""
        parts = urlsplit(self.url)
        limit = self.timeout_s if timeout_s is None else timeout_s
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=limit)
        try:
            method, payload = ("GET", None) if body is None else ("POST", json.dumps(body))
            connection.request(method, path, payload, self.headers())
            answer = connection.getresponse()
            data = answer.read()
        except (OSError, http.client.HTTPException) as error:
            reason = f"{type(error).__name__}: {error}".rstrip(": ")
            what = f"no answer within {limit:g} s" if isinstance(error, TimeoutError) else "no answer"
            raise ServerUnreachableError(f"{self.url}{path}: {what} ({reason})") from error
        finally:
            connection.close()
        if answer.status != 200:
            text = data[:300].decode(errors="replace").replace("\n", " ")
            raise ServerRefusedError(f"{self.url}{path}: HTTP {answer.status}, expected 200: {text}", answer.status)
        return data

    def ready(self, timeout_s: float = 2.0) -> bool:
        """Whether it takes requests. Cheap; `/health` sleeps a second by design."""
        try:
            self.call("/ready", timeout_s=timeout_s)
        except (ServerUnreachableError, ServerRefusedError):
            return False
        return True

    def server_info(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Arguments and state; its scheduler has to answer, so a stuck one is noticed."""
        info: dict[str, Any] = json.loads(self.call("/server_info", timeout_s=timeout_s))
        return info

    def weight_version(self, timeout_s: float | None = None) -> str:
        return str(json.loads(self.call("/model_info", timeout_s=timeout_s))["weight_version"])

    def set_weight_version(self, text: str) -> None:
        self.call("/update_weight_version", {"new_version": text, "abort_all_requests": False})

    def pause(self, mode: PauseMode, timeout_s: float | None = None) -> None:
        self.call("/pause_generation", {"mode": mode}, timeout_s)

    def resume(self) -> None:
        self.call("/continue_generation", {})

    def abort(self, rid: str | None = None) -> None:
        """Ends one request, or all of them; each returns what it has."""
        self.call("/abort_request", {"abort_all": True} if rid is None else {"rid": rid})

    def flush_cache(self) -> None:
        """Drops the KV cache. Refused (400) while requests run."""
        self.call("/flush_cache", {})

    def begin_weight_update(self) -> bool:
        """Opens a session; False when this server knows none (<= 0.5.20). One left open is closed first."""
        try:
            self.call("/begin_weight_update", {})
        except ServerRefusedError as refused:
            if refused.status == 404:
                return False
            if "already open" not in str(refused):
                raise
            self.end_weight_update()
            self.call("/begin_weight_update", {})
        return True

    def end_weight_update(self, timeout_s: float | None = None) -> None:
        self.call("/end_weight_update", {}, timeout_s)

    def checksums(self, skip: Sequence[str] = (), timeout_s: float | None = None) -> list[dict[str, str]]:
        """Hash by parameter name of SGLang's own (fused) module tree, one mapping a tensor-parallel rank.

        `skip` names parameters to leave out, so that a sample costs what a sample should.
        """
        body = {"action": "checksum", "skip_tensor_list": list(skip)}
        ranks = json.loads(self.call("/weights_checker", body, timeout_s))["ranks"]
        return [dict(rank["checksums"]) for rank in ranks]

    def release_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Gives GPU memory back to the trainer (colocated). The server must be idle or paused."""
        self.call("/release_memory_occupation", {"tags": list(tags)})

    def resume_memory(self, tags: Sequence[MemoryTag]) -> None:
        self.call("/resume_memory_occupation", {"tags": list(tags)})
