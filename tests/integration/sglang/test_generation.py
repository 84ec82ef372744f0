"""Samples of the real server against Hugging Face, and the fake server against the real one."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from pacs_megatron.contracts import SampleRequest, SamplingParams, Stop
from pacs_megatron.errors import RolloutError
from tests.integration.sglang.conftest import Lab, sample_requests
from tests.support.fake_sglang import FakeSglang
from tests.support.fault_proxy import FaultProxy, Spoil

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]
BF16_NATS = 0.15
"""Largest log-prob difference of any token between the bf16 server and fp32 arithmetic on these models; other weights
differ by several nats."""


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_tokens_and_logprobs_are_of_the_pushed_model(lab: Lab, temperature: float) -> None:
    with lab.opened(weights=1):
        asked = sample_requests(32, tag=f"t{temperature}", temperature=temperature)
        samples = list(lab.engine.stream(asked))
        assert sorted(s.id for s in samples) == sorted(r.id for r in asked)
        for sample in samples:
            expected = lab.logprobs(1, sample.token_ids, temperature)[sample.prompt_len - 1 :]
            got = expected.gather(1, _column(sample.response_ids))[:, 0].numpy()
            np.testing.assert_allclose(sample.sampler_logprobs, got, atol=BF16_NATS / temperature)
            assert {(s.version, s.digest) for s in sample.spans} == {(lab.version, lab.sync.report.digest)}
        assert len({tuple(s.response_ids) for s in samples}) > 20  # they are samples, not one answer


def test_greedy_is_the_models_argmax(lab: Lab) -> None:
    with lab.opened():
        for sample in lab.engine.stream(sample_requests(8, tag="g", temperature=0.0)):
            expected = lab.logprobs(0, sample.token_ids)[sample.prompt_len - 1 :]
            chosen = expected.gather(1, _column(sample.response_ids))[:, 0]
            assert (expected.max(1).values - chosen).max() < BF16_NATS


def test_stop_rules(lab: Lab) -> None:
    with lab.opened():
        samples = list(lab.engine.stream(sample_requests(16, tag="s", tokens=200, stop=("X", "Y", "Z"))))
        # Bytes 0..255 are the tokens 0..255 in the tokenizer's order of characters; a stop string is one token here.
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(lab.folders[0])
        ended = [s for s in samples if s.stop is Stop.EOS]
        assert len(ended) >= 8
        for sample in ended:
            text = tokenizer.decode(sample.response_ids[-1:])
            assert text in ("X", "Y", "Z") or sample.response_ids[-1] == tokenizer.eos_token_id
            assert not set("XYZ") & set(tokenizer.decode(sample.response_ids[:-1]))
        for sample in samples:
            if sample.stop is Stop.LENGTH:
                assert sample.response_len == 200


def test_a_prompt_that_is_too_long_is_refused_with_the_servers_reason(lab: Lab) -> None:
    params = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_tokens=8)
    request = SampleRequest(id="x", prompt_id="x", token_ids=np.full(5000, 40, np.int32), seed=0, params=params)
    with lab.opened(), pytest.raises(RolloutError, match=r"failed 1 times.*HTTP 400.*longer than"):
        list(lab.engine.stream([request]))


def test_the_fake_server_answers_like_the_real_one(lab: Lab) -> None:
    """Every field that our code reads is there in both, with the same JSON type; statuses agree."""
    params = {
        "temperature": 1.0,
        "max_new_tokens": 3,
        "sampling_seed": 1,
        "no_stop_trim": True,
        "top_k": -1,
        "top_p": 1.0,
    }
    body = {"rid": "r/1", "input_ids": [40, 41], "sampling_params": params, "return_logprob": True}
    calls: list[tuple[str, dict[str, Any] | None]] = [
        ("/ready", None),
        ("/server_info", None),
        ("/model_info", None),
        ("/update_weight_version", {"new_version": "7:contract", "abort_all_requests": False}),
        ("/generate", body),
        ("/generate", body | {"input_ids": [40] * 5000}),
        ("/pause_generation", {"mode": "abort"}),
        ("/continue_generation", {}),
        ("/flush_cache", {}),
        ("/abort_request", {"rid": "nobody"}),
        ("/no_such_path", {}),
    ]
    with FakeSglang() as fake:
        for path, content in calls:
            real, ours = (_call(url, path, content) for url in (lab.url, fake.url))
            assert ours[0] == real[0], path
            if path in ("/server_info", "/model_info", "/generate") and real[0] == 200:
                _same_shape(ours[1], real[1], path)
                assert real[1].get("weight_version") is None or path != "/model_info" or real[1]["weight_version"]


def _nan(body: bytes) -> bytes:
    answer = json.loads(body)
    answer["meta_info"]["output_token_logprobs"][0][0] = None
    return json.dumps(answer).encode()


@pytest.mark.parametrize(
    "spoil", [lambda _: 500, lambda body: body[: len(body) // 2], _nan], ids=["500", "truncated", "nan"]
)
def test_spoiled_answers_of_the_real_server(lab: Lab, spoil: Spoil) -> None:
    """The first ten answers are spoiled; every sample comes all the same, once, and right."""
    with FaultProxy(lab.url) as proxy:

        def first_ten(body: bytes) -> bytes | int:
            return spoil(body) if proxy.spoiled <= 10 else body

        with lab.opened(proxy.url, retries=20, max_failures=100):
            proxy.spoil = first_ten
            asked = sample_requests(24, tag="f")
            samples = list(lab.engine.stream(asked))
            assert proxy.spoiled >= 34
            assert sorted(s.id for s in samples) == sorted(r.id for r in asked)
            for sample in samples[:4]:
                expected = lab.logprobs(0, sample.token_ids)[sample.prompt_len - 1 :]
                got = expected.gather(1, _column(sample.response_ids))[:, 0].numpy()
                np.testing.assert_allclose(sample.sampler_logprobs, got, atol=BF16_NATS)


def _column(ids: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(ids.astype(np.int64))[:, None]


def _call(url: str, path: str, body: dict[str, Any] | None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    headers = {"Content-Type": "application/json"}
    connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body), headers)
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    try:
        return answer.status, json.loads(data)
    except json.JSONDecodeError:
        return answer.status, data


def _same_shape(ours: Any, real: Any, where: str) -> None:
    """Ours is a part of the real one: same keys (not all), same types."""
    if isinstance(ours, dict):
        for key, value in ours.items():
            assert key in real, f"{where}.{key}"
            _same_shape(value, real[key], f"{where}.{key}")
    elif isinstance(ours, list):
        assert isinstance(real, list), where
        for mine, theirs in zip(ours, real, strict=False):
            _same_shape(mine, theirs, where)
    else:
        assert type(ours) is type(real), f"{where}: {ours!r} against {real!r}"
