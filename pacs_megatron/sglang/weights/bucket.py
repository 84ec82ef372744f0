"""Packs weights without gaps into one flat byte buffer, linear ones optionally as blockwise FP8.

The FP8 format is that of Hugging Face checkpoints with `quant_method: fp8` and
`weight_block_size: [128, 128]`.
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
        is_aligned = self.num_bytes % tensor.element_size() == 0
        is_on_device = tensor.device == self._buffer.device
        return is_aligned and is_on_device and self.num_bytes + tensor.nbytes <= self._capacity

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Copies the tensor's bytes into the buffer.

        Args:
            name: name of the weight on the server.
            tensor: any shape, dtype and device; the first one of a bucket decides the device.
        """
        if not self.tensors:
            self._reserve(tensor)
        end = self.num_bytes + tensor.nbytes
        place = self._buffer[self.num_bytes : end]
        flat = tensor.detach().contiguous().reshape(-1)
        place.copy_(flat.view(torch.uint8))
        view = place.view(tensor.dtype).reshape(tensor.shape)
        self.tensors.append((name, view))
        self.num_bytes = end

    @property
    def data(self) -> torch.Tensor:
        """uint8 [num_bytes], a view of the buffer."""
        return self._buffer[: self.num_bytes]

    def clear(self) -> None:
        self.tensors = []
        self.num_bytes = 0

    def free(self) -> None:
        """Removes all tensors and frees the memory.

        Other processes can then use the memory of a GPU.
        """
        on_gpu = self._buffer.is_cuda
        self.clear()
        self._buffer = torch.empty(0, dtype=torch.uint8)
        if on_gpu:
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()

    def _reserve(self, tensor: torch.Tensor) -> None:
        """Allocates the buffer for a bucket that starts with this tensor, if it does not fit."""
        size = max(self._capacity, tensor.nbytes)
        is_on_device = self._buffer.device == tensor.device
        if is_on_device and tensor.nbytes <= self._buffer.numel() <= size:
            return
        # Frees the old buffer before the new one is allocated.
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._buffer = torch.empty(size, dtype=torch.uint8, device=tensor.device)


def quantize_blockwise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The blockwise FP8 format of a weight: weight ~ values * scale_inv.

    scale_inv = (largest magnitude of the block) / 448, or 1 for a block of zeros. Blocks at the
    edges are smaller.

    Args:
        weight: [n, k], any floating-point dtype.

    Returns:
        values: [n, k], float8_e4m3fn.
        scale_inv: [ceil(n / 128), ceil(k / 128)], fp32.
    """
    rows, columns = weight.shape
    pad_rows = -rows % BLOCK
    pad_columns = -columns % BLOCK

    # The only fp32 copy; later operations are in place.
    padded = weight.detach().to(torch.float32, copy=True)
    if pad_rows or pad_columns:
        padded = torch.nn.functional.pad(padded, (0, pad_columns, 0, pad_rows))

    block_rows = padded.shape[0] // BLOCK
    block_columns = padded.shape[1] // BLOCK
    blocks = padded.reshape(block_rows, BLOCK, block_columns, BLOCK)
    highest = blocks.amax(dim=3).amax(dim=1)
    lowest = blocks.amin(dim=3).amin(dim=1)
    scale_inv = torch.maximum(highest, lowest.neg()) / E4M3_MAX
    # 1 also where the quotient underflows to 0.
    scale_inv = torch.where(scale_inv > 0, scale_inv, torch.ones_like(scale_inv))

    blocks.div_(scale_inv[:, None, :, None]).clamp_(-E4M3_MAX, E4M3_MAX)
    values = padded[:rows, :columns].to(torch.float8_e4m3fn)
    return values.contiguous(), scale_inv


def is_quantized(name: str) -> bool:
    """Whether a weight is quantized: the linear layers of attention and MLP.

    Embeddings, norms, router and lm_head are not.
    """
    return _LINEAR.fullmatch(name) is not None


def scale_name(name: str) -> str:
    """Name of the scales that belong to the weight `name`."""
    return f"{name}_scale_inv"
