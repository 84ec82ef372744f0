"""Tokenizers of Hugging Face checkpoints, and the tokens that end a response."""

from functools import partial
from pathlib import Path
from typing import Any

from pacs_megatron.config.text import HUB_ID, local_path
from pacs_megatron.errors import DataError, shown
from pacs_megatron.runtime.files import is_file
from pacs_megatron.runtime.json_reader import read_object
from pacs_megatron.runtime.processes import run_limited
from pacs_megatron.runtime.waiting import hub_wait, report_wait

GENERATION_CONFIG = "generation_config.json"
_LOAD_LIMIT_S = 120.0
_LOAD_MEMORY_BYTES = 4 * 2**30


def load_tokenizer(path: str, trust_remote_code: bool = False) -> Any:
    """The fast tokenizer of a local folder (without network access) or of a hub id.

    Raises DataError.
    """
    folder = local_path(path)
    is_local = folder.is_dir()
    if not is_local and (folder.exists() or not HUB_ID.fullmatch(path)):
        raise DataError(f"tokenizer {path}: no such folder, and not a hub id; correct model.path")
    for file in folder.glob("*.j*"):
        is_file(file)  # raises: transformers would use defaults in place of a pipe or a lost link

    wait = report_wait(f"for the tokenizer of {path}") if is_local else hub_wait(path)
    try:
        with wait:
            from transformers import AutoTokenizer

            load = partial(
                AutoTokenizer.from_pretrained,
                str(folder) if is_local else path,
                trust_remote_code=trust_remote_code,
                local_files_only=is_local,
            )
            if is_local:  # first in a process that may crash
                run_limited(
                    lambda: load() is None, seconds=_LOAD_LIMIT_S, memory_bytes=_LOAD_MEMORY_BYTES
                )
            return load()
    except Exception as error:  # the library raises bare Exception for a malformed tokenizer.json
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        fix = _fix_of(error, is_local=is_local)
        raise DataError(
            f"tokenizer {path}: transformers could not load it: {reason}; {fix}"
        ) from error


def _fix_of(error: Exception, *, is_local: bool) -> str:
    if "trust_remote_code" in str(error):
        return (
            "it contains Python code: set model.trust_remote_code=true only if you trust its author"
        )
    if is_local:
        return (
            "the folder needs tokenizer.json and tokenizer_config.json as save_pretrained writes "
            "them"
        )
    return "run `pacs-megatron fetch` where the hub can be reached, or give the path of a folder"


def stop_token_ids(tokenizer: Any, path: str) -> tuple[int, ...]:
    """Ids that end a response, ascending.

    They are the tokenizer's end of sequence and the tokens of generation_config.json, since chat
    models end a turn with another token than their base model.

    Args:
        tokenizer: From `load_tokenizer`.
        path: Its folder or hub id.

    Raises:
        DataError: There is none.
    """
    ids = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    file = _generation_config(path)
    if file is not None:
        ids |= read_eos_ids(file)
    if not ids:
        raise DataError(
            f"tokenizer {path}: has no end-of-sequence token; set eos_token in "
            f"tokenizer_config.json or eos_token_id in {GENERATION_CONFIG}"
        )
    return tuple(sorted(ids))


def _generation_config(path: str) -> Path | None:
    folder = local_path(path)
    if folder.is_dir():
        file = folder / GENERATION_CONFIG
        return file if is_file(file) else None

    from transformers.utils import cached_file

    cached = cached_file(
        path,
        GENERATION_CONFIG,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if cached is None else Path(cached)


def read_eos_ids(file: Path) -> set[int]:
    """The ids of generation_config.json. Raises DataError."""
    value = read_object(file).get("eos_token_id")
    if value is None:
        return set()
    ids = value if isinstance(value, list) else [value]
    if not all(_is_token_id(number) for number in ids):
        raise DataError(
            f"{file}: eos_token_id is {shown(value)}, expected a token id or a list of them; "
            "correct it"
        )
    return set(ids)


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31
