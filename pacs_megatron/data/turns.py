"""Tokens of the messages between two turns of the policy, such as the output of a tool.

A conversation is a list of token ids that only grows. The policy's tokens stay as they were
sampled: no text of the policy is encoded. A message adds the tokens of its own text and of the
markers around it. The markers are the difference of two renderings of the chat template, with and
without the message. So the template must write the same text before and after a message in every
conversation, and must not change what it wrote before.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

import numpy as np

from pacs_megatron.config.schema import DataOptions
from pacs_megatron.contracts.turns import TurnMarkers
from pacs_megatron.data.encode import (
    BREAK,
    as_letters,
    as_plain_text,
    control_ids,
    control_tokens,
    encode_continued,
)
from pacs_megatron.data.limits import run_in_child
from pacs_megatron.data.template import apply_template
from pacs_megatron.errors import DataError, shown

_LIMIT_S = 10.0
"""CPU time for all renderings, which take about 0.05 s"""
_QUESTION = "Which number is it?"
_ANSWER = "It is seven."
_REASONED = "<think>\nIt was six before.\n</think>\n\nIt is eight."
_REASONED_END = "It is eight."
_WORD = "Fifty-one"
_SPACED = "  two lines\nof text \n"
_MARKUP = 'a "b" <c> & {d} \\n'
_FIX = "set rollout.agent.turn_markers, or use another template"


class Message(NamedTuple):
    """A text that is not the policy's, e.g. of a tool."""

    role: str
    text: str


def derive_markers(
    roles: Sequence[str], data: DataOptions, tokenizer: Any, now: datetime
) -> TurnMarkers:
    """The markers of the tokenizer's chat template.

    Args:
        roles: of the messages; at least one.
        data: system prompt and arguments of the template.
        tokenizer: from `load_tokenizer`.
        now: time that the template prints.

    Raises:
        DataError: the template fails, or what it writes for a message depends on earlier turns or
            on the text.
    """
    where = f"chat template of {tokenizer.name_or_path}"
    if not tokenizer.chat_template:
        raise DataError(f"{where}: there is none, so a turn has no markers; {_FIX}")

    def derive() -> dict[str, Any]:
        return _Renderings(data, tokenizer, now).markers(roles).model_dump()

    found = run_in_child(derive, _LIMIT_S, where, _FIX)
    return TurnMarkers.model_validate(found)


@dataclass(frozen=True, slots=True)
class _Renderings:
    """Conversations as the template writes them. Runs in a child process."""

    data: DataOptions
    tokenizer: Any
    now: datetime

    def markers(self, roles: Sequence[str]) -> TurnMarkers:
        """Raises ValueError with the first rule that the template breaks."""
        ends = {self._answer_end(history) for history in self._histories(roles[0])}
        if len(ends) != 1:
            raise ValueError("the text after an answer depends on earlier turns")

        before: dict[str, str] = {}
        after: dict[str, str] = {}
        generations: set[str] = set()
        is_stripped: set[bool] = set()
        for role in roles:
            found = {self._around(history, role) for history in self._histories(role)}
            if len(found) != 1:
                raise ValueError(f"the text around a message of role {role} depends on other turns")
            [(before[role], after[role], generation, strips)] = found
            generations.add(generation)
            is_stripped.add(strips)
        if len(generations) != 1 or len(is_stripped) != 1:
            raise ValueError("the text before an answer depends on the role of the message")

        [answer_end] = ends
        [generation] = generations
        [strips_text] = is_stripped
        found_markers = TurnMarkers(
            answer_end=answer_end,
            before=before,
            after=after,
            generation=generation,
            strips_text=strips_text,
        )
        return found_markers.model_copy(update={"joins": self._joins(found_markers)})

    def _joins(self, markers: TurnMarkers) -> bool:
        """Whether a message can follow another one with the same markers."""
        for first in markers.before:
            history = [_turn("user", _QUESTION), _turn("assistant", _ANSWER), _turn(first, _WORD)]
            earlier = self._text(history)
            for second in markers.before:
                text = self._text([*history, _turn(second, _WORD)])
                if text != earlier + markers.before[second] + _WORD + markers.after[second]:
                    return False
        return True

    def _histories(self, role: str) -> list[list[dict[str, str]]]:
        """Conversations of one and of several turns that end with an answer."""
        first = [_turn("user", _QUESTION), _turn("assistant", _ANSWER)]
        reasoned = [_turn("user", _QUESTION), _turn("assistant", _REASONED)]
        more = [_turn(role, _WORD), _turn("assistant", _ANSWER)]
        return [first, reasoned, [*first, *more], [*reasoned, *more], [*first, *more, *more]]

    def _text(self, messages: Sequence[dict[str, str]], *, opens_answer: bool = False) -> str:
        system = []
        if self.data.system_prompt is not None:
            system = [_turn("system", self.data.system_prompt)]
        arguments = {**self.data.chat_template_args, "add_generation_prompt": opens_answer}
        return apply_template([*system, *messages], arguments, self.tokenizer, self.now)

    def _answer_end(self, history: Sequence[dict[str, str]]) -> str:
        """The text after the last answer."""
        answer = _REASONED_END if history[-1]["content"] == _REASONED else _ANSWER
        text = self._text(history)
        before, _, after = text.rpartition(answer)
        if not before:
            raise ValueError(f"it does not write the answer {answer!r} as it is")
        return after

    def _around(self, history: Sequence[dict[str, str]], role: str) -> tuple[str, str, str, bool]:
        """Text before and after a message, text that opens the next answer, and whether the
        message loses its outer white space.
        """
        earlier = self._text(history)
        with_message = self._difference(earlier, [*history, _turn(role, _WORD)])
        before, found, after = with_message.partition(_WORD)
        if not found:
            raise ValueError(f"it does not write a message of role {role}")

        strips = False
        for text in (_SPACED, _MARKUP):
            written = self._difference(earlier, [*history, _turn(role, text)])
            if written == before + text + after:
                continue
            if written != before + text.strip() + after:
                raise ValueError(f"it changes the text of a message of role {role}: {text!r}")
            strips = True

        message = [*history, _turn(role, _WORD)]
        opened = self._text(message, opens_answer=True)
        generation = opened.removeprefix(earlier + with_message)
        if generation == opened:
            raise ValueError("an answer that begins changes the text of earlier turns")
        return before, after, generation, strips

    def _difference(self, earlier: str, messages: Sequence[dict[str, str]]) -> str:
        """The text that the last message adds."""
        text = self._text(messages)
        if not text.startswith(earlier):
            raise ValueError(
                f"a message of role {messages[-1]['role']} changes the text of earlier turns"
            )
        return text[len(earlier) :]


def _turn(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


class TurnEncoder:
    """Token ids of messages. One thread at a time uses it."""

    def __init__(self, markers: TurnMarkers, tokenizer: Any) -> None:
        """Reads the control tokens.

        Args:
            markers: of the template, or of the configuration.
            tokenizer: from `load_tokenizer`.

        Raises:
            DataError: the tokenizer drops or changes the markers.
        """
        self.markers = markers
        self._tokenizer = tokenizer
        self._controls = control_tokens(tokenizer)
        self._control_ids = np.array(sorted(control_ids(tokenizer)), dtype=np.int64)
        self._end_ids, self._end_at = self._turn_end()

    def encode(self, messages: Sequence[Message], last_id: int) -> np.ndarray:
        """The tokens from the policy's last one to its next: end of turn, messages, start of turn.

        Control tokens that a text spells out stay text.

        Args:
            messages: at least one, in order.
            last_id: last token of the policy. If it is the token that ends a turn, it is not added
                once more.

        Returns:
            int32 [tokens].

        Raises:
            ValueError: an unknown role, a text that is not Unicode, or several messages with a
                template that writes them differently.
        """
        if len(messages) > 1 and not self.markers.joins:
            raise ValueError(
                f"{len(messages)} messages in a row, which the chat template writes differently "
                "from one; join their texts"
            )
        for message in messages:
            if message.role not in self.markers.before:
                roles = ", ".join(self.markers.before)
                raise ValueError(f"role {shown(message.role)}, expected one of {roles}")
            if not _is_unicode(message.text):
                raise ValueError("the text contains a lone surrogate, which no tokenizer encodes")

        marked = [as_plain_text(message.text, self._controls) for message in messages]
        ids = self._encode_around(messages, marked)
        # A normalizer (case, width) can turn a text into a control token that it does not spell.
        spelled = self._encode_around(messages, [""] * len(messages))
        if np.isin(ids, self._control_ids).sum() > np.isin(spelled, self._control_ids).sum():
            letters = [as_letters(message.text) for message in messages]
            ids = self._encode_around(messages, letters)

        is_ended = self._end_at is not None and last_id == self._end_ids[self._end_at]
        if is_ended and self._end_at is not None:
            ids = ids[self._end_at + 1 :]
        return np.array(ids, dtype=np.int32)

    def _encode_around(self, messages: Sequence[Message], texts: Sequence[str]) -> list[int]:
        """Token ids with the markers of `messages` around the marked `texts`."""
        markers = self.markers
        parts = [markers.answer_end]
        for message, text in zip(messages, texts, strict=True):
            inner = _stripped(text) if markers.strips_text else text
            parts += [markers.before[message.role], inner, markers.after[message.role]]
        parts.append(markers.generation)

        ids: list[int] = []
        for piece in encode_continued("".join(parts).split(BREAK), self._tokenizer):
            ids += piece
        return ids

    def _turn_end(self) -> tuple[list[int], int | None]:
        """Token ids of the text after an answer, and the place of the control token that ends the
        turn; None if the template writes none there.
        """
        text = self.markers.answer_end
        [ids] = encode_continued([text], self._tokenizer)
        match = self._controls and self._controls.match(text.lstrip())
        if not match:
            return ids, None
        token_id = int(self._tokenizer.convert_tokens_to_ids(match[0]))
        return ids, ids.index(token_id) if token_id in ids else None


def _stripped(text: str) -> str:
    """`text` without outer white space; marks that it then begins or ends with do no harm."""
    return re.sub(rf"^[\s{BREAK}]+|[\s{BREAK}]+$", "", text)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
