"""A Hugging Face checkpoint folder: safetensors shards, index, config, tokenizer.

Reads and writes no pickled weights.
"""

import json
import os
import re
import shutil
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch

from pacs_megatron.checkpoint.page_cache import WriteBehind
from pacs_megatron.checkpoint.safetensors_file import (
    SafetensorsFile,
    TensorInfo,
    plan_header,
    tensor_bytes,
)
from pacs_megatron.checkpoint.staging import StagedFolder
from pacs_megatron.config.text import MAX_NAME_BYTES
from pacs_megatron.errors import CheckpointError, ConversionError
from pacs_megatron.models import (
    VISION_PREFIX,
    Entry,
    ModelSpec,
    WeightTable,
    language_config,
    load_config,
)
from pacs_megatron.models.table import CRITIC_CLASS
from pacs_megatron.runtime.files import is_file, naming, sync_path, write_atomically
from pacs_megatron.runtime.json_reader import read_object

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
BESIDE_NAME = "beside.safetensors"
"""File of a checkpoint's metadata folder (`beside.py`)"""
_BESIDE = re.compile(r"(mtp|visual|model\.visual)\.")
_ALL_EXPERTS = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")
"""Tensors [experts, ...], as published models with a vision tower have them"""
VISIBLE = "[!.]*"
"""Pattern of names, without the hidden files of macOS (`._config.json`) and NFS (`.nfs*`)."""
_ADAPTER_NAME = "adapter_config.json"
_MISTRAL_NAME = "consolidated.safetensors"
"""The same weights under Mistral's names; transformers and SGLang skip it, too."""
_OUTPUT = "lm_head.weight"
_EMBEDDING = "embed_tokens.weight"
_ROTARY_TABLE = ".rotary_emb.inv_freq"
WEIGHT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
MAX_SHARD_BYTES = 5 * 10**9
"""Maximum size of one file, unless a single tensor is larger."""
_METADATA_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken")
_GENERATION_CONFIG = "generation_config.json"
_TOKENS = ("bos_token_id", "pad_token_id")
_METADATA_FOLDERS = ("additional_chat_templates",)
_WRITTEN_BY_US = ("certificate.json", "manifest.json")
"""Files of a conversion or a checkpoint, which are not metadata of the model"""


class HfFolder:
    """Reads a folder; tensors are views of mapped files.

    A tensor of all experts of a layer appears as the tensors of each expert.
    """

    def __init__(self, path: str | Path) -> None:
        """Checks everything except the data.

        Raises:
            ConversionError: for config.json.
            CheckpointError: with the file or tensor that is missing, truncated, duplicate or not in
                the index, or with a file that makes other programs load other weights.
        """
        self.path = Path(path)
        if not self.path.is_dir():
            raise CheckpointError(
                f"{self.path} is not a folder; give the folder of a Hugging Face checkpoint"
            )
        self.config: dict[str, Any] = load_config(self.path)
        if (self.path / _ADAPTER_NAME).exists():
            raise CheckpointError(
                f"{self.path / _ADAPTER_NAME}: transformers would add this adapter to the weights, "
                "and this program would not; merge it into them, or remove it"
            )
        self._file_of = self._split_experts(self._open())
        self._check_dtypes()
        self.names: tuple[str, ...] = tuple(self._file_of)
        """in the order of the files"""

    def info(self, name: str) -> TensorInfo:
        """dtype, shape and size, without reading the tensor."""
        return self._file(name).tensors[name]

    def get(self, name: str) -> torch.Tensor:
        """A view of the mapped file: copy-on-write, read when touched."""
        return self._file(name).get(name)

    def release(self, name: str) -> None:
        """Drops the tensor from memory.

        Views read it again and lose values that were written to them.
        """
        self._file(name).release(name)

    def _split_experts(self, file_of: dict[str, SafetensorsFile]) -> dict[str, SafetensorsFile]:
        """The same, with the tensors of each expert in the place of a tensor of all experts."""
        found: dict[str, SafetensorsFile] = {}
        for name, file in file_of.items():
            match = _ALL_EXPERTS.fullmatch(name)
            shape = file.tensors[name].shape
            if match is None or len(shape) != 3 or _BESIDE.match(name):
                found[name] = file
                continue

            prefix, kind = match.groups()
            matrices = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
            if shape[1] % len(matrices):
                raise CheckpointError(
                    f"{file.path}: {name} is {list(shape)}, expected an even number of rows (gates "
                    "and values); get another copy"
                )
            own_names = []
            for expert in range(shape[0]):
                own_names += [f"{prefix}.{expert}.{matrix}.weight" for matrix in matrices]
            for own_name in own_names:
                if own_name in file_of:
                    raise CheckpointError(
                        f"{self.path} has both {name} and {own_name}; remove the one that is left "
                        "over"
                    )
            file.split(name, own_names, (shape[1] // len(matrices), shape[2]))
            found |= dict.fromkeys(own_names, file)
        return found

    def _file(self, name: str) -> SafetensorsFile:
        if name not in self._file_of:
            raise CheckpointError(
                f"{self.path} has no tensor {name}; the weights and config.json do not match"
            )
        return self._file_of[name]

    def _open(self) -> dict[str, SafetensorsFile]:
        """Name of a tensor -> its file. Raises CheckpointError unless files and index agree."""
        index = self.path / INDEX_NAME
        if not is_file(index, CheckpointError):
            single = self._open_single()
            return dict.fromkeys(single.tensors, single)

        weight_map = _read_weight_map(index)
        if (self.path / SINGLE_NAME).exists() and SINGLE_NAME not in weight_map.values():
            raise CheckpointError(
                f"{self.path} has both {SINGLE_NAME}, which transformers loads, and {INDEX_NAME} "
                f"of other files ({min(weight_map.values(), default='none')}, ...), which this "
                "program and SGLang load; remove the one that is left over"
            )
        file_of: dict[str, SafetensorsFile] = {}
        for file_name in sorted(set(weight_map.values())):
            file = SafetensorsFile(self.path / file_name)
            for name in file.tensors:
                if name in file_of:
                    raise CheckpointError(
                        f"{name} is in {file_of[name].path.name} and in {file_name} of {self.path}"
                    )
                if name not in weight_map:
                    raise CheckpointError(
                        f"{self.path / file_name} contains {name}, which {INDEX_NAME} does not list"
                    )
                file_of[name] = file

        for name, file_name in weight_map.items():
            if name not in file_of or file_of[name].path.name != file_name:
                raise CheckpointError(
                    f"{index} maps {name} to {file_name}, which does not contain it; get a "
                    "complete copy"
                )
        return file_of

    def _open_single(self) -> SafetensorsFile:
        """The file of a folder without an index. Raises CheckpointError if there is none."""
        single = self.path / SINGLE_NAME
        if single.exists():
            others = {path.name for path in self.path.glob(f"{VISIBLE}.safetensors")}
            others.remove(SINGLE_NAME)
            if others - {_MISTRAL_NAME} or len(others) > 1:
                raise CheckpointError(
                    f"{self.path} has no {INDEX_NAME}, but {SINGLE_NAME} and {min(others)}; SGLang "
                    f"would load both, transformers the first; remove the other one"
                )
            return SafetensorsFile(single)
        if any(self.path.glob("model-*.safetensors")):
            raise CheckpointError(
                f"{self.path / INDEX_NAME} is missing beside the weight shards; download it"
            )
        if any(self.path.glob("pytorch_model*.bin")):
            raise CheckpointError(
                f"{self.path} has only pickled weights (.bin), which this program does not load; "
                "save them as safetensors"
            )
        raise CheckpointError(f"{self.path} has no weights: neither {SINGLE_NAME} nor {INDEX_NAME}")

    def _check_dtypes(self) -> None:
        """Raises CheckpointError unless weights are floating-point, and 16-bit ones have the dtype
        of config.json.

        Otherwise a conversion would give wrong numbers without an error.
        """
        config = language_config(self.config)
        declared = config.get("dtype") or config.get("torch_dtype")
        declared_name = str(declared).removeprefix("torch.")
        contradicting = {"bfloat16": torch.float16, "float16": torch.bfloat16}.get(declared_name)
        for name, file in self._file_of.items():
            dtype = file.tensors[name].dtype
            if dtype not in WEIGHT_DTYPES:
                supported = ", ".join(map(str, WEIGHT_DTYPES))
                raise CheckpointError(
                    f"{file.path}: {name} is {dtype}, expected one of {supported}; dequantise the "
                    "model, or get another copy"
                )
            if dtype == contradicting:
                raise CheckpointError(
                    f"{file.path}: {name} is {dtype}, but config.json declares {declared_name}; "
                    "correct the one that is wrong"
                )


def _read_weight_map(index: Path) -> dict[str, str]:
    """Name of a tensor -> name of its file. Raises CheckpointError for a malformed index."""
    weight_map = read_object(index, error=CheckpointError).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(file_name, str) for file_name in weight_map.values()
    ):
        raise CheckpointError(f"{index}: weight_map must map names to files; download it again")
    for file_name in set(weight_map.values()):
        is_plain = Path(file_name).name == file_name
        if not is_plain or not 0 < len(file_name.encode()) <= MAX_NAME_BYTES:
            raise CheckpointError(
                f"{index} names {file_name[:100]!r}, which is not a file of this folder"
            )
    return weight_map


def check_names(folder: HfFolder, table: WeightTable) -> list[str]:
    """Checks that every row has its tensors, with the right shape, and every tensor a row.

    Returns:
        Names of redundant tensors, without those that are kept beside.

    Raises:
        ConversionError: names the first tensor that does not fit.
    """
    left_out = []
    for name in folder.names:
        if name not in table.by_hf and not is_beside(name, table.spec):
            _check_redundant(folder, table, name)
            left_out.append(name)

    present = set(folder.names)
    for entry in table.entries:
        for name, shape in zip(entry.hf_names, entry.hf_shapes, strict=True):
            if name not in present:
                raise ConversionError(
                    f"{folder.path} lacks {name}, which makes {entry.megatron_name}; get a "
                    "complete copy"
                )
            stored_shape = folder.info(name).shape
            if stored_shape != shape:
                raise ConversionError(
                    f"{folder.path}: {name} is {list(stored_shape)}, expected {list(shape)} from "
                    "config.json; the two are of different models, get another copy"
                )
    return left_out


def is_beside(name: str, spec: ModelSpec) -> bool:
    """Whether a tensor is of a hybrid's vision tower or of its MTP layers."""
    return spec.delta is not None and _BESIDE.match(name) is not None


def _check_redundant(folder: HfFolder, table: WeightTable, name: str) -> None:
    """Raises ConversionError if a tensor without a row has weights of its own."""
    if name.endswith(_ROTARY_TABLE):
        return
    if name.startswith(VISION_PREFIX) and table.spec.delta is not None:
        raise ConversionError(
            f"{folder.path} contains {name}, a name of a model with a vision tower, but its "
            f"config.json is of the language model alone ({table.spec.family}); load the folder "
            "with transformers and write it with save_pretrained(..., save_original_format=False)"
        )
    if name != _OUTPUT or not table.spec.tied:
        raise ConversionError(
            f"{folder.path} contains {name}, which no row of the table of family "
            f"{table.spec.family} maps; the checkpoint and its config.json are of different "
            "architectures"
        )
    embedding = table.spec.hf_prefix + _EMBEDDING
    if not torch.equal(folder.get(_OUTPUT), folder.get(embedding)):
        raise ConversionError(
            f"{folder.path}: config.json has tie_word_embeddings: true, but {_OUTPUT} "
            f"differs from {embedding}; set tie_word_embeddings to false if the output "
            "layer has its own weights"
        )


class HfFolderWriter:
    """Writes a folder of announced tensors; `put` takes them in any order, from any thread.

    The files are in `<path>.partial-*` until `finish` renames it. Leaving the context before
    `finish` removes them.
    """

    def __init__(
        self,
        path: str | Path,
        tensors: Iterable[TensorInfo],
        *,
        max_shard_bytes: int = MAX_SHARD_BYTES,
    ) -> None:
        """Creates the files with their headers.

        Args:
            path: the folder, which must not exist.
            tensors: name, dtype and shape of every tensor, in the order of the files.
            max_shard_bytes: maximum size of one file, unless a single tensor is larger.

        Raises:
            CheckpointError: if the folder exists, or without a tensor.
        """
        shards = _split(list(tensors), max_shard_bytes)
        self.staged = StagedFolder(Path(path))
        """complete after `seal`, to be committed then"""
        self._place: dict[str, tuple[int, TensorInfo]] = {}
        """name -> descriptor of its file, and its place there"""
        self._weight_map: dict[str, str] = {}
        self._descriptors: list[int] = []
        self._mutex = threading.Lock()
        self._behind = WriteBehind()
        for number, shard in enumerate(shards, start=1):
            file_name = SINGLE_NAME
            if len(shards) > 1:
                file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            self._create(file_name, shard)
        self._missing = set(self._place)

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Writes one tensor, cast to the announced dtype.

        Raises CheckpointError on a wrong name or shape.
        """
        with self._mutex:
            if name not in self._missing:
                reason = "was written already" if name in self._place else "was not announced"
                raise CheckpointError(f"{self.staged.target}: tensor {name} {reason}")
            self._missing.discard(name)

        descriptor, info = self._place[name]
        if tuple(tensor.shape) != info.shape:
            raise CheckpointError(
                f"{name}: shape {list(tensor.shape)}, announced as {list(info.shape)}"
            )
        data = tensor_bytes(tensor.to("cpu", info.dtype))
        self._write(descriptor, data, info.offset)
        self._behind.wrote(descriptor, info.offset, len(data))

    def finish(self, metadata_from: Path, stop_token_ids: Sequence[int] = ()) -> Path:
        """`seal`, then renames the folder and returns its path."""
        self.seal(metadata_from, stop_token_ids)
        return self.staged.commit()

    def seal(self, metadata_from: Path, stop_token_ids: Sequence[int] = ()) -> None:
        """Adds config.json (with the new dtype), tokenizer files and index; flushes and closes the
        shards.

        Args:
            metadata_from: folder of the files.
            stop_token_ids: tokens that generation_config.json lists; empty keeps the file.

        Raises CheckpointError with an announced tensor that was not put.
        """
        if self._missing:
            name = min(self._missing)
            raise CheckpointError(
                f"{self.staged.target}: {len(self._missing)} tensors were never written, e.g. "
                f"{name}; nothing is kept"
            )
        infos = [info for _, info in self._place.values()]
        copy_hf_metadata(
            metadata_from,
            self.staged.path,
            dtypes={info.dtype for info in infos if not _BESIDE.match(info.name)},
            is_critic="score.weight" in self._place,
            stop_token_ids=stop_token_ids,
        )
        if len(self._descriptors) > 1:
            total = sum(info.nbytes for info in infos)
            index = {"metadata": {"total_size": total}, "weight_map": self._weight_map}
            text = json.dumps(index, indent=2) + "\n"
            write_atomically(self.staged.path / INDEX_NAME, [text.encode()])
        with naming(self.staged.path):
            for descriptor in self._descriptors:
                os.fsync(descriptor)
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        """Removes the temporary folder; does nothing after `finish`."""
        self._close()
        self.staged.abort()

    def _create(self, file_name: str, tensors: list[TensorInfo]) -> None:
        """Creates a shard and writes its header."""
        header, placed = plan_header(tensors)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        descriptor = os.open(self.staged.path / file_name, flags, 0o644)
        self._descriptors.append(descriptor)
        self._write(descriptor, header, 0)
        for info in placed:
            self._place[info.name] = (descriptor, info)
            self._weight_map[info.name] = file_name

    def _write(self, descriptor: int, data: bytes | memoryview, offset: int) -> None:
        written = 0
        with naming(self.staged.path):
            while written < len(data):
                written += os.pwrite(descriptor, data[written:], offset + written)

    def _close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []


def hf_tensors(entries: Iterable[Entry], dtype: torch.dtype) -> list[TensorInfo]:
    """The tensors of these entries, for HfFolderWriter."""
    tensors = []
    for entry in entries:
        for name, shape in zip(entry.hf_names, entry.hf_shapes, strict=True):
            tensors.append(TensorInfo(name, dtype, shape))
    return tensors


def metadata_files(folder: Path) -> list[Path]:
    """Config, generation config, tokenizer and chat template files; no weights, no code.

    Raises CheckpointError.
    """
    files = [
        path
        for path in folder.glob(VISIBLE)
        if path.suffix in _METADATA_SUFFIXES and is_file(path, CheckpointError)
    ]
    for name in _METADATA_FOLDERS:
        files += (folder / name).glob(f"{VISIBLE}.jinja")
    return sorted(
        path
        for path in files
        if not path.name.endswith(".index.json") and path.name not in _WRITTEN_BY_US
    )


def copy_hf_metadata(
    source: Path,
    target: Path,
    *,
    dtypes: set[torch.dtype],
    is_critic: bool = False,
    stop_token_ids: Sequence[int] = (),
) -> None:
    """Copies `metadata_files`, adapts config.json to the weights, and lists the stop tokens.

    Args:
        source: the folder of the files.
        target: an existing folder.
        dtypes: those of the weights; config.json gets the dtype if there is a single one.
        is_critic: whether config.json gets a critic's class.
        stop_token_ids: tokens on which training has ended responses, so that other programs do the
            same; empty keeps generation_config.json.
    """
    for file in metadata_files(source):
        copy = target / file.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        if file.name != "config.json":
            shutil.copyfile(file, copy)
            sync_path(copy)

    config = load_config(source)
    if stop_token_ids:
        _list_stops(source, target, sorted(stop_token_ids), language_config(config))
    if is_critic:
        config |= {
            "architectures": [_class_prefix(str(config["model_type"])) + CRITIC_CLASS],
            "id2label": {"0": "value"},
            "label2id": {"value": 0},
        }
    if len(dtypes) == 1:
        _declare_dtype(config, str(next(iter(dtypes))).removeprefix("torch."))
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    write_atomically(target / "config.json", [text.encode()])


def _declare_dtype(config: dict[str, Any], name: str) -> None:
    """Replaces the dtype that the config declares; one with a vision tower may have it twice."""
    places = [config]
    if isinstance(config.get("text_config"), dict):
        places.append(config["text_config"])
    # transformers 4 reads only `torch_dtype`; 5 reads both and writes `dtype`.
    is_declared = False
    for place in places:
        for key in ("dtype", "torch_dtype"):
            if key in place:
                place[key] = name
                is_declared = True
    if not is_declared:
        config["torch_dtype"] = name


def _class_prefix(model_type: str) -> str:
    """The start of the names of transformers' classes: `Qwen3Moe`, `Qwen3_5` (of qwen3_5_text)."""
    prefix = ""
    for part in model_type.removesuffix("_text").split("_"):
        prefix += f"_{part}" if part.isdigit() else part.capitalize()
    return prefix


def _list_stops(source: Path, target: Path, stops: list[int], config: Mapping[str, Any]) -> None:
    """Writes the stop tokens to generation_config.json, unless it, or config.json without it, lists
    exactly these.
    """
    file = source / _GENERATION_CONFIG
    has_file = is_file(file, CheckpointError)
    generation = read_object(file, error=CheckpointError) if has_file else {}
    listed = (generation if has_file else config).get("eos_token_id")
    if set(stops) == set(listed if isinstance(listed, list) else [listed]):
        return

    # Without the file, `transformers` takes these values of config.json.
    others = {} if has_file else {key: config[key] for key in _TOKENS if key in config}
    changed = {**others, **generation, "eos_token_id": stops}
    text = json.dumps(changed, indent=2, ensure_ascii=False) + "\n"
    write_atomically(target / _GENERATION_CONFIG, [text.encode()])


def _split(tensors: list[TensorInfo], max_shard_bytes: int) -> list[list[TensorInfo]]:
    """Consecutive tensors by shard, each at most `max_shard_bytes` unless one tensor is larger."""
    if not tensors:
        raise CheckpointError("a checkpoint without tensors cannot be written")
    shards: list[list[TensorInfo]] = [[]]
    shard_bytes = 0
    for info in tensors:
        if shards[-1] and shard_bytes + info.nbytes > max_shard_bytes:
            shards.append([])
            shard_bytes = 0
        shards[-1].append(info)
        shard_bytes += info.nbytes
    return shards
