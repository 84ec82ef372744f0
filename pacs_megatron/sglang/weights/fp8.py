"""Blockwise FP8 of linear weights: e4m3 values and one scale per block of 128 x 128, the format of Hugging Face FP8
checkpoints (`quantization_config: {quant_method: fp8, weight_block_size: [128, 128]}`)."""

import re

import torch

BLOCK = 128
E4M3_MAX = 448.0
_LINEAR = re.compile(r".*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)\.weight")


def quantize_blockwise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`(values, scale_inv)`: float8_e4m3fn [n, k] and float32 [ceil(n/128), ceil(k/128)], weight ~ values * scale_inv.

    scale_inv = (largest magnitude of the block) / 448; a block of zeros gets scale 1. Blocks at the edges are smaller.
    """
    rows, columns = weight.shape
    pad_rows, pad_columns = -rows % BLOCK, -columns % BLOCK
    padded = weight.detach().to(torch.float32, copy=True)  # the only fp32 copy; later operations are in place
    if pad_rows or pad_columns:
        padded = torch.nn.functional.pad(padded, (0, pad_columns, 0, pad_rows))
    blocks = padded.reshape(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    largest = torch.maximum(blocks.amax(dim=3).amax(dim=1), blocks.amin(dim=3).amin(dim=1).neg())
    scale_inv = largest / E4M3_MAX
    scale_inv = torch.where(scale_inv > 0, scale_inv, torch.ones_like(scale_inv))  # 0 also below fp32's range
    blocks.div_(scale_inv[:, None, :, None]).clamp_(-E4M3_MAX, E4M3_MAX)
    values = padded[:rows, :columns].to(torch.float8_e4m3fn)
    return values.contiguous(), scale_inv


def is_quantized(name: str) -> bool:
    """True for linear layers of attention and MLP; embeddings, norms, router and lm_head are not quantized."""
    return _LINEAR.fullmatch(name) is not None


def scale_name(name: str) -> str:
    """Name of the scales that belong to the weight `name`."""
    return f"{name}_scale_inv"
