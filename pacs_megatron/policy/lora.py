"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685) on Megatron's linear layers.

A layer y = W x becomes y = W x + alpha / rank * B A x, where only A [rank, inputs] and B [outputs,
rank] are trained. Megatron fuses several modules of Hugging Face into one layer (q, k and v; gate
and up). Each of them has its own A and B, as in PEFT, and the weight table's transform puts the
rows of their B into the order of the fused layer.

Tensor parallelism splits what it splits of the layer: B of a column-parallel layer by outputs, A of
a row-parallel layer by inputs. The other matrix is replicated. The ranks exchange activations of
`rank` features only.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import xxhash
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor

from pacs_megatron.config.schema import LoraOptions
from pacs_megatron.models import Entry, WeightTable
from pacs_megatron.models.lora import (
    AdapterMatrix,
    adapter_matrices,
    fused_up,
    merged,
    sizes_of_rank,
    target_of,
)

ADAPTER = "lora"
"""Name of the adapter inside its layer"""
Values = Callable[[Tensor], Tensor]
"""a parameter -> its values"""


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


class Adapter(torch.nn.Module):
    """The low-rank term of one linear layer, from A and B of its Hugging Face modules.

    A module that is no target has no parameters, and its rows of the term are 0.
    """

    def __init__(
        self,
        entry: Entry,
        options: LoraOptions,
        weight: Tensor,
        *,
        seed: int,
        sequence_parallel: bool,
    ) -> None:
        """A has PEFT's random values, which depend on `seed` and the module's name, not on the
        layout. B is 0.

        Args:
            entry: of the layer's weight.
            options: of the section `policy.lora`.
            weight: of the layer; the parameters have its dtype and device.
            seed: of the run.
            sequence_parallel: whether a rank has a part of the sequence outside the layer.
        """
        super().__init__()
        self.entry = entry
        self.is_on = True
        """whether the layer adds the term"""
        self._scale = options.alpha / options.rank
        self._rank = options.rank
        self._sequence_parallel = sequence_parallel
        self._group = parallel_state.get_tensor_model_parallel_group()
        self._is_column_parallel = entry.transform.tp_dim == 0

        self.matrices: dict[AdapterMatrix, torch.nn.Parameter] = {}
        """this rank's shards, in the table's order"""
        for matrix in adapter_matrices(entry, options):
            parameter = torch.nn.Parameter(
                self._shard(matrix, initial_values(matrix, seed), weight)
            )
            self._mark(matrix, parameter)
            self.register_parameter(f"{target_of(matrix.hf_name)}_{matrix.kind}", parameter)
            self.matrices[matrix] = parameter

    def forward(self, x: Tensor) -> Tensor:
        """The term of this rank's outputs.

        Args:
            x: [t, 1, inputs], the layer's input. Of a column-parallel layer it is this rank's part
                of the sequence with sequence parallelism, of a row-parallel layer this rank's
                features.

        Returns:
            As the layer's output.
        """
        low = F.linear(x, self._down(_as_it_is))
        if not self._is_column_parallel and self._sequence_parallel:
            low = tensor_parallel.reduce_scatter_to_sequence_parallel_region(low, group=self._group)
        elif not self._is_column_parallel:
            low = tensor_parallel.reduce_from_tensor_model_parallel_region(low, group=self._group)
        elif self._sequence_parallel:
            low = tensor_parallel.gather_from_sequence_parallel_region(low, group=self._group)
        else:
            low = tensor_parallel.copy_to_tensor_model_parallel_region(low, group=self._group)
        return F.linear(low * self._scale, self._up(_as_it_is))

    @torch.no_grad()
    def merged(self, weight: Tensor, readable: Values) -> Tensor:
        """W + alpha / rank * B A of this rank's shard, rounded once.

        Args:
            weight: this rank's shard of the layer's weight.
            readable: returns the values of an off-loaded parameter.

        Returns:
            As `weight`, a new tensor.
        """

        def values(parameter: Tensor) -> Tensor:
            return readable(parameter.detach()).to(weight.device, torch.float64)

        return merged(weight, self._up(values), self._down(values), self._scale)

    @torch.no_grad()
    def load(self, read: Callable[[AdapterMatrix], Tensor]) -> None:
        """Fills the parameters.

        Args:
            read: returns a whole matrix.
        """
        for matrix, parameter in self.matrices.items():
            parameter.copy_(self._shard(matrix, read(matrix), parameter))

    def _down(self, values: Values) -> Tensor:
        """[targets * rank, inputs], A of all targets, one below the other."""
        return torch.cat([values(self.matrices[matrix]) for matrix in self._of_kind("A")])

    def _up(self, values: Values) -> Tensor:
        """[outputs, targets * rank], B of all targets in the layer's order of rows.

        A row has the B of its module in the columns of the module's A, and 0 elsewhere.
        """
        ups = {matrix.hf_name: values(self.matrices[matrix]) for matrix in self._of_kind("B")}
        return fused_up(self.entry, ups, sizes_of_rank(self.entry.sizes, self._group.size()))

    def _of_kind(self, kind: str) -> list[AdapterMatrix]:
        return [matrix for matrix in self.matrices if matrix.kind == kind]

    def _shard(self, matrix: AdapterMatrix, whole: Tensor, like: Tensor) -> Tensor:
        """This rank's part of a whole matrix, with dtype and device of `like`."""
        shard = whole
        if matrix.split_dim is not None:
            shard = whole.chunk(self._group.size(), dim=matrix.split_dim)[self._group.rank()]
        return shard.to(like).contiguous()

    def _mark(self, matrix: AdapterMatrix, parameter: Any) -> None:
        """Sets the attributes that Megatron's optimizer and its sums of gradients read."""
        if matrix.split_dim is not None:
            set_tensor_model_parallel_attributes(parameter, True, matrix.split_dim, 1)
            return
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        # With sequence parallelism a rank has the gradient of its part of the sequence, and
        # Megatron sums these parts over the tensor-parallel ranks.
        parameter.sequence_parallel = self._sequence_parallel


def initial_values(matrix: AdapterMatrix, seed: int) -> Tensor:
    """PEFT's initial values of a whole matrix, fp32: B is 0, A is uniform in 1 / sqrt(inputs).

    This is `kaiming_uniform_` with a = sqrt(5), the initialisation of torch's linear layer.

    Args:
        matrix: to initialise.
        seed: of the run. Together with the name it determines the values.
    """
    values = torch.zeros(matrix.shape)
    if matrix.kind == "A":
        generator = torch.Generator()
        text = f"{seed}|{matrix.name}"
        generator.manual_seed(xxhash.xxh3_64_intdigest(text.encode()) >> 1)
        bound = 1 / math.sqrt(matrix.shape[1])
        values.uniform_(-bound, bound, generator=generator)
    return values


def attach(
    model: torch.nn.Module,
    table: WeightTable,
    options: LoraOptions,
    *,
    name_of: Callable[[str], str],
    seed: int,
    sequence_parallel: bool,
) -> None:
    """Freezes a chunk and adds an adapter to each of its linear layers that has a target.

    Args:
        model: the chunk.
        table: of the model.
        options: of the section `policy.lora`.
        name_of: the table's name of a parameter of this chunk.
        seed: of the run.
        sequence_parallel: of the layout.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(False)

    for local_name, layer in list(model.named_modules()):
        weight = layer._parameters.get("weight")
        if weight is None:
            continue
        entry = table.by_megatron.get(name_of(f"{local_name}.weight"))
        if entry is None or not adapter_matrices(entry, options):
            continue
        adapter = Adapter(entry, options, weight, seed=seed, sequence_parallel=sequence_parallel)
        layer.add_module(ADAPTER, adapter)
        layer.register_forward_hook(_add_term)

    embedding = getattr(model, "embedding", None)
    if embedding is not None:
        embedding.register_forward_hook(_as_input_of_frozen_layers)


def _add_term(layer: Any, inputs: tuple[Any, ...], output: Any) -> Any:
    """A hook on a linear layer, which returns (result, bias)."""
    adapter = layer.lora
    if not adapter.is_on:
        return output
    result, bias = output
    return result + adapter(inputs[0]), bias


def _as_input_of_frozen_layers(_embedding: Any, _inputs: Any, output: Tensor) -> Tensor:
    """A hook on the frozen embedding, whose output is [t, 1, hidden].

    Recomputation keeps the graph of a layer only if an input of it requires a gradient.
    `torch.matmul` folds t and 1 for a frozen weight only if their strides allow it, for a trained
    one always. The strides of new memory give both the same kernel, so the same bits.
    """
    output = output.flatten(0, 1)[:, None]
    return output.requires_grad_() if torch.is_grad_enabled() else output


def adapters_of(models: Sequence[torch.nn.Module]) -> list[Adapter]:
    """The adapters of these chunks."""
    adapters = []
    for model in models:
        adapters += [module for module in model.modules() if isinstance(module, Adapter)]
    return adapters


class BaseModel:
    """The frozen reference of a policy whose adapters started at 0: the model without them."""

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        """The reference of these chunks."""
        self._adapters = adapters_of(models)

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Inside the block the adapters are off."""
        for adapter in self._adapters:
            adapter.is_on = False
        try:
            yield
        finally:
            for adapter in self._adapters:
                adapter.is_on = True
