"""Client of SGLang's control endpoints (version 0.5.23; older servers may lack sessions).

A method is one blocking call and may run in any thread. Generation is in `sglang/client.py`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pacs_megatron.errors import RolloutError
from pacs_megatron.runtime.http import CONNECTION_ERRORS, exchange, open_session

T = TypeVar("T")
_MAX_BYTES = 64 << 20
"""Size limit of a response."""
FRESH_VERSION = "default"
"""The `weight_version` of a newly started server."""
RELEASED_VERSION = "released"
"""The `weight_version` of a newly started server that has released its memory to the trainer."""
UPDATING = "updating"
WARM_UP_RID = "warm-up"
"""Id of the request of `SglangApi.warm_up`."""


class ServerUnreachableError(RolloutError):
    """No response: connection refused or broken, or timeout."""


class BadControlResponseError(RolloutError):
    """A response of status 200 that SGLang does not send."""


class ServerRejectedError(RolloutError):
    """A response other than 200; `status` is the HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """A server's `weight_version`, which names one export of weights."""

    version: int
    """counts from 0"""
    digest: str
    """`WeightDigest` of the export"""

    def __str__(self) -> str:
        return f"{self.version}:{self.digest}"

    @classmethod
    def parse(cls, text: str) -> WeightVersion | None:
        """Inverse of `str`.

        None for other texts: `default` of a new server, or `updating_version` during an update.
        """
        number, _, digest = text.partition(":")
        if not number.isdecimal() or len(number) > 18:
            return None
        if not digest or digest == UPDATING:
            return None
        return cls(int(number), digest)


def updating_version(version: int) -> str:
    """The `weight_version` during an update, when weights are mixed.

    `WeightVersion.parse` returns None for it.
    """
    return f"{version}:{UPDATING}"


def hint(status: int) -> str:
    """Advice about an HTTP status, as the end of a message.

    Empty for a status without a known cause.
    """
    if status in (401, 403):
        return "; the server expects another key: see rollout.api_key_env"
    if 300 <= status < 400:
        return "; redirects are not followed: name the server's own address"
    return ""


def excerpt(data: bytes) -> str:
    """The first 300 bytes of a response as one line."""
    text = data[:300].decode(errors="replace")
    return " ".join(text.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangApi:
    """The control endpoints of one server."""

    url: str
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = 30.0
    """limit of a call that names no other"""

    def headers(self) -> dict[str, str]:
        if self.api_key is None:
            return {}
        return {"Authorization": f"Bearer {self.api_key}"}

    def call(
        self, path: str, body: Mapping[str, Any] | None = None, timeout_s: float | None = None
    ) -> bytes:
        """The response body of a GET without `body`, else of a POST.

        Raises:
            ServerUnreachableError: there was no response.
            ServerRejectedError: the response has another status than 200.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        payload = None if body is None else json.dumps(body).encode()
        try:
            status, data = asyncio.run(self._exchange(path, payload, limit_s))
        except CONNECTION_ERRORS as error:
            problem = "no response"
            if isinstance(error, TimeoutError):
                problem = f"no response within {limit_s:g} s"
            reason = f"{type(error).__name__}: {error}".rstrip(": ")
            raise ServerUnreachableError(f"{self.url}{path}: {problem} ({reason})") from error

        if status != 200:
            message = (
                f"{self.url}{path}: HTTP {status}, expected 200: {excerpt(data)}{hint(status)}"
            )
            raise ServerRejectedError(message, status)
        return data

    async def _exchange(
        self, path: str, payload: bytes | None, timeout_s: float
    ) -> tuple[int, bytes]:
        async with open_session() as session:
            return await exchange(
                session,
                self.url + path,
                payload,
                self.headers(),
                timeout_s=timeout_s,
                limit=_MAX_BYTES,
            )

    def post(self, path: str, body: Mapping[str, Any], timeout_s: float | None = None) -> None:
        """A call that changes state.

        Raises:
            ServerUnreachableError: there was no response.
            ServerRejectedError: another status than 200, or 200 with `success: false`.
        """
        data = self.call(path, body, timeout_s)
        try:
            response = json.loads(data)
        except (ValueError, RecursionError):  # some responses are plain text
            return
        if isinstance(response, dict) and response.get("success") is False:
            raise ServerRejectedError(
                f"{self.url}{path}: HTTP 200, but no success: {excerpt(data)}", 200
            )

    def query(
        self,
        path: str,
        read: Callable[[Any], T],
        body: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> T:
        """The value that `read` returns for the response's JSON.

        Raises:
            BadControlResponseError: `read` failed, or the response is not JSON.
        """
        data = self.call(path, body, timeout_s)
        try:
            return read(json.loads(data))
        except (
            ValueError,
            KeyError,
            TypeError,
            IndexError,
            AttributeError,
            RecursionError,
        ) as error:
            raise BadControlResponseError(
                f"{self.url}{path}: unexpected response ({type(error).__name__}: {error}): "
                f"{excerpt(data)}; is it SGLang?"
            ) from error

    def ready(self, timeout_s: float = 2.0) -> bool:
        """Whether the server accepts requests.

        Fast, unlike `/health`, which sleeps for a second.
        """
        try:
            self.call("/ready", timeout_s=timeout_s)
        except (ServerUnreachableError, ServerRejectedError):
            return False
        return True

    def warm_up(self, timeout_s: float) -> None:
        """Samples a few tokens as a run does, with `top_p` below 1 and log-probs.

        On a GPU the first such request compiles kernels in the scheduler, which then responds to
        nothing else for minutes.

        Raises:
            RolloutError: there was no response, or it has no tokens.
        """
        sampling = {"temperature": 1.0, "top_p": 0.5, "max_new_tokens": 4, "sampling_seed": 0}
        body = {
            "rid": WARM_UP_RID,
            "input_ids": [0, 1, 2, 3],
            "sampling_params": sampling,
            "return_logprob": True,
        }
        self.query("/generate", lambda response: response["meta_info"], body, timeout_s)

    def placement(self, timeout_s: float | None = None) -> tuple[int, str]:
        """(tensor-parallel size, device); the scheduler has to respond."""

        def read(info: Any) -> tuple[int, str]:
            return int(info["tp_size"]), str(info["device"])

        return self.query("/server_info", read, timeout_s=timeout_s)

    def context_tokens(self, timeout_s: float | None = None) -> int | None:
        """The smaller of context and KV cache, in tokens; None if the server does not report it.

        `max_req_input_len` is 6 less (SGLang 0.5.23, managers/tp_worker.py:568).
        """

        def read(info: Any) -> int | None:
            limit = info.get("max_req_input_len")
            return None if limit is None else int(limit) + 6

        return self.query("/server_info", read, timeout_s=timeout_s)

    def weight_version(self, timeout_s: float | None = None) -> str:
        """The text that the server reports: a `WeightVersion`, or a mark that is not one."""
        return self.query(
            "/model_info", lambda info: str(info["weight_version"]), timeout_s=timeout_s
        )

    def set_weight_version(self, text: str) -> None:
        self.post("/update_weight_version", {"new_version": text, "abort_all_requests": False})

    def begin_weight_update(self) -> bool:
        """Opens a session and closes one left open.

        False if the server has no sessions (<= 0.5.20).
        """
        try:
            self.post("/begin_weight_update", {})
        except ServerRejectedError as error:
            if error.status == 404:
                return False
            if "already open" not in str(error):
                raise
            self.end_weight_update()
            self.post("/begin_weight_update", {})
        return True

    def end_weight_update(self, timeout_s: float | None = None) -> None:
        self.post("/end_weight_update", {}, timeout_s)

    def start_profile(
        self, folder: str, name: str, activities: Sequence[str], num_forwards: int
    ) -> None:
        """Starts a profile, which ends by itself after `num_forwards` forward passes.

        Args:
            folder: of the profile's files, on the server's host.
            name: start of their names.
            activities: `CPU`, `GPU`, `MEM` (CUDA's allocator) or `CUDA_PROFILER` (for nsys).
            num_forwards: limits the size of the files.

        Raises:
            ServerRejectedError: another profile is in progress.
        """
        body = {
            "output_dir": folder,
            "profile_id": name,
            "activities": list(activities),
            "num_steps": num_forwards,
            "with_stack": False,
            "record_shapes": False,
        }
        self.post("/start_profile", body)

    def stop_profile(self, timeout_s: float) -> bool:
        """Ends a profile and writes its files; False if it has ended by itself."""
        try:
            self.post("/stop_profile", {}, timeout_s)
        except ServerRejectedError as error:
            if error.status != 500:
                raise
            return False
        return True

    def checksums(
        self, skip: Sequence[str] = (), timeout_s: float | None = None
    ) -> list[dict[str, str]]:
        """Hashes by name of SGLang's own (fused) parameters, one mapping per tensor-parallel rank.

        Args:
            skip: names of parameters that the server does not hash.
            timeout_s: limit of the call.
        """

        def read(response: Any) -> list[dict[str, str]]:
            ranks = [rank["checksums"] for rank in response["ranks"]]
            return [{str(name): str(value) for name, value in rank.items()} for rank in ranks]

        request = {"action": "checksum", "skip_tensor_list": list(skip)}
        return self.query("/weights_checker", read, request, timeout_s)
