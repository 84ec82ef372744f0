"""Requests, responses and clients of tests with fake SGLang servers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from pacs_megatron.config.rollout_options import SglangRollout
from pacs_megatron.contracts import Sample, SampleRequest, SamplingOptions, Stop
from pacs_megatron.sglang.api import SglangApi
from pacs_megatron.sglang.client import SglangEngine
from pacs_megatron.sglang.fleet import Server
from tests.support.servers.fake_sglang import FakeSglang

VERSION = "1:aa"
VOCAB = 272


def requests(
    num: int, *, group: int = 4, tokens: int = 8, prompt: int = 3, tag: str = "1"
) -> list[SampleRequest]:
    """`num` requests in groups of `group`."""
    params = SamplingOptions(temperature=1.0, top_p=1.0, top_k=0, max_response_tokens=tokens)
    return [
        SampleRequest(
            id=f"{tag}:p{i // group}#{i % group}",
            prompt_id=f"p{i // group}",
            token_ids=np.arange(prompt, dtype=np.int32) % 250,
            seed=i,
            params=params,
        )
        for i in range(num)
    ]


OPTIONS: dict[str, Any] = {
    "max_in_flight": 64,
    "probe_interval_s": 0.05,
    "probe_timeout_s": 60.0,  # of a server that hangs; tests of one set less
    "dead_after_s": 1.5,
    "max_failures": 3,
    "request_timeout_s": 600.0,
    "retries": 3,
    "all_down_after_s": 600.0,
}


@contextmanager
def engine(servers: Sequence[FakeSglang], **changes: Any) -> Iterator[SglangEngine]:
    """All servers have the current weights by default."""
    options = OPTIONS | changes
    members = [Server(SglangApi(url=s.url, api_key=s.api_key)) for s in servers]
    with SglangEngine(members, SglangRollout.model_construct(**options), vocab_size=VOCAB) as made:
        made.set_current(1, "aa")
        yield made


def until(condition: Callable[[], bool], within_s: float = 600.0) -> bool:
    """Whether `condition` comes true in time."""
    deadline = time.monotonic() + within_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def check_all_there(samples: list[Sample], asked: list[SampleRequest]) -> None:
    """Each exactly once, and each the answer to its own request."""
    assert sorted(s.id for s in samples) == sorted(r.id for r in asked)
    by_id = {r.id: r for r in asked}
    for sample in samples:
        request = by_id[sample.id]
        assert sample.prompt_id == request.prompt_id
        assert sample.token_ids[: sample.prompt_len].tolist() == request.token_ids.tolist()
        expected = [(request.seed + i) % 251 for i in range(request.params.max_response_tokens)]
        assert sample.response_ids.tolist() == expected
        assert sample.token_ids.dtype == np.int32
        assert sample.sampler_logprobs.dtype == np.float32
        assert len(sample.sampler_logprobs) == sample.response_len
        assert [(s.version, s.digest, s.start, s.end) for s in sample.spans] == [
            (1, "aa", 0, sample.response_len)
        ]
        assert sample.stop is Stop.LENGTH


def answer(**changes: Any) -> bytes:
    """A good response, with changes."""
    meta: dict[str, Any] = {
        "id": "r/1",
        "finish_reason": {"type": "length", "length": 3},
        "output_token_logprobs": [[-0.5, 7, None], [-0.25, 8, None], [-1.0, 9, None]],
        "weight_versions": [
            {"version": "1:a", "start": 0, "end": 2},
            {"version": "2:b", "start": 2, "end": 3},
        ],
    }
    ids = changes.pop("output_ids", [7, 8, 9])
    return json.dumps({"text": "", "output_ids": ids, "meta_info": meta | changes}).encode()


def http(body: bytes, *headers: str, status: str = "200 OK", length: int | None = None) -> bytes:
    """An HTTP response; `length` announces another size."""
    size = len(body) if length is None else length
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {size}", "Connection: close", *headers, "", ""]
    return "\r\n".join(lines).encode() + body
