"""Builds the body of a `/generate` request, and parses its response with a check of every token."""

import base64
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import orjson

from pacs_megatron.contracts.samples import SampleRequest, Stop
from pacs_megatron.errors import RolloutError

_STOPS = {"stop": Stop.EOS, "abort": Stop.ABORTED, "length": Stop.LENGTH}


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
    """One checked response.

    `token_ids`: int32 [response]. `logprobs`: float32 [response], nats, finite, <= 0 up to
    rounding. `spans`: (weight_version, start, end), contiguous. `routes`: int16 [prompt + response
    - 1, layers, top k].
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    stop: Stop
    spans: tuple[tuple[str, int, int], ...]
    routes: np.ndarray | None = None


def request_body(request: SampleRequest, rid: str, *, with_routes: bool = False) -> bytes:
    """The JSON of a `/generate` request with the id `rid`.

    `with_routes`: also requests the experts of the tokens.
    """
    params = request.params
    sampling: dict[str, Any] = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
        "max_new_tokens": params.max_response_tokens,
        "sampling_seed": request.seed,
        "no_stop_trim": True,
    }
    if params.stop:
        sampling["stop"] = list(params.stop)
    ids = np.ascontiguousarray(request.token_ids)
    body = {"rid": rid, "input_ids": ids, "sampling_params": sampling, "return_logprob": True}
    if with_routes:
        body["return_routed_experts"] = True
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def decode(body: bytes, rid: str, max_tokens: int, routes: RoutesShape | None = None) -> Response:
    """The response to request `rid`, with the experts of its tokens.

    Raises BadResponseError with the first problem.
    """
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
        kind = finish["type"]
        if meta["id"] != rid:
            raise BadResponseError(f"response to request {meta['id']!r}, expected {rid!r}")
        logprobs = np.array([entry[0] for entry in entries], dtype=np.float32)
        entry_ids = [entry[1] for entry in entries]
        if type(ids) is not list or not set(map(type, ids)) <= {int} or logprobs.ndim != 1:
            raise BadResponseError(
                "output_ids or output_token_logprobs contain values that are not numbers"
            )
    except (
        KeyError,
        TypeError,
        ValueError,
        IndexError,
        OverflowError,
    ) as error:  # ValueError: also orjson's error
        text = " ".join(body[:80].decode(errors="replace").split())
        reason = (
            f"malformed response of {len(body)} bytes ({type(error).__name__}: {error}): {text}"
        )
        raise BadResponseError(reason) from error
    stop = _STOPS.get(str(kind))
    if stop is None:
        raise BadResponseError(f"finish reason {finish!r}, expected stop, length or abort")
    if len(ids) > max_tokens:
        raise BadResponseError(f"{len(ids)} tokens, expected at most {max_tokens}")
    if stop is Stop.LENGTH and len(ids) != max_tokens:
        raise BadResponseError(
            f"{len(ids)} tokens with finish reason length, expected {max_tokens}: the server's "
            "context or KV cache is too "
            "small for prompt and response; see rollout.servers.context_length and "
            "max_total_tokens"
        )
    _check(ids, entry_ids, logprobs, stop, spans)
    experts = None
    if routes is not None and stop is not Stop.ABORTED:
        experts = _routes(meta.get("routed_experts"), routes, len(ids))
    return Response(np.array(ids, dtype=np.int32), logprobs, stop, tuple(spans), experts)


def _routes(text: object, shape: RoutesShape, num_tokens: int) -> np.ndarray:
    """The experts of every token but the last, from SGLang's base64 of int32
    (srt/state_capturer/routed_experts.py).
    """
    if not isinstance(text, str):
        raise BadResponseError(
            "no routed_experts, which policy.routing=replay_sampler needs; start the server with "
            "--enable-return-routed-experts"
        )
    expected = (shape.prompt_len + num_tokens - 1, shape.layers, shape.top_k)
    try:
        found = np.frombuffer(base64.b64decode(text, validate=True), dtype="<i4")
    except ValueError as error:
        raise BadResponseError(f"routed_experts is no base64 of int32 ({error})") from error
    problem = ""
    total = math.prod(expected)
    if found.size != total:
        layout = f"({expected[0]} tokens, {shape.layers} layers, top {shape.top_k})"
        problem = f"{found.size} numbers, expected {total} {layout}"
    elif found.min() < 0 or found.max() >= shape.experts:
        problem = f"{found.min()} to {found.max()}, expected 0 to {shape.experts - 1}"
    if problem:
        raise BadResponseError(f"routed_experts has {problem}: the server has another model")
    ordered = np.sort(found.reshape(expected), axis=-1)
    twice = (ordered[..., 1:] == ordered[..., :-1]).any((1, 2))
    if twice.any():  # the server's buffer starts as zeros
        token = twice.argmax()
        raise BadResponseError(
            f"routed_experts has an expert twice at token {token}: the server did not record it"
        )
    return found.reshape(expected).astype(np.int16)


def _check(
    ids: list[int],
    entry_ids: list[int],
    logprobs: np.ndarray,
    stop: Stop,
    spans: list[tuple[str, int, int]],
) -> None:
    if ids != entry_ids:
        raise BadResponseError(
            f"{len(ids)} tokens but log-probs of {len(entry_ids)}, or of other tokens"
        )
    if not ids and stop is not Stop.ABORTED:
        raise BadResponseError("no tokens in a finished response")
    if logprobs.size and not (np.isfinite(logprobs).all() and logprobs.max() <= 1e-3):
        worst = int(np.argmax(~np.isfinite(logprobs) | (logprobs > 1e-3)))
        raise BadResponseError(
            f"log-prob {logprobs[worst]} at token {worst}, expected a finite number <= 0"
        )
    at = 0
    for version, start, end in spans:
        if start != at or end < start:
            raise BadResponseError(f"weight version spans {spans}, expected them contiguous")
        at = end
        if not version:
            raise BadResponseError("a token span without a weight version")
    if at != len(ids):
        raise BadResponseError(f"weight version spans end at {at} of {len(ids)} tokens")
    if ids and (min(ids) < 0 or max(ids) > np.iinfo(np.int32).max):
        raise BadResponseError(f"token id out of range: {min(ids)} to {max(ids)}")
