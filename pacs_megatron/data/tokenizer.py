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
    if not folder.is_dir() and (folder.exists() or not HUB_ID.fullmatch(path)):
        raise DataError(f"tokenizer {path}: no such folder, and not a hub id; correct model.path")
    is_local = folder.is_dir()
    for file in folder.glob(
        "*.j*"
    ):  # transformers would use defaults in place of a pipe or a lost link
        is_file(file)
    try:
        with report_wait(f"for the tokenizer of {path}") if is_local else hub_wait(path):
            from transformers import AutoTokenizer

            options = {"trust_remote_code": trust_remote_code, "local_files_only": is_local}
            load = partial(
                AutoTokenizer.from_pretrained, str(folder) if is_local else path, **options
            )
            if is_local:  # first in a process that may crash
                run_limited(
                    lambda: load() is None, seconds=_LOAD_LIMIT_S, memory_bytes=_LOAD_MEMORY_BYTES
                )
            tokenizer = load()
    except Exception as error:  # the library raises bare Exception for a malformed tokenizer.json
        fix = "run `pacs-megatron fetch` where the hub can be reached, or give the path of a folder"
        if is_local:
            fix = "the folder needs tokenizer.json and tokenizer_config.json as save_pretrained writes them"
        if "trust_remote_code" in str(error):
            fix = "it contains Python code: set model.trust_remote_code=true only if you trust its author"
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise DataError(
            f"tokenizer {path}: transformers could not load it: {reason}; {fix}"
        ) from error
    return tokenizer


def stop_token_ids(tokenizer: Any, path: str) -> tuple[int, ...]:
    """Ids that end a response, ascending: the tokenizer's end of sequence and those of
    generation_config.json, since chat models end a turn with another token than their base model.
    Raises DataError if there is none.
    """
    found = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    file = _generation_config(path)
    if file is not None:
        found |= read_eos_ids(file)
    if not found:
        raise DataError(
            f"tokenizer {path}: has no end-of-sequence token; set eos_token in "
            "tokenizer_config.json or eos_token_id in "
            f"{GENERATION_CONFIG}"
        )
    return tuple(sorted(found))


def _generation_config(path: str) -> Path | None:
    folder = local_path(path)
    if folder.is_dir():
        file = folder / GENERATION_CONFIG
        return file if is_file(file) else None
    from transformers.utils import cached_file

    never_raise = (
        "_raise_exceptions_for_missing_entries",
        "_raise_exceptions_for_connection_errors",
    )
    cached = cached_file(path, GENERATION_CONFIG, **dict.fromkeys(never_raise, False))
    return None if cached is None else Path(cached)


def read_eos_ids(file: Path) -> set[int]:
    """The ids of generation_config.json. Raises DataError."""
    value = read_object(file).get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(
        isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 2**31
        for number in ids
    ):
        raise DataError(
            f"{file}: eos_token_id is {shown(value)}, expected a token id or a list of them; "
            "correct it"
        )
    return set(ids)
