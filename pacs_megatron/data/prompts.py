"""From rows to prompts: chat template, tokens, length limit."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pacs_megatron.config.schema import DataOptions, DatasetOptions
from pacs_megatron.contracts import Prompt
from pacs_megatron.data.presets import Problem, columns_of, problem_of
from pacs_megatron.data.sources import read_rows
from pacs_megatron.errors import ConfigError, DataError

_RESERVED = frozenset({"conversation", "tokenize", "add_generation_prompt", "chat_template", "return_tensors"})
_BATCH = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """The prompts that are kept, and what became of the other rows. num_rows == len(prompts) + num_too_long."""

    name: str
    prompts: tuple[Prompt, ...]
    num_rows: int
    num_too_long: int
    """dropped: more than data.max_prompt_tokens"""
    num_duplicates: int
    """rows whose problem text an earlier row has already; kept"""


def load_prompts(dataset: DatasetOptions, data: DataOptions, tokenizer: Any) -> PromptSet:
    """Reads, renders and tokenizes a data set; a prompt's id is `<name>/<row>`, so it survives other length limits.

    Raises DataError for bad rows, a tokenizer without chat template, and when no prompt is short enough.
    """
    _check_template(data, tokenizer)
    columns = columns_of(dataset)
    name = dataset_name(dataset)
    rows = [(row.index, problem_of(row, columns)) for row in read_rows(dataset)]
    prompts: list[Prompt] = []
    for start in range(0, len(rows), _BATCH):
        batch = rows[start : start + _BATCH]
        texts = render([problem for _, problem in batch], data, tokenizer)
        for (index, problem), text, ids in zip(batch, texts, tokenize(texts, tokenizer), strict=True):
            if len(ids) <= data.max_prompt_tokens:
                prompts.append(_prompt(f"{name}/{index}", name, problem, text, ids))
    if not prompts:
        raise DataError(
            f"{dataset.path}: all {len(rows)} prompts have more than data.max_prompt_tokens={data.max_prompt_tokens} "
            "tokens; raise the limit"
        )
    return PromptSet(
        name=name,
        prompts=tuple(prompts),
        num_rows=len(rows),
        num_too_long=len(rows) - len(prompts),
        num_duplicates=len(rows) - len({problem.problem.strip() for _, problem in rows}),
    )


def dataset_name(dataset: DatasetOptions) -> str:
    """The given name, else the preset's, else the file's."""
    return dataset.name or dataset.preset or Path(dataset.path).stem


def render(problems: list[Problem], data: DataOptions, tokenizer: Any) -> list[str]:
    """What the model sees of each problem, up to where its answer begins. Raises DataError when the template fails."""
    import jinja2

    system = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
    suffix = f" {data.prompt_suffix}" if data.prompt_suffix else ""
    chats = [[*system, {"role": "user", "content": problem.problem + suffix}] for problem in problems]
    try:
        texts: list[str] = tokenizer.apply_chat_template(
            chats, tokenize=False, add_generation_prompt=True, **data.chat_template_args
        )
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        raise DataError(
            f"chat template of {tokenizer.name_or_path}: {type(error).__name__}: {' '.join(str(error).split())}; "
            "check data.system_prompt and data.chat_template_args, or repair the template"
        ) from error
    return texts


def tokenize(texts: list[str], tokenizer: Any) -> list[np.ndarray]:
    """int32 ids of each text. Nothing is added: the template has written the special tokens already."""
    encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
    return [np.asarray(ids, dtype=np.int32) for ids in encoded["input_ids"]]


def _check_template(data: DataOptions, tokenizer: Any) -> None:
    if tokenizer.chat_template is None:
        raise DataError(
            f"tokenizer {tokenizer.name_or_path}: has no chat template; add chat_template.jinja to the model folder (an "
            "instruction-tuned model of the family has one) or use such a model"
        )
    reserved = sorted(_RESERVED & data.chat_template_args.keys())
    if reserved:
        raise ConfigError(f"data.chat_template_args: {reserved[0]} is set by this program; remove it")


def _prompt(prompt_id: str, source: str, problem: Problem, text: str, ids: np.ndarray) -> Prompt:
    return Prompt(
        id=prompt_id,
        text=text,
        token_ids=ids,
        answer=problem.answer,
        problem=problem.problem,
        solution=problem.solution,
        source=source,
    )
