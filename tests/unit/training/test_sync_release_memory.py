"""Servers that release their GPU memory before a training step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pacs_megatron.config.rollout_options import SglangRollout, SglangServers, SglangSync
from pacs_megatron.contracts import SamplingOptions
from pacs_megatron.training.sync import release_memory

URL = "http://127.0.0.1:1"


class Recorder:
    """Stands where the weight sync stands."""

    def __init__(self) -> None:
        self.targets: list[str] = []
        self.released: list[str] = []

    def set_targets(self, apis: Any) -> None:
        self.targets = [api.url for api in apis]

    def release_memory(self) -> None:
        self.released += self.targets


@pytest.mark.parametrize(
    ("place", "released"),
    [
        ({"urls": (URL,)}, []),
        ({"urls": (URL,), "shares_gpus": True}, [URL]),
        ({"servers": SglangServers(python=("python",))}, []),
        ({"servers": SglangServers(python=("python",), colocated=True)}, [URL]),
    ],
)
def test_only_servers_on_the_trainers_gpus(place: dict[str, Any], released: list[str]) -> None:
    options = SglangRollout(
        engine="sglang",
        sampling=SamplingOptions(max_response_tokens=8),
        sync=SglangSync(transport="disk"),
        **place,
    )
    recorder = Recorder()
    returned = []  # type: ignore[var-annotated]
    world: Any = SimpleNamespace(
        config=SimpleNamespace(rollout=options),
        channel=SimpleNamespace(
            run_together=lambda action, only=None: action(),
            broadcast_json=lambda value: value,
            any_rank=bool,
        ),
        rank=SimpleNamespace(rank=0),
        driver=SimpleNamespace(call=lambda _question: ({"servers": [[URL, 0]]}, {})),
        server_sync=recorder,
        models=[
            SimpleNamespace(
                offload=SimpleNamespace(to_device=lambda: returned.append(list(recorder.released)))
            )
        ],
    )
    release_memory(world)
    assert recorder.released == released
    assert returned == ([released] if released else [])  # after the servers have released theirs
