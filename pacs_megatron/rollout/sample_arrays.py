"""Requests and samples as flat arrays, for messages between driver and ranks, checkpoints and records.

A record, `rollouts/step_000012.safetensors`, has the samples of a step bit for bit: int32 token ids, float32 log-probs, the
reason of each response's end, its spans with version and digest of their weights, and the sampler's experts where they were
recorded, with the sample ids in the metadata.
A run can train the step again from it. A sample's seed follows from its id and the run's seed (`requests`).

A msgpack encoder would need the same conversion: samples are objects with arrays of different lengths, and one array per
sample costs more than its tokens.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from pacs_megatron.batching.tables import flat
from pacs_megatron.contracts import Prompt, Sample, SampleRequest, SamplingOptions, Span, Stop
from pacs_megatron.runtime.files import write_atomically

_RECORD_HEADER = "samples"
_STOPS = (Stop.EOS, Stop.LENGTH, Stop.ABORTED)
Message = tuple[dict[str, Any], dict[str, np.ndarray]]


def requests_to_message(prompts: Sequence[Prompt], requests: Sequence[SampleRequest]) -> Message:
    """`requests` share their sampling parameters and belong to `prompts`."""
    number = {prompt.id: k for k, prompt in enumerate(prompts)}
    token_ids, offsets = flat([prompt.token_ids for prompt in prompts], np.int32)
    header = {
        "ids": [request.id for request in requests],
        "prompt_ids": [prompt.id for prompt in prompts],
        "params": requests[0].params.model_dump(mode="json"),
    }
    return header, {
        "prompt": np.array([number[request.prompt_id] for request in requests], dtype=np.int64),
        "seeds": np.array([request.seed for request in requests], dtype=np.int64),
        "token_ids": token_ids,
        "offsets": offsets,
    }


def requests_from_message(header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> list[SampleRequest]:
    """Inverse of `requests_to_message`; requests of one prompt share its token array."""
    bounds = arrays["offsets"]
    prompts = [arrays["token_ids"][start:stop] for start, stop in pairwise(bounds)]
    params = SamplingOptions.model_validate(header["params"])
    return [
        SampleRequest(
            id=sample_id,
            prompt_id=header["prompt_ids"][number],
            token_ids=prompts[number],
            seed=int(seed),
            params=params,
        )
        for sample_id, number, seed in zip(header["ids"], arrays["prompt"], arrays["seeds"], strict=True)
    ]


def samples_to_message(samples: Sequence[Sample]) -> Message:
    """Token ids, log-probs, experts and weight versions, without rewards and labels."""
    token_ids, offsets = flat([s.token_ids for s in samples], np.int32)
    logprobs, logprob_offsets = flat([s.sampler_logprobs for s in samples], np.float32)
    spans = [span for s in samples for span in s.spans]
    header = {
        "ids": [s.id for s in samples],
        "prompt_ids": [s.prompt_id for s in samples],
        "digests": sorted({span.digest for span in spans}),
    }
    routes: dict[str, np.ndarray] = {}
    if any(s.routes is not None for s in samples):
        shape = next(s.routes.shape[1:] for s in samples if s.routes is not None)
        none = np.empty((0, *shape), dtype=np.int16)
        values, bounds = flat([none if s.routes is None else s.routes for s in samples], np.int16)
        routes = {"routes": values, "route_offsets": bounds}
    digest_number = {digest: k for k, digest in enumerate(header["digests"])}
    return header, {
        "token_ids": token_ids,
        "offsets": offsets,
        "prompt_lens": np.array([s.prompt_len for s in samples], dtype=np.int64),
        "logprobs": logprobs,
        "logprob_offsets": logprob_offsets,
        "stops": np.array([_STOPS.index(s.stop) for s in samples], dtype=np.uint8),
        "num_spans": np.array([len(s.spans) for s in samples], dtype=np.int64),
        "spans": np.array(
            [[span.version, digest_number[span.digest], span.start, span.end] for span in spans], dtype=np.int64
        ).reshape(-1, 4),
    } | routes


def samples_from_message(header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> list[Sample]:
    """Inverse of `samples_to_message`."""
    samples = []
    next_span = 0
    routes = list(pairwise(arrays["route_offsets"])) if "routes" in arrays else [(0, 0)] * len(header["ids"])
    for k, (sample_id, prompt_id) in enumerate(zip(header["ids"], header["prompt_ids"], strict=True)):
        rows = arrays["spans"][next_span : next_span + int(arrays["num_spans"][k])]
        next_span += len(rows)
        samples.append(
            Sample(
                id=sample_id,
                prompt_id=prompt_id,
                token_ids=arrays["token_ids"][arrays["offsets"][k] : arrays["offsets"][k + 1]],
                prompt_len=int(arrays["prompt_lens"][k]),
                sampler_logprobs=arrays["logprobs"][arrays["logprob_offsets"][k] : arrays["logprob_offsets"][k + 1]],
                spans=tuple(
                    Span(version=int(v), digest=header["digests"][int(d)], start=int(start), end=int(end))
                    for v, d, start, end in rows
                ),
                stop=_STOPS[int(arrays["stops"][k])],
                routes=arrays["routes"][slice(*routes[k])] if routes[k][0] < routes[k][1] else None,
            )
        )
    return samples


def check_saved(header: Mapping[str, Any], arrays: Mapping[str, np.ndarray], steps: range, vocab_size: int) -> None:
    """Raises ValueError for samples of a checkpoint that no sampler returned, although their digest fits."""
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
            raise ValueError(f"step {saved['step']} is not between {steps.start} and {steps.stop - 1}")


def write_record(path: Path, samples: Sequence[Sample]) -> None:
    """Record of samples without their verdicts, in the given order; equal samples give equal bytes."""
    from safetensors.numpy import save

    header, arrays = samples_to_message(samples)
    write_atomically(path, [save(arrays, metadata={_RECORD_HEADER: json.dumps(header)})])
