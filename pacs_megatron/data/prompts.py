"""Converts rows to prompts: chat template, tokens, length limit.

A special token in the text of a problem (`<|im_end|>`) is encoded letter by letter, so that data
cannot close a turn.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pacs_megatron.config.schema import DataOptions, DatasetOptions
from pacs_megatron.contracts import Prompt
from pacs_megatron.data.presets import Problem, columns_of, problem_of
from pacs_megatron.data.sources import read_rows
from pacs_megatron.errors import DataError, shown
from pacs_megatron.runtime.processes import run_limited
from pacs_megatron.runtime.waiting import report_wait

_BATCH = 1024
_BREAK = "\ue000"
"""Private-use character that marks where the text of a problem is cut before it is encoded."""
_TEMPLATE_LIMIT_S = 5.0
_TOKENIZER_LIMIT_S = 120.0
"""CPU time for one batch of prompts, which usually takes 0.02 s and 0.1 s."""
_MEMORY_BYTES = 2 * 2**30
"""Memory limit for the texts of one batch"""
_MAX_TEMPLATE_CHARS = 1_000_000
"""Characters that the template may add to one problem."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """The prompts of a data set and the number of dropped rows. num_rows == len(prompts) +
    num_too_long.
    """

    name: str
    prompts: tuple[Prompt, ...]
    num_rows: int
    num_too_long: int
    """dropped: more than data.max_prompt_tokens"""


def load_prompts(dataset: DatasetOptions, data: DataOptions, tokenizer: Any) -> PromptSet:
    """Reads, renders and tokenizes a data set.

    Raises DataError for bad rows or templates, and if no prompt is short enough.
    """
    if tokenizer.chat_template is None:
        raise DataError(
            f"tokenizer {tokenizer.name_or_path}: has no chat template; add chat_template.jinja to "
            "the model folder (an instruction-tuned model of the family has one) or use such a "
            "model"
        )
    columns = columns_of(dataset)
    name = dataset_name(dataset)
    prompts: list[Prompt] = []
    with report_wait(lambda: f"for the prompts of {dataset.path} ({len(prompts)})"):
        rows = [(row.index, problem_of(row, columns)) for row in read_rows(dataset)]
        for start in range(0, len(rows), _BATCH):
            batch = rows[start : start + _BATCH]
            texts = render([problem for _, problem in batch], data, tokenizer)
            # tokenizer.json may have a pattern that never ends on some text.
            work = partial(_encode, texts, tokenizer)
            where = f"tokenizer {tokenizer.name_or_path}"
            encoded = _apart(work, _TOKENIZER_LIMIT_S, where, "correct tokenizer.json, or the data")
            for (index, problem), text, found in zip(batch, texts, encoded, strict=True):
                if len(found) <= data.max_prompt_tokens:
                    texts_of = {"text": text.replace(_BREAK, ""), "source": name, **asdict(problem)}
                    ids = np.array(found, dtype=np.int32)
                    prompts.append(Prompt(id=f"{name}/{index}", token_ids=ids, **texts_of))
    if not prompts:
        limit = f"data.max_prompt_tokens={data.max_prompt_tokens}"
        raise DataError(
            f"{dataset.path}: all {len(rows)} prompts have more than {limit} tokens; raise the "
            "limit"
        )
    distinct = {prompt.token_ids.tobytes() for prompt in prompts}
    if b"" in distinct or len(distinct) == 1 < len({prompt.problem for prompt in prompts}):
        raise DataError(
            f"{tokenizer.name_or_path}: creates prompts without the problem, such as "
            f"{shown(prompts[0].text)}; correct chat_template.jinja, or the tokenizer"
        )
    return PromptSet(
        name=name,
        prompts=tuple(prompts),
        num_rows=len(rows),
        num_too_long=len(rows) - len(prompts),
    )


def digest_of(prompts: Iterable[Prompt]) -> str:
    """Digest of the fields that training uses of each prompt: id, tokens, answer, demonstration."""
    state = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        texts = (prompt.id, prompt.answer, prompt.solution or "")
        for data in (
            *(text.encode("utf-8", "surrogatepass") for text in texts),
            prompt.token_ids.tobytes(),
        ):
            state.update(len(data).to_bytes(8, "little"))
            state.update(data)
    return state.hexdigest()


def dataset_name(dataset: DatasetOptions) -> str:
    """The configured name; by default the preset's name, or the file's."""
    return dataset.name or dataset.preset or Path(dataset.path).stem


def render(problems: list[Problem], data: DataOptions, tokenizer: Any) -> list[str]:
    """The text of each prompt, up to the start of the response, for `tokenize`.

    Raises DataError if the template fails.
    """
    system = (
        [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
    )
    suffix = f" {data.prompt_suffix}" if data.prompt_suffix else ""
    where = f"chat template of {tokenizer.name_or_path}"
    controls = control_tokens(tokenizer)
    contents = [as_plain_text(problem.problem, controls) + suffix for problem in problems]

    def apply(content: str) -> str:
        messages = [*system, {"role": "user", "content": content}]
        options = {"tokenize": False, "add_generation_prompt": True, **data.chat_template_args}
        text: str = tokenizer.apply_chat_template(messages, **options)
        text.encode()  # raises for a lone surrogate
        if len(text) > len(content) + _MAX_TEMPLATE_CHARS:
            raise ValueError(f"{len(text)} characters for a problem of {len(content)}")
        return text

    fix = "check data.system_prompt and data.chat_template_args, or correct the template"
    texts: list[str] = _apart(
        lambda: [apply(content) for content in contents], _TEMPLATE_LIMIT_S, where, fix
    )
    return texts


def control_tokens(tokenizer: Any) -> re.Pattern[str] | None:
    """Matches every token that the vocabulary adds to plain text, such as `<|im_end|>` and
    `<think>`.
    """
    added = {token.content for token in tokenizer.added_tokens_decoder.values()}
    found = sorted(
        (text for text in added if len(text) > 1 and not text.isspace()), key=len, reverse=True
    )
    return re.compile("|".join(map(re.escape, found))) if found else None


def as_plain_text(text: str, controls: re.Pattern[str] | None) -> str:
    """`text` with a mark inside every control token that it spells out; `tokenize` cuts there."""
    text = text.replace(_BREAK, "")
    return (
        text
        if controls is None
        else controls.sub(lambda match: match[0][0] + _BREAK + match[0][1:], text)
    )


def tokenize(texts: Sequence[str], tokenizer: Any) -> list[np.ndarray]:
    """int32 ids of each text. Adds no special tokens: the template has written them already."""
    # Encodes texts without cuts as a whole, because separate pieces would be tokenized differently
    # at their borders.
    pieces = [text.split(_BREAK) for text in texts]
    flat = [piece for parts in pieces for piece in parts]
    encoded = tokenizer(flat, add_special_tokens=False, return_attention_mask=False, verbose=False)[
        "input_ids"
    ]
    ids = iter(encoded)
    return [
        np.array([token for _ in parts for token in next(ids)], dtype=np.int32) for parts in pieces
    ]


def _encode(texts: Sequence[str], tokenizer: Any) -> list[list[int]]:
    return [ids.tolist() for ids in tokenize(texts, tokenizer)]


def _apart(work: Callable[[], Any], seconds: float, where: str, fix: str) -> Any:
    """The result of `work()`, computed in a process that may crash or be ended.

    Raises DataError with `fix`.
    """
    try:
        with report_wait(f"for the {where}"):
            return run_limited(work, seconds=seconds, memory_bytes=_MEMORY_BYTES)
    except (TimeoutError, RuntimeError) as error:
        reason = (
            " ".join(str(error).split())[:300] or f"not finished after {seconds:g} s of CPU time"
        )
        raise DataError(f"{where}: {reason}; {fix}") from error
