"""A tiny tokenizer of each kind that models have, with the control tokens of a reasoning model."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

from tests.support.tiny_models import CHAT_TEMPLATE, EOS, PAD

SPECIAL = (PAD, "<|im_start|>", EOS)
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Added tokens that are not special, as Qwen3's."""
KINDS = ("byte_level", "merges", "prepend", "metaspace", "unigram", "strips", "lowercase")
"""
- byte_level: bytes without merges
- merges: bytes with merges, also over line ends (GPT, Qwen, Llama 3)
- prepend: SentencePiece with bytes as a fall-back, a space before every text (Llama 2)
- metaspace: the same, a space before the first token only
- unigram: SentencePiece's other model, whose vocabulary contains the special tokens
- strips: added tokens that take the white space around them
- lowercase: a normalizer before the search for added tokens
"""
THINKING_TEMPLATE = CHAT_TEMPLATE.replace(
    "assistant\n{%- endif -%}", "assistant\n<think>\n{% endif -%}"
)
"""Ends the prompt with `<think>`, as the templates of reasoning models do."""
_LETTERS = string.ascii_letters + string.digits + string.punctuation
_SPACE = "\u2581"


def save_kind(folder: Path, kind: str, *, chat_template: str = CHAT_TEMPLATE) -> Any:
    """Saves the tokenizer to `folder` and returns it as transformers loads it."""
    from tokenizers import AddedToken
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    inner = _INNER[kind]()
    inner.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    )
    strips = {"lstrip": kind == "strips", "rstrip": kind == "strips"}
    inner.add_tokens(
        [AddedToken(token, normalized=kind == "lowercase", **strips) for token in ADDED]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=EOS, pad_token=PAD)
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def _byte_level(merges: tuple[tuple[str, str], ...] = ()) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate(alphabet)}
    for left, right in merges:
        vocab[left + right] = len(vocab)
    inner = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    use_regex = bool(merges)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    inner.decoder = decoders.ByteLevel()
    return inner


def _merges() -> Any:
    # \u010a is the byte-level letter of a line end.
    return _byte_level((("\u010a", "\u010a"), ("t", "h"), ("th", "i"), ("i", "m"), ("<", "|")))


def _lowercase() -> Any:
    from tokenizers import normalizers

    inner = _byte_level()
    inner.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    return inner


def _bytes_and_letters() -> list[str]:
    return [f"<0x{byte:02X}>" for byte in range(256)] + [_SPACE, *_LETTERS]


def _sentencepiece() -> Any:
    from tokenizers import Tokenizer, models

    vocab = {token: number for number, token in enumerate(["<unk>", *_bytes_and_letters()])}
    merges = [("t", "h"), (_SPACE, "t"), (_SPACE, _SPACE)]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    return Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )


def _prepend() -> Any:
    from tokenizers import decoders, normalizers

    inner = _sentencepiece()
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)]
    )
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace(_SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return inner


def _metaspace() -> Any:
    from tokenizers import decoders, pre_tokenizers

    inner = _sentencepiece()
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace(_SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return inner


def _unigram() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = [("<unk>", 0.0), *((token, 0.0) for token in SPECIAL)]
    vocab += [(token, -5.0) for token in _bytes_and_letters()]
    inner = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    inner.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")]
    )
    return inner


_INNER = {
    "byte_level": _byte_level,
    "merges": _merges,
    "prepend": _prepend,
    "metaspace": _metaspace,
    "unigram": _unigram,
    "strips": _byte_level,
    "lowercase": _lowercase,
}
