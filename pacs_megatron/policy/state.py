"""The policy as a sharded state dict for Megatron's dist_checkpointing: weights, optimizer,
reference, RNG.

Keys: `model.*` (global layer numbers, so any layout reads them), `reference.*` likewise, and for
each weight `optimizer.state.{param,exp_avg,exp_avg_sq}.model.*`, with or without the distributed
optimizer, in fp32.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.utils import (
    add_prefix_for_sharding,
    extract_sharded_tensors_and_factories,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor

from pacs_megatron.errors import CheckpointError
from pacs_megatron.policy import weights
from pacs_megatron.policy.engine import MegatronPolicy

Values = Callable[[Tensor], Tensor]

MODEL = "model"
REFERENCE = "reference"
OPTIMIZER = "optimizer"
_STATE = ("param", "exp_avg", "exp_avg_sq")
OPTIMIZER_FORMAT = 2
"""Recorded in a checkpoint. 2: the same keys for every layout and optimizer."""


def sharding_metadata() -> dict[str, Any]:
    """Selects the format of a checkpoint in Megatron's modules."""
    return {
        # One key per layer, numbered over the whole model, so a stage can be read without the
        # others.
        "non_homogeneous_layers": True,
        "singleton_local_shards": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _model_state(policy: MegatronPolicy, prefix: str) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for number, model in enumerate(policy.models):
        chunk = model.sharded_state_dict(metadata=sharding_metadata())
        add_prefix_for_sharding(chunk, f"{prefix}.")
        state[f"{prefix}{number}"] = chunk
    return state


def sharded_state(
    policy: MegatronPolicy, *, is_loading: bool, with_reference: bool
) -> dict[str, Any]:
    """The state dict that dist_checkpointing saves, or fills when loading. Collective."""
    weights.complete(policy.chunks)
    readable = policy.offload.readable
    state = _model_state(policy, MODEL)
    optimizer: dict[str, Any] = {"step": policy.optimizer.adam_step}
    for number, part in enumerate(policy.optimizer.optimizers()):
        if part.optimizer is not None:
            tensors = _optimizer_tensors(part, state, readable, is_loading=is_loading)
            optimizer |= {f"part{number}": tensors} if tensors else {}
    _set_data(state, readable)  # after the optimizer, which finds parameters by identity
    state[OPTIMIZER] = optimizer
    if with_reference:
        assert policy.reference is not None
        with policy.reference.swapped_in():
            # The sharded tensors alias the parameters, so their values are copied while the
            # snapshot is in the model.
            reference = _model_state(policy, REFERENCE)
            _set_data(reference, lambda data: readable(data).detach().to("cpu", copy=True))
        state |= reference
    return state


def _optimizer_tensors(
    part: Any, model_state: dict[str, Any], readable: Values, *, is_loading: bool
) -> dict[int, dict[str, Any]]:
    """Number -> master weight and moments of one parameter, each with the key and the shards of its
    weight. Every optimizer writes the keys of Megatron's distributed optimizer, so each reads the
    files of every other.
    """
    sharded, _ = extract_sharded_tensors_and_factories(model_state)
    found: dict[int, dict[str, Any]] = {}
    if isinstance(part, DistributedOptimizer):
        by_weight = {id(weight.data): weight for weight in nested_values(sharded)}
        for number, (weight, start, stop) in enumerate(_ranges(part)):
            if is_loading:
                flat = {name: torch.empty(stop - start) for name in _STATE}
            else:
                # Copies to host memory at once: the precision-aware optimizer returns new fp32
                # tensors on the GPU.
                own = part._get_main_param_and_optimizer_states(weight)
                flat = {name: readable(own[name]).detach().float().cpu() for name in _STATE}
            found[number] = {
                name: _boxes(by_weight[id(weight)], name, start, data)
                for name, data in flat.items()
            }
        return found
    by_master = {
        id(getattr(weight.data, "main_param", weight.data)): weight
        for weight in nested_values(sharded)
    }
    for number, master in enumerate(part.get_parameters()):
        found[number] = {}
        for name, tensor in _tensors_of(part, master).items():
            # A new tensor: in fp32 the master weight is the weight, which the load of `model.` also
            # fills.
            data = torch.empty(tensor.shape) if is_loading else readable(tensor)
            key = f"optimizer.state.{name}"
            found[number][name] = make_sharded_optimizer_tensor(by_master[id(master)], data, key)
    return found


def _ranges(part: Any) -> Iterator[tuple[Tensor, int, int]]:
    """(weight, start, end): the ranges of flattened elements of which this rank has optimizer
    state.
    """
    for by_type in part.gbuf_ranges:
        for buckets in by_type.values():
            for bucket in buckets:
                for weight, places in bucket["param_map"].items():
                    yield weight, places["param"].start, places["param"].end


def _boxes(
    weight: ShardedTensor | ShardedTensorFactory, name: str, start: int, data: Tensor
) -> list[ShardedTensor]:
    """`data`, the flat elements of the local shard `weight` from `start` on, as views with offsets
    in the whole tensor. Megatron's own fully reshardable form gathers whole weights on one
    data-parallel rank, or on every GPU (distrib_optimizer.py:977-1124). Here each rank writes its
    own elements, and torch's planner reads any boxes.
    """
    whole = torch.empty(weight.data.shape, device="meta")
    if isinstance(weight, ShardedTensorFactory):  # gate over up
        shards = weight.build_fn(weight.key, whole, weight.replica_id, None)
    else:
        shards = [replace(weight, data=whole, dtype=whole.dtype)]
    found = []
    done = 0
    for shard in shards:
        assert shard.data.untyped_storage()._cdata == whole.untyped_storage()._cdata, (
            f"{shard.key}: no part of a weight"
        )
        first = shard.data.storage_offset()
        prepended = (0,) * shard.prepend_axis_num
        begin, end = (
            min(max(at - first, 0), shard.data.numel()) for at in (start, start + data.numel())
        )
        for offset, shape in _rows(shard.local_shape, begin, end):
            box = data[done : done + math.prod(shape)].view((1,) * len(prepended) + shape)
            done += box.numel()
            found.append(
                replace(
                    shard,
                    key=f"optimizer.state.{name}.{shard.key}",
                    data=box,
                    local_shape=tuple(box.shape),
                    global_offset=tuple(
                        map(sum, zip(shard.global_offset, (*prepended, *offset), strict=True))
                    ),
                    axis_fragmentations=None,  # no regular grid
                    prepend_axis_num=0,
                    allow_shape_mismatch=False,
                    replica_id=(*shard.replica_id[:2], 0),  # no other data-parallel rank has it
                )
            )
    assert done == data.numel(), weight.key
    return found


def _rows(
    shape: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offset, shape) of boxes that cover the flat elements `start` to `stop`, in order: part of a
    row, rows, part of a row.
    """
    if start >= stop:
        return
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    inner = math.prod(shape[1:])
    # whole rows
    first = -(-start // inner)
    last = stop // inner

    def within(row: int, begin: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        for offset, size in _rows(shape[1:], begin - row * inner, end - row * inner):
            yield (row, *offset), (1, *size)

    yield from within(first - 1, start, min(stop, first * inner))
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if first <= last:
        yield from within(last, last * inner, stop)


def _tensors_of(part: Any, master: Tensor) -> dict[str, Tensor]:
    return {"param": master} | {name: part.optimizer.state[master][name] for name in _STATE[1:]}


def own_copy(*policies: MegatronPolicy) -> Values:
    """Returns a tensor's values in host memory that no later update changes; copies only where it
    is necessary.
    """
    live = set()
    for policy in policies:
        weights = (t for model in policy.models for t in (*model.parameters(), *model.buffers()))
        live |= {
            t.untyped_storage()._cdata
            for t in (*weights, *policy.optimizer.tensors(), policy.offload.host)
        }

    def copied(tensor: Tensor) -> Tensor:
        is_live = tensor.is_cuda or tensor.untyped_storage()._cdata in live
        return tensor.detach().to("cpu", copy=True) if is_live else tensor

    return copied


def _set_data(state: dict[str, Any], change: Values) -> None:
    for value in nested_values(state):
        if isinstance(value, ShardedTensor | ShardedTensorFactory) and value.data is not None:
            value.data = change(value.data)


def load_sharded_state(policy: MegatronPolicy, state: dict[str, Any]) -> None:
    """Loads a filled state dict into the policy. Collective."""
    for number, model in enumerate(policy.models):
        model.load_state_dict(state[f"{MODEL}{number}"], strict=True)
    with torch.no_grad():
        for number, part in enumerate(policy.optimizer.optimizers()):
            tensors = state[OPTIMIZER].get(f"part{number}", {})
            if isinstance(part, DistributedOptimizer) and tensors:
                for entry in part.optimizer.state.values():
                    entry.pop("step", None)  # Megatron treats every entry as a moment tensor
                for index, (weight, _, _) in enumerate(_ranges(part)):
                    flat = {
                        name: torch.cat([box.flatten() for box in boxes])
                        for name, boxes in tensors[index].items()
                    }
                    part._set_main_param_and_optimizer_states(weight, flat)
            elif tensors:
                for index, master in enumerate(part.get_parameters()):
                    for name, tensor in _tensors_of(part, master).items():
                        tensor.copy_(tensors[index][name])
    policy.optimizer.share_state()
    policy.optimizer.set_adam_step(state[OPTIMIZER]["step"])
    if f"{REFERENCE}0" in state:
        policy.take_reference(reset_optimizer=False)
        assert policy.reference is not None
        with policy.reference.swapped_in():
            for number, model in enumerate(policy.models):
                model.load_state_dict(state[f"{REFERENCE}{number}"], strict=True)


def rng_state() -> dict[str, Tensor]:
    """The state of every generator of this rank, as uint8 tensors."""
    tracked = get_cuda_rng_tracker().get_states()
    return {
        "cpu": torch.get_rng_state(),
        **({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}),
        **{f"tracker.{name}": value for name, value in tracked.items() if torch.is_tensor(value)},
    }


def load_rng_state(state: dict[str, Tensor], where: Path) -> None:
    """Inverse of `rng_state`.

    Raises CheckpointError for tensors (from `where`) that are no generator state.
    """
    try:
        torch.set_rng_state(state["cpu"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
    except (KeyError, RuntimeError, TypeError) as error:
        raise CheckpointError(
            f"{where}: no state of torch's generators ({error}); restore it"
        ) from error
    tracker = get_cuda_rng_tracker()
    saved = {
        name.removeprefix("tracker."): value
        for name, value in state.items()
        if name.startswith("tracker.")
    }
    if saved:
        tracker.set_states({**tracker.get_states(), **saved})
