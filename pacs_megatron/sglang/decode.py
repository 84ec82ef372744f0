"""Decodes a `/generate` response and checks every token. Runs in worker processes: no torch here.

A response of 8k tokens is 250 kB of JSON, about 3 ms; thousands of them on the event loop would delay other requests.
"""

from dataclasses import dataclass

import numpy as np
import orjson

from pacs_megatron.contracts.samples import Stop
from pacs_megatron.errors import RolloutError
from pacs_megatron.runtime.processes import die_with_parent, ignore_job_signals


class BadResponseError(RolloutError):
    """A response of status 200 with invalid content."""


@dataclass(frozen=True, slots=True)
class Response:
    """One checked response."""

    token_ids: np.ndarray
    """int32 [response]"""
    logprobs: np.ndarray
    """float32 [response], nats, finite, <= 0 up to rounding"""
    stop: Stop
    spans: tuple[tuple[str, int, int], ...]
    """(weight_version, start, end), contiguous, from 0 to the end of the response"""


def init_worker() -> None:
    """Ends the worker with the driver, also if that is killed: the worker's queue never closes by itself."""
    die_with_parent()
    ignore_job_signals()


def decode(body: bytes, rid: str, max_tokens: int) -> Response:
    """The response to request `rid`. Raises BadResponseError with the first problem."""
    try:
        data = orjson.loads(body)
        meta = data["meta_info"]
        finish = meta["finish_reason"]
        ids = data["output_ids"]
        entries = meta["output_token_logprobs"]
        spans = [(str(span["version"]), int(span["start"]), int(span["end"])) for span in meta["weight_versions"]]
        kind = finish["type"]
        if meta["id"] != rid:
            raise BadResponseError(f"response to request {meta['id']!r}, expected {rid!r}")
        logprobs = np.array([entry[0] for entry in entries], dtype=np.float32)
        entry_ids = [entry[1] for entry in entries]
        if type(ids) is not list or not set(map(type, ids)) <= {int} or logprobs.ndim != 1:
            raise BadResponseError("output_ids or output_token_logprobs contain values that are not numbers")
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:  # orjson's is a ValueError
        text = " ".join(body[:80].decode(errors="replace").split())
        raise BadResponseError(
            f"malformed response of {len(body)} bytes ({type(error).__name__}: {error}): {text}"
        ) from error
    return _checked(ids, entry_ids, logprobs, _stop(kind, finish, len(ids), max_tokens), spans)


def _stop(kind: str, finish: dict[str, object], num_tokens: int, max_tokens: int) -> Stop:
    if num_tokens > max_tokens:
        raise BadResponseError(f"{num_tokens} tokens, expected at most {max_tokens}")
    if kind == "stop":
        return Stop.EOS
    if kind == "abort":
        return Stop.ABORTED
    if kind != "length":
        raise BadResponseError(f"finish reason {finish!r}, expected stop, length or abort")
    if num_tokens != max_tokens:
        raise BadResponseError(
            f"{num_tokens} tokens with finish reason length, expected {max_tokens}: the server's context or KV cache is too "
            "small for prompt and response; see rollout.servers.context_length and max_total_tokens"
        )
    return Stop.LENGTH


def _checked(
    ids: list[int], entry_ids: list[int], logprobs: np.ndarray, stop: Stop, spans: list[tuple[str, int, int]]
) -> Response:
    if ids != entry_ids:
        raise BadResponseError(f"{len(ids)} tokens but log-probs of {len(entry_ids)}, or of other tokens")
    if not ids and stop is not Stop.ABORTED:
        raise BadResponseError("no tokens in a finished response")
    if logprobs.size and not (np.isfinite(logprobs).all() and logprobs.max() <= 1e-3):
        worst = int(np.argmax(~np.isfinite(logprobs) | (logprobs > 1e-3)))
        raise BadResponseError(f"log-prob {logprobs[worst]} at token {worst}, expected a finite number <= 0")
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
    return Response(np.array(ids, dtype=np.int32), logprobs, stop, tuple(spans))
