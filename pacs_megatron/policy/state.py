"""The policy as a sharded state dict for Megatron's dist_checkpointing: weights, optimizer, schedule, reference, RNG.

Keys: `model.*` (global layer numbers, so any layout reads them), `reference.*` likewise, `optimizer.*`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from pacs_megatron.errors import CheckpointError
from pacs_megatron.parallel import cpu_redirects
from pacs_megatron.policy.engine import MegatronPolicy

MODEL, REFERENCE, OPTIMIZER = "model", "reference", "optimizer"


def sharding_metadata() -> dict[str, Any]:
    """Metadata for Megatron's modules and optimizers that selects the format of a checkpoint."""
    return {
        # One key per layer, numbered over the whole model, so a stage can be read without the others.
        "non_homogeneous_layers": True,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        # The only format that loads at another tensor- or pipeline-parallel size.
        "distrib_optim_sharding_type": "fully_reshardable",
        # Without it every rank gathers whole fp32 buffers on its GPU (distrib_optimizer.py:1085-1095), beside resident
        # servers; with it data-parallel rank 0 gathers them over gloo in host memory.
        "distrib_optim_fully_reshardable_mem_efficient": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def optimizer_format(policy: MegatronPolicy) -> dict[str, Any]:
    """Settings that Megatron cannot change between saving and loading an optimizer; part of a checkpoint's state."""
    is_distributed = any(isinstance(part, DistributedOptimizer) for part in policy.optimizer.optimizers())
    return {
        "parallel.distributed_optimizer": is_distributed,
        "parallel.ep > 1": parallel_state.get_expert_model_parallel_world_size() > 1,
    }


def check_optimizer_format(saved: Mapping[str, Any], policy: MegatronPolicy) -> None:
    """Raises CheckpointError, before anything is loaded, if the optimizer of a checkpoint does not fit this layout."""
    for key, value in optimizer_format(policy).items():
        if saved.get(key, value) != value:
            raise CheckpointError(
                f"the checkpoint was saved with {key}: {str(saved[key]).lower()}, this run has {str(value).lower()}; "
                "Megatron cannot convert the optimizer's state between them. Resume with the saved setting, or export the "
                "checkpoint and start a new run from its weights"
            )


def _model_state(policy: MegatronPolicy, prefix: str) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for number, model in enumerate(policy.models):
        chunk = model.sharded_state_dict(metadata=sharding_metadata())
        add_prefix_for_sharding(chunk, f"{prefix}.")
        state[f"{prefix}{number}"] = chunk
    return state


def sharded_state(policy: MegatronPolicy, *, is_loading: bool, with_reference: bool) -> dict[str, Any]:
    """The state dict that dist_checkpointing saves, or fills when loading. Collective."""
    state = _model_state(policy, MODEL)
    model_only = (
        state[f"{MODEL}0"]
        if len(policy.models) == 1
        else {f"model{k}": state[f"{MODEL}{k}"] for k in range(len(policy.models))}
    )
    with cpu_redirects.cuda_type_names():
        state[OPTIMIZER] = policy.optimizer.megatron.sharded_state_dict(
            model_only, is_loading=is_loading, metadata=sharding_metadata()
        )
    _drop_missing_state(state[OPTIMIZER])
    readable = policy.offload.readable
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


def _drop_missing_state(state: Any) -> None:
    """Removes `param_state: None` of ranks that gather nothing: Megatron warns if ranks differ in values outside of
    sharded tensors. Changes `state`."""
    if isinstance(state, dict):
        if state.get("param_state", ...) is None:
            del state["param_state"]
        for value in state.values():
            _drop_missing_state(value)


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
    if _has_steps_of_parameters(policy):
        _restore_step_zero(state[OPTIMIZER])
    keeps = policy.optimizer.keeps_hyperparameters()
    with torch.no_grad(), keeps, _steps_apart(policy), cpu_redirects.cuda_type_names():
        policy.optimizer.megatron.load_state_dict(state[OPTIMIZER])
    if f"{REFERENCE}0" in state:
        policy.take_reference(reset_optimizer=False)
        assert policy.reference is not None
        with policy.reference.swapped_in():
            for number, model in enumerate(policy.models):
                model.load_state_dict(state[f"{REFERENCE}{number}"], strict=True)


def _has_steps_of_parameters(policy: MegatronPolicy) -> bool:
    """Whether Adam counts steps per parameter, as torch's AdamW does; fused optimizers count per param group."""
    optimizers = [part.optimizer for part in policy.optimizer.optimizers() if part.optimizer is not None]
    return any("step" in entry for optimizer in optimizers for entry in optimizer.state.values())


def _restore_step_zero(state: Any) -> None:
    """Adds the `step` of 0 that Megatron does not save (it tests for truth) and that torch's AdamW requires.

    Applies to optimizer states with moments but without any step. Changes `state`.
    """
    if isinstance(state, list):
        for part in state:
            _restore_step_zero(part)
    if not isinstance(state, dict):
        return
    if not ("state" in state and "param_groups" in state):
        for part in state.values():
            _restore_step_zero(part)
        return
    moments = [entry for entry in state["state"].values() if isinstance(entry, dict) and "exp_avg" in entry]
    in_groups = any("step" in group for group in state["param_groups"])
    if moments and not in_groups and "common_step" not in state["state"] and "step" not in moments[0]:
        state["state"]["common_step"] = torch.tensor(0.0)


@contextmanager
def _steps_apart(policy: MegatronPolicy) -> Iterator[None]:
    """Keeps per-parameter steps out of the load of Megatron's distributed optimizer.

    On load, that optimizer takes every entry of Adam's state for a moment tensor. torch's AdamW (used without Transformer
    Engine and Apex) has a per-parameter `step` there, which the checkpoint stores in the param group.
    """
    parts = [part for part in policy.optimizer.optimizers() if isinstance(part, DistributedOptimizer)]
    for part in parts:
        part._set_main_param_and_optimizer_states = partial(_set_moments, part)
    try:
        yield
    finally:
        for part in parts:
            del part._set_main_param_and_optimizer_states


def _set_moments(part: DistributedOptimizer, model_param: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
    group, order = part.model_param_group_index_map[model_param]
    state = part.optimizer.state[part.optimizer.param_groups[group]["params"][order]]
    step = state.pop("step", None)
    DistributedOptimizer._set_main_param_and_optimizer_states(part, model_param, tensors)
    if step is not None:
        # One tensor each: Megatron shares a single one, which AdamW would advance once per parameter.
        state["step"] = step.detach().clone()


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
