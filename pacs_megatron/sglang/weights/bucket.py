"""Packs weights without gaps into one flat byte buffer, linear ones optionally as blockwise FP8
(the format of Hugging Face checkpoints with `quant_method: fp8`, `weight_block_size: [128, 128]`).
"""

import re

import torch

BLOCK = 128
E4M3_MAX = 448.0
_LINEAR = re.compile(r".*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)\.weight")


class Bucket:
    """A buffer of up to `capacity` bytes, or of one larger tensor.

    `clear` keeps the memory for reuse.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self.tensors: list[tuple[str, torch.Tensor]] = []
        """names and views of `data`"""
        self.num_bytes = 0

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether `add` accepts the tensor.

        A view in its dtype must start at a multiple of the item size.
        """
        if not self.tensors:
            return True
        aligned = self.num_bytes % tensor.element_size() == 0
        return (
            aligned
            and tensor.device == self._buffer.device
            and self.num_bytes + tensor.nbytes <= self._capacity
        )

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Copies the tensor's bytes into the buffer."""
        if not self.tensors:
            self._reserve(tensor)
        place = self._buffer[self.num_bytes : self.num_bytes + tensor.nbytes]
        place.copy_(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
        self.tensors.append((name, place.view(tensor.dtype).reshape(tensor.shape)))
        self.num_bytes += tensor.nbytes

    @property
    def data(self) -> torch.Tensor:
        """uint8 [num_bytes], a view"""
        return self._buffer[: self.num_bytes]

    def clear(self) -> None:
        self.tensors = []
        self.num_bytes = 0

    def free(self) -> None:
        """Removes all tensors and frees the memory; other processes can then use the memory of a
        GPU.
        """
        on_gpu = self._buffer.is_cuda
        self.clear()
        self._buffer = torch.empty(0, dtype=torch.uint8)
        if on_gpu:
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()

    def _reserve(self, tensor: torch.Tensor) -> None:
        size = max(self._capacity, tensor.nbytes)
        if (
            self._buffer.device != tensor.device
            or self._buffer.numel() < tensor.nbytes
            or self._buffer.numel() > size
        ):
            self._buffer = torch.empty(
                0, dtype=torch.uint8
            )  # frees the old buffer before the new one is allocated
            self._buffer = torch.empty(size, dtype=torch.uint8, device=tensor.device)


def quantize_blockwise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`(values, scale_inv)`: float8_e4m3fn [n, k] and float32 [ceil(n/128), ceil(k/128)], weight ~
    values * scale_inv, where scale_inv = (largest magnitude of the block) / 448, or 1 for zeros.
    Blocks at the edges are smaller.
    """
    rows, columns = weight.shape
    pad_rows = -rows % BLOCK
    pad_columns = -columns % BLOCK
    padded = weight.detach().to(
        torch.float32, copy=True
    )  # the only fp32 copy; later operations are in place
    if pad_rows or pad_columns:
        padded = torch.nn.functional.pad(padded, (0, pad_columns, 0, pad_rows))
    blocks = padded.reshape(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    largest = torch.maximum(blocks.amax(dim=3).amax(dim=1), blocks.amin(dim=3).amin(dim=1).neg())
    scale_inv = largest / E4M3_MAX
    scale_inv = torch.where(
        scale_inv > 0, scale_inv, torch.ones_like(scale_inv)
    )  # also 0 if it underflows
    blocks.div_(scale_inv[:, None, :, None]).clamp_(-E4M3_MAX, E4M3_MAX)
    values = padded[:rows, :columns].to(torch.float8_e4m3fn)
    return values.contiguous(), scale_inv


def is_quantized(name: str) -> bool:
    """Whether a weight is quantized: linear layers of attention and MLP, not embeddings, norms,
    router and lm_head.
    """
    return _LINEAR.fullmatch(name) is not None


def scale_name(name: str) -> str:
    """Name of the scales that belong to the weight `name`."""
    return f"{name}_scale_inv"
