"""Builds the body of a `/generate` request, and parses its response with a check of every token."""

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import orjson

from pacs_megatron.contracts.samples import SampleRequest, Stop
from pacs_megatron.errors import RolloutError

_STOPS = {"stop": Stop.EOS, "abort": Stop.ABORTED, "length": Stop.LENGTH}
_NO_OTHER_CHANGE = {
    "min_p": 0.0,
    "min_new_tokens": 0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}
"""Parameters that change the distribution, at their neutral values.

A server may have other defaults (`--preferred-sampling-params`).
"""
_MAX_LOGPROB = 1e-3
"""Nats above 0 that a server's rounding may give a log-prob."""


class BadResponseError(RolloutError):
    """A response of status 200 with invalid content."""


class RoutesShape(NamedTuple):
    """Shape of the experts of one sample; `experts` is the number of experts in a layer."""

    layers: int
    top_k: int
    experts: int
    prompt_len: int = 0

    def num_bytes(self, max_tokens: int) -> int:
        """Size of the JSON text, int32 in base64."""
        return (self.prompt_len + max_tokens) * self.layers * self.top_k * 4 * 4 // 3


@dataclass(frozen=True, slots=True)
class Response:
    """One checked response."""

    token_ids: np.ndarray
    """int32 [response]"""
    logprobs: np.ndarray
    """float32 [response], nats, finite, <= 0 up to rounding"""
    stop: Stop
    spans: tuple[tuple[str, int, int], ...]
    """(weight_version, start, end), contiguous"""
    routes: np.ndarray | None = None
    """int16 [prompt + response - 1, layers, top k]"""
    cached_tokens: int = 0
    """tokens of the prompt that the server's cache had"""


class _Parsed(NamedTuple):
    """The parts of a response that are read, not checked yet."""

    token_ids: np.ndarray
    """int64 [response]"""
    is_aligned: bool
    """whether the log-probs belong to these tokens"""
    logprobs: np.ndarray
    spans: list[tuple[str, int, int]]
    kind: str
    """type of the finish reason"""
    finish: Any
    """the finish reason itself, for messages"""
    experts: Any
    """base64 text, or None"""
    cached_tokens: int


def request_body(
    request: SampleRequest, rid: str, *, with_routes: bool = False, stops: Sequence[int] = ()
) -> bytes:
    """The JSON of a `/generate` request.

    Args:
        request: prompt, sampling parameters and seed.
        rid: id of the request on the server.
        with_routes: also requests the experts of the tokens.
        stops: tokens that end the response, in addition to those that the server knows.
    """
    params = request.params
    sampling: dict[str, Any] = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
        **_NO_OTHER_CHANGE,
        "max_new_tokens": params.max_response_tokens,
        "sampling_seed": request.seed,
        "no_stop_trim": True,
    }
    if stops:
        sampling["stop_token_ids"] = list(stops)
    if params.stop:
        sampling["stop"] = list(params.stop)
    body = {
        "rid": rid,
        "input_ids": np.ascontiguousarray(request.token_ids),
        "sampling_params": sampling,
        "return_logprob": True,
    }
    if with_routes:
        body["return_routed_experts"] = True
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def decode(body: bytes, rid: str, max_tokens: int, routes: RoutesShape | None = None) -> Response:
    """The checked response to a request.

    Args:
        body: JSON of the response.
        rid: id of the request on the server.
        max_tokens: limit of the response's length that the request had.
        routes: shape of the experts; None if the request had no `with_routes`.

    Raises:
        BadResponseError: names the first problem.
    """
    parsed = _parse(body, rid)
    stop = _stop(parsed, max_tokens)
    _check(parsed, stop)
    experts = None
    if routes is not None and stop is not Stop.ABORTED:
        experts = _routes(parsed.experts, routes, len(parsed.token_ids))
    token_ids = parsed.token_ids.astype(np.int32)
    spans = tuple(parsed.spans)
    return Response(token_ids, parsed.logprobs, stop, spans, experts, parsed.cached_tokens)


def _parse(body: bytes, rid: str) -> _Parsed:
    try:
        data = orjson.loads(body)
        meta = data["meta_info"]
        finish = meta["finish_reason"]
        ids = data["output_ids"]
        entries = meta["output_token_logprobs"]
        spans = [
            (str(span["version"]), int(span["start"]), int(span["end"]))
            for span in meta["weight_versions"]
        ]
        kind = str(finish["type"])
        if meta["id"] != rid:
            raise BadResponseError(f"response to request {meta['id']!r}, expected {rid!r}")
        cached_tokens = int(meta.get("cached_tokens", 0))

        logprobs = np.array([entry[0] for entry in entries], dtype=np.float32)
        entry_ids = [entry[1] for entry in entries]
        has_int_ids = type(ids) is list and set(map(type, ids)) <= {int}
        if not has_int_ids or logprobs.ndim != 1:
            raise BadResponseError(
                "output_ids or output_token_logprobs contain values that are not numbers"
            )
        token_ids = np.array(ids, dtype=np.int64)
    # orjson's error is a ValueError.
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        text = " ".join(body[:80].decode(errors="replace").split())
        reason = (
            f"malformed response of {len(body)} bytes ({type(error).__name__}: {error}): {text}"
        )
        raise BadResponseError(reason) from error
    experts = meta.get("routed_experts")
    is_aligned = ids == entry_ids
    return _Parsed(token_ids, is_aligned, logprobs, spans, kind, finish, experts, cached_tokens)


def _stop(parsed: _Parsed, max_tokens: int) -> Stop:
    """Why the response ended; checks its length."""
    stop = _STOPS.get(parsed.kind)
    if stop is None:
        raise BadResponseError(f"finish reason {parsed.finish!r}, expected stop, length or abort")

    num_tokens = len(parsed.token_ids)
    if num_tokens > max_tokens:
        raise BadResponseError(f"{num_tokens} tokens, expected at most {max_tokens}")
    if stop is Stop.LENGTH and num_tokens != max_tokens:
        raise BadResponseError(
            f"{num_tokens} tokens with finish reason length, expected {max_tokens}: the server's "
            "context or KV cache is too small for prompt and response; see "
            "rollout.servers.context_length and max_total_tokens"
        )
    return stop


def _check(parsed: _Parsed, stop: Stop) -> None:
    """Checks that every token has a log-prob, a weight version and a valid id."""
    token_ids = parsed.token_ids
    logprobs = parsed.logprobs
    num_tokens = len(token_ids)
    if not parsed.is_aligned:
        raise BadResponseError(
            f"{num_tokens} tokens but log-probs of {len(logprobs)}, or of other tokens"
        )
    if not num_tokens and stop is not Stop.ABORTED:
        raise BadResponseError("no tokens in a finished response")
    is_wrong = ~np.isfinite(logprobs) | (logprobs > _MAX_LOGPROB)
    if is_wrong.any():
        token = int(np.argmax(is_wrong))
        raise BadResponseError(
            f"log-prob {logprobs[token]} at token {token}, expected a finite number <= 0"
        )

    covered = 0
    for version, start, end in parsed.spans:
        if start != covered or end < start:
            raise BadResponseError(f"weight version spans {parsed.spans}, expected them contiguous")
        covered = end
        if not version:
            raise BadResponseError("a token span without a weight version")
    if covered != num_tokens:
        raise BadResponseError(f"weight version spans end at {covered} of {num_tokens} tokens")
    if num_tokens and (token_ids.min() < 0 or token_ids.max() > np.iinfo(np.int32).max):
        raise BadResponseError(f"token id out of range: {token_ids.min()} to {token_ids.max()}")


def _routes(text: object, shape: RoutesShape, num_tokens: int) -> np.ndarray:
    """The experts of every token but the last, int16 [prompt + response - 1, layers, top k].

    `text` is SGLang's base64 of int32 (srt/state_capturer/routed_experts.py).
    """
    if not isinstance(text, str):
        raise BadResponseError(
            "no routed_experts, which policy.routing=replay_sampler needs; start the server with "
            "--enable-return-routed-experts"
        )
    try:
        experts = np.frombuffer(base64.b64decode(text, validate=True), dtype="<i4")
    except ValueError as error:
        raise BadResponseError(f"routed_experts is no base64 of int32 ({error})") from error

    expected = (shape.prompt_len + num_tokens - 1, shape.layers, shape.top_k)
    total = math.prod(expected)
    problem = ""
    if experts.size != total:
        layout = f"({expected[0]} tokens, {shape.layers} layers, top {shape.top_k})"
        problem = f"{experts.size} numbers, expected {total} {layout}"
    elif experts.min() < 0 or experts.max() >= shape.experts:
        problem = f"{experts.min()} to {experts.max()}, expected 0 to {shape.experts - 1}"
    if problem:
        raise BadResponseError(f"routed_experts has {problem}: the server has another model")

    experts = experts.reshape(expected)
    ordered = np.sort(experts, axis=-1)
    is_repeated = (ordered[..., 1:] == ordered[..., :-1]).any((1, 2))
    if is_repeated.any():  # the server's buffer starts as zeros
        token = is_repeated.argmax()
        raise BadResponseError(
            f"routed_experts has an expert twice at token {token}: the server did not record it"
        )
    return experts.astype(np.int16)
