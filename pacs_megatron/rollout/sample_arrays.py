"""Requests and samples as flat arrays and a JSON header, for messages between driver and ranks,
checkpoints and records.

A record, `rollouts/step_000012.safetensors`, has the exact samples of a step. Its arrays are int32
token ids, float32 log-probs and the sampler's experts; its metadata has ids, prompt lengths, stop
reasons and spans as JSON. A run can train the step again from it. A sample's seed follows from its
id and the run's seed (`requests`).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from pacs_megatron.batching.tables import flat
from pacs_megatron.contracts import Prompt, Sample, SampleRequest, SamplingOptions, Span, Stop
from pacs_megatron.runtime.files import write_atomically

Message = tuple[dict[str, Any], dict[str, np.ndarray]]


def requests_to_message(prompts: Sequence[Prompt], requests: Sequence[SampleRequest]) -> Message:
    """The message of `requests`, which share their sampling parameters and belong to `prompts`."""
    number = {prompt.id: k for k, prompt in enumerate(prompts)}
    token_ids, offsets = flat([prompt.token_ids for prompt in prompts], np.int32)
    header = {
        "ids": [request.id for request in requests],
        "prompts": [number[request.prompt_id] for request in requests],
        "seeds": [request.seed for request in requests],
        "prompt_ids": [prompt.id for prompt in prompts],
        "params": requests[0].params.model_dump(mode="json"),
    }
    return header, {"token_ids": token_ids, "offsets": offsets}


def requests_from_message(
    header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> list[SampleRequest]:
    """Inverse of `requests_to_message`; requests of one prompt share its token array."""
    prompts = [arrays["token_ids"][start:stop] for start, stop in pairwise(arrays["offsets"])]
    params = SamplingOptions.model_validate(header["params"])
    return [
        SampleRequest(
            id=sample_id,
            prompt_id=header["prompt_ids"][k],
            token_ids=prompts[k],
            seed=seed,
            params=params,
        )
        for sample_id, k, seed in zip(
            header["ids"], header["prompts"], header["seeds"], strict=True
        )
    ]


def samples_to_message(samples: Sequence[Sample]) -> Message:
    """The message of samples: token ids, log-probs, experts and weight versions, without rewards
    and labels.
    """
    header = {
        "ids": [s.id for s in samples],
        "prompt_ids": [s.prompt_id for s in samples],
        "prompt_lens": [s.prompt_len for s in samples],
        "stops": [s.stop for s in samples],
        "spans": [[astuple(span) for span in s.spans] for s in samples],
    }
    arrays: dict[str, np.ndarray] = {}
    arrays["token_ids"], arrays["offsets"] = flat([s.token_ids for s in samples], np.int32)
    arrays["logprobs"], arrays["logprob_offsets"] = flat(
        [s.sampler_logprobs for s in samples], np.float32
    )
    recorded = [s.routes for s in samples if s.routes is not None]
    if recorded:
        none = recorded[0][:0]
        routes = [none if s.routes is None else s.routes for s in samples]
        arrays["routes"], arrays["route_offsets"] = flat(routes, np.int16)
    return header, arrays


def samples_from_message(
    header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> list[Sample]:
    def parts(values: str, offsets: str) -> list[np.ndarray]:
        return [arrays[values][start:stop] for start, stop in pairwise(arrays[offsets])]

    routes = (
        parts("routes", "route_offsets")
        if "routes" in arrays
        else [np.empty(0)] * len(header["ids"])
    )
    tokens = parts("token_ids", "offsets")
    logprobs = parts("logprobs", "logprob_offsets")
    columns = zip(
        header["ids"],
        header["prompt_ids"],
        header["prompt_lens"],
        header["stops"],
        header["spans"],
        strict=True,
    )
    return [
        Sample(
            id=sample_id,
            prompt_id=prompt_id,
            token_ids=tokens[k],
            prompt_len=prompt_len,
            sampler_logprobs=logprobs[k],
            spans=tuple(
                Span(version=v, digest=d, start=start, end=end) for v, d, start, end in spans
            ),
            stop=Stop(stop),
            routes=routes[k] if len(routes[k]) else None,
        )
        for k, (sample_id, prompt_id, prompt_len, stop, spans) in enumerate(columns)
    ]


def check_saved(
    header: Mapping[str, Any], arrays: Mapping[str, np.ndarray], steps: range, vocab_size: int
) -> None:
    """Raises ValueError for samples of a checkpoint that no sampler can return, although the digest
    is right.
    """
    for values, bounds in (("token_ids", "offsets"), ("logprobs", "logprob_offsets")):
        offsets = arrays[bounds]
        if offsets[0] != 0 or offsets[-1] != len(arrays[values]) or (np.diff(offsets) < 0).any():
            raise ValueError(f"{bounds} do not divide {values}")
    if ((arrays["token_ids"] < 0) | (arrays["token_ids"] >= vocab_size)).any():
        raise ValueError(f"a token id is not between 0 and {vocab_size - 1}")
    if not np.isfinite(arrays["logprobs"]).all():
        raise ValueError("a log-prob is not finite")
    if not np.isin(arrays["labels"], (-1, 0, 1)).all():
        raise ValueError("a label is not 0 or 1")
    for saved in header["steps"]:
        if saved["step"] not in steps:
            raise ValueError(
                f"step {saved['step']} is not between {steps.start} and {steps.stop - 1}"
            )


def write_record(path: Path, samples: Sequence[Sample]) -> None:
    """Writes a record of samples without verdicts, in the given order; equal samples give equal
    bytes.
    """
    header, arrays = samples_to_message(samples)
    write_atomically(path, [save(arrays, metadata={"samples": json.dumps(header)})])
