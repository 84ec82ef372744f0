"""The source of a conversion: the check of its tensors against the weight table."""

import torch

from pacs_megatron.checkpoint.hf_folder import HfFolder
from pacs_megatron.errors import ConversionError
from pacs_megatron.models import WeightTable

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_OUTPUT = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"
_ROTARY_TABLE = ".rotary_emb.inv_freq"


def check_names(folder: HfFolder, table: WeightTable) -> list[str]:
    """Checks that every row has its tensors, with the right shape, and every tensor a row; returns redundant tensors.

    Raises ConversionError naming the first tensor that does not fit.
    """
    left_out: list[str] = []
    for name in folder.names:
        if name in table.by_hf:
            continue
        if name.endswith(_ROTARY_TABLE):
            left_out.append(name)
        elif name == _OUTPUT and table.spec.tied:
            _check_tied_copy(folder)
            left_out.append(name)
        else:
            raise ConversionError(
                f"{folder.path} contains {name}, which no row of the table of family {table.spec.family} maps; "
                "the checkpoint and its config.json are of different architectures"
            )
    present = set(folder.names)
    for entry in table.entries:
        for name, shape in zip(entry.hf_names, entry.hf_shapes, strict=True):
            if name not in present:
                raise ConversionError(
                    f"{folder.path} lacks {name}, which makes {entry.megatron_name}; get a complete copy"
                )
            if folder.shape(name) != shape:
                raise ConversionError(
                    f"{folder.path}: {name} is {list(folder.shape(name))}, expected {list(shape)} from config.json; the two are "
                    "of different models, get another copy"
                )
    return left_out


def _check_tied_copy(folder: HfFolder) -> None:
    if not torch.equal(folder.get(_OUTPUT), folder.get(_EMBEDDING)):
        raise ConversionError(
            f"{folder.path}: config.json has tie_word_embeddings: true, but {_OUTPUT} differs from {_EMBEDDING}; "
            "set tie_word_embeddings to false if the output layer has its own weights"
        )
