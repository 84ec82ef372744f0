"""Text to token ids: prompts, whose problems must contain no control token, and demonstrations.

A control token is a token that the vocabulary adds to plain text (`<|im_end|>`, `<think>`). In the
text of a problem it stays text, so that data cannot close a turn. A demonstration has the tokens
that the policy itself would sample, control tokens included.
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

BREAK = "\ue000"
"""Private-use character that marks where the text of a problem is cut before it is encoded."""
_LEADS = ("\n", "0", ".", "x")
"""Texts after which a piece is encoded, so that no space is added before it"""


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
    text = text.replace(BREAK, "")
    if controls is None:
        return text
    return controls.sub(lambda match: match[0][0] + BREAK + match[0][1:], text)


def as_letters(text: str) -> str:
    """`text` with a mark between all of its characters."""
    return BREAK.join(text.replace(BREAK, ""))


def control_ids(tokenizer: Any) -> frozenset[int]:
    """The ids of the control tokens."""
    ids = []
    for token_id, token in tokenizer.added_tokens_decoder.items():
        if len(token.content) > 1 and not token.content.isspace():
            ids.append(token_id)
    return frozenset(ids)


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
    pieces_of_texts = [text.split(BREAK) for text in texts]
    firsts: list[str] = []
    others: list[str] = []
    for pieces in pieces_of_texts:
        firsts.append(pieces[0])
        others += pieces[1:]
    ids_of_others = iter(encode_continued(others, tokenizer))

    token_ids = []
    for pieces, ids in zip(pieces_of_texts, _encode(firsts, tokenizer), strict=True):
        for _ in pieces[1:]:
            ids = ids + next(ids_of_others)
        token_ids.append(np.array(ids, dtype=np.int32))
    return token_ids


def encode_continued(texts: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """Token ids of texts that continue another text: pieces of a prompt, and demonstrations.

    SentencePiece models add a space before a text; here they do not.
    """
    texts = [text.replace(BREAK, "") for text in texts]
    if not texts:
        return []
    encoded = _encode(texts, tokenizer)
    if not _adds_space(tokenizer):
        return encoded

    is_pending = [True] * len(texts)
    for lead in _LEADS:
        [lead_ids] = _encode([lead], tokenizer)
        numbers = [number for number, pending in enumerate(is_pending) if pending]
        if not numbers:
            break
        joined = _encode([lead + texts[number] for number in numbers], tokenizer)
        for number, ids in zip(numbers, joined, strict=True):
            # Otherwise a token contains the border, and the next lead is tried.
            if ids[: len(lead_ids)] == lead_ids:
                encoded[number] = ids[len(lead_ids) :]
                is_pending[number] = False
    return encoded


def _adds_space(tokenizer: Any) -> bool:
    """Whether the first token of a text differs from that of the same text behind another."""
    lead_ids, text_ids, joined_ids = _encode(["\n", "x", "\nx"], tokenizer)
    return joined_ids != lead_ids + text_ids


def _encode(texts: Sequence[str], tokenizer: Any) -> list[list[int]]:
    # tokenizer_config.json can set `split_special_tokens`, which would spell the template's tokens.
    encoded = tokenizer(
        list(texts),
        add_special_tokens=False,
        split_special_tokens=False,
        return_attention_mask=False,
        verbose=False,
    )
    ids: list[list[int]] = encoded["input_ids"]
    return ids
