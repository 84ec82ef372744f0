"""Samples of the real server against Hugging Face, and the fake server against the real one."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import psutil
import pytest

from pacs_megatron.contracts import Sample, SampleRequest, SamplingOptions, Stop
from pacs_megatron.errors import RolloutError
from pacs_megatron.models import load_spec
from pacs_megatron.sglang.api import ServerRejectedError, SglangApi
from pacs_megatron.sglang.fleet import Health
from tests.integration.sglang.conftest import Lab, num_running, sample_requests, server_pids
from tests.support.needs import SGLANG_PYTHON
from tests.support.servers.fake_sglang import FakeSglang
from tests.support.servers.fault_proxy import FaultProxy, Spoil

pytestmark = [pytest.mark.sglang]
BF16_NATS = 0.15
"""Largest log-prob difference of any token between the bf16 server and fp32 arithmetic on these
models; other weights differ by several nats.
"""


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
            assert {(s.version, s.digest) for s in sample.spans} == {
                (lab.version, lab.sync.report.digest)
            }
        assert (
            len({tuple(s.response_ids) for s in samples}) > 20
        )  # they are samples, not one answer


@pytest.mark.full
@pytest.mark.parametrize(
    ("top_k", "top_p"), [(3, 1.0), (0, 0.5), (8, 0.7)], ids=["top_k", "top_p", "both"]
)
def test_filters_restrict_tokens_and_change_no_log_prob(lab: Lab, top_k: int, top_p: float) -> None:
    """The meaning of log-probs and filters that the embedded sampler has
    (tests/unit/embedded/test_sampling.py).
    """
    temperature = 0.7
    tolerance = BF16_NATS / temperature
    with lab.opened(weights=1):
        asked = sample_requests(
            64, tag=f"f{top_k}{top_p}", temperature=temperature, top_k=top_k, top_p=top_p
        )
        ranks: list[int] = []
        beyond: list[bool] = []
        for sample in lab.engine.stream(asked):
            expected = lab.logprobs(1, sample.token_ids, temperature)[sample.prompt_len - 1 :]
            chosen = expected.gather(1, _column(sample.response_ids))
            np.testing.assert_allclose(
                sample.sampler_logprobs, chosen[:, 0].numpy(), atol=tolerance
            )
            # Tokens that are more likely beyond the difference of two arithmetics.
            is_likelier = expected > chosen + 2 * tolerance
            mass = (expected.exp() * is_likelier).sum(1)
            ranks += is_likelier.sum(1).tolist()
            assert int(is_likelier.sum(1).max()) < (top_k or expected.shape[1])
            assert float(mass.max()) < top_p + tolerance
            if top_k:
                before = (expected.exp() * (expected > chosen)).sum(1)
                of_top_k = expected.exp().topk(top_k).values.sum(1)
                beyond += (before >= top_p * of_top_k).tolist()
        assert max(ranks) > 0
        if top_k and top_p < 1:
            # About a quarter; none if top_p applied to the tokens that top_k leaves.
            assert np.mean(beyond) > 0.1


def test_greedy_is_the_models_argmax(lab: Lab) -> None:
    with lab.opened():
        for sample in lab.engine.stream(sample_requests(8, tag="g", temperature=0.0)):
            expected = lab.logprobs(0, sample.token_ids)[sample.prompt_len - 1 :]
            chosen = expected.gather(1, _column(sample.response_ids))[:, 0]
            assert (expected.max(1).values - chosen).max() < BF16_NATS


def test_stop_rules(lab: Lab) -> None:
    with lab.opened():
        samples = list(
            lab.engine.stream(sample_requests(16, tag="s", tokens=200, stop=("X", "Y", "Z")))
        )
        # Bytes 0..255 are the tokens 0..255 in the tokenizer's order of characters; a stop string
        # is one token here.
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


def test_a_prompt_that_is_too_long_is_rejected_with_the_servers_reason(lab: Lab) -> None:
    params = SamplingOptions(temperature=1.0, top_p=1.0, top_k=0, max_response_tokens=8)
    request = SampleRequest(
        id="x", prompt_id="x", token_ids=np.full(5000, 40, np.int32), seed=0, params=params
    )
    with lab.opened(), pytest.raises(RolloutError, match=r"failed 1 times.*HTTP 400.*longer than"):
        list(lab.engine.stream([request]))


def test_the_fake_server_responds_like_the_real_one(lab: Lab) -> None:
    """Every field that our code reads exists in both, with the same JSON type; statuses agree."""
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
                assert (
                    real[1].get("weight_version") is None
                    or path != "/model_info"
                    or real[1]["weight_version"]
                )


def _until(condition: Callable[[], bool], within_s: float = 600.0) -> bool:
    deadline = time.monotonic() + within_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_what_is_no_longer_needed_ends_on_the_server_too(lab: Lab) -> None:
    """Over-sampling: all but two requests are cancelled in the middle of generation, some still
    waiting in the client.
    """
    with lab.opened(weights=0, max_in_flight=24):
        asked = sample_requests(32, tag="over", tokens=900, temperature=0.0)
        done: list[Sample] = []
        reader = threading.Thread(target=lambda: done.extend(lab.engine.stream(asked)))
        reader.start()
        assert _until(lambda: num_running(SglangApi(url=lab.url)) == 24)
        lab.engine.cancel([request.id for request in asked[2:]])
        began = time.monotonic()
        assert _until(lambda: num_running(SglangApi(url=lab.url)) <= 2)
        assert lab.engine.status()[0].in_flight <= 2
        reader.join(600)
        assert sorted(s.id for s in done) == sorted(r.id for r in asked[:2])
        assert all(s.response_len == 900 or s.stop is Stop.EOS for s in done)
        assert (
            time.monotonic() - began > 0.5 or min(s.response_len for s in done) < 900
        )  # they had been far from the end
        again = sample_requests(4, tag="again")
        assert len(list(lab.engine.stream(again))) == 4


def test_everything_of_an_own_server_listens_on_loopback_only(lab: Lab) -> None:
    with lab.opened(weights=0, sync={"transport": "broadcast"}):  # the weight group is open, too
        pids = server_pids(lab.url.rpartition(":")[2])
        listening = []
        for pid in [*pids, os.getpid()]:
            for c in psutil.Process(pid).net_connections(kind="inet"):
                if c.status == psutil.CONN_LISTEN:
                    listening.append(c.laddr.ip)
        assert len(listening) >= 3 and set(listening) == {"127.0.0.1"}


def _nan(body: bytes) -> bytes:
    answer = json.loads(body)
    answer["meta_info"]["output_token_logprobs"][0][0] = None
    return json.dumps(answer).encode()


@pytest.mark.parametrize(
    "spoil",
    [lambda _: 500, lambda body: body[: len(body) // 2], _nan],
    ids=["500", "truncated", "nan"],
)
def test_what_one_of_two_servers_spoils_the_other_delivers(lab: Lab, spoil: Spoil) -> None:
    """The real server twice, once behind a proxy that spoils its first ten responses: every sample
    arrives once and is right.
    """
    with FaultProxy(lab.url) as proxy:

        def first_ten(body: bytes) -> bytes | int:
            return spoil(body) if proxy.spoiled <= 10 else body

        with (
            lab.opened(weights=0),
            lab.attached(lab.url, proxy.url, max_in_flight=4, max_failures=100) as engine,
        ):
            proxy.spoil = first_ten
            asked = sample_requests(48, tag="f")
            _check(lab, asked, list(engine.stream(asked)))
            assert proxy.spoiled >= 10


def test_one_of_two_servers_rejects_connections_for_a_while(lab: Lab) -> None:
    with FaultProxy(lab.url) as proxy, lab.opened(weights=0):
        changes = {"max_in_flight": 4, "dead_after_s": 1.0, "probe_timeout_s": 0.5}
        with lab.attached(lab.url, proxy.url, **changes) as engine:
            asked = sample_requests(32, tag="r", tokens=32)
            stream = engine.stream(asked)
            samples = [next(stream) for _ in range(4)]
            proxy.refuse()
            assert _until(lambda: engine.status()[1].health is Health.DEAD)
            samples += list(stream)
            _check(lab, asked, samples)
            proxy.accept()
            assert _until(lambda: engine.status()[1].health is Health.HEALTHY)
            before = proxy.counts["/generate"]
            again = sample_requests(16, tag="r2")
            _check(lab, again, list(engine.stream(again)))
            assert proxy.counts["/generate"] > before


def test_one_of_two_servers_is_slow(lab: Lab) -> None:
    """It gets less of the work, and what it has is waited for."""
    with FaultProxy(lab.url) as proxy, lab.opened(weights=0):
        proxy.delay_s = 2.0
        with lab.attached(lab.url, proxy.url, max_in_flight=4) as engine:
            asked = sample_requests(48, tag="slow")
            _check(lab, asked, list(engine.stream(asked)))
            assert 0 < proxy.counts["/generate"] < 24
            assert engine.status()[1].health is Health.HEALTHY


def _check(lab: Lab, asked: list[SampleRequest], samples: list[Sample]) -> None:
    """Each sample once; some of them against Hugging Face."""
    assert sorted(s.id for s in samples) == sorted(r.id for r in asked)
    spans = itertools.chain.from_iterable(sample.spans for sample in samples)
    assert {(span.version, span.digest) for span in spans} == {
        (lab.version, lab.sync.report.digest)
    }
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
    connection.request(
        "GET" if body is None else "POST", path, None if body is None else json.dumps(body), headers
    )
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


def test_every_process_of_the_server_finds_ninja_of_its_environment(lab: Lab) -> None:
    """SGLang and flashinfer compile kernels in the scheduler, a child of the server."""
    programs = SGLANG_PYTHON.absolute().parent
    assert (programs / "ninja").exists()
    paths = []
    for pid in server_pids(str(urlsplit(lab.url).port)):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        # Its environment in /proc is that of its start; a child with a title has none there.
        if "--port" not in words:
            lines = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
            paths += [line for line in lines if line.startswith("PATH=")]
    assert paths
    assert {path.removeprefix("PATH=").split(":")[0] for path in paths} == {str(programs)}


def test_the_server_needs_two_tokens_more_than_prompt_and_response(lab: Lab) -> None:
    """The stand-in servers have the same limits."""
    api = SglangApi(url=lab.url)
    context = load_spec(lab.folders[0]).max_positions
    assert api.context_tokens(600.0) == context
    with FakeSglang() as fake:
        fake.context = context
        for prompt, response in ((context - 12, 10), (context - 11, 10), (context - 10, 10)):
            expected, problem = fake._clip(prompt, response)
            assert not problem
            assert generate(api, prompt, response) == expected == context - prompt - 2
        for prompt in (context - 8, context - 7, context - 6):
            _, problem = fake._clip(prompt, 1)
            if problem:
                with pytest.raises(ServerRejectedError, match="exceeds the maximum allowed length"):
                    generate(api, prompt, 1)
            else:
                assert generate(api, prompt, 1) == 1
        assert not fake._clip(context - 7, 1)[1] and fake._clip(context - 6, 1)[1]


def generate(api: SglangApi, prompt: int, response: int) -> int:
    """Number of tokens that the server samples."""
    sampling = {"max_new_tokens": response, "ignore_eos": True, "temperature": 0.0}

    def read(answer: Any) -> int:
        assert answer["meta_info"]["finish_reason"]["type"] == "length"
        return len(answer["output_ids"])

    body = {"input_ids": [40 + i % 20 for i in range(prompt)], "sampling_params": sampling}
    return api.query("/generate", read, body, 600.0)
