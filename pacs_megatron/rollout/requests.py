"""Creates one request for each sample of a rollout engine, with its id and seed.

A seed depends on the request only, not on the server or on the batch of the sample.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Literal

from pacs_megatron.config.layout import draws_of
from pacs_megatron.config.schema import EvaluationOptions
from pacs_megatron.contracts import Prompt, SampleRequest, SamplingOptions
from pacs_megatron.data import PromptSet

Purpose = Literal["train", "eval"]


def sample_requests(
    prompts: Sequence[Prompt], samples_per_prompt: int, sampling: SamplingOptions, *, run_seed: int, step: int,
    purpose: Purpose = "train",
) -> list[SampleRequest]:  # fmt: skip
    """`samples_per_prompt` requests for each prompt, siblings adjacent, in the order of `prompts`."""
    prefix = f"{step}:" if purpose == "train" else f"{purpose}{step}:"
    return [
        SampleRequest(
            id=f"{prefix}{prompt.id}#{index}",
            prompt_id=prompt.id,
            token_ids=prompt.token_ids,
            seed=sample_seed(run_seed, step, prompt.id, index, purpose=purpose),
            params=sampling,
        )
        for prompt in prompts
        for index in range(samples_per_prompt)
    ]


def evaluation_requests(
    options: EvaluationOptions, benchmarks: Sequence[PromptSet], *, run_seed: int, step: int
) -> list[SampleRequest]:
    """The requests of an evaluation; `benchmarks` are the prompts of `options.benchmarks`, in their
    order.
    """
    assert options.sampling is not None  # the config requires it with benchmarks
    requests: list[SampleRequest] = []
    for benchmark, found in zip(options.benchmarks, benchmarks, strict=True):
        num = draws_of(options, benchmark)[0]
        requests += sample_requests(
            found.prompts, num, options.sampling, run_seed=run_seed, step=step, purpose="eval"
        )
    return requests


def sample_seed(
    run_seed: int, step: int, prompt_id: str, index: int, *, purpose: str = "train"
) -> int:
    """63-bit seed of a sample.

    `purpose` separates an evaluation from the training step with the same number.
    """
    # prompt_id, the only free text, comes last, so different requests never give the same bytes.
    key = f"{purpose}|{run_seed}|{step}|{index}|{prompt_id}".encode()
    return int.from_bytes(blake2b(key, digest_size=8, person=b"pacs-sample").digest(), "big") >> 1
