"""The policy as a sharded state dict for Megatron's dist_checkpointing: weights, optimizer, schedule, reference, RNG.

Keys: `model.*` (global layer numbers, so any layout reads them), `reference.*` likewise, and for each weight
`optimizer.state.{param,exp_avg,exp_avg_sq}.model.*`, with or without the distributed optimizer, in fp32.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding, extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from pacs_megatron.policy import weights
from pacs_megatron.policy.engine import MegatronPolicy

MODEL, REFERENCE, OPTIMIZER = "model", "reference", "optimizer"
OPTIMIZER_FORMAT = 2
"""Recorded in a checkpoint. 2: the same keys for every layout and optimizer."""


def sharding_metadata() -> dict[str, Any]:
    """Metadata for Megatron's modules and optimizers that selects the format of a checkpoint."""
    return {
        # One key per layer, numbered over the whole model, so a stage can be read without the others.
        "non_homogeneous_layers": True,
        "singleton_local_shards": False,
        # The only format that loads at another tensor- or pipeline-parallel size.
        "distrib_optim_sharding_type": "fully_reshardable",
        # Without it every rank gathers whole fp32 buffers on its GPU (distrib_optimizer.py:1085-1095), beside resident
        # servers; with it data-parallel rank 0 gathers them over gloo in host memory.
        "distrib_optim_fully_reshardable_mem_efficient": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _model_state(policy: MegatronPolicy, prefix: str) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for number, model in enumerate(policy.models):
        chunk = model.sharded_state_dict(metadata=sharding_metadata())
        add_prefix_for_sharding(chunk, f"{prefix}.")
        state[f"{prefix}{number}"] = chunk
    return state


def sharded_state(policy: MegatronPolicy, *, is_loading: bool, with_reference: bool) -> dict[str, Any]:
    """The state dict that dist_checkpointing saves, or fills when loading. Collective."""
    weights.complete(policy.chunks)
    state = _model_state(policy, MODEL)
    model_only = (
        state[f"{MODEL}0"]
        if len(policy.models) == 1
        else {f"model{k}": state[f"{MODEL}{k}"] for k in range(len(policy.models))}
    )
    readable = policy.offload.readable
    state[OPTIMIZER] = {"step": policy.optimizer.adam_step} | {
        f"part{number}": tensors
        for number, part in enumerate(policy.optimizer.optimizers())
        if part.optimizer is not None
        and (tensors := _optimizer_tensors(part, model_only, readable, is_loading=is_loading))
    }
    for number in range(len(policy.models)):  # now: the optimizer finds parameters by identity
        _with_data(state[f"{MODEL}{number}"], readable)
    if with_reference:
        assert policy.reference is not None
        with policy.reference.swapped_in():
            # The sharded tensors alias the parameters, so their values are cloned while the snapshot is in the model.
            reference = _model_state(policy, REFERENCE)
            state |= {
                name: _with_data(chunk, lambda data: readable(data).detach().clone())
                for name, chunk in reference.items()
            }
    return state


def _optimizer_tensors(
    part: Any, model_state: dict[str, Any], readable: Callable[[torch.Tensor], torch.Tensor], *, is_loading: bool
) -> dict[int, dict[str, Any]] | None:
    """Number -> master weight and moments of one parameter, each with the key and the shards of its weight.

    Every optimizer writes the keys of Megatron's distributed optimizer, also for fp32 weights, so each reads the files
    of every other. The distributed optimizer returns None on ranks that gather nothing.
    """
    if isinstance(part, DistributedOptimizer):
        found: dict[int, dict[str, Any]] | None = part.sharded_param_state_fully_reshardable(
            model_state, is_loading, sharding_metadata()
        )
        return found
    sharded, _ = extract_sharded_tensors_and_factories(model_state)
    by_master = {id(getattr(weight.data, "main_param", weight.data)): weight for weight in nested_values(sharded)}
    return {
        number: {
            name: make_sharded_optimizer_tensor(by_master[id(master)], readable(tensor), f"optimizer.state.{name}")
            for name, tensor in _tensors_of(part, master).items()
        }
        for number, master in enumerate(part.get_parameters())
    }


def _tensors_of(part: Any, master: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"param": master, **{name: part.optimizer.state[master][name] for name in ("exp_avg", "exp_avg_sq")}}


def own_copy(*policies: MegatronPolicy) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a tensor's values in host memory that no later update changes; copies only where it is necessary."""
    live = set()
    for policy in policies:
        weights = (t for model in policy.models for t in (*model.parameters(), *model.buffers()))
        live |= {t.untyped_storage()._cdata for t in (*weights, *policy.optimizer.tensors(), policy.offload.host)}

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        is_live = tensor.is_cuda or tensor.untyped_storage()._cdata in live
        return tensor.detach().to("cpu", copy=True) if is_live else tensor

    return copied


def _with_data(chunk: dict[str, Any], change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    def replace(value: Any) -> Any:
        if isinstance(value, ShardedTensor | ShardedTensorFactory) and value.data is not None:
            value.data = change(value.data)
        return value

    dict_list_map_inplace(replace, chunk)
    return chunk


def load_sharded_state(policy: MegatronPolicy, state: dict[str, Any]) -> None:
    """Loads a filled state dict into the policy. Collective."""
    for number, model in enumerate(policy.models):
        model.load_state_dict(state[f"{MODEL}{number}"], strict=True)
    with torch.no_grad():
        for number, part in enumerate(policy.optimizer.optimizers()):
            tensors = state[OPTIMIZER].get(f"part{number}", {})
            if isinstance(part, DistributedOptimizer) and tensors:
                for entry in part.optimizer.state.values():
                    entry.pop("step", None)  # Megatron takes every entry for a moment tensor
                part.load_parameter_state_from_fully_reshardable(tensors)
            elif tensors:
                for index, master in enumerate(part.get_parameters()):
                    for name, tensor in _tensors_of(part, master).items():
                        tensor.copy_(tensors[index][name])
    policy.optimizer.take_loaded_state()
    policy.optimizer.set_adam_step(state[OPTIMIZER]["step"])
    if f"{REFERENCE}0" in state:
        policy.take_reference(reset_optimizer=False)
        assert policy.reference is not None
        with policy.reference.swapped_in():
            for number, model in enumerate(policy.models):
                model.load_state_dict(state[f"{REFERENCE}{number}"], strict=True)


def rng_state() -> dict[str, torch.Tensor]:
    """Every generator of this rank, as uint8 tensors."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    for name, value in get_cuda_rng_tracker().get_states().items():
        if torch.is_tensor(value):
            state[f"tracker.{name}"] = value
    return state


def load_rng_state(state: dict[str, torch.Tensor]) -> None:
    """Inverse of `rng_state`."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    tracker = get_cuda_rng_tracker()
    saved = {name.removeprefix("tracker."): value for name, value in state.items() if name.startswith("tracker.")}
    if saved:
        tracker.set_states({**tracker.get_states(), **saved})
