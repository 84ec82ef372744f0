"""Sample requests for a rollout engine: one for each sample, with its id and seed."""

from collections.abc import Sequence
from typing import Literal

from pacs_megatron.config.rollout_options import SamplingOptions
from pacs_megatron.contracts import Prompt, SampleRequest, SamplingParams
from pacs_megatron.rollout.seeds import sample_seed

Purpose = Literal["train", "eval"]


def sample_requests(
    prompts: Sequence[Prompt], samples_per_prompt: int, sampling: SamplingOptions, *, run_seed: int, step: int,
    purpose: Purpose,
) -> list[SampleRequest]:  # fmt: skip
    """`samples_per_prompt` requests for each prompt, siblings adjacent, in the order of `prompts`.

    Ids are `<step>:<prompt id>#<index>`, for an evaluation `eval<step>:<prompt id>#<index>`.
    """
    params = sampling_params(sampling)
    prefix = f"{step}:" if purpose == "train" else f"{purpose}{step}:"
    return [
        SampleRequest(
            id=f"{prefix}{prompt.id}#{index}",
            prompt_id=prompt.id,
            token_ids=prompt.token_ids,
            seed=sample_seed(run_seed, step, prompt.id, index, purpose=purpose),
            params=params,
        )
        for prompt in prompts
        for index in range(samples_per_prompt)
    ]


def sampling_params(options: SamplingOptions) -> SamplingParams:
    """The configured sampling options as the contract's parameters."""
    return SamplingParams(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        max_tokens=options.max_response_tokens,
        stop=options.stop,
    )
