"""A frozen copy of the policy's weights in host memory, swapped in for a reference pass."""

import contextlib
from collections.abc import Iterator, Sequence

import torch


class Snapshot:
    """Weights of all of this rank's chunks, one host tensor a parameter, in the parameters' own order."""

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self._chunks = chunks
        self.tensors = [p.detach().to("cpu", copy=True) for p in self._parameters()]

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        for chunk in self._chunks:
            yield from chunk.parameters()

    @torch.no_grad()
    def take(self) -> None:
        """Hard reset: the snapshot becomes the current policy."""
        for tensor, parameter in zip(self.tensors, self._parameters(), strict=True):
            tensor.copy_(parameter)

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Runs the body with the snapshot's weights in the model, then restores the policy's weights bit for bit."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for tensor, parameter in zip(self.tensors, self._parameters(), strict=True):
            current = parameter.detach().to("cpu", copy=True)
            parameter.copy_(tensor)
            tensor.copy_(current)
