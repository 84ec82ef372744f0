"""Creates one request for each sample of a rollout engine, with its id and seed.

A seed depends on the request only, not on the server or on the batch of the sample.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Literal

from pacs_megatron.config.layout import draws_of
from pacs_megatron.config.schema import EvaluationOptions, RunConfig
from pacs_megatron.contracts import Prompt, SampleRequest, SamplingOptions
from pacs_megatron.data import PromptSet
from pacs_megatron.errors import ConfigError

Purpose = Literal["train", "eval"]
_RESERVED_BY_SGLANG = 2
"""Tokens of the context that a request cannot use (`config.checks.min_server_context`)"""


def sample_requests(
    prompts: Sequence[Prompt],
    samples_per_prompt: int | Mapping[str, int],
    sampling: SamplingOptions,
    *,
    run_seed: int,
    step: int,
    purpose: Purpose = "train",
) -> list[SampleRequest]:
    """`samples_per_prompt` requests for each prompt, in the order of `prompts`; siblings adjacent.

    Args:
        prompts: with unique ids.
        samples_per_prompt: size of a group, of all groups or by prompt id.
        sampling: the parameters of every request.
        run_seed: `run.seed`.
        step: the training step, or the step before the evaluation.
        purpose: separates an evaluation from the training step with the same number.
    """
    prefix = f"{step}:" if purpose == "train" else f"{purpose}{step}:"
    requests = []
    for prompt in prompts:
        num_samples = samples_per_prompt
        if not isinstance(num_samples, int):
            num_samples = num_samples[prompt.id]
        for index in range(num_samples):
            request = SampleRequest(
                id=f"{prefix}{prompt.id}#{index}",
                prompt_id=prompt.id,
                token_ids=prompt.token_ids,
                seed=sample_seed(run_seed, step, prompt.id, index, purpose=purpose),
                params=sampling,
            )
            requests.append(request)
    return requests


def evaluation_requests(
    options: EvaluationOptions, benchmarks: Sequence[PromptSet], *, run_seed: int, step: int
) -> list[SampleRequest]:
    """The requests of an evaluation; `benchmarks` are the prompts of `options.benchmarks`, in their
    order.
    """
    assert options.sampling is not None  # the config requires it with benchmarks
    requests: list[SampleRequest] = []
    for benchmark, prompt_set in zip(options.benchmarks, benchmarks, strict=True):
        samples_per_prompt, _ = draws_of(options, benchmark)
        requests += sample_requests(
            prompt_set.prompts,
            samples_per_prompt,
            options.sampling,
            run_seed=run_seed,
            step=step,
            purpose="eval",
        )
    return requests


def max_benchmark_prompt(config: RunConfig, max_context: int) -> int | None:
    """Tokens of the longest problem of a benchmark whose response can have its maximum length.

    Args:
        config: of the run.
        max_context: context of the model, tokens.

    Returns:
        None without `evaluation.sampling`.

    Raises:
        ConfigError: the response alone exceeds the context.
    """
    sampling = config.evaluation.sampling
    if sampling is None:
        return None
    context = max_context
    if config.rollout.sglang is not None:
        servers = config.rollout.sglang.servers
        limits = () if servers is None else (servers.context_length, servers.max_total_tokens)
        context = min([context, *(limit for limit in limits if limit is not None)])
        context -= _RESERVED_BY_SGLANG
    if context <= sampling.max_response_tokens:
        raise ConfigError(
            f"evaluation.sampling.max_response_tokens={sampling.max_response_tokens} and a problem "
            f"exceed the model's context of {context}; lower it"
        )
    return context - sampling.max_response_tokens


def sample_seed(
    run_seed: int, step: int, prompt_id: str, index: int, *, purpose: str = "train"
) -> int:
    """63-bit seed of a sample.

    `purpose` separates an evaluation from the training step with the same number.
    """
    # prompt_id, the only free text, comes last, so different requests never give the same bytes.
    key = f"{purpose}|{run_seed}|{step}|{index}|{prompt_id}".encode()
    digest = blake2b(key, digest_size=8, person=b"pacs-sample").digest()
    return int.from_bytes(digest, "big") >> 1
