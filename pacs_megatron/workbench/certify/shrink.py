"""A run's configuration as a tiny case: the same family, layout, objective and options; sizes are
small and odd.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

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
"""Longest prompt of the samples, tokens."""
RESPONSE = 13
"""Longest response of the samples, tokens."""
VOCAB = 251
MAX_UPDATES = 4
"""Most updates of a step that the case keeps."""
MAX_EPOCHS = 2
_MAX_GROUP = 4
"""Most samples of a group that the case keeps."""
_MAX_RANKS = 8
_MAX_RANK_OF_ADAPTERS = 3
_ON_CPU = ("overlap_grad_reduce", "overlap_param_gather")
"""Options of `parallel.megatron` that need no GPU."""
_NOT_OF_TINY_MODELS = (
    "torch_dtype",
    "layer_types",
    "max_window_layers",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
"""Keys of config.json that do not fit the tiny sizes."""


@dataclass(frozen=True, slots=True)
class Case:
    """A tiny run of two attempts, each with one of `layouts`."""

    config: RunConfig
    layouts: tuple[Layout, Layout]
    hf_config: Mapping[str, Any]
    """config.json of the tiny model"""
    steps: int
    stop_after: int
    """number of updates of the first attempt, which ends inside a step if steps have several
    updates
    """
    changes: tuple[str, ...]
    """differences from the user's configuration, for the certificate"""

    def parallel(self, attempt: int) -> Any:
        """`config.parallel` in the layout of an attempt."""
        layout = self.layouts[attempt]
        axes = ("tp", "pp", "cp", "ep", "vpp", "sequence_parallel")
        return self.config.parallel.model_copy(
            update={axis: getattr(layout, axis) for axis in axes}
        )


def shrink(
    config: RunConfig, hf_config: Mapping[str, Any], user: Layout, *, world: int | None
) -> Case:
    """The case of a configuration.

    Args:
        config: the user's.
        hf_config: config.json of its model.
        user: the layout that the configuration trains in.
        world: ranks of this job, which keep the layout and the precision; None: processes on this
            host's CPU.
    """
    is_job = world is not None
    layout = replace(user, world_size=world) if world else _few_ranks(user)
    is_moe = read_spec(hf_config).moe is not None
    layout_after = _neighbour(layout, is_fixed=is_job, is_moe=is_moe)
    for_kernels = is_job and config.precision.dtype == "bf16"
    tiny_model = _tiny_model(hf_config, layout, layout_after, for_kernels=for_kernels)

    updates = min(config.batch.updates_per_step, MAX_UPDATES)
    epochs = min(config.batch.epochs, MAX_EPOCHS)
    resets = getattr(config.objective, "reset_every", None) is not None
    steps, stop_after = _lengths(updates, epochs, resets=resets)
    changed = _changes(config, updates, epochs, steps, on_cpu=not is_job)
    return Case(
        config=_changed_config(config, changed),
        layouts=(layout, layout_after),
        hf_config=tiny_model,
        steps=steps,
        stop_after=stop_after,
        changes=(_layout_note(user, layout, layout_after), *_notes(config, changed)),
    )


def missing_of_groups(step: int, updates: int) -> list[int]:
    """Number of missing samples of each group of a step.

    A first step has fewer groups than updates; others divide unevenly.
    """
    is_short = step == 1 and updates > 1
    num_groups = updates - 1 if is_short else 2 * updates + 1
    return [group % 3 for group in range(num_groups)]


def _lengths(updates: int, epochs: int, *, resets: bool) -> tuple[int, int]:
    """(steps of the case, updates of the first attempt).

    The first attempt ends inside a step, unless a step has one update. A reset reference is used
    after the resume.
    """
    if updates == 1:
        return 5, 3
    steps = 3
    stop_after = epochs * len(missing_of_groups(1, updates)) + 1
    if resets:
        return steps + 1, stop_after + epochs * updates
    return steps, stop_after


def _few_ranks(user: Layout) -> Layout:
    """The layout on at most 4 ranks, on 8 where the model's own axes need them."""
    size = {"tp": user.tp, "pp": user.pp, "cp": user.cp}
    while math.prod(size.values()) > _MAX_RANKS:
        largest = max(size, key=lambda axis: size[axis])
        size[largest] = max(2, size[largest] // 2)

    model_ranks = math.prod(size.values())
    stage_ranks = model_ranks // size["pp"]
    ep = user.ep
    dp = 2 if user.dp > 1 and model_ranks <= 2 else 1
    # Experts are divided over the ranks of a stage.
    while stage_ranks * dp % ep:
        if model_ranks * dp < _MAX_RANKS:
            dp *= 2
        else:
            ep = max(1, ep // 2)

    is_sequence_parallel = user.sequence_parallel and size["tp"] > 1
    return replace(
        user, world_size=model_ranks * dp, ep=ep, sequence_parallel=is_sequence_parallel, **size
    )


def _neighbour(layout: Layout, *, is_fixed: bool, is_moe: bool) -> Layout:
    """Another layout of the same ranks that can resume the first one's checkpoint
    (docs/configuration.md); the same one if no other fits.

    Args:
        is_fixed: whether the number of ranks is that of a job.
    """
    tp = layout.tp
    has_sequence_parallel = layout.sequence_parallel
    if layout.world_size == 1:
        if is_fixed:
            return layout
        # One rank resumes on two: data-parallel with experts, else tensor-parallel.
        return replace(layout, world_size=2, tp=layout.tp if is_moe else 2)

    if tp % 2 == 0:
        return replace(layout, tp=tp // 2, sequence_parallel=has_sequence_parallel and tp > 2)
    if layout.pp % 2 == 0:
        return replace(layout, pp=layout.pp // 2, vpp=layout.vpp if layout.pp > 2 else None)
    if layout.cp % 2 == 0:
        return replace(layout, cp=layout.cp // 2)
    if layout.dp % 2 == 0:
        # Megatron's experts need sequence parallelism with tensor parallelism.
        return replace(layout, tp=2 * tp, sequence_parallel=has_sequence_parallel or is_moe)
    return layout


def _tiny_model(
    hf: Mapping[str, Any], first: Layout, second: Layout, *, for_kernels: bool
) -> dict[str, Any]:
    """config.json with odd sizes that both layouts divide: 3 heads for each key-value head, a prime
    vocabulary.

    Args:
        hf: the user's config.json.
        first: layout of the first attempt.
        second: layout of the attempt that resumes.
        for_kernels: whether FP8 kernels must support the sizes.
    """
    spec = read_spec(hf)
    shards = math.lcm(first.tp, second.tp)
    stages = math.lcm(first.pp * (first.vpp or 1), second.pp * (second.vpp or 1))
    kv_heads = shards * (3 if shards <= 2 else 1)
    heads = kv_heads if spec.num_heads == spec.num_kv_heads else 3 * kv_heads

    # FP8 kernels need multiples of 16 on every rank, blockwise with sequence parallelism 128 for
    # `hidden_size`.
    head_dim = 128 if for_kernels else 8
    unit = 16 if for_kernels else 1
    # transformers rejects a Llama whose heads do not divide `hidden_size`.
    has_free_hidden_size = "head_dim" in hf and hf["model_type"] != "llama"
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 5 * head_dim if has_free_hidden_size else heads * head_dim,
        "intermediate_size": shards * 13 * unit,
        "num_hidden_layers": 3 if stages == 1 else 2 * stages,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "dtype": "float32",
    }
    if "head_dim" in hf:
        sizes["head_dim"] = head_dim
    if spec.moe is not None:
        num_experts = 3 * math.lcm(first.ep, second.ep)
        sizes |= {key: num_experts for key in ("num_experts", "num_local_experts") if key in hf}
        sizes["num_experts_per_tok"] = min(spec.moe.top_k, 2)
        sizes["moe_intermediate_size"] = shards * 5 * unit

    if spec.moe is not None and spec.moe.shared_ffn_size:
        sizes["shared_expert_intermediate_size"] = shards * 7 * unit
    if spec.delta is not None:
        key_heads = math.lcm(first.tp * first.cp, second.tp * second.cp)
        sizes |= {
            "full_attention_interval": 2,
            "linear_num_key_heads": key_heads,
            "linear_num_value_heads": 3 * key_heads,
            "linear_key_head_dim": 128 if for_kernels else 6,
            "linear_value_head_dim": 128 if for_kernels else 5,
            # The norm after a delta net divides by the size of outputs that are differences of
            # nearly equal numbers, and would amplify their rounding.
            "rms_norm_eps": 1e-4,
        }

    tiny = {key: value for key, value in hf.items() if key not in _NOT_OF_TINY_MODELS}
    for key in ("rope_scaling", "rope_parameters"):
        rope = tiny.get(key)
        if rope and "original_max_position_embeddings" in rope:
            # So short that the few tokens of a sample show the scaling.
            tiny[key] = {**rope, "original_max_position_embeddings": 64}
    return tiny | sizes


def _changes(
    config: RunConfig, updates: int, epochs: int, steps: int, *, on_cpu: bool
) -> dict[str, Any]:
    """Section -> keys with the values of the case."""
    changed: dict[str, Any] = {
        "run": {"steps": steps},
        "batch": _batch_changes(config, updates, epochs),
        "optimizer": _optimizer_changes(config),
        "parallel": {},
        "precision": {},
        "objective": _objective_changes(config),
        "policy": _policy_changes(config),
    }
    if on_cpu:
        changed["precision"] = {"dtype": "fp32", "fp8": None}
        changed["parallel"] = _parallel_changes_on_cpu(config)
        changed["resources"] = {"gpus_per_node": 0, "gpu": None}
    return changed


def _batch_changes(config: RunConfig, updates: int, epochs: int) -> dict[str, Any]:
    """The same packing: the token budget relative to the longest sample."""
    batch = config.batch
    longest = PROMPT + RESPONSE
    share = min(batch.tokens_per_microbatch / max_sequence_tokens(config), 100.0)
    return {
        "updates_per_step": updates,
        "epochs": epochs,
        "samples_per_prompt": min(batch.samples_per_prompt, _MAX_GROUP),
        "tokens_per_microbatch": max(longest, round(share * longest)),
    }


def _optimizer_changes(config: RunConfig) -> dict[str, Any]:
    optimizer = config.optimizer
    return {
        # Large enough that float32 resolves an update, and that rounding of a zero gradient is not
        # a full step.
        "lr": 1e-3,
        "min_lr": optimizer.min_lr / optimizer.lr * 1e-3,
        "adam_eps": 1e-3,
        # Otherwise one update's decay is below a weight's tolerance.
        "weight_decay": 10 * optimizer.weight_decay,
        "warmup_updates": min(optimizer.warmup_updates, 3),
    }


def _policy_changes(config: RunConfig) -> dict[str, Any]:
    """Adapters of a small rank with the same alpha / rank."""
    adapters = config.policy.lora
    if adapters is None:
        return {}
    rank = min(adapters.rank, _MAX_RANK_OF_ADAPTERS)
    changed = {"rank": rank, "alpha": adapters.alpha * rank / adapters.rank, "path": None}
    return {"lora": adapters.model_dump(mode="json") | changed}


def _objective_changes(config: RunConfig) -> dict[str, Any]:
    objective = config.objective
    changed: dict[str, Any] = {}
    if isinstance(objective, PpoOptions):
        changed["critic"] = {"path": None, "lr": 2e-3, "warmup_steps": 0}

    # Ratios and values change by a few per cent in a case.
    for key in ("clip_low", "clip_high", "value_clip"):
        bound = getattr(objective, key, None) or 0.0
        if bound >= 0.05:
            changed[key] = 0.1 * bound

    reset_every = getattr(objective, "reset_every", None)
    if reset_every is not None:
        changed["reset_every"] = min(reset_every, 2)

    max_response_tokens = config.rollout.sampling.max_response_tokens
    for key in ("constant_length", "overlong_length", "overlong_buffer"):
        length = getattr(objective, key, None)
        if length is not None:
            changed[key] = max(1, round(length * RESPONSE / max_response_tokens))
    return changed


def _parallel_changes_on_cpu(config: RunConfig) -> dict[str, Any]:
    """Without the options that need a GPU or Transformer Engine."""
    megatron = MegatronOptions().model_dump()
    user_megatron = config.parallel.megatron.model_dump(mode="json")
    for name in _ON_CPU:
        megatron[name] = user_megatron[name]

    recompute = config.parallel.recompute.model_dump(mode="json")
    modules = [
        name for name in recompute["modules"] if name not in RECOMPUTED_WITH_TRANSFORMER_ENGINE
    ]
    # Selective recomputation without a module is an error.
    return {
        "megatron": megatron,
        "recompute": recompute | {"modules": modules} if modules else {},
    }


def _changed_config(config: RunConfig, changed: Mapping[str, Any]) -> RunConfig:
    sections = config.model_dump(mode="json")
    tree = {}
    for section, values in sections.items():
        if values is not None:
            tree[section] = values | changed.get(section, {})

    # Recorded samples need no engine.
    if config.rollout.is_sampled:
        tree["rollout"] = {
            "engine": "embedded",
            "sampling": sections["rollout"]["sampling"],
            "max_staleness": config.rollout.steps_ahead,
        }
        if config.rollout.agents is not None:
            tree["rollout"]["agent"] = sections["rollout"]["agent"]
    return RunConfig.model_validate(tree)


def _notes(config: RunConfig, changed: Mapping[str, Any]) -> list[str]:
    """The changed values of the configuration, for the certificate."""
    before = config.model_dump(mode="json")
    notes = []
    for section, values in changed.items():
        for key, value in values.items():
            value_before = before[section][key]
            if value_before != value:
                notes.append(f"{section}.{key}: {value} for {value_before}")
    return notes


def _layout_note(user: Layout, layout: Layout, layout_after: Layout) -> str:
    after = "the same layout: no other one fits"
    if layout_after != layout:
        after = _text(layout_after)
    return f"layout: {_text(layout)} for {_text(user)}; resumed in {after}"


def _text(layout: Layout) -> str:
    """`tp2 dp2 sequence-parallel`"""
    sizes = []
    for axis in ("tp", "pp", "vpp", "cp", "ep", "dp"):
        size = getattr(layout, axis) or 1
        if size > 1:
            sizes.append(f"{axis}{size}")
    text = " ".join(sizes) or "1 rank"
    return f"{text} sequence-parallel" if layout.sequence_parallel else text
