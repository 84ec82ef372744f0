"""A run's configuration as a tiny case: the same family, layout, objective and options; sizes are
small and odd.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pacs_megatron.config.checks import max_sequence_tokens
from pacs_megatron.config.schema import (
    RECOMPUTED_WITH_TRANSFORMER_ENGINE,
    MegatronOptions,
    RunConfig,
)
from pacs_megatron.contracts import Layout
from pacs_megatron.models import read_spec
from pacs_megatron.objectives.ppo import PpoOptions

PROMPT = 8
RESPONSE = 13
"""Longest prompt and response of the samples, tokens."""
MAX_UPDATES = 4
MAX_EPOCHS = 2
_MAX_GROUP = 4
"""Updates per step, epochs and samples of a group that are kept."""
_VOCAB = 251
_ON_CPU = ("overlap_grad_reduce", "overlap_param_gather")
"""Options of `parallel.megatron` that need no GPU."""


@dataclass(frozen=True, slots=True)
class Case:
    """A tiny run of two attempts, each with one of `layouts`.

    `changes`: differences from the user's configuration.
    """

    config: RunConfig
    layouts: tuple[Layout, Layout]
    hf_config: Mapping[str, Any]
    steps: int
    stop_after: int
    """number of updates of the first attempt, which ends inside a step if steps have several
    updates
    """
    changes: tuple[str, ...]

    def parallel(self, attempt: int) -> Any:
        """`config.parallel` in the layout of an attempt."""
        layout = self.layouts[attempt]
        names = ("tp", "pp", "cp", "ep", "vpp", "sequence_parallel")
        return self.config.parallel.model_copy(
            update={name: getattr(layout, name) for name in names}
        )


def shrink(
    config: RunConfig, hf_config: Mapping[str, Any], user: Layout, *, world: int | None
) -> Case:
    """The case of a configuration that trains in the layout `user`.

    `world`: ranks of this job, which keep the layout and the precision; None: processes on this
    host's CPU.
    """
    layout = replace(user, world_size=world) if world else _few_ranks(user)
    after = _neighbour(
        layout, is_fixed=world is not None, is_moe=read_spec(hf_config).moe is not None
    )
    tiny = _tiny_model(
        hf_config, layout, after, for_kernels=world is not None and config.precision.dtype == "bf16"
    )
    updates = min(config.batch.updates_per_step, MAX_UPDATES)
    epochs = min(config.batch.epochs, MAX_EPOCHS)
    # The first attempt ends inside a step, unless a step has one update. A reset reference is used
    # after the resume.
    resets = getattr(config.objective, "reset_every", None) is not None
    steps, stop_after = (
        (5, 3) if updates == 1 else (3, epochs * len(_groups_of_step(1, updates)) + 1)
    )
    if resets and updates > 1:
        steps = steps + 1
        stop_after = stop_after + epochs * updates
    changed = _changes(config, updates, epochs, steps, on_cpu=world is None)
    after_text = _text(after) if after != layout else "the same layout: no other one fits"
    notes = [f"layout: {_text(layout)} for {_text(user)}; resumed in {after_text}"]
    before = config.model_dump(mode="json")
    for section, values in changed.items():
        notes += [
            f"{section}.{k}: {v} for {before[section][k]}"
            for k, v in values.items()
            if before[section][k] != v
        ]
    tree = {
        section: values | changed.get(section, {})
        for section, values in before.items()
        if values is not None
    }
    if config.rollout.is_sampled:  # recorded samples need no engine
        ahead = config.rollout.steps_ahead
        sampling = before["rollout"]["sampling"]
        tree["rollout"] = {"engine": "embedded", "sampling": sampling, "max_staleness": ahead}
    own = RunConfig.model_validate(tree)
    return Case(own, (layout, after), tiny, steps, stop_after, tuple(notes))


def _few_ranks(user: Layout) -> Layout:
    """The layout on at most 4 ranks, on 8 where the model's own axes need them."""
    size = {"tp": user.tp, "pp": user.pp, "cp": user.cp}
    while math.prod(size.values()) > 8:
        largest = max(size, key=lambda name: size[name])
        size[largest] = max(2, size[largest] // 2)
    model = math.prod(size.values())
    ep = user.ep
    dp = 2 if user.dp > 1 and model <= 2 else 1
    while (model // size["pp"]) * dp % ep:  # experts are divided over the ranks of a stage
        if model * dp < 8:
            dp *= 2
        else:
            ep = max(1, ep // 2)
    is_sequence_parallel = user.sequence_parallel and size["tp"] > 1
    return replace(
        user, world_size=model * dp, ep=ep, sequence_parallel=is_sequence_parallel, **size
    )


def _neighbour(layout: Layout, *, is_fixed: bool, is_moe: bool) -> Layout:
    """Another layout of the same ranks that can resume the first one's checkpoint
    (docs/configuration.md).
    """
    tp = layout.tp
    sp = layout.sequence_parallel
    if layout.world_size == 1:
        # One rank resumes on two: data-parallel with experts, else tensor-parallel.
        two = replace(layout, world_size=2) if is_moe else replace(layout, world_size=2, tp=2)
        return layout if is_fixed else two
    if tp % 2 == 0:
        return replace(layout, tp=tp // 2, sequence_parallel=sp and tp > 2)
    if layout.pp % 2 == 0:
        return replace(layout, pp=layout.pp // 2, vpp=layout.vpp if layout.pp > 2 else None)
    if layout.cp % 2 == 0:
        return replace(layout, cp=layout.cp // 2)
    return (
        replace(layout, tp=2 * tp, sequence_parallel=sp or is_moe) if layout.dp % 2 == 0 else layout
    )


def _tiny_model(
    hf: Mapping[str, Any], first: Layout, second: Layout, *, for_kernels: bool
) -> dict[str, Any]:
    """config.json with odd sizes that both layouts divide:

    3 heads for each key-value head, a prime vocabulary.
    """
    spec = read_spec(hf)
    shards = math.lcm(first.tp, second.tp)
    stages = math.lcm(*(layout.pp * (layout.vpp or 1) for layout in (first, second)))
    kv_heads = shards * (3 if shards <= 2 else 1)
    heads = kv_heads * (1 if spec.num_heads == spec.num_kv_heads else 3)
    # FP8 kernels need multiples of 16 on every rank, blockwise with sequence parallelism 128 for
    # `hidden_size`.
    head_dim, unit = (128, 16) if for_kernels else (8, 1)
    sizes: dict[str, Any] = {
        "vocab_size": _VOCAB,
        # transformers rejects a Llama whose heads do not divide it
        "hidden_size": 5 * head_dim
        if "head_dim" in hf and hf["model_type"] != "llama"
        else heads * head_dim,
        "intermediate_size": shards * 13 * unit,
        "num_hidden_layers": 3 if stages == 1 else 2 * stages,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "dtype": "float32",
    }
    if "head_dim" in hf:
        sizes["head_dim"] = head_dim
    if spec.moe is not None:
        experts = "num_experts" if "num_experts" in hf else "num_local_experts"
        sizes |= {
            experts: 3 * math.lcm(first.ep, second.ep),
            "num_experts_per_tok": min(spec.moe.top_k, 2),
        }
        sizes["moe_intermediate_size"] = shards * 5 * unit
    dropped = (
        "torch_dtype",
        "layer_types",
        "max_window_layers",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    )
    kept = {key: value for key, value in hf.items() if key not in dropped}
    for key in ("rope_scaling", "rope_parameters"):
        if kept.get(key) and "original_max_position_embeddings" in kept[key]:
            kept[key] = kept[key] | {
                "original_max_position_embeddings": 64
            }  # so that short samples show it
    return kept | sizes


def _changes(
    config: RunConfig, updates: int, epochs: int, steps: int, *, on_cpu: bool
) -> dict[str, Any]:
    """Section -> keys with the values of the case."""
    optimizer = config.optimizer
    batch = config.batch
    objective = config.objective
    longest = PROMPT + RESPONSE
    response = config.rollout.sampling.max_response_tokens
    share = min(batch.tokens_per_microbatch / max_sequence_tokens(config), 100.0)
    changed: dict[str, Any] = {
        "run": {"steps": steps},
        "batch": {
            "updates_per_step": updates,
            "epochs": epochs,
            "samples_per_prompt": min(batch.samples_per_prompt, _MAX_GROUP),
            "tokens_per_microbatch": max(longest, round(share * longest)),
        },
        # Large enough that float32 resolves an update, and that rounding of a zero gradient is not
        # a full step.
        "optimizer": {
            "lr": 1e-3,
            "min_lr": optimizer.min_lr / optimizer.lr * 1e-3,
            "adam_eps": 1e-3,
            "weight_decay": 10
            * optimizer.weight_decay,  # otherwise one update's decay is below a weight's tolerance
            "warmup_updates": min(optimizer.warmup_updates, 3),
        },
        "parallel": {},
        "precision": {},
        "objective": {},
    }
    if isinstance(objective, PpoOptions):
        changed["objective"]["critic"] = {"path": None, "lr": 2e-3, "warmup_steps": 0}
    for key in (
        "clip_low",
        "clip_high",
        "value_clip",
    ):  # ratios and values change by a few per cent
        if (getattr(objective, key, None) or 0.0) >= 0.05:
            changed["objective"][key] = 0.1 * getattr(objective, key)
    if (reset_every := getattr(objective, "reset_every", None)) is not None:
        changed["objective"]["reset_every"] = min(reset_every, 2)
    for name in ("constant_length", "overlong_length", "overlong_buffer"):
        if getattr(objective, name, None) is not None:
            changed["objective"][name] = max(
                1, round(getattr(objective, name) * RESPONSE / response)
            )
    recompute = config.parallel.recompute.model_dump(mode="json")
    if on_cpu:
        changed["precision"] = {"dtype": "fp32", "fp8": None}
        megatron = config.parallel.megatron.model_dump(mode="json")
        changed["parallel"]["megatron"] = MegatronOptions().model_dump() | {
            name: megatron[name] for name in _ON_CPU
        }
        modules = [
            name for name in recompute["modules"] if name not in RECOMPUTED_WITH_TRANSFORMER_ENGINE
        ]
        changed["parallel"].setdefault(
            "recompute", recompute | {"modules": modules} if modules else {}
        )
        changed["resources"] = {"gpus_per_node": 0, "gpu": None}
    return changed


def _groups_of_step(step: int, updates: int) -> list[int]:
    """Number of missing samples of each group.

    A first step has fewer groups than updates; others divide unevenly.
    """
    count = max(updates - 1, 1) if step == 1 and updates > 1 else 2 * updates + 1
    return [k % 3 for k in range(count)]


def write_samples(case: Case, folder: Path, seed: int) -> None:
    """Writes `case.json`, `steps.npz` and the configuration of the model, for the reference and the
    ranks.

    Responses and groups have uneven lengths, the last group of a step has one class, and some
    samples are truncated.
    """
    config = case.config
    rng = np.random.default_rng(seed)
    size = config.batch.samples_per_prompt
    arrays = dict[str, Any]()
    ids = dict[int, list[str]]()
    for step in range(1, case.steps + 1):
        sizes = [
            max(min(size, 2), size - less)
            for less in _groups_of_step(step, config.batch.updates_per_step)
        ]
        groups = np.repeat(np.arange(len(sizes)), sizes)
        labels = rng.integers(0, 2, len(groups)).astype(np.float64)
        first = np.cumsum([0, *sizes[:-1]])
        labels[first] = 0.0
        labels[first + np.array(sizes) - 1] = 1.0
        last = (groups == len(sizes) - 1) & (len(sizes) > 1)
        labels[last] = float(step % 2)
        prompt_lens = rng.integers(1, PROMPT + 1, len(sizes))[groups]
        response_lens = rng.integers(1, RESPONSE + 1, len(groups))
        response_lens[-1] = RESPONSE
        # Equal rewards in the last group; where lengths change them, rounding must not decide which
        # advantage is 0.
        is_equal = last & (getattr(config.objective, "overlong_length", None) is None)
        rewards = labels + np.where(is_equal, 0.0, rng.normal(0, 0.1, len(groups)))
        arrays |= {
            f"{step}.groups": groups,
            f"{step}.labels": labels,
            f"{step}.rewards": rewards,
            f"{step}.prompt_lens": prompt_lens,
            f"{step}.response_lens": response_lens,
            f"{step}.truncated": rng.random(len(groups)) < 0.3,
            f"{step}.tokens": rng.integers(
                0, _VOCAB, int((prompt_lens + response_lens).sum())
            ).astype(np.int32),
            # Of tokens and of whole samples, so that every cap of an importance weight applies to
            # some.
            f"{step}.noise": rng.normal(0, 0.4, int(response_lens.sum()))
            + np.repeat(rng.normal(0, 0.7, len(groups)), response_lens),
        }
        if (
            config.policy.routing == "replay_sampler"
        ):  # random experts; the policy would choose others
            experts = case.hf_config.get("num_experts") or case.hf_config["num_local_experts"]
            shape = (
                int((prompt_lens + response_lens - 1).sum()),
                case.hf_config["num_hidden_layers"],
                experts,
            )
            order = rng.permuted(
                np.broadcast_to(np.arange(experts, dtype=np.int16), shape), axis=-1
            )
            arrays[f"{step}.routes"] = order[..., : case.hf_config["num_experts_per_tok"]]
        ids[step] = [f"{step}:case/{(7 * g) % 11}-{g}#{row}" for row, g in enumerate(groups)]
    np.savez(folder / "steps.npz", **arrays)
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(dict(case.hf_config)))
    content = {
        name: getattr(config, name).model_dump(mode="json") for name in ("objective", "optimizer")
    } | {
        "clip_grad": config.objective.clip_grad,
        "updates_per_step": config.batch.updates_per_step,
        "epochs": config.batch.epochs,
        "temperature": config.rollout.sampling.temperature,
        "mismatch_threshold": config.mismatch.threshold,
        "is_sampled": config.rollout.is_sampled,
        "steps": case.steps,
        "ids": ids,
    }
    (folder / "case.json").write_text(json.dumps(content))


def _text(layout: Layout) -> str:
    sizes = ((name, getattr(layout, name) or 1) for name in ("tp", "pp", "vpp", "cp", "ep", "dp"))
    text = " ".join(f"{name}{size}" for name, size in sizes if size > 1) or "1 rank"
    return text + (" sequence-parallel" if layout.sequence_parallel else "")
