"""Tokenizers of Hugging Face checkpoints, and the tokens that end a response."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pacs_megatron.config.text import HUB_ID, local_path
from pacs_megatron.data.encode import control_tokens
from pacs_megatron.data.template import text_after_answer
from pacs_megatron.errors import DataError, shown
from pacs_megatron.runtime.files import is_file
from pacs_megatron.runtime.json_reader import check_content, read_object
from pacs_megatron.runtime.processes import run_limited
from pacs_megatron.runtime.waiting import hub_wait, report_wait

GENERATION_CONFIG = "generation_config.json"
MODEL_CONFIG = "config.json"
_STOPS_OF_SGLANG = ("<|eom_id|>", "<|content_model_end_sampling|>", "<|ifm|im_end|>")
"""Tokens on which SGLang 0.5.23 always stops (srt/utils/hf_transformers/common.py)"""
_FILES = ("*token*", "vocab*", "*.model", "*.bpe", "merges.txt")
"""Names of a tokenizer's files"""
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
    for pattern in ("[!.]*.j*", "[!.]*.model"):
        for file in folder.glob(pattern):
            is_file(file)  # raises: transformers would use defaults in place of a lost link
            check_content(file)

    if is_local and not _has_tokenizer(folder):
        models = [file.parent.name for file in sorted(folder.glob("*/config.json"))]
        hint = f", such as {path.rstrip('/')}/{models[0]}" if models else ""
        raise DataError(
            f"tokenizer {path}: the folder has no tokenizer.json; copy the files of the model's "
            f"tokenizer into it, or correct model.path{hint}"
        )
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


def check_same_vocabulary(key: str, other: Path, policy: Path, trust_remote_code: bool) -> None:
    """Checks that the model at `key` reads the policy's tokens as the same text.

    Args:
        key: configuration key of `other`, for the message.
        other: folder of the other model.
        policy: folder of the policy.
        trust_remote_code: `model.trust_remote_code`.

    Raises:
        DataError: a token has another number, or only one of the two has it.
    """
    ids = load_tokenizer(str(policy), trust_remote_code).get_vocab()
    other_ids = load_tokenizer(str(other), trust_remote_code).get_vocab()
    different = sorted(dict(ids.items() ^ other_ids.items()))
    if different:
        token = different[0]
        raise DataError(
            f"{key}={other} has another vocabulary than model.path: {len(different)} tokens "
            f"differ, such as {token!r}, which is {other_ids.get(token)} there and "
            f"{ids.get(token)} in the policy's; use a model with the policy's tokenizer"
        )


def _has_tokenizer(folder: Path) -> bool:
    """Whether any file of the folder may be a tokenizer's."""
    return any(any(folder.glob(name)) for name in _FILES)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class EndTokens:
    """The tokens that end a response."""

    listed: frozenset[int]
    """Of the tokenizer, config.json and generation_config.json, and those that SGLang adds."""
    template: int | None
    """The token that the chat template writes after an answer; None if it writes none."""
    eos: int | None
    """The tokenizer's end of sequence"""

    @property
    def stops(self) -> tuple[int, ...]:
        """Ids that end a sampled response, ascending."""
        template = () if self.template is None else (self.template,)
        return tuple(sorted({*self.listed, *template}))

    @property
    def end(self) -> int:
        """The token that ends a demonstration."""
        if self.template is not None:
            return self.template
        return self.stops[0] if self.eos is None else self.eos


def stop_token_ids(tokenizer: Any, path: str) -> tuple[int, ...]:
    """Ids that end a response, ascending: `EndTokens.stops`."""
    return end_tokens(tokenizer, path).stops


def end_tokens(tokenizer: Any, path: str) -> EndTokens:
    """The tokens that end a response: in every rollout engine, in demonstrations and in exports.

    They are those of the tokenizer, of config.json and of generation_config.json, as in SGLang and
    `transformers`, and the one that closes a turn of the chat template: a base model with the
    template of a chat model lists another token.

    Args:
        tokenizer: From `load_tokenizer`.
        path: Its folder or hub id.

    Raises:
        DataError: There is none, or a file is malformed.
    """
    eos = None if tokenizer.eos_token_id is None else int(tokenizer.eos_token_id)
    listed = set() if eos is None else {eos}
    for name in (MODEL_CONFIG, GENERATION_CONFIG):
        file = _find_file(path, name)
        if file is not None:
            listed |= read_eos_ids(file)
    added = tokenizer.get_added_vocab()
    listed |= {added[text] for text in _STOPS_OF_SGLANG if text in added}

    tokens = EndTokens(listed=frozenset(listed), template=_turn_end(tokenizer), eos=eos)
    if not tokens.stops:
        raise DataError(
            f"tokenizer {path}: has no end-of-sequence token; set eos_token in "
            f"tokenizer_config.json or eos_token_id in {GENERATION_CONFIG}"
        )
    return tokens


def _turn_end(tokenizer: Any) -> int | None:
    controls = control_tokens(tokenizer)
    match = controls and controls.match(text_after_answer(tokenizer).lstrip())
    return int(tokenizer.convert_tokens_to_ids(match[0])) if match else None


def _find_file(path: str, name: str) -> Path | None:
    """A file of a folder or of a hub id in the cache; None if there is none."""
    folder = local_path(path)
    if folder.is_dir():
        file = folder / name
        return file if is_file(file) else None

    from transformers.utils import cached_file

    cached = cached_file(
        path,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if cached is None else Path(cached)


def read_eos_ids(file: Path) -> set[int]:
    """The end tokens of config.json or generation_config.json.

    A config with a vision tower has those of the language model in `text_config`.

    Raises DataError.
    """
    config = read_object(file)
    found: set[int] = set()
    for part in (config, config.get("text_config")):
        value = part.get("eos_token_id") if isinstance(part, dict) else None
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(_is_token_id(number) for number in ids):
            raise DataError(
                f"{file}: eos_token_id is {shown(value)}, expected a token id or a list of them; "
                "correct it"
            )
        found.update(ids)
    return found


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31
