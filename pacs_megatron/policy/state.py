"""The policy as a sharded state dict for Megatron's dist_checkpointing.

It has the weights, the optimizer and the reference; the RNG state is separate.

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
from megatron.core.utils import (
    make_sharded_tensor_for_checkpoint,
    make_tp_sharded_tensor_for_checkpoint,
)
from torch import Tensor

from pacs_megatron.errors import CheckpointError
from pacs_megatron.policy import lora, weights
from pacs_megatron.policy.engine import MegatronPolicy
from pacs_megatron.policy.fp8_state import readable_fp8_state

Values = Callable[[Tensor], Tensor]
"""a tensor -> a tensor with its values"""
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offset, shape) in a tensor"""

MODEL = "model"
REFERENCE = "reference"
OPTIMIZER = "optimizer"
OPTIMIZER_FORMAT = 2
"""Recorded in a checkpoint. 2: the same keys for every layout and optimizer."""
_STATE = ("param", "exp_avg", "exp_avg_sq")


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
    """Sharded tensors of this rank's chunks: of the adapters alone, if these are trained.

    Args:
        policy: the model.
        prefix: of the keys in the checkpoint, MODEL or REFERENCE.

    Returns:
        `prefix` and the number of a chunk -> its state dict, whose data are the parameters.
    """
    state: dict[str, Any] = {}
    for number, model in enumerate(policy.models):
        if policy.adapters is not None:
            state[f"{prefix}{number}"] = _adapter_state(model, prefix)
            continue
        chunk = model.sharded_state_dict(metadata=sharding_metadata())
        add_prefix_for_sharding(chunk, f"{prefix}.")
        state[f"{prefix}{number}"] = chunk
    return state


def _adapter_state(model: torch.nn.Module, prefix: str) -> dict[str, ShardedTensor]:
    """Sharded tensors of a chunk's adapters, by PEFT's names."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    groups = {
        "tp_group": parallel_state.get_tensor_model_parallel_group(),
        "dp_cp_group": group,
    }
    state = {}
    for adapter in lora.adapters_of([model]):
        for matrix, parameter in adapter.matrices.items():
            key = f"{prefix}.{matrix.name}"
            if matrix.split_dim is None:
                sharded = make_sharded_tensor_for_checkpoint(parameter, key, **groups)
            else:
                sharded = make_tp_sharded_tensor_for_checkpoint(
                    parameter, key, matrix.split_dim, **groups
                )
            state[matrix.name] = sharded
    return state


def sharded_state(
    policy: MegatronPolicy,
    *,
    is_loading: bool,
    with_reference: bool,
) -> dict[str, Any]:
    """The state dict that dist_checkpointing saves, or fills when loading. Collective.

    Args:
        policy: the model with its optimizer.
        is_loading: whether dist_checkpointing fills the state; tensors of the optimizer are then
            new ones.
        with_reference: whether the state has the frozen reference.
    """
    weights.complete(policy.chunks)
    readable = policy.offload.readable
    state = _model_state(policy, MODEL)

    optimizer: dict[str, Any] = {"step": policy.optimizer.adam_step}
    for number, part in enumerate(policy.optimizer.optimizers()):
        if part.optimizer is None:
            continue
        tensors = _optimizer_tensors(part, state, readable, is_loading=is_loading)
        if tensors:
            optimizer[f"part{number}"] = tensors

    # After the optimizer, which finds parameters by identity.
    _set_data(state, readable)
    state[OPTIMIZER] = optimizer
    if with_reference:
        state |= _reference_state(policy, readable)
    return state


def _reference_state(policy: MegatronPolicy, readable: Values) -> dict[str, Any]:
    """Sharded tensors of the frozen reference, copied to host memory."""
    assert policy.reference is not None
    with policy.reference.swapped_in():
        # The sharded tensors alias the parameters, so their values are copied while the snapshot is
        # in the model.
        reference = _model_state(policy, REFERENCE)
        _set_data(reference, lambda data: readable(data).detach().to("cpu", copy=True))
    return reference


def _optimizer_tensors(
    part: Any,
    model_state: dict[str, Any],
    readable: Values,
    *,
    is_loading: bool,
) -> dict[int, dict[str, Any]]:
    """Master weights and moments, each with the key and the shards of its weight.

    Every optimizer writes the keys of Megatron's distributed optimizer, so each reads the files of
    every other.

    Args:
        part: one of Megatron's optimizers.
        model_state: of `_model_state`, still with the parameters themselves.
        readable: returns the values of an off-loaded tensor.
        is_loading: whether the tensors are new ones, to be filled.

    Returns:
        Number of a parameter -> name of a state (`_STATE`) -> its sharded tensors.
    """
    sharded, _ = extract_sharded_tensors_and_factories(model_state)
    if isinstance(part, DistributedOptimizer):
        return _tensors_of_ranges(part, sharded, readable, is_loading=is_loading)
    return _tensors_of_whole(part, sharded, readable, is_loading=is_loading)


def _tensors_of_ranges(
    part: DistributedOptimizer,
    sharded: Any,
    readable: Values,
    *,
    is_loading: bool,
) -> dict[int, dict[str, Any]]:
    """`_optimizer_tensors` of the distributed optimizer: this rank has ranges of the weights."""
    by_weight = {id(weight.data): weight for weight in nested_values(sharded)}
    tensors: dict[int, dict[str, Any]] = {}
    for number, (weight, start, stop) in enumerate(_ranges(part)):
        if is_loading:
            flat = {name: torch.empty(stop - start) for name in _STATE}
        else:
            # Copies to host memory at once: the precision-aware optimizer returns new fp32 tensors
            # on the GPU.
            values = part._get_main_param_and_optimizer_states(weight)
            flat = {name: readable(values[name]).detach().float().cpu() for name in _STATE}

        shard = by_weight[id(weight)]
        tensors[number] = {name: _boxes(shard, name, start, data) for name, data in flat.items()}
    return tensors


def _tensors_of_whole(
    part: Any,
    sharded: Any,
    readable: Values,
    *,
    is_loading: bool,
) -> dict[int, dict[str, Any]]:
    """`_optimizer_tensors` of an optimizer that has the state of all this rank's weights."""
    by_master = {}
    for weight in nested_values(sharded):
        master = getattr(weight.data, "main_param", weight.data)
        by_master[id(master)] = weight

    tensors: dict[int, dict[str, Any]] = {}
    for number, master in enumerate(part.get_parameters()):
        tensors[number] = {}
        for name, tensor in _tensors_of(part, master).items():
            # A new tensor: in fp32 the master weight is the weight, which the load of `model.` also
            # fills.
            data = torch.empty(tensor.shape) if is_loading else readable(tensor)
            tensors[number][name] = make_sharded_optimizer_tensor(
                by_master[id(master)], data, f"optimizer.state.{name}"
            )
    return tensors


def _tensors_of(part: Any, master: Tensor) -> dict[str, Tensor]:
    """Name of a state (`_STATE`) -> the optimizer's own tensor, of one master weight."""
    moments = {name: part.optimizer.state[master][name] for name in _STATE[1:]}
    return {"param": master} | moments


def _ranges(part: Any) -> Iterator[tuple[Tensor, int, int]]:
    """The ranges of this rank's weights of which it has optimizer state.

    Yields:
        A weight, and the first and the end element of the range in the flattened weight.
    """
    for by_type in part.gbuf_ranges:
        for buckets in by_type.values():
            for bucket in buckets:
                for weight, places in bucket["param_map"].items():
                    yield weight, places["param"].start, places["param"].end


def _boxes(
    weight: ShardedTensor | ShardedTensorFactory,
    name: str,
    start: int,
    data: Tensor,
) -> list[ShardedTensor]:
    """A range of a weight's optimizer state as views with offsets in the whole tensor.

    Megatron's own fully reshardable form gathers whole weights on one data-parallel rank, or on
    every GPU (distrib_optimizer.py:977-1124). Here each rank writes its own elements, and torch's
    planner reads any boxes.

    Args:
        weight: this rank's shard of the weight.
        name: of the state, one of `_STATE`.
        start: first element of the range in the flattened shard.
        data: [elements of the range], fp32.
    """
    whole = torch.empty(weight.data.shape, device="meta")
    if isinstance(weight, ShardedTensorFactory):  # gate over up
        shards = weight.build_fn(weight.key, whole, weight.replica_id, None)
    else:
        shards = [replace(weight, data=whole, dtype=whole.dtype)]

    boxes = []
    done = 0
    for shard in shards:
        assert shard.data.untyped_storage()._cdata == whole.untyped_storage()._cdata, (
            f"{shard.key}: no part of a weight"
        )
        first = shard.data.storage_offset()
        num_elements = shard.data.numel()
        begin = min(max(start - first, 0), num_elements)
        end = min(max(start + data.numel() - first, 0), num_elements)

        for offset, shape in _rows(shard.local_shape, begin, end):
            stop = done + math.prod(shape)
            boxes.append(_box(shard, name, offset, data[done:stop].view(shape)))
            done = stop
    assert done == data.numel(), weight.key
    return boxes


def _box(
    shard: ShardedTensor,
    name: str,
    offset: tuple[int, ...],
    data: Tensor,
) -> ShardedTensor:
    """One box of a weight's optimizer state.

    Args:
        shard: this rank's shard of the weight; its whole tensor may have axes (layers, experts)
            before those of the shard.
        name: of the state, one of `_STATE`.
        offset: of the box in the shard.
        data: the box, with the axes of the shard.
    """
    num_prepended = shard.prepend_axis_num
    offset_of_box = (0,) * num_prepended + offset
    offsets = zip(shard.global_offset, offset_of_box, strict=True)
    data = data.view((1,) * num_prepended + tuple(data.shape))
    return replace(
        shard,
        key=f"optimizer.state.{name}.{shard.key}",
        data=data,
        local_shape=tuple(data.shape),
        global_offset=tuple(of_shard + of_box for of_shard, of_box in offsets),
        axis_fragmentations=None,  # the boxes are not a regular grid
        prepend_axis_num=0,
        allow_shape_mismatch=False,
        replica_id=(*shard.replica_id[:2], 0),  # no other data-parallel rank has it
    )


def _rows(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Boxes that cover a range of the elements of a flattened tensor, in order.

    They are a part of a row, whole rows, and a part of a row.

    Args:
        shape: of the tensor.
        start: first element of the range.
        stop: end of the range.
    """
    if start >= stop:
        return
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return

    inner_shape = shape[1:]
    row_size = math.prod(inner_shape)
    first_whole = -(-start // row_size)
    end_whole = stop // row_size

    def within(row: int, begin: int, end: int) -> Iterator[Box]:
        """Boxes of the flat elements `begin` to `end`, all of them in `row`."""
        row_start = row * row_size
        for offset, size in _rows(inner_shape, begin - row_start, end - row_start):
            yield (row, *offset), (1, *size)

    yield from within(first_whole - 1, start, min(stop, first_whole * row_size))
    if first_whole < end_whole:
        zeros = (0,) * len(inner_shape)
        yield (first_whole, *zeros), (end_whole - first_whole, *inner_shape)
    if first_whole <= end_whole:
        yield from within(end_whole, end_whole * row_size, stop)


def own_copy(*policies: MegatronPolicy) -> Values:
    """A function that returns a tensor's values in host memory, which no later update changes.

    It copies only tensors of a GPU, and those of the policies' state.
    """
    live: set[int] = set()
    for policy in policies:
        tensors = [policy.offload.host, *policy.optimizer.tensors()]
        for model in policy.models:
            tensors += [*model.parameters(), *model.buffers()]
        live |= {tensor.untyped_storage()._cdata for tensor in tensors}

    def copied(tensor: Tensor) -> Tensor:
        is_live = tensor.is_cuda or tensor.untyped_storage()._cdata in live
        return tensor.detach().to("cpu", copy=True) if is_live else tensor

    return copied


def _set_data(state: dict[str, Any], change: Values) -> None:
    """Replaces the data of every sharded tensor of `state` by `change` of it."""
    for value in nested_values(state):
        if isinstance(value, ShardedTensor | ShardedTensorFactory) and value.data is not None:
            value.data = change(value.data)


def load_sharded_state(policy: MegatronPolicy, state: dict[str, Any]) -> None:
    """Loads a filled state dict into the policy. Collective.

    Args:
        policy: the model with its optimizer.
        state: of `sharded_state`, filled by dist_checkpointing.

    Raises:
        CheckpointError: if an FP8 state in it is damaged or unsafe.
    """
    for number, model in enumerate(policy.models):
        _load_model(model, state[f"{MODEL}{number}"])

    with torch.no_grad():
        for number, part in enumerate(policy.optimizer.optimizers()):
            tensors = state[OPTIMIZER].get(f"part{number}")
            if tensors:
                _load_optimizer(part, tensors)
    policy.optimizer.share_state()
    policy.optimizer.set_adam_step(state[OPTIMIZER]["step"])

    if f"{REFERENCE}0" in state:
        policy.take_reference(reset_optimizer=False)
        assert policy.reference is not None
        with policy.reference.swapped_in():
            for number, model in enumerate(policy.models):
                _load_model(model, state[f"{REFERENCE}{number}"])


def _load_model(model: torch.nn.Module, state: dict[str, Any]) -> None:
    adapters = lora.adapters_of([model])
    if adapters:
        with torch.no_grad():
            for adapter in adapters:
                for matrix, parameter in adapter.matrices.items():
                    parameter.copy_(state[matrix.name])
        return
    with readable_fp8_state(state):
        model.load_state_dict(state, strict=True)


def _load_optimizer(part: Any, tensors: dict[int, dict[str, Any]]) -> None:
    """Copies filled tensors of `_optimizer_tensors` into one of Megatron's optimizers."""
    if not isinstance(part, DistributedOptimizer):
        for number, master in enumerate(part.get_parameters()):
            for name, tensor in _tensors_of(part, master).items():
                tensor.copy_(tensors[number][name])
        return

    # Megatron treats every entry as a moment tensor.
    for entry in part.optimizer.state.values():
        entry.pop("step", None)
    for number, (weight, _, _) in enumerate(_ranges(part)):
        flat = {}
        for name, boxes in tensors[number].items():
            flat[name] = torch.cat([box.flatten() for box in boxes])
        part._set_main_param_and_optimizer_states(weight, flat)


def rng_state() -> dict[str, Tensor]:
    """The state of every generator of this rank.

    Returns:
        uint8 tensors: `cpu`, `cuda` with a GPU, and `tracker.<name>` of Megatron's generators.
    """
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    for name, value in get_cuda_rng_tracker().get_states().items():
        if torch.is_tensor(value):
            state[f"tracker.{name}"] = value
    return state


def load_rng_state(state: dict[str, Tensor], where: Path) -> None:
    """Inverse of `rng_state`.

    Args:
        state: uint8 tensors by name.
        where: the file of the tensors, for the message.

    Raises:
        CheckpointError: if a tensor is not the state of a generator.
    """
    try:
        torch.set_rng_state(state["cpu"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
    except (KeyError, RuntimeError, TypeError) as error:
        raise CheckpointError(
            f"{where}: no state of torch's generators ({error}); restore it"
        ) from error

    tracked = {}
    for name, value in state.items():
        if name.startswith("tracker."):
            tracked[name.removeprefix("tracker.")] = value
    if tracked:
        tracker = get_cuda_rng_tracker()
        tracker.set_states({**tracker.get_states(), **tracked})
