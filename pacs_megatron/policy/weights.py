"""Loads, exports and copies this rank's Megatron parameters as Hugging Face tensors, through the
weight table of `models`.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from pacs_megatron.errors import ConversionError, PacsError
from pacs_megatron.models import Entry, WeightTable, canonical_name
from pacs_megatron.policy.model import PolicyModel

EMBEDDING = "embedding.word_embeddings.weight"
TIED_OUTPUT = "output_layer.weight"


def named_parameters(model: PolicyModel, table: WeightTable) -> dict[str, torch.nn.Parameter]:
    """This chunk's parameters by the table's names, with global layer and expert numbers.
    Skips the copy of a tied embedding on the last pipeline stage."""
    global_layer = {
        index: layer.layer_number - 1 for index, layer in enumerate(model.decoder.layers)
    }
    ep_rank = parallel_state.get_expert_model_parallel_rank()
    found: dict[str, torch.nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        pieces = name.split(".")
        if pieces[:2] == ["decoder", "layers"]:
            pieces[2] = str(global_layer[int(pieces[2])])
        canonical = canonical_name(".".join(pieces)).split(".")
        if "local_experts" in canonical:
            at = canonical.index("local_experts") + 1
            canonical[at] = str(int(canonical[at]) + ep_rank * _num_local_experts(table))
        full_name = ".".join(canonical)
        if full_name == TIED_OUTPUT and table.spec.tied:
            continue
        if full_name not in table.by_megatron:
            raise ConversionError(
                f"Megatron parameter {full_name} has no row in the table of {table.spec.family}"
            )
        found[full_name] = parameter
    return found


def _num_local_experts(table: WeightTable) -> int:
    assert table.spec.moe is not None
    return table.spec.moe.num_experts // int(parallel_state.get_expert_model_parallel_world_size())


def _tp_group(entry: Entry) -> Any:
    """The tensor-parallel group of the entry: experts have their own."""
    if entry.expert is None:
        return parallel_state.get_tensor_model_parallel_group()
    return parallel_state.get_expert_tensor_parallel_group()


@torch.no_grad()
def load(models: Sequence[PolicyModel], table: WeightTable, read: Callable[[str], Tensor]) -> None:
    """Fills this rank's parameters; `read` returns one Hugging Face tensor by name.

    Reads only tensors that this rank needs. Raises ConversionError for a wrong shape, and the error
    of `read` for a missing name.
    """
    for model in models:
        targets = list(named_parameters(model, table).items())
        if table.spec.tied and model.post_process and not model.pre_process:
            targets.append((EMBEDDING, model.output_layer.weight))  # this stage's own copy
        for name, parameter in targets:
            entry = table.by_megatron[name]
            full = entry.to_megatron([read(hf_name) for hf_name in entry.hf_names])
            group = _tp_group(entry)
            parameter.copy_(entry.split_tp(full, group.size())[group.rank()])


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
    models: Sequence[PolicyModel], table: WeightTable, readable: Callable[[Tensor], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, full tensor) for every weight, in the table's order, on every rank.

    Collective. One entry is in flight at a time: its stage gathers the tensor-parallel shards, then
    the other expert ranks and stages receive the merged tensor. `readable` returns the values of an
    off-loaded parameter.
    """
    mine: dict[str, torch.nn.Parameter] = {}
    for model in models:
        mine |= named_parameters(model, table)
    device = next(models[0].parameters()).device
    dtype = models[0].config.params_dtype
    pp_group = parallel_state.get_pipeline_model_parallel_group()
    ep_group = parallel_state.get_expert_model_parallel_group()
    for entry in table.entries:
        owner = _stage(entry, table.spec.num_layers)
        full = None
        if entry.megatron_name in mine:
            full = readable(mine[entry.megatron_name].detach()).to(device)
            group = _tp_group(entry)
            if group.size() > 1 and entry.shard_shape(group.size()) != entry.megatron_shape:
                shards = [torch.empty_like(full) for _ in range(group.size())]
                dist.all_gather(shards, full.contiguous(), group=group)
                full = entry.merge_tp(shards)
        if entry.expert is not None and ep_group.size() > 1 and owner == pp_group.rank():
            full = _broadcast(
                entry, full, entry.expert // _num_local_experts(table), ep_group, device, dtype
            )
        if pp_group.size() > 1:
            full = _broadcast(entry, full, owner, pp_group, device, dtype)
        assert full is not None
        yield from zip(entry.hf_names, entry.to_hf(full), strict=True)


def _stage(entry: Entry, num_layers: int) -> int:
    """The pipeline stage of an entry. With interleaving a stage has every pp-th chunk of layers."""
    pp = int(parallel_state.get_pipeline_model_parallel_world_size())
    if entry.layer is None:
        return 0 if entry.place == "embedding" else pp - 1
    num_chunks = pp * (parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1)
    return entry.layer * num_chunks // num_layers % pp


def _broadcast(
    entry: Entry,
    full: Tensor | None,
    source: int,
    group: dist.ProcessGroup,
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor:
    if group.rank() != source:
        full = torch.empty(entry.megatron_shape, dtype=dtype, device=device)
    assert full is not None
    full = full.contiguous()
    dist.broadcast(full, src=dist.get_global_rank(group, source), group=group)
    return full


def pin(buffer: Tensor, purpose: str) -> None:
    """Pins host memory; torch's own pinned memory rounds up to a power of two. Raises PacsError."""
    error = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)  # type: ignore[no-untyped-call]
    if int(error) != 0:
        raise PacsError(
            f"{purpose}: {buffer.nbytes / 2**30:.1f} GiB of host memory cannot be pinned (CUDA "
            f"error {int(error)}); `plan` lists the host memory of a rank. Use "
            "policy.offload=none, or an objective without a frozen reference"
        )


class Snapshot:
    """Frozen copy of all of this rank's chunks, one host tensor a parameter, in the parameters' own
    order.
    """

    def __init__(
        self, chunks: Sequence[torch.nn.Module], readable: Callable[[Tensor], Tensor]
    ) -> None:
        """`readable` returns the values of an off-loaded parameter, as a view."""
        self._readable = readable
        self._parameters = parameters = [
            parameter for chunk in chunks for parameter in chunk.parameters()
        ]
        width = max((p.element_size() for p in parameters), default=1)
        buffer = torch.empty(sum(p.numel() for p in parameters) * width, dtype=torch.uint8)
        if parameters and parameters[0].is_cuda:
            pin(buffer, "the frozen reference")
        pieces = torch.split(buffer, [p.numel() * width for p in parameters])
        self.tensors = [
            piece.view(p.dtype)[: p.numel()].view_as(p)
            for piece, p in zip(pieces, parameters, strict=True)
        ]
        self.take()

    @torch.no_grad()
    def take(self) -> None:
        """Copies the current policy into the snapshot (hard reset)."""
        for tensor, parameter in zip(self.tensors, self._parameters, strict=True):
            tensor.copy_(self._readable(parameter.detach()))

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Runs the body with the snapshot's weights in the model, then restores the policy's
        weights bit for bit.
        """
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for tensor, parameter in zip(self.tensors, self._parameters, strict=True):
            place = self._readable(parameter.detach())
            current = place.clone()
            # In stream order, the copy from the host ends before the copy to it.
            place.copy_(tensor, non_blocking=True)
            tensor.copy_(current, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
