"""Micro-batches are built when the schedule reaches them, once for all chunks."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from pacs_megatron.policy import microbatch
from pacs_megatron.policy.microbatch import MicroBatches


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_each_is_built_once_and_freed_after_its_last_use(
    monkeypatch: pytest.MonkeyPatch, num_chunks: int
) -> None:
    built: list[int] = []

    def build(_minibatch: Any, rows: Any, _columns: Any, **_options: Any) -> str:
        built.append(int(rows[0]))
        return f"batch of row {rows[0]}"

    monkeypatch.setattr(microbatch, "build_microbatch", build)
    facts = SimpleNamespace(num_samples=3, response_lens=np.ones(3, np.int64))
    minibatch = SimpleNamespace(
        facts=facts,
        tokens=SimpleNamespace(index=np.arange(3)),
        plan=SimpleNamespace(together=np.ones(3, np.bool_)),
    )
    batches = MicroBatches(
        cast("Any", minibatch),
        [np.array([row]) for row in range(3)],
        multiple=1,
        device=torch.device("cpu"),
        with_tables=False,
        num_uses=num_chunks,
    )
    assert len(batches) == 3 and built == []
    iterators = [iter(batches) for _ in range(num_chunks)]
    for row in range(3):
        of_chunks = [next(iterator) for iterator in iterators]
        assert of_chunks == [f"batch of row {row}"] * num_chunks
        assert built == list(range(row + 1))
        assert batches._built == {}
