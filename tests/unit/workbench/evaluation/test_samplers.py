"""The servers of an evaluation: one model after the other, and a restarted server gets the weights
again.
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import numpy as np
import pytest

from pacs_megatron.checkpoint.hf_folder import HfFolder
from pacs_megatron.config.rollout_options import SglangRollout, SglangSync
from pacs_megatron.config.schema import ModelOptions, RunConfig
from pacs_megatron.contracts import SampleRequest, SamplingOptions
from pacs_megatron.data import load_tokenizer
from pacs_megatron.workbench.evaluation.samplers import ServerSampler, push_folder
from tests.support.servers.weight_server import WeightServer
from tests.support.tiny_models import make_tiny_qwen3


def requests(tag: str, count: int = 48) -> list[SampleRequest]:
    params = SamplingOptions(temperature=1.0, top_p=1.0, top_k=0, max_response_tokens=4)
    return [
        SampleRequest(
            id=f"{tag}:{i // 4}#{i % 4}",
            prompt_id=str(i // 4),
            token_ids=np.arange(40, 45, dtype=np.int32),
            seed=i,
            params=params,
        )
        for i in range(count)
    ]


@pytest.mark.full
@pytest.mark.timeout(600)
def test_one_model_after_the_other_and_a_restarted_server(tmp_path: Path) -> None:
    folders = [HfFolder(make_tiny_qwen3(tmp_path / f"m{seed}", seed=seed)) for seed in range(2)]
    tokenizer = load_tokenizer(str(folders[0].path))
    with (
        WeightServer({}, latency_s=lambda _: 0.05) as first,
        WeightServer({}, latency_s=lambda _: 0.05) as second,
    ):
        options = SglangRollout(
            engine="sglang",
            urls=(first.url, second.url),
            sampling=SamplingOptions(max_response_tokens=4),
            sync=SglangSync(transport="disk", timeout_s=30.0),
            probe_interval_s=0.1,
            max_in_flight=2,
        )
        config = RunConfig.model_construct(
            rollout=options, model=ModelOptions(path=str(folders[0].path)), data=None
        )
        with ServerSampler(config, tmp_path / "servers") as sampler:
            assert sampler._options.sync.verify == "full"
            # The stand-in has no fused parameters; test_evaluation.py compares checksums on the
            # real server.
            sync = sampler._options.sync.model_copy(update={"verify": "off"})
            sampler._options = sampler._options.model_copy(update={"sync": sync})
            for number, folder in enumerate(folders):
                sampler.load(folder, tokenizer)
                digest = push_folder(folder, None, 0)
                assert first.weight_version == second.weight_version == f"{number}:{digest}"
                samples = []
                for sample in sampler.stream(requests("a"), {}):
                    samples.append(sample)
                    if len(samples) == 8:
                        second.restart()
                assert sorted(s.id for s in samples) == sorted(r.id for r in requests("a"))
                deadline = time.monotonic() + 60
                while second.weight_version != first.weight_version and time.monotonic() < deadline:
                    time.sleep(0.05)
                answered = second.answered
                samples += sampler.stream(requests("b"), {})
                assert second.answered > answered
                spans = itertools.chain.from_iterable(sample.spans for sample in samples)
                assert {span.digest for span in spans} == {digest}
                assert set(second.held) == set(folder.names)
        assert not list((tmp_path / "servers" / "weights").glob("v*"))
