"""Where a Hugging Face checkpoint comes from, and whether its tensors are exactly those that the table needs."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from pacs_megatron.checkpoint.hf_folder import HfFolder
from pacs_megatron.errors import ConversionError
from pacs_megatron.models import WeightTable
from pacs_megatron.models.hub import HUB_FILES

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_OUTPUT = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"
_ROTARY_TABLE = ".rotary_emb.inv_freq"


def local_hf_folder(folder_or_hub_id: str) -> Path:
    """The folder itself, or the hub's snapshot of it (no code and no pickled weights are downloaded)."""
    path = Path(folder_or_hub_id)
    if path.exists() or not _HUB_ID.fullmatch(folder_or_hub_id):
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(folder_or_hub_id, allow_patterns=list(HUB_FILES)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ConversionError(
            f"{folder_or_hub_id} is neither a folder nor a hub id that can be downloaded ({reason}); download it first"
        ) from None


def check_names(folder: HfFolder, table: WeightTable) -> list[str]:
    """Every row is filled and every tensor is mapped, with the right shape; returns what is left out on purpose.

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
                f"{folder.path} holds {name}, which no row of the table of family {table.spec.family} maps; "
                "the checkpoint is of another architecture than its config.json says"
            )
    present = set(folder.names)
    for entry in table.entries:
        for name, shape in zip(entry.hf_names, entry.hf_shapes, strict=True):
            if name not in present:
                raise ConversionError(
                    f"{folder.path} lacks {name}, which makes {entry.megatron_name}; get a whole copy"
                )
            if folder.shape(name) != shape:
                raise ConversionError(
                    f"{folder.path}: {name} is {list(folder.shape(name))}, expected {list(shape)} from config.json"
                )
    return left_out


def _check_tied_copy(folder: HfFolder) -> None:
    if not torch.equal(folder.get(_OUTPUT), folder.get(_EMBEDDING)):
        raise ConversionError(
            f"{folder.path}: config.json says tie_word_embeddings, but {_OUTPUT} differs from {_EMBEDDING}; "
            "set tie_word_embeddings to false if the output layer is its own"
        )
