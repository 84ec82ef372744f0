"""Converts requests and samples to a JSON header and flat arrays, and back.

Messages between driver and ranks, checkpoints and records have this form.

A record, `rollouts/step_000012.safetensors`, has the exact samples of a step. Its arrays are int32
token ids, float32 log-probs and the sampler's experts; its metadata has ids, prompt lengths, stop
reasons, spans and tokens of the environment as JSON. A run can train the step again from it. A
sample's seed follows from its id and the run's seed (`requests`).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from pacs_megatron.batching.tables import flat
from pacs_megatron.contracts import (
    Prompt,
    Sample,
    SampleRequest,
    SamplingOptions,
    Span,
    Stop,
    ToolCall,
)
from pacs_megatron.contracts.pieces import ToSend
from pacs_megatron.runtime.files import write_atomically

Message = tuple[dict[str, Any], dict[str, np.ndarray]]
"""JSON header and flat arrays"""
Reply = tuple[dict[str, Any], ToSend]
"""A message of the driver, which arrives as a Message"""


def requests_to_message(prompts: Sequence[Prompt], requests: Sequence[SampleRequest]) -> Message:
    """The message of requests that share their sampling parameters.

    Args:
        prompts: those of the requests.
        requests: at least one.

    Returns:
        Header: `ids`, `prompts` (number of the prompt) and `seeds` by request; `prompt_ids` by
        prompt; `params`, the sampling parameters.
        Arrays: `token_ids`, int32, prompt after prompt; `offsets`, int64 [prompts + 1].
    """
    number_of = {prompt.id: number for number, prompt in enumerate(prompts)}
    token_ids, offsets = flat([prompt.token_ids for prompt in prompts], np.int32)
    header = {
        "ids": [request.id for request in requests],
        "prompts": [number_of[request.prompt_id] for request in requests],
        "seeds": [request.seed for request in requests],
        "prompt_ids": [prompt.id for prompt in prompts],
        "params": requests[0].params.model_dump(mode="json"),
    }
    return header, {"token_ids": token_ids, "offsets": offsets}


def turns_to_message(turns: Sequence[SampleRequest]) -> Message:
    """The message of turns of agents: each request has its own tokens, limit and stop strings.

    Args:
        turns: at least one; temperature and filters are equal.

    Returns:
        Same as `requests_to_message`, with a prompt for each request. The header has also
        `max_tokens` and `stop` by request.
    """
    token_ids, offsets = flat([turn.token_ids for turn in turns], np.int32)
    header = {
        "ids": [turn.id for turn in turns],
        "prompts": list(range(len(turns))),
        "seeds": [turn.seed for turn in turns],
        "prompt_ids": [turn.prompt_id for turn in turns],
        "params": turns[0].params.model_dump(mode="json"),
        "max_tokens": [turn.params.max_response_tokens for turn in turns],
        "stop": [turn.params.stop for turn in turns],
    }
    return header, {"token_ids": token_ids, "offsets": offsets}


def requests_from_message(
    header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> list[SampleRequest]:
    """Inverse of `requests_to_message` and `turns_to_message`; requests of one prompt share its
    token array.
    """
    prompts = _split(arrays["token_ids"], arrays["offsets"])
    requests = []
    for sample_id, number, seed, params in zip(
        header["ids"], header["prompts"], header["seeds"], _params(header), strict=True
    ):
        request = SampleRequest(
            id=sample_id,
            prompt_id=header["prompt_ids"][number],
            token_ids=prompts[number],
            seed=seed,
            params=params,
        )
        requests.append(request)
    return requests


def _params(header: Mapping[str, Any]) -> list[SamplingOptions]:
    """The sampling parameters of each request of a message."""
    shared = SamplingOptions.model_validate(header["params"])
    if "max_tokens" not in header:
        return [shared] * len(header["ids"])
    return [
        shared.model_copy(update={"max_response_tokens": max_tokens, "stop": tuple(stop)})
        for max_tokens, stop in zip(header["max_tokens"], header["stop"], strict=True)
    ]


def samples_to_message(samples: Sequence[Sample]) -> Message:
    """The message of samples, without rewards and labels.

    Returns:
        Header: `ids`, `prompt_ids`, `prompt_lens`, `stops`, `spans` (weight versions), by
        sample; `environment`, its tokens, if it wrote any; `calls` of tools and `own_rewards` of
        agents, if there are any.
        Arrays, sample after sample, each with its offsets [samples + 1]: `token_ids`, int32;
        `logprobs`, float32; `routes`, int16, if a sample has the sampler's experts.
    """
    header = {
        "ids": [sample.id for sample in samples],
        "prompt_ids": [sample.prompt_id for sample in samples],
        "prompt_lens": [sample.prompt_len for sample in samples],
        "stops": [sample.stop for sample in samples],
        "spans": [[astuple(span) for span in sample.spans] for sample in samples],
    }
    if any(sample.environment for sample in samples):
        header["environment"] = [sample.environment for sample in samples]
    if any(sample.calls for sample in samples):
        header["calls"] = [[asdict(call) for call in sample.calls] for sample in samples]
    if any(sample.own_reward is not None for sample in samples):
        header["own_rewards"] = [sample.own_reward for sample in samples]

    arrays: dict[str, np.ndarray] = {}
    token_ids = [sample.token_ids for sample in samples]
    arrays["token_ids"], arrays["offsets"] = flat(token_ids, np.int32)
    logprobs = [sample.sampler_logprobs for sample in samples]
    arrays["logprobs"], arrays["logprob_offsets"] = flat(logprobs, np.float32)

    recorded = [sample.routes for sample in samples if sample.routes is not None]
    if recorded:
        empty = recorded[0][:0]
        routes = [empty if sample.routes is None else sample.routes for sample in samples]
        arrays["routes"], arrays["route_offsets"] = flat(routes, np.int16)
    return header, arrays


def samples_from_message(
    header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> list[Sample]:
    """Inverse of `samples_to_message`; the samples' arrays are views."""
    tokens = _split(arrays["token_ids"], arrays["offsets"])
    logprobs = _split(arrays["logprobs"], arrays["logprob_offsets"])
    # Without it, all samples have one turn.
    environments = header.get("environment", [()] * len(tokens))
    calls = header.get("calls", [()] * len(tokens))
    own_rewards = header.get("own_rewards", [None] * len(tokens))
    routes = [np.empty(0)] * len(header["ids"])
    if "routes" in arrays:
        routes = _split(arrays["routes"], arrays["route_offsets"])
    columns = zip(
        header["ids"],
        header["prompt_ids"],
        header["prompt_lens"],
        header["stops"],
        header["spans"],
        strict=True,
    )

    samples = []
    for k, (sample_id, prompt_id, prompt_len, stop, spans) in enumerate(columns):
        sample = Sample(
            id=sample_id,
            prompt_id=prompt_id,
            token_ids=tokens[k],
            prompt_len=prompt_len,
            sampler_logprobs=logprobs[k],
            spans=tuple(
                Span(version=version, digest=digest, start=start, end=end)
                for version, digest, start, end in spans
            ),
            stop=Stop(stop),
            environment=tuple((start, end) for start, end in environments[k]),
            calls=tuple(ToolCall(**call) for call in calls[k]),
            own_reward=own_rewards[k],
            routes=routes[k] if len(routes[k]) else None,
        )
        samples.append(sample)
    return samples


def check_saved(
    header: Mapping[str, Any], arrays: Mapping[str, np.ndarray], steps: range, vocab_size: int
) -> None:
    """Raises ValueError for samples of a checkpoint that no sampler can return.

    Such a file can have the right digest.

    Args:
        header: of `rollouts_to_message`.
        arrays: of `rollouts_to_message`.
        steps: the steps that the buffer can have.
        vocab_size: of the model.
    """
    for values, bounds in (("token_ids", "offsets"), ("logprobs", "logprob_offsets")):
        offsets = arrays[bounds]
        if offsets[0] != 0 or offsets[-1] != len(arrays[values]) or (np.diff(offsets) < 0).any():
            raise ValueError(f"{bounds} do not divide {values}")

    token_ids = arrays["token_ids"]
    if ((token_ids < 0) | (token_ids >= vocab_size)).any():
        raise ValueError(f"a token id is not between 0 and {vocab_size - 1}")
    _check_environment(header, arrays)
    if not np.isfinite(arrays["logprobs"]).all():
        raise ValueError("a log-prob is not finite")
    if not np.isin(arrays["labels"], (-1, 0, 1)).all():
        raise ValueError("a label is not 0 or 1")
    for saved in header["steps"]:
        if saved["step"] not in steps:
            raise ValueError(
                f"step {saved['step']} is not between {steps.start} and {steps.stop - 1}"
            )


def _check_environment(header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Raises ValueError for tokens of the environment that are not inside the response."""
    response_lens = np.diff(arrays["logprob_offsets"]).tolist()
    for spans, length in zip(header.get("environment", []), response_lens, strict=False):
        # Ascending, without overlap, and the last token is the policy's.
        edges: list[int] = []
        for span in spans:
            edges += span
        if edges != sorted(edges) or (edges and not 0 <= edges[0] < edges[-1] < length):
            raise ValueError(f"tokens {spans} of the environment are not in a response of {length}")


def write_record(path: Path, samples: Sequence[Sample]) -> None:
    """Writes a record of samples without verdicts and calls of tools, in the given order.

    Equal samples give equal bytes (a call has its seconds).

    Args:
        path: with the suffix `.safetensors`.
        samples: of one step.
    """
    header, arrays = samples_to_message(samples)
    header.pop("calls", None)
    header.pop("own_rewards", None)
    content = save(arrays, metadata={"samples": json.dumps(header)})
    write_atomically(path, [content])


def _split(values: np.ndarray, offsets: np.ndarray) -> list[np.ndarray]:
    """A view for each sample."""
    return [values[start:stop] for start, stop in pairwise(offsets)]
