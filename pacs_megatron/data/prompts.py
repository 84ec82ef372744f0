"""Converts rows to prompts: chat template, tokens, length limit; and solutions to demonstrations.

A special token in the text of a problem (`<|im_end|>`) is encoded letter by letter, so that data
cannot close a turn. A solution has the tokens that the policy itself would sample.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pacs_megatron.config.schema import BenchmarkOptions, DataOptions, DatasetOptions
from pacs_megatron.contracts import Prompt
from pacs_megatron.data.encode import (
    BREAK,
    as_letters,
    as_plain_text,
    control_ids,
    control_tokens,
    encode_continued,
    tokenize,
)
from pacs_megatron.data.limits import run_in_child
from pacs_megatron.data.presets import Problem, columns_of, problem_of
from pacs_megatron.data.sources import read_rows
from pacs_megatron.data.template import render
from pacs_megatron.data.tokenizer import EndTokens
from pacs_megatron.errors import DataError, shown
from pacs_megatron.runtime.waiting import report_wait

_BATCH = 1024
_TOKENIZER_LIMIT_S = 120.0
"""CPU time for one batch of prompts, which usually takes 0.1 s"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseRules:
    """Turns the solutions of a data set into responses."""

    ends: EndTokens
    max_tokens: int
    """`rollout.max_response_tokens`; a longer demonstration is dropped"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstrations:
    """The solutions of a data set as responses."""

    token_ids: Mapping[str, np.ndarray]
    """Prompt id -> int32 [response], with the end token; those that are short enough"""
    lens: np.ndarray
    """int64 [prompts that are short enough], tokens of each response, dropped ones included"""
    max_tokens: int
    opened: str = ""
    """Control token with which the template starts the response (`<think>`); empty for none"""
    num_opened: int = 0
    """Demonstrations that started with `opened` and have it once, in the prompt"""
    num_unclosed: int = 0
    """Demonstrations without `</think>` though the template writes `<think>`"""

    @property
    def num_too_long(self) -> int:
        """Dropped: more than `max_tokens`"""
        return len(self.lens) - len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """The prompts of a data set, and what was dropped.

    num_rows == len(prompts) + num_dropped.
    """

    name: str
    prompts: tuple[Prompt, ...]
    num_rows: int
    num_too_long: int
    """Dropped: more tokens than the limit"""
    prompt_lens: np.ndarray
    """int64 [num_rows], tokens of each prompt, dropped ones included"""
    limit: str
    """The limit of the prompts' length, for messages"""
    num_filtered: int = 0
    """rows before these that do not match the data set's `where`; not in num_rows"""
    prints_time: bool = False
    """Whether the chat template prints the time"""
    demonstrations: Demonstrations | None = None

    @property
    def num_dropped(self) -> int:
        """Rows that are too long, as prompts or as demonstrations."""
        return self.num_rows - len(self.prompts)


def load_prompts(
    dataset: DatasetOptions,
    data: DataOptions,
    tokenizer: Any,
    *,
    now: datetime | None = None,
    max_tokens: int | None = None,
    responses: ResponseRules | None = None,
) -> PromptSet:
    """Reads, renders and tokenizes a data set.

    `data.max_prompt_tokens` is a limit of training: a benchmark has all its problems, except those
    above `max_tokens`.

    Args:
        dataset: The data set; a benchmark has the type BenchmarkOptions.
        data: Chat template, suffix and length limit.
        tokenizer: From `load_tokenizer`.
        now: Time that the chat template prints; None: the current one.
        max_tokens: Tokens of the longest prompt of a benchmark that the model's context allows;
            None: no limit.
        responses: Encodes the solutions too; None: they stay text.

    Raises:
        DataError: A row or the chat template is malformed, or no prompt is short enough.
    """
    _check_template(tokenizer)
    limit, limit_text = _limit_of(dataset, data, max_tokens)
    loading = _Loading(
        name=dataset_name(dataset),
        path=dataset.path,
        data=data,
        tokenizer=tokenizer,
        now=datetime.now() if now is None else now,
        limit=limit,
        responses=responses,
        controls=control_tokens(tokenizer),
    )
    with report_wait(lambda: f"for the prompts of {dataset.path} ({len(loading.prompts)})"):
        rows, num_filtered = _read_problems(dataset, loading.name)
        for start in range(0, len(rows), _BATCH):
            loading.add(rows[start : start + _BATCH])

    num_long = sum(length > limit for length in loading.prompt_lens)
    if num_long == len(rows):
        raise DataError(
            f"{dataset.path}: all {len(rows)} prompts have more than {limit_text}; raise the limit"
        )
    demonstrations = loading.demonstrations()
    prompts = loading.prompts
    if demonstrations is not None:
        prompts = [prompt for prompt in prompts if prompt.id in demonstrations.token_ids]
    _check_problems_appear(prompts, tokenizer)
    return PromptSet(
        name=loading.name,
        prompts=tuple(prompts),
        num_rows=len(rows),
        num_too_long=num_long,
        num_filtered=num_filtered,
        prompt_lens=np.array(loading.prompt_lens, dtype=np.int64),
        limit=limit_text,
        prints_time=loading.prints_time,
        demonstrations=demonstrations,
    )


def _check_template(tokenizer: Any) -> None:
    """Raises DataError without a chat template."""
    if tokenizer.chat_template is None:
        raise DataError(
            f"tokenizer {tokenizer.name_or_path}: has no chat template; add chat_template.jinja to "
            "the model folder (an instruction-tuned model of the family has one) or use such a "
            "model"
        )


def _limit_of(
    dataset: DatasetOptions, data: DataOptions, max_tokens: int | None
) -> tuple[int, str]:
    """The limit of the prompts' length, tokens, and its text for messages; `load_prompts` has the
    arguments.
    """
    if not isinstance(dataset, BenchmarkOptions):
        return (
            data.max_prompt_tokens,
            f"data.max_prompt_tokens={data.max_prompt_tokens} tokens",
        )
    limit = np.iinfo(np.int32).max if max_tokens is None else max_tokens
    text = f"{limit} tokens, the model's context less evaluation.sampling.max_response_tokens"
    return limit, text


def _read_problems(dataset: DatasetOptions, name: str) -> tuple[list[tuple[str, Problem]], int]:
    """The problems of a data set with their prompt ids, and the number of rows before them that its
    `where` leaves out. Raises DataError.
    """
    num_orders = dataset.choice_orders if isinstance(dataset, BenchmarkOptions) else 1
    columns = columns_of(dataset)
    found = read_rows(dataset)
    problems = []
    for row in found.used:
        for order in range(num_orders):
            problem = problem_of(replace(row, choice_order=order), columns)
            problems.append((_prompt_id(name, row.index, order), problem))
    return problems, found.num_filtered


@dataclass(slots=True, kw_only=True)
class _Loading:
    """The prompts and demonstrations of the rows so far."""

    name: str
    path: str
    data: DataOptions
    tokenizer: Any
    now: datetime
    limit: int
    """tokens of a prompt"""
    responses: ResponseRules | None
    controls: re.Pattern[str] | None

    prompts: list[Prompt] = field(default_factory=list)
    """those that are short enough"""
    prompt_lens: list[int] = field(default_factory=list)
    prints_time: bool = False
    opened: str = ""
    num_opened: int = 0
    num_unclosed: int = 0
    responses_of: dict[str, np.ndarray] = field(default_factory=dict)
    """prompt id -> int32 [response]"""

    def add(self, rows: Sequence[tuple[str, Problem]]) -> None:
        """Renders and encodes rows."""
        suffix = f" {self.data.prompt_suffix}" if self.data.prompt_suffix else ""
        contents = [as_plain_text(row.problem, self.controls) + suffix for _, row in rows]
        systems = [self._system(prompt_id, row.system) for prompt_id, row in rows]
        texts = self._render(contents, systems)
        encoded = self._encode(texts)
        self._cut_created_tokens(rows, texts, encoded)

        kept = []
        for (prompt_id, problem), text, ids in zip(rows, texts, encoded, strict=True):
            self.prompt_lens.append(len(ids))
            if len(ids) > self.limit:
                continue
            prompt = Prompt(
                id=prompt_id,
                source=self.name,
                text=text.replace(BREAK, ""),
                token_ids=ids,
                problem=problem.problem,
                answer=problem.answer,
                solution=problem.solution,
                extra=problem.extra,
            )
            kept.append((prompt, text))
        self.prompts += [prompt for prompt, _ in kept]
        if self.responses is not None and kept:
            self._add_responses(kept, self.responses)

    def demonstrations(self) -> Demonstrations | None:
        """The demonstrations of all rows. Raises DataError if all are too long."""
        if self.responses is None:
            return None
        limit = self.responses.max_tokens
        short = {key: ids for key, ids in self.responses_of.items() if len(ids) <= limit}
        if not short:
            raise DataError(
                f"{self.path}: no demonstration fits rollout.max_response_tokens={limit}; raise it"
            )
        return Demonstrations(
            token_ids=short,
            lens=np.array([len(ids) for ids in self.responses_of.values()], dtype=np.int64),
            max_tokens=limit,
            opened=self.opened,
            num_opened=self.num_opened,
            num_unclosed=self.num_unclosed,
        )

    def _system(self, prompt_id: str, text: str | None) -> str | None:
        """The marked text of a row's own system message. Raises DataError for a second one."""
        if text is None:
            return None
        if self.data.system_prompt is not None:
            raise DataError(
                f"{self.path}: prompt {prompt_id} has a system message, and data.system_prompt is "
                "set too; remove data.system_prompt"
            )
        return as_plain_text(text, self.controls)

    def _render(self, contents: Sequence[str], systems: Sequence[str | None]) -> list[str]:
        rendered = render(contents, self.data, self.tokenizer, self.now, systems)
        self.prints_time = self.prints_time or rendered.prints_time
        return rendered.texts

    def _encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        encoded = self._in_child(partial(_token_lists, texts, self.tokenizer))
        return [np.array(ids, dtype=np.int32) for ids in encoded]

    def _in_child(self, work: Callable[[], list[list[int]]]) -> list[list[int]]:
        """Encodes in a child: tokenizer.json may have a pattern that never ends on some text."""
        where = f"tokenizer {self.tokenizer.name_or_path}"
        fix = "correct tokenizer.json, or the data"
        encoded: list[list[int]] = run_in_child(work, _TOKENIZER_LIMIT_S, where, fix)
        return encoded

    def _cut_created_tokens(
        self, rows: Sequence[tuple[str, Problem]], texts: list[str], encoded: list[np.ndarray]
    ) -> None:
        """Cuts problems between all letters if the tokenizer creates control tokens of them.

        A normalizer turns letters into others (case, width), so that a token appears that the text
        does not spell.

        Args:
            rows: Id and problem of each prompt.
            texts: Their rendered texts; those of such problems are replaced.
            encoded: Their tokens; those of such problems are replaced.
        """
        controls = sorted(control_ids(self.tokenizer))
        numbers = []
        for number, (text, ids) in enumerate(zip(texts, encoded, strict=True)):
            spelled = 0 if self.controls is None else len(self.controls.findall(text))
            if np.isin(ids, controls).sum() > spelled:
                numbers.append(number)
        if not numbers:
            return

        suffix = f" {self.data.prompt_suffix}" if self.data.prompt_suffix else ""
        contents = []
        systems = []
        for number in numbers:
            problem = rows[number][1]
            contents.append(as_letters(problem.problem) + suffix)
            systems.append(None if problem.system is None else as_letters(problem.system))
        cut_texts = self._render(contents, systems)
        for number, text, ids in zip(numbers, cut_texts, self._encode(cut_texts), strict=True):
            # Otherwise the template's own text creates them.
            if np.isin(ids, controls).sum() < np.isin(encoded[number], controls).sum():
                texts[number] = text
                encoded[number] = ids

    def _add_responses(self, kept: Sequence[tuple[Prompt, str]], responses: ResponseRules) -> None:
        """Encodes the solutions of prompts with their marked texts. Raises DataError."""
        solutions = []
        for prompt, text in kept:
            if not prompt.solution:
                raise DataError(
                    f"{self.path}: prompt {prompt.id} has no solution to train on; name the column "
                    "with data.train.columns.solution"
                )
            solution = self._without_opened(text, prompt.solution)
            solutions.append(self._without_space_after_end(solution, responses.ends))

        encoded = self._in_child(partial(encode_continued, solutions, self.tokenizer))
        for (prompt, _), ids in zip(kept, encoded, strict=True):
            self.responses_of[prompt.id] = self._ended(prompt.id, ids, responses.ends)

    def _without_opened(self, text: str, solution: str) -> str:
        """The solution without the control token that the template has written before it.

        Templates of reasoning models end a prompt with `<think>`; the policy continues after it.
        """
        matches = [] if self.controls is None else list(self.controls.finditer(text))
        if not matches or text[matches[-1].end() :].strip():
            return solution

        token = matches[-1][0]
        space = text[matches[-1].end() :]
        closing = f"</{token[1:]}"
        if self.controls is not None and self.controls.fullmatch(closing):
            self.opened = token
            self.num_unclosed += closing not in solution

        stripped = solution.lstrip()
        if not stripped.startswith(token):
            return solution
        self.opened = token
        self.num_opened += 1
        rest = stripped[len(token) :]
        return rest.removeprefix(space) if rest.startswith(space) else rest.lstrip()

    def _without_space_after_end(self, solution: str, ends: EndTokens) -> str:
        """The solution without the white space that a template writes after an end token."""
        stops = self.tokenizer.convert_ids_to_tokens(list(ends.stops))
        stripped = solution.rstrip()
        is_ended = stripped.endswith(tuple(text for text in stops if text))
        return stripped if is_ended else solution

    def _ended(self, prompt_id: str, ids: list[int], ends: EndTokens) -> np.ndarray:
        """int32 [response], the solution with one end token, its last.

        Raises DataError for an end token before the end: the policy would not sample what follows.
        """
        stops = set(ends.stops)
        if not ids or ids[-1] not in stops:
            ids = [*ids, ends.end]
        early = [token_id for token_id in ids[:-1] if token_id in stops]
        if early:
            token = self.tokenizer.convert_ids_to_tokens(early[0])
            raise DataError(
                f"{self.path}: the solution of {prompt_id} has the stop token {shown(token)} (id "
                f"{early[0]}) before its end, where a response of the model ends; cut the solution "
                "there, or remove the token"
            )
        return np.array(ids, dtype=np.int32)


def _token_lists(texts: Sequence[str], tokenizer: Any) -> list[list[int]]:
    return [ids.tolist() for ids in tokenize(texts, tokenizer)]


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
    """Digest of the fields that training uses of each prompt: id, tokens, answer, demonstration,
    further columns.
    """
    state = hashlib.blake2b(digest_size=16)

    def add(content: bytes) -> None:
        # The length first, so that no two sequences of fields have the same bytes.
        state.update(len(content).to_bytes(8, "little"))
        state.update(content)

    for prompt in prompts:
        for text in (prompt.id, prompt.answer, prompt.solution or ""):
            add(text.encode("utf-8", "surrogatepass"))
        add(prompt.token_ids.tobytes())
        # An id starts with no brace, so this is not the next prompt's id.
        if prompt.extra:
            add(json.dumps(prompt.extra, sort_keys=True).encode())
    return state.hexdigest()


def dataset_name(dataset: DatasetOptions) -> str:
    """The configured name; by default the preset's name, or the file's."""
    return dataset.name or dataset.preset or Path(dataset.path).stem
