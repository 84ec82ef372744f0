"""The caller of Apex's kernels over lists of tensors."""

from collections.abc import Callable
from typing import Any

import amp_C  # noqa: F401  (Apex's multi_tensor_applier.available means that it is importable)
from torch import Tensor


class MultiTensorApply:
    """Calls a kernel with the size of a chunk in front of the arguments."""

    available = True

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(
        self, op: Callable[..., Any], noop_flag_buffer: Tensor, tensor_lists: Any, *args: Any
    ) -> Any:
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


multi_tensor_applier = MultiTensorApply(2048 * 32)
