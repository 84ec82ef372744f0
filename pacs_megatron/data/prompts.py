"""Converts rows to prompts: chat template, tokens, length limit.

A special token in the text of a problem (`<|im_end|>`) is encoded letter by letter, so that data
cannot close a turn.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pacs_megatron.config.schema import BenchmarkOptions, DataOptions, DatasetOptions
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
    num_filtered: int = 0
    """rows before these that do not match the data set's `where`; not in num_rows"""


def load_prompts(dataset: DatasetOptions, data: DataOptions, tokenizer: Any) -> PromptSet:
    """Reads, renders and tokenizes a data set.

    Args:
        dataset: The data set.
        data: Chat template, suffix and length limit.
        tokenizer: From `load_tokenizer`.

    Raises:
        DataError: A row or the chat template is malformed, or no prompt is short enough.
    """
    if tokenizer.chat_template is None:
        raise DataError(
            f"tokenizer {tokenizer.name_or_path}: has no chat template; add chat_template.jinja to "
            "the model folder (an instruction-tuned model of the family has one) or use such a "
            "model"
        )

    columns = columns_of(dataset)
    name = dataset_name(dataset)
    num_orders = 1
    if isinstance(dataset, BenchmarkOptions):
        num_orders = dataset.choice_orders
    prompts: list[Prompt] = []
    with report_wait(lambda: f"for the prompts of {dataset.path} ({len(prompts)})"):
        found = read_rows(dataset)
        rows = []
        for row in found.used:
            for order in range(num_orders):
                problem = problem_of(replace(row, choice_order=order), columns)
                rows.append((_prompt_id(name, row.index, order), problem))
        for start in range(0, len(rows), _BATCH):
            prompts += _prompts_of(rows[start : start + _BATCH], name, data, tokenizer)

    if not prompts:
        limit = f"data.max_prompt_tokens={data.max_prompt_tokens}"
        raise DataError(
            f"{dataset.path}: all {len(rows)} prompts have more than {limit} tokens; raise the "
            "limit"
        )
    _check_problems_appear(prompts, tokenizer)
    return PromptSet(
        name=name,
        prompts=tuple(prompts),
        num_rows=len(rows),
        num_too_long=len(rows) - len(prompts),
        num_filtered=found.num_filtered,
    )


def _prompts_of(
    rows: Sequence[tuple[str, Problem]], name: str, data: DataOptions, tokenizer: Any
) -> list[Prompt]:
    """The prompts of some rows that are short enough."""
    texts = render([problem for _, problem in rows], data, tokenizer)
    # In a child process: tokenizer.json may have a pattern that never ends on some text.
    encoded = _run_in_child(
        partial(_encode, texts, tokenizer),
        _TOKENIZER_LIMIT_S,
        f"tokenizer {tokenizer.name_or_path}",
        "correct tokenizer.json, or the data",
    )

    prompts = []
    for (prompt_id, problem), text, ids in zip(rows, texts, encoded, strict=True):
        if len(ids) <= data.max_prompt_tokens:
            prompt = Prompt(
                id=prompt_id,
                source=name,
                text=text.replace(_BREAK, ""),
                token_ids=np.array(ids, dtype=np.int32),
                problem=problem.problem,
                answer=problem.answer,
                solution=problem.solution,
            )
            prompts.append(prompt)
    return prompts


def _prompt_id(name: str, index: int, order: int) -> str:
    """`<data set>/<row>`, and `~<order>` for a further order of the choices."""
    return f"{name}/{index}~{order}" if order else f"{name}/{index}"


def problem_id_of(prompt_id: str) -> str:
    """The id of a prompt without the order of its choices. A name of a data set has no `~`."""
    return prompt_id.partition("~")[0]


def _check_problems_appear(prompts: Sequence[Prompt], tokenizer: Any) -> None:
    """Raises DataError if the prompts of different problems are equal, or one is empty."""
    token_ids = {prompt.token_ids.tobytes() for prompt in prompts}
    problems = {prompt.problem for prompt in prompts}
    are_equal = len(token_ids) == 1 and len(problems) > 1
    if are_equal or b"" in token_ids:
        raise DataError(
            f"{tokenizer.name_or_path}: creates prompts without the problem, such as "
            f"{shown(prompts[0].text)}; correct chat_template.jinja, or the tokenizer"
        )


def digest_of(prompts: Iterable[Prompt]) -> str:
    """Digest of the fields that training uses of each prompt: id, tokens, answer, demonstration."""
    state = hashlib.blake2b(digest_size=16)

    def add(content: bytes) -> None:
        # The length first, so that no two sequences of fields have the same bytes.
        state.update(len(content).to_bytes(8, "little"))
        state.update(content)

    for prompt in prompts:
        for text in (prompt.id, prompt.answer, prompt.solution or ""):
            add(text.encode("utf-8", "surrogatepass"))
        add(prompt.token_ids.tobytes())
    return state.hexdigest()


def dataset_name(dataset: DatasetOptions) -> str:
    """The configured name; by default the preset's name, or the file's."""
    return dataset.name or dataset.preset or Path(dataset.path).stem


def render(problems: list[Problem], data: DataOptions, tokenizer: Any) -> list[str]:
    """The text of each prompt, up to the start of the response, for `tokenize`.

    Raises DataError if the template fails.
    """
    system = []
    if data.system_prompt is not None:
        system = [{"role": "system", "content": data.system_prompt}]
    suffix = f" {data.prompt_suffix}" if data.prompt_suffix else ""
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

    texts: list[str] = _run_in_child(
        lambda: [apply(content) for content in contents],
        _TEMPLATE_LIMIT_S,
        f"chat template of {tokenizer.name_or_path}",
        "check data.system_prompt and data.chat_template_args, or correct the template",
    )
    return texts


def control_tokens(tokenizer: Any) -> re.Pattern[str] | None:
    """Matches every token that the vocabulary adds to plain text, such as `<|im_end|>` and
    `<think>`.
    """
    added = {token.content for token in tokenizer.added_tokens_decoder.values()}
    controls = [text for text in added if len(text) > 1 and not text.isspace()]
    if not controls:
        return None
    # An expression takes its first alternative that matches, so the longest token comes first.
    controls.sort(key=len, reverse=True)
    return re.compile("|".join(map(re.escape, controls)))


def as_plain_text(text: str, controls: re.Pattern[str] | None) -> str:
    """`text` with a mark inside every control token that it spells out; `tokenize` cuts there."""
    text = text.replace(_BREAK, "")
    if controls is None:
        return text
    return controls.sub(lambda match: match[0][0] + _BREAK + match[0][1:], text)


def tokenize(texts: Sequence[str], tokenizer: Any) -> list[np.ndarray]:
    """Token ids of each text, cut at its marks.

    Adds no special tokens: the template has written them already.

    Args:
        texts: Rendered prompts.
        tokenizer: From `load_tokenizer`.

    Returns:
        [t] of each text, int32.
    """
    # Encodes texts without cuts as a whole, because separate pieces would be tokenized differently
    # at their borders.
    pieces_of_texts = [text.split(_BREAK) for text in texts]
    all_pieces: list[str] = []
    for pieces in pieces_of_texts:
        all_pieces += pieces
    encoded = tokenizer(
        all_pieces, add_special_tokens=False, return_attention_mask=False, verbose=False
    )

    ids_of_pieces = iter(encoded["input_ids"])
    token_ids = []
    for pieces in pieces_of_texts:
        ids: list[int] = []
        for _ in pieces:
            ids += next(ids_of_pieces)
        token_ids.append(np.array(ids, dtype=np.int32))
    return token_ids


def _encode(texts: Sequence[str], tokenizer: Any) -> list[list[int]]:
    return [ids.tolist() for ids in tokenize(texts, tokenizer)]


def _run_in_child(work: Callable[[], Any], seconds: float, where: str, fix: str) -> Any:
    """The result of `work()`, computed in a process that may crash or be ended.

    Args:
        work: Runs code or patterns of the model folder.
        seconds: CPU time of the process.
        where: Source of what runs, for messages.
        fix: Advice of the message.

    Raises:
        DataError: `work` fails, or exceeds the limits of time and memory.
    """
    try:
        with report_wait(f"for the {where}"):
            return run_limited(work, seconds=seconds, memory_bytes=_MEMORY_BYTES)
    except (TimeoutError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        if not reason:
            reason = f"not finished after {seconds:g} s of CPU time"
        raise DataError(f"{where}: {reason}; {fix}") from error
