"""The recorded samples of a case, drawn at random: uneven groups and lengths."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from pacs_megatron.config.schema import RunConfig
from pacs_megatron.workbench.certify import shrink
from pacs_megatron.workbench.certify.shrink import Case


def write_samples(case: Case, folder: Path, seed: int) -> None:
    """Writes `case.json`, `steps.npz` and the configuration of the model, for the reference and the
    ranks.

    Responses and groups have uneven lengths, the last group of a step has one class, and some
    samples are truncated. Of a run with an agent, responses have random spans of the environment.
    """
    rng = np.random.default_rng(seed)
    arrays: dict[str, Any] = {}
    ids: dict[int, list[str]] = {}
    for step in range(1, case.steps + 1):
        step_arrays = _step_arrays(case, step, rng)
        arrays |= {f"{step}.{name}": values for name, values in step_arrays.items()}
        ids[step] = _sample_ids(step, step_arrays["groups"])

    np.savez(folder / "steps.npz", **arrays)
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(dict(case.hf_config)))
    (folder / "case.json").write_text(json.dumps(_case_content(case, ids)))


def _step_arrays(case: Case, step: int, rng: np.random.Generator) -> dict[str, Any]:
    """The arrays of one step, without its number in their names."""
    sizes = _group_sizes(case, step)
    groups = np.repeat(np.arange(len(sizes)), sizes)
    num_samples = len(groups)
    # A single group keeps both classes.
    is_in_last_group = (groups == len(sizes) - 1) & (len(sizes) > 1)

    labels = rng.integers(0, 2, num_samples).astype(np.float64)
    first_of_group = np.cumsum([0, *sizes[:-1]])
    last_of_group = first_of_group + np.array(sizes) - 1
    labels[first_of_group] = 0.0
    labels[last_of_group] = 1.0
    labels[is_in_last_group] = float(step % 2)

    prompt_lens = rng.integers(1, shrink.PROMPT + 1, len(sizes))[groups]
    whole_lens = rng.integers(1, shrink.RESPONSE + 1, num_samples)
    whole_lens[-1] = shrink.RESPONSE
    lens = prompt_lens + whole_lens
    is_policy = np.ones(int(whole_lens.sum()), dtype=bool)
    if case.config.rollout.agents is not None:
        is_policy = _random_turns(whole_lens, rng)
    starts = np.cumsum([0, *whole_lens[:-1]])
    response_lens = np.add.reduceat(is_policy, starts, dtype=np.int64)
    num_response_tokens = int(response_lens.sum())

    # Equal rewards in the last group; where lengths change them, rounding must not decide which
    # advantage is 0.
    has_overlong = getattr(case.config.objective, "overlong_length", None) is not None
    is_equal = is_in_last_group & (not has_overlong)
    reward_noise = rng.normal(0, 0.1, num_samples)

    truncated = rng.random(num_samples) < 0.3
    tokens = rng.integers(0, shrink.VOCAB, int(lens.sum())).astype(np.int32)
    # Of tokens and of whole samples, so that every cap of an importance weight applies to some.
    token_noise = rng.normal(0, 0.4, num_response_tokens)
    sample_noise = rng.normal(0, 0.7, num_samples)

    arrays = {
        "groups": groups,
        "labels": labels,
        # Not negative: an objective may divide by their mean.
        "rewards": np.abs(labels + np.where(is_equal, 0.0, reward_noise)),
        "prompt_lens": prompt_lens,
        "response_lens": response_lens,
        "environment_lens": whole_lens - response_lens,
        "is_policy": is_policy,
        "truncated": truncated,
        "tokens": tokens,
        "noise": token_noise + np.repeat(sample_noise, response_lens),
    }
    if case.config.policy.routing == "replay_sampler":
        arrays["routes"] = _random_experts(case, int((lens - 1).sum()), rng)
    return arrays


def _random_turns(whole_lens: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """bool [sum of whole_lens], whether the policy wrote each token of the responses; up to two
    random spans of the environment in each. The last token is the policy's.
    """
    responses = []
    for length in whole_lens.tolist():
        is_policy = np.ones(length, dtype=bool)
        edges = np.sort(rng.integers(0, length, 4))
        is_policy[edges[0] : edges[1]] = False
        is_policy[edges[2] : edges[3]] = False
        responses.append(is_policy)
    return np.concatenate(responses)


def _group_sizes(case: Case, step: int) -> list[int]:
    size = case.config.batch.samples_per_prompt
    missing = shrink.missing_of_groups(step, case.config.batch.updates_per_step)
    return [max(min(size, 2), size - less) for less in missing]


def _random_experts(case: Case, num_tokens: int, rng: np.random.Generator) -> np.ndarray:
    """Experts that the policy's router would not choose, int16 [tokens, layers, top k]."""
    hf_config = case.hf_config
    num_experts = hf_config.get("num_experts") or hf_config["num_local_experts"]
    shape = (num_tokens, hf_config["num_hidden_layers"], num_experts)
    in_order = np.broadcast_to(np.arange(num_experts, dtype=np.int16), shape)
    shuffled = rng.permuted(in_order, axis=-1)
    return shuffled[..., : hf_config["num_experts_per_tok"]]


def _sample_ids(step: int, groups: np.ndarray) -> list[str]:
    """Ids whose order is not that of the rows."""
    ids = []
    for row, group in enumerate(groups):
        ids.append(f"{step}:case/{(7 * group) % 11}-{group}#{row}")
    return ids


def lora_content(config: RunConfig) -> dict[str, Any] | None:
    """`policy.lora` in case.json; None if all weights are trained."""
    adapters = config.policy.lora
    return None if adapters is None else adapters.model_dump(mode="json")


def _case_content(case: Case, ids: dict[int, list[str]]) -> dict[str, Any]:
    config = case.config
    return {
        "objective": config.objective.model_dump(mode="json"),
        "optimizer": config.optimizer.model_dump(mode="json"),
        "clip_grad": config.objective.clip_grad,
        "updates_per_step": config.batch.updates_per_step,
        "epochs": config.batch.epochs,
        "temperature": config.rollout.sampling.temperature,
        "mismatch_threshold": config.mismatch.threshold,
        "step_start_entropy": config.logging.step_start_entropy,
        "is_sampled": config.rollout.is_sampled,
        "lora": lora_content(config),
        "steps": case.steps,
        "ids": ids,
    }
