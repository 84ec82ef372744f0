"""Requests, and an embedded engine with the weights of a Hugging Face folder, as from a policy's
export.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pacs_megatron.contracts import Sample, SampleRequest, SamplingOptions
from pacs_megatron.rollout.requests import sample_seed
from pacs_megatron.rollout.sample_arrays import samples_from_message


def sampling(*, max_tokens: int = 12, **changes: Any) -> SamplingOptions:
    """Temperature 1, no filter, 12 tokens; with `changes`."""
    return SamplingOptions(max_response_tokens=max_tokens, **changes)


def requests_for(
    prompts: Sequence[Sequence[int]],
    *,
    samples: int = 1,
    params: SamplingOptions | None = None,
    run_seed: int = 0,
) -> list[SampleRequest]:
    """`samples` requests for each prompt, siblings adjacent."""
    requests = []
    for number, prompt in enumerate(prompts):
        for index in range(samples):
            request = SampleRequest(
                id=f"0:p/{number}#{index}",
                prompt_id=f"p/{number}",
                token_ids=np.array(prompt, dtype=np.int32),
                seed=sample_seed(run_seed, 0, f"p/{number}", index),
                params=params if params is not None else sampling(),
            )
            requests.append(request)
    return requests


def random_prompts(
    number: int, *, vocab: int = 250, shortest: int = 3, longest: int = 20, seed: int = 0
) -> list[list[int]]:
    """Prompts of different lengths."""
    rng = np.random.default_rng(seed)
    return [
        rng.integers(0, vocab, rng.integers(shortest, longest + 1)).tolist() for _ in range(number)
    ]


def checkpoint_weights(folder: Path) -> list[tuple[str, Any]]:
    """(name, tensor) of a folder's safetensors: as an export of the same policy yields them."""
    from safetensors.torch import load_file

    tensors = []
    for file in sorted(folder.glob("*.safetensors")):
        tensors += sorted(load_file(file).items())
    return tensors


def fill(engine: Any, weights: Iterable[tuple[str, Any]], version: int = 0) -> str:
    """One complete update; returns the digest."""
    from pacs_megatron.contracts.digest import WeightDigest

    digest = WeightDigest()
    engine.begin_update(version)
    for name, tensor in weights:
        engine.put(name, tensor)
        digest.update(name, tensor)
    engine.end_update(digest.hexdigest())
    return digest.hexdigest()


def embedded_engine(
    folder: Path,
    *,
    rank: int = 0,
    num_ranks: int = 1,
    batch_sequences: int = 64,
    eos: int = 258,
    filled: bool = True,
) -> Any:
    """An fp32 engine on the CPU, with the folder's own weights as version 0 unless `filled` is
    False.
    """
    from transformers import AutoTokenizer

    from pacs_megatron.config.rollout_options import EmbeddedRollout
    from pacs_megatron.embedded.engine import EmbeddedEngine, Vocabulary

    tokenizer = AutoTokenizer.from_pretrained(folder)
    engine = EmbeddedEngine(
        folder,
        EmbeddedRollout(
            engine="embedded",
            sampling=SamplingOptions(max_response_tokens=12),
            batch_sequences=batch_sequences,
        ),
        Vocabulary(eos_token_ids=frozenset([eos]), pad_token_id=256, decode=tokenizer.decode),
        rank=rank,
        num_ranks=num_ranks,
    )
    if filled:
        fill(engine, checkpoint_weights(folder))
    return engine


def read_record(path: Path) -> list[Sample]:
    """The samples of a record of `logging.save_tokens`."""
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        header = json.loads(file.metadata()["samples"])
        return samples_from_message(header, {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
