"""Renders the chat template of a tokenizer, which is code of the model folder: in a child process.

A template can print the date (`strftime_now`, in Llama 3.2 and Mistral Small). The time is an
argument here, so that a run has the prompts of its first attempt in every attempt.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from pacs_megatron.config.schema import DataOptions
from pacs_megatron.data.limits import run_in_child
from pacs_megatron.errors import DataError

_LIMIT_S = 5.0
"""CPU time for one batch of prompts, which usually takes 0.02 s"""
_MAX_CHARS = 1_000_000
"""Characters that the template may add to one problem."""
_LATER = timedelta(days=401, hours=5, minutes=7, seconds=11)
"""Changes every part of a date and of a time."""
_QUESTION = "Which number is it?"
_ANSWER = "It is seven."


class Rendered(NamedTuple):
    """The prompts' texts."""

    texts: list[str]
    prints_time: bool
    """Whether the texts depend on the time."""


def render(
    contents: Sequence[str],
    data: DataOptions,
    tokenizer: Any,
    now: datetime,
    systems: Sequence[str | None] = (),
) -> Rendered:
    """The text of each prompt, up to the start of the response.

    Args:
        contents: Text of the user's turn of each prompt; at least one.
        data: System prompt and arguments of the template.
        tokenizer: From `load_tokenizer`.
        now: Time that the template prints.
        systems: System message of each prompt, None for `data.system_prompt`; empty: all None.

    Raises:
        DataError: The template fails, or gives another text each time.
    """
    conversations = []
    for content, own_system in zip(contents, systems or [None] * len(contents), strict=True):
        system = data.system_prompt if own_system is None else own_system
        messages = [] if system is None else [{"role": "system", "content": system}]
        conversations.append([*messages, {"role": "user", "content": content}])

    def text_of(messages: Sequence[Mapping[str, str]], time: datetime) -> str:
        return apply_template(messages, data.chat_template_args, tokenizer, time)

    def render_all() -> tuple[list[str], bool]:
        texts = [text_of(messages, now) for messages in conversations]
        if text_of(conversations[0], now) != texts[0]:
            raise ValueError("it gives another text each time; remove its random parts")
        return texts, text_of(conversations[0], now + _LATER) != texts[0]

    texts, prints_time = run_in_child(
        render_all,
        _LIMIT_S,
        f"chat template of {tokenizer.name_or_path}",
        "check data.system_prompt and data.chat_template_args, or correct the template",
    )
    return Rendered(texts, prints_time)


def text_after_answer(tokenizer: Any) -> str:
    """The text that the template writes after an answer; empty if it renders no conversation."""
    if not tokenizer.chat_template:
        return ""
    messages = [
        {"role": "user", "content": _QUESTION},
        {"role": "assistant", "content": _ANSWER},
    ]

    def render_turns() -> str:
        options = {"add_generation_prompt": False}
        return apply_template(messages, options, tokenizer, datetime.now())

    try:
        text: str = run_in_child(
            render_turns, _LIMIT_S, f"chat template of {tokenizer.name_or_path}", "correct it"
        )
    except DataError:  # many templates of base models take a user's turn only
        return ""
    before, _, after = text.rpartition(_ANSWER)
    return after if before else ""


def apply_template(
    messages: Sequence[Mapping[str, str]],
    arguments: Mapping[str, Any],
    tokenizer: Any,
    time: datetime,
) -> str:
    """The text of a conversation.

    Raises ValueError for a lone surrogate or a flood of characters.
    """
    # An argument replaces the function of that name, which reads the clock.
    options = {
        "tokenize": False,
        "add_generation_prompt": True,
        "strftime_now": time.strftime,
        **arguments,
    }
    text: str = tokenizer.apply_chat_template(messages, **options)
    text.encode()  # raises for a lone surrogate
    num_chars = sum(len(message["content"]) for message in messages)
    if len(text) > num_chars + _MAX_CHARS:
        raise ValueError(f"{len(text)} characters for a problem of {len(messages[-1]['content'])}")
    return text
