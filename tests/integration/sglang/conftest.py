"""One real SGLang server for the whole session: a start takes 30 to 70 s and 2 GB.

A test leaves any weights in it; a test that depends on the weights pushes them first.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
import torch

from pacs_megatron.config.rollout_options import SglangRollout, SglangServers, SglangSync
from pacs_megatron.config.schema import ModelOptions
from pacs_megatron.contracts import SampleRequest, SamplingOptions
from pacs_megatron.convert.convert import ConversionOptions, hf_to_megatron, megatron_to_hf
from pacs_megatron.models import load_spec
from pacs_megatron.sglang import build as sglang
from pacs_megatron.sglang import guard as sglang_guard
from pacs_megatron.sglang.api import SglangApi
from pacs_megatron.sglang.client import SglangEngine
from pacs_megatron.sglang.weights.server_sync import ServerSync, server_sync
from pacs_megatron.training.push import push
from tests.support.needs import SGLANG_PYTHON, require_sglang
from tests.support.servers.fleet_run import FleetRun
from tests.support.tiny_models import make_tiny_qwen3

ROOT = Path(__file__).parents[3]
START_S = 600.0
FIRST_PROMPTS = [list(range(start, start + 5)) for start in range(40, 80, 2)]


class Lab:
    """The server, two sets of weights for it, and what tests do with them."""

    def __init__(self, url: str, folders: list[Path], tmp: Path) -> None:
        self.url = url
        self.folders = folders
        self.tmp = tmp
        self.version = 0
        """of the last push; grows over the session, as a trainer's does"""
        self.first_answers: list[list[int]] | None = None
        """greedy answers to FIRST_PROMPTS before any push; None for a server that ran already"""
        self._models: dict[tuple[int, bool], torch.nn.Module] = {}
        self.engine: SglangEngine
        self.sync: ServerSync

    def options(self, *urls: str, **changes: Any) -> SglangRollout:
        sync = {"transport": "broadcast", "verify": "full", "timeout_s": 30.0} | changes.pop(
            "sync", {}
        )
        quick = {
            "probe_interval_s": 0.2,
            "probe_timeout_s": 3.0,
            "dead_after_s": 6.0,
            "all_down_after_s": 60.0,
        }
        return SglangRollout(
            engine="sglang",
            urls=urls or (self.url,),
            sampling=SamplingOptions(max_response_tokens=32),
            sync=SglangSync(**sync),
            **(quick | changes),
        )

    @contextmanager
    def opened(self, *urls: str, weights: int | None = 0, **changes: Any) -> Iterator[Lab]:
        """An engine and a sync; `weights` are pushed first unless None."""
        options = self.options(*urls, **changes)
        self.sync = server_sync(options, load_spec(self.folders[0]), self.tmp / "weights")
        self.sync.set_targets(sglang.server_apis(options, options.urls))
        try:
            with sglang.open_engine(
                options, ModelOptions(path=str(self.folders[0])), self.tmp
            ) as self.engine:
                if weights is not None:
                    self.push(weights)
                yield self
        finally:
            self.sync.close()

    @contextmanager
    def attached(self, *urls: str, **changes: Any) -> Iterator[SglangEngine]:
        """Another engine over servers that hold what was pushed last; within `opened`."""
        options = self.options(*urls, **changes)
        with sglang.open_engine(
            options, ModelOptions(path=str(self.folders[0])), self.tmp
        ) as engine:
            engine.set_current(self.version, self.sync.report.digest)
            yield engine

    def push(self, weights: int) -> str:
        self.version += 1
        self.engine.begin_update()
        pushed = push(self.version, self.export(weights), [self.sync])
        self.engine.set_current(self.version, pushed)
        return pushed

    def export(self, weights: int) -> Iterator[tuple[str, torch.Tensor]]:
        """As a policy exports: Hugging Face names, its own dtype (fp32)."""
        yield from self.model(weights).state_dict().items()

    def model(self, weights: int, rounded: bool = False) -> torch.nn.Module:
        """By Hugging Face, in fp32; `rounded` to bf16's values first."""
        from transformers import Qwen3ForCausalLM

        key = (weights, rounded)
        if key not in self._models:
            model = Qwen3ForCausalLM.from_pretrained(
                self.folders[weights], dtype=torch.float32
            ).eval()
            self._models[key] = model.to(torch.bfloat16).to(torch.float32) if rounded else model
        return self._models[key]

    def logprobs(
        self, weights: int, token_ids: np.ndarray, temperature: float = 1.0
    ) -> torch.Tensor:
        """float32 [tokens - 1, vocab]: log-probs of every next token by Hugging Face, weights
        rounded to bf16.
        """
        model = self.model(weights, rounded=True)
        with torch.no_grad():
            logits = model(torch.from_numpy(token_ids.astype(np.int64))[None]).logits[0, :-1]
        return torch.log_softmax(logits / temperature, -1)


def sample_requests(num: int, *, tokens: int = 16, tag: str, **params: Any) -> list[SampleRequest]:
    """Prompts of different lengths, four samples each."""
    return [
        SampleRequest(
            id=f"{tag}:p{i // 4}#{i % 4}",
            prompt_id=f"p{i // 4}",
            token_ids=np.arange(40, 43 + i // 4 % 7, dtype=np.int32),
            seed=i,
            params=SamplingOptions(max_response_tokens=tokens, **params),
        )
        for i in range(num)
    ]


@pytest.fixture(autouse=True)
def _no_run_is_left() -> Iterator[None]:
    yield
    FleetRun.end_all()


@pytest.fixture(scope="session")
def lab_folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two checkpoints of one architecture."""
    tmp = tmp_path_factory.mktemp("sglang-models")
    return [make_tiny_qwen3(tmp / f"m{seed}", seed=seed) for seed in range(2)]


@pytest.fixture(scope="session")
def lab(lab_folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    running = os.environ.get(
        "PACS_SGLANG_URL"
    )  # while developing: a server of `make_tiny_qwen3`'s shape
    if running is not None:
        yield Lab(running, lab_folders, tmp_path_factory.mktemp("sglang-server"))
        return
    require_sglang()
    tmp = tmp_path_factory.mktemp("sglang-server")
    options = own_options()
    assert options.servers is not None
    # From a folder that went through both conversions: SGLang has to load what they write as it
    # stands.
    hf_to_megatron(str(lab_folders[0]), ConversionOptions(out=tmp / "megatron"))
    back = ConversionOptions(out=tmp / "converted")
    megatron_to_hf(tmp / "megatron", back, step=None, max_shard_bytes=200_000)
    specs = sglang.server_specs(options, ModelOptions(path=str(back.out)), tmp)
    [server] = sglang.start_servers(specs, START_S)
    try:
        lab = Lab(server.url, lab_folders, tmp)
        lab.first_answers = [_greedy(server.url, prompt) for prompt in FIRST_PROMPTS]
        yield lab
    finally:
        server.close()


def _greedy(url: str, prompt: list[int]) -> list[int]:
    sampling = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    answer = requests.post(
        f"{url}/generate", json={"input_ids": prompt, "sampling_params": sampling}, timeout=600
    )
    tokens: list[int] = answer.json()["output_ids"]
    return tokens


def own_options(**changes: Any) -> SglangRollout:
    """Own servers on CPU."""
    servers = {
        "python": (str(SGLANG_PYTHON),),
        "device": "cpu",
        "max_total_tokens": 16384,
    } | changes.pop("servers", {})
    return SglangRollout(
        engine="sglang",
        sampling=SamplingOptions(max_response_tokens=32),
        sync=SglangSync(transport="disk"),
        servers=SglangServers(**servers),
        **changes,
    )


def server_pids(port: str) -> list[int]:
    """Processes of the process group of the server that has this port on its command line."""
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                words = Path(f"/proc/{entry}/cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue
            if (
                "--nccl-port" in words
                and port in words
                and "sglang/guard.py" not in " ".join(words)
            ):
                return sglang_guard.members(os.getpgid(int(entry)))
    raise AssertionError(f"no server on port {port}")


def num_running(api: SglangApi) -> int:
    """Requests that the server's scheduler works on or has queued."""
    [load] = json.loads(api.call("/v1/loads"))["loads"]
    return int(load["num_running_reqs"]) + int(load["num_waiting_reqs"])
