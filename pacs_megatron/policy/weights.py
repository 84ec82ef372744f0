"""Loads, exports and copies the weights of this rank.

Outside they are Hugging Face tensors, inside Megatron's parameters; the weight table of `models`
maps the two.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from pacs_megatron.config.schema import LoraOptions
from pacs_megatron.errors import ConversionError, PacsError
from pacs_megatron.models import Entry, WeightTable, canonical_name
from pacs_megatron.models.lora import AdapterMatrix, adapter_matrices
from pacs_megatron.policy import lora
from pacs_megatron.policy.model import PolicyModel

EMBEDDING = "embedding.word_embeddings.weight"
TIED_OUTPUT = "output_layer.weight"
_RUN_BYTES = 256 * 2**20
"""Largest run of entries in one collective of an export; a larger entry is a run of its own."""


def named_parameters(model: PolicyModel, table: WeightTable) -> dict[str, torch.nn.Parameter]:
    """This chunk's parameters by the table's names, with global layer and expert numbers.

    Skips the copy of a tied embedding on the last pipeline stage, and adapters.

    Raises:
        ConversionError: if a parameter has no row in the table.
    """
    parameters: dict[str, torch.nn.Parameter] = {}
    for local_name, parameter in model.named_parameters():
        name = global_name(local_name, model, table)
        is_adapter = f".{lora.ADAPTER}." in name
        if is_adapter or (name == TIED_OUTPUT and table.spec.tied):
            continue
        if name not in table.by_megatron:
            raise ConversionError(
                f"Megatron parameter {name} has no row in the table of {table.spec.family}"
            )
        parameters[name] = parameter
    return parameters


def global_name(local_name: str, model: PolicyModel, table: WeightTable) -> str:
    """The table's name of a parameter of this chunk."""
    pieces = local_name.split(".")
    if pieces[:2] == ["decoder", "layers"]:
        layer = model.decoder.layers[int(pieces[2])]
        pieces[2] = str(layer.layer_number - 1)

    pieces = canonical_name(".".join(pieces)).split(".")
    if "local_experts" in pieces:
        ep_rank = parallel_state.get_expert_model_parallel_rank()
        position = pieces.index("local_experts") + 1
        expert = int(pieces[position]) + ep_rank * _num_local_experts(table)
        pieces[position] = str(expert)
    return ".".join(pieces)


def _num_local_experts(table: WeightTable) -> int:
    assert table.spec.moe is not None
    return table.spec.moe.num_experts // int(parallel_state.get_expert_model_parallel_world_size())


def _tp_group(entry: Entry) -> Any:
    """The tensor-parallel group of the entry: experts have their own."""
    if entry.expert is None:
        return parallel_state.get_tensor_model_parallel_group()
    return parallel_state.get_expert_tensor_parallel_group()


@torch.no_grad()
def load(
    models: Sequence[PolicyModel],
    table: WeightTable,
    read: Callable[[str], Tensor],
) -> None:
    """Fills this rank's parameters. Reads only tensors that this rank needs.

    Args:
        models: this rank's chunks.
        table: the weight table of the model.
        read: returns one whole Hugging Face tensor by name, and raises for a missing name.

    Raises:
        ConversionError: if a tensor has a wrong shape.
    """
    for model in models:
        targets = list(named_parameters(model, table).items())
        if table.spec.tied and model.post_process and not model.pre_process:
            # The last stage has a copy of the embedding.
            targets.append((EMBEDDING, model.output_layer.weight))
        for name, parameter in targets:
            entry = table.by_megatron[name]
            full = entry.to_megatron([read(hf_name) for hf_name in entry.hf_names])
            group = _tp_group(entry)
            shards = entry.split_tp(full, group.size())
            parameter.copy_(shards[group.rank()])


@torch.no_grad()
def complete(chunks: Sequence[DistributedDataParallel]) -> None:
    """Gathers the weights, which `overlap_param_gather` delays to the next forward pass.

    Collective.
    """
    for chunk in chunks:
        if chunk.ddp_config.overlap_param_gather:
            for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
                if not group.param_gather_dispatched or group.param_gather_handle is not None:
                    group.start_param_sync(force_sync=True)


@torch.no_grad()
def export(
    models: Sequence[PolicyModel],
    table: WeightTable,
    readable: Callable[[Tensor], Tensor],
) -> Iterator[tuple[str, Tensor]]:
    """Yields every whole weight in the table's order, on every rank. Collective.

    Adapters are merged into the weights of their layers.

    One run of entries is in flight at a time: its stage gathers the tensor-parallel shards, then
    the other expert ranks and stages receive the merged tensors, with one collective each.

    Args:
        models: this rank's chunks.
        table: the weight table of the model.
        readable: returns the values of an off-loaded parameter.

    Yields:
        Hugging Face name, and the tensor in the dtype of the weights, on this rank's device.
    """
    parameters: dict[str, torch.nn.Parameter] = {}
    for model in models:
        parameters |= named_parameters(model, table)
    adapters = {adapter.entry.megatron_name: adapter for adapter in lora.adapters_of(models)}
    device = next(models[0].parameters()).device
    dtype = models[0].config.params_dtype
    pp_group = parallel_state.get_pipeline_model_parallel_group()
    ep_group = parallel_state.get_expert_model_parallel_group()

    for entries, (stage, ep_rank) in _runs(table, ep_group.size(), dtype.itemsize):
        full = None
        if entries[0].megatron_name in parameters:
            shards = []
            for entry in entries:
                shard = readable(parameters[entry.megatron_name].detach()).to(device)
                if entry.megatron_name in adapters:
                    shard = adapters[entry.megatron_name].merged(shard, readable)
                shards.append(shard)
            full = _gather_shards(entries, shards)
        if ep_rank is not None and stage == pp_group.rank():
            full = _broadcast(entries, full, ep_rank, ep_group, device, dtype)
        if pp_group.size() > 1:
            full = _broadcast(entries, full, stage, pp_group, device, dtype)
        assert full is not None
        for entry, tensor in zip(entries, full, strict=True):
            yield from zip(entry.hf_names, entry.to_hf(tensor), strict=True)


@torch.no_grad()
def export_adapters(
    models: Sequence[PolicyModel],
    table: WeightTable,
    options: LoraOptions,
    readable: Callable[[Tensor], Tensor],
) -> Iterator[tuple[str, Tensor]]:
    """Yields every whole A and B in the table's order, on every rank. Collective.

    Args:
        models: this rank's chunks.
        table: the weight table of the model.
        options: of the section `policy.lora`.
        readable: returns the values of an off-loaded parameter.

    Yields:
        PEFT's name, and the tensor in the dtype of the weights, on this rank's device.
    """
    parameters: dict[AdapterMatrix, torch.nn.Parameter] = {}
    for adapter in lora.adapters_of(models):
        parameters |= adapter.matrices
    device = next(models[0].parameters()).device
    tp_group = parallel_state.get_tensor_model_parallel_group()
    pp_group = parallel_state.get_pipeline_model_parallel_group()

    for entry in table.entries:
        stage = _stage(entry, table.spec.num_layers)
        for matrix in adapter_matrices(entry, options):
            full = None
            if matrix in parameters:
                full = readable(parameters[matrix].detach()).to(device)
                if matrix.split_dim is not None and tp_group.size() > 1:
                    shards = [torch.empty_like(full) for _ in range(tp_group.size())]
                    dist.all_gather(shards, full.contiguous(), group=tp_group)
                    full = torch.cat(shards, dim=matrix.split_dim)
            if pp_group.size() > 1:
                dtype = models[0].config.params_dtype
                if full is None:
                    full = torch.empty(matrix.shape, dtype=dtype, device=device)
                source = dist.get_global_rank(pp_group, stage)
                dist.broadcast(full.contiguous(), src=source, group=pp_group)
            assert full is not None
            yield matrix.name, full


def _runs(
    table: WeightTable, ep: int, item_bytes: int
) -> Iterator[tuple[list[Entry], tuple[int, int | None]]]:
    """Consecutive entries of the table that the same ranks have, of up to `_RUN_BYTES`.

    Experts of a model are thousands of small tensors; a collective for each of them takes longer
    than their bytes.

    Args:
        table: the weight table of the model.
        ep: expert-parallel size.
        item_bytes: bytes of an element.

    Yields:
        The entries; their pipeline stage, and the expert-parallel rank that has them if not all
        have.
    """
    run: list[Entry] = []
    run_bytes = 0
    run_owners: tuple[int, int | None] | None = None
    run_is_of_experts = False
    for entry in table.entries:
        is_of_expert = entry.expert is not None
        ep_rank = None
        if entry.expert is not None and ep > 1:
            ep_rank = entry.expert // _num_local_experts(table)
        owners = (_stage(entry, table.spec.num_layers), ep_rank)
        num_bytes = math.prod(entry.megatron_shape) * item_bytes

        # Experts have another tensor-parallel group.
        continues = owners == run_owners and is_of_expert == run_is_of_experts
        if run and run_owners and not (continues and run_bytes + num_bytes <= _RUN_BYTES):
            yield run, run_owners
            run = []
            run_bytes = 0
        run.append(entry)
        run_bytes += num_bytes
        run_owners = owners
        run_is_of_experts = is_of_expert
    if run_owners:
        yield run, run_owners


def _gather_shards(entries: Sequence[Entry], shards: Sequence[Tensor]) -> list[Tensor]:
    """The whole tensors of a run from the shards of its tensor-parallel ranks. Collective.

    Args:
        entries: of the run.
        shards: of this rank, one for each entry.
    """
    group = _tp_group(entries[0])
    whole = list(shards)
    sharded: dict[torch.dtype, list[int]] = {}
    if group.size() > 1:
        for number, (entry, shard) in enumerate(zip(entries, shards, strict=True)):
            if entry.shard_shape(group.size()) != entry.megatron_shape:
                sharded.setdefault(shard.dtype, []).append(number)

    for numbers in sharded.values():
        flat = _flat([shards[number] for number in numbers])
        flats = [torch.empty_like(flat) for _ in range(group.size())]
        dist.all_gather(flats, flat, group=group)

        shapes = [shards[number].shape for number in numbers]
        of_ranks = [_cut(flat_of_rank, shapes) for flat_of_rank in flats]
        for place, number in enumerate(numbers):
            whole[number] = entries[number].merge_tp([pieces[place] for pieces in of_ranks])
    return whole


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """[elements of all tensors]; the memory of a single contiguous one."""
    if len(tensors) == 1:
        return tensors[0].reshape(-1)
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _cut(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Views of `flat` with these shapes, one after the other."""
    pieces = torch.split(flat, [math.prod(shape) for shape in shapes])
    return [piece.view(tuple(shape)) for piece, shape in zip(pieces, shapes, strict=True)]


def _stage(entry: Entry, num_layers: int) -> int:
    """The pipeline stage of an entry. With interleaving a stage has every pp-th chunk of layers."""
    pp = int(parallel_state.get_pipeline_model_parallel_world_size())
    if entry.layer is None:
        return 0 if entry.place == "embedding" else pp - 1
    chunks_per_stage = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
    num_chunks = pp * chunks_per_stage
    chunk = entry.layer * num_chunks // num_layers
    return chunk % pp


def _broadcast(
    entries: Sequence[Entry],
    full: Sequence[Tensor] | None,
    source: int,
    group: dist.ProcessGroup,
    device: torch.device,
    dtype: torch.dtype,
) -> list[Tensor]:
    """The whole tensors of a run, on every rank of `group`. Collective.

    Args:
        entries: of the run.
        full: the tensors on rank `source` of `group`; unused elsewhere.
        source: rank in `group`.
        group: the ranks that receive the tensors.
        device: of the result.
        dtype: of the result.
    """
    shapes = [entry.megatron_shape for entry in entries]
    if group.rank() == source:
        assert full is not None
        flat = _flat(full)
    else:
        num_elements = sum(math.prod(shape) for shape in shapes)
        flat = torch.empty(num_elements, dtype=dtype, device=device)
    dist.broadcast(flat, src=dist.get_global_rank(group, source), group=group)
    return _cut(flat, shapes)


def pin(buffer: Tensor, purpose: str) -> None:
    """Pins host memory. torch's own pinned memory rounds up to a power of two.

    Args:
        buffer: contiguous, on the host.
        purpose: of the buffer, for the message.

    Raises:
        PacsError: if CUDA cannot pin the memory.
    """
    error = torch.cuda.cudart().cudaHostRegister(  # type: ignore[no-untyped-call]
        buffer.data_ptr(), buffer.nbytes, 0
    )
    if int(error) != 0:
        raise PacsError(
            f"{purpose}: {buffer.nbytes / 2**30:.1f} GiB of host memory cannot be pinned (CUDA "
            f"error {int(error)}); `plan` lists the host memory of a rank. Use "
            "policy.offload=none, or an objective without a frozen reference"
        )


class Snapshot:
    """Frozen copy of the trained parameters of this rank's chunks, in host memory."""

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        readable: Callable[[Tensor], Tensor],
    ) -> None:
        """Copies the current weights.

        Args:
            chunks: this rank's model chunks.
            readable: returns the values of an off-loaded parameter, as a view.

        Raises:
            PacsError: if host memory cannot be pinned.
        """
        self._readable = readable
        self._parameters: list[Tensor] = []
        for chunk in chunks:
            self._parameters += [each for each in chunk.parameters() if each.requires_grad]

        # Every element has the width of the largest one, so each view is aligned.
        width = max((parameter.element_size() for parameter in self._parameters), default=1)
        sizes = [parameter.numel() * width for parameter in self._parameters]
        buffer = torch.empty(sum(sizes), dtype=torch.uint8)
        if self._parameters and self._parameters[0].is_cuda:
            pin(buffer, "the frozen reference")

        self.tensors: list[Tensor] = []
        """one host tensor for each parameter, in the order of the parameters"""
        for parameter, piece in zip(self._parameters, torch.split(buffer, sizes), strict=True):
            values = piece.view(parameter.dtype)[: parameter.numel()]
            self.tensors.append(values.view_as(parameter))
        self.take()

    @torch.no_grad()
    def take(self) -> None:
        """Copies the current policy into the snapshot (hard reset)."""
        for tensor, parameter in zip(self.tensors, self._parameters, strict=True):
            tensor.copy_(self._readable(parameter.detach()))

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Inside the block the model has the snapshot's weights.

        Afterwards it has the policy's weights again, bit for bit.
        """
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        """Exchanges the weights of the model and of the snapshot."""
        for tensor, parameter in zip(self.tensors, self._parameters, strict=True):
            place = self._readable(parameter.detach())
            current = place.clone()
            # In stream order, the copy from the host ends before the copy to it.
            place.copy_(tensor, non_blocking=True)
            tensor.copy_(current, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
