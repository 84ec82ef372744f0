"""A policy on any layout, and random mini-batches for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from pacs_megatron.batching.split import plan_microbatches
from pacs_megatron.batching.tables import select_tokens, single_turn_writers
from pacs_megatron.config.schema import (
    Fp8Options,
    LoraOptions,
    OptimizerOptions,
    ParallelOptions,
    PrecisionOptions,
)
from pacs_megatron.contracts import Layout, MiniBatch, SampleFacts, TokenBuffers, Writer

# adam_eps is large so that the update is a smooth function of the gradient: at 1e-8 Adam turns
# rounding noise of a zero gradient into a full step, so that two correct implementations differ.
OPTIMIZER: dict[str, Any] = {"lr": 1e-3, "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-3}
CLIP_GRAD = 1.0


def make_policy(
    folder: Path,
    world_size: int,
    *,
    tokens_per_microbatch: int = 256,
    dtype: Literal["fp32", "bf16"] = "fp32",
    optimizer: dict[str, Any] | None = None,
    total_updates: int = 100,
    temperature: float = 1.0,
    clip_grad: float = CLIP_GRAD,
    fp8: dict[str, Any] | None = None,
    offload: Literal["none", "optimizer", "all"] = "none",
    head: Literal["bf16", "fp32"] = "bf16",
    lora: dict[str, Any] | None = None,
    **parallel: Any,
) -> Any:
    """MegatronPolicy on the calling ranks, loaded from the Hugging Face folder.

    Call it inside `run_ranks`.
    """
    from safetensors.torch import load_file

    from pacs_megatron.models import load_spec
    from pacs_megatron.parallel import groups

    options = ParallelOptions(**parallel)
    layout = Layout(
        world_size=world_size,
        tp=options.tp,
        pp=options.pp,
        cp=options.cp,
        ep=options.ep,
        vpp=options.vpp,
        sequence_parallel=options.sequence_parallel,
    )
    rank = groups.initialize(layout, seed=1, control_timeout_s=600.0)
    from pacs_megatron.policy.engine import MegatronPolicy

    policy = MegatronPolicy(
        load_spec(folder),
        rank,
        parallel=options,
        precision_options=PrecisionOptions(
            dtype=dtype, head=head, fp8=None if fp8 is None else Fp8Options(**fp8)
        ),
        optimizer=OptimizerOptions(**(OPTIMIZER | (optimizer or {}))),
        clip_grad=clip_grad,
        total_updates=total_updates,
        tokens_per_microbatch=tokens_per_microbatch,
        temperature=temperature,
        offload=offload,
        adapters=None if lora is None else LoraOptions(**lora),
        seed=5,
    )
    tensors = load_file(folder / "model.safetensors")
    policy.load_weights(lambda name: tensors[name].to(policy.config.params_dtype))
    return policy


def random_step(
    seed: int, *, num_groups: int = 4, group_size: int = 4, vocab: int = 250
) -> tuple[SampleFacts, TokenBuffers]:
    """Ragged prompts and responses with mixed labels; siblings share their prompt."""
    rng = np.random.default_rng(seed)
    ids = []
    groups = []
    labels = []
    prompt_lens = []
    response_lens = []
    tokens = []
    for group in range(num_groups):
        prompt = rng.integers(0, vocab, rng.integers(3, 9))
        for sample in range(group_size):
            response = rng.integers(0, vocab, rng.integers(1, 14))
            ids.append(f"0:p{group}#{sample}")
            groups.append(group)
            labels.append(float(rng.integers(0, 2)))
            prompt_lens.append(len(prompt))
            response_lens.append(len(response))
            tokens.append(np.concatenate([prompt, response]).astype(np.int32))
    labels[0] = 0.0
    labels[1] = 1.0
    facts = SampleFacts(
        ids=tuple(ids),
        groups=np.array(groups, dtype=np.int64),
        labels=np.array(labels),
        rewards=np.array(labels),
        prompt_lens=np.array(prompt_lens, dtype=np.int64),
        response_lens=np.array(response_lens, dtype=np.int64),
        environment_lens=np.zeros(len(ids), dtype=np.int64),
        truncated=np.zeros(len(ids), dtype=bool),
    )
    return facts, TokenBuffers(
        index=np.arange(len(ids)),
        token_ids=np.concatenate(tokens),
        offsets=np.concatenate([[0], np.cumsum(facts.lens)]),
        writers=single_turn_writers(facts.prompt_lens, facts.response_lens),
        sampler_logprobs=rng.normal(-2.0, 0.5, int(facts.response_lens.sum())).astype(np.float32),
        response_offsets=np.concatenate([[0], np.cumsum(facts.response_lens)]),
    )


def with_environment(
    step: tuple[SampleFacts, TokenBuffers], seed: int
) -> tuple[SampleFacts, TokenBuffers]:
    """The same tokens, of which the environment wrote about half of each response: random spans,
    also next to the prompt. The last token is the policy's.
    """
    facts, tokens = step
    rng = np.random.default_rng(seed)
    writers = tokens.writers.copy()
    for row in range(facts.num_samples):
        start = int(tokens.offsets[row] + facts.prompt_lens[row])
        last = int(tokens.offsets[row + 1]) - 1
        edges = np.sort(rng.integers(start, last + 1, 4))
        writers[edges[0] : edges[1]] = Writer.ENVIRONMENT
        writers[edges[2] : edges[3]] = Writer.ENVIRONMENT

    def count(writer: Writer) -> np.ndarray:
        return np.add.reduceat(writers == writer, tokens.offsets[:-1], dtype=np.int64)

    response_lens = count(Writer.POLICY)
    facts = replace(facts, response_lens=response_lens, environment_lens=count(Writer.ENVIRONMENT))
    return facts, replace(
        tokens,
        writers=writers,
        sampler_logprobs=rng.normal(-2.0, 0.5, response_lens.sum()).astype(np.float32),
        response_offsets=np.concatenate([[0], np.cumsum(response_lens)]),
    )


def make_part(
    facts: SampleFacts,
    tokens: TokenBuffers,
    policy: Any,
    tokens_per_microbatch: int = 256,
    *,
    index: int = 0,
    keep_groups: bool = False,
) -> MiniBatch:
    """The mini-batch of update `index` of its step, with this rank's share of the tokens."""
    plan = plan_microbatches(
        facts,
        layout=policy.rank.layout,
        tokens_per_microbatch=tokens_per_microbatch,
        keep_groups=keep_groups,
    )
    rows = np.flatnonzero(plan.owners(facts.num_samples) == policy.rank.dp)
    return MiniBatch(
        facts=facts,
        rows=np.arange(facts.num_samples),
        tokens=select_tokens(tokens, rows, rows),
        plan=plan,
        index=index,
    )


def logprobs_by_row(
    policy: Any, minibatch: MiniBatch, source: str = "step_start"
) -> dict[int, np.ndarray]:
    """Row -> log-probs of this rank's samples; empty except on the last pipeline stage."""
    return by_row(minibatch, policy.logprobs(minibatch, source))


def by_row(minibatch: MiniBatch, column: torch.Tensor) -> dict[int, np.ndarray]:
    """Row -> values of this rank's samples in a response column."""
    pieces = minibatch.tokens.by_sample(column.cpu().numpy())
    return dict(zip(minibatch.tokens.index.tolist(), pieces, strict=False))


def column_of(minibatch: MiniBatch, values: Mapping[int, np.ndarray]) -> torch.Tensor:
    """The response column of this rank's samples; inverse of `by_row`."""
    return torch.from_numpy(
        np.concatenate([values[int(row)] for row in minibatch.tokens.index]).astype(np.float32)
    )


def with_passes(policy: Any, objective: Any, minibatch: MiniBatch) -> MiniBatch:
    """The mini-batch with the log-probs that the objective needs before its update."""
    logprobs = {
        f"{name}_logprobs": policy.logprobs(minibatch, name)
        for name in objective.logprob_passes(minibatch.index)
    }
    return replace(minibatch, **logprobs)


def train(
    policy: Any, objective: Any, steps: list[tuple[SampleFacts, TokenBuffers]], **part_options: Any
) -> list[Any]:
    """Runs one update with all passes that the objective needs; returns the reports."""
    reports = []
    for facts, tokens in steps:
        minibatch = with_passes(policy, objective, make_part(facts, tokens, policy, **part_options))
        reports.append(policy.update(minibatch, objective, objective.prepare_step(minibatch.facts)))
    return reports
