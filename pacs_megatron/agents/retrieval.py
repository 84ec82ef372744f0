"""Retrieval: the passages of a local text file that fit a query best.

The score is BM25 (Robertson and Zaragoza, The Probabilistic Relevance Framework, 2009, equation
3.15), with k1 = 1.2 and b = 0.75, and the logarithm of 1 + odds, which is never negative.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from pacs_megatron.errors import ConfigError, ToolError

_K1 = 1.2
_B = 0.75
_MAX_QUERY_CHARS = 2000
_WORD = re.compile(r"\w+")
_BREAK = re.compile(r"\n[ \t]*\n")


class Retrieval:
    """An index of passages in memory."""

    def __init__(self, path: Path, top_k: int) -> None:
        """Reads the file.

        Args:
            path: text in UTF-8; an empty line separates passages.
            top_k: number of passages of a result.

        Raises:
            ConfigError: the file cannot be read, or has no passage.
        """
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{path}: cannot be read as text in UTF-8 ({error}); correct rollout.agent.tools"
            ) from error
        passages = [passage.strip() for passage in _BREAK.split(text)]
        self._passages = [passage for passage in passages if passage]
        if not self._passages:
            raise ConfigError(f"{path}: has no passage; expected text with empty lines between")

        self._top_k = top_k
        self._lens = []
        self._postings: dict[str, list[tuple[int, int]]] = {}
        """word -> (number of the passage, count in it)"""
        for number, passage in enumerate(self._passages):
            words = words_of(passage)
            self._lens.append(len(words))
            for word, count in Counter(words).items():
                self._postings.setdefault(word, []).append((number, count))
        self._mean_len = max(sum(self._lens) / len(self._lens), 1.0)

    def search(self, query: str) -> str:
        """The best passages, best first, with empty lines between; equal ones by their place.

        Raises:
            ToolError: the query is no text, or too long.
        """
        if not isinstance(query, str):
            raise ToolError(f"query is {type(query).__name__}, expected text")
        if len(query) > _MAX_QUERY_CHARS:
            raise ToolError(f"a query of {len(query)} characters, at most {_MAX_QUERY_CHARS}")
        scores = self.scores(words_of(query))
        if not scores:
            return "no passage contains a word of the query"
        best = sorted(scores, key=lambda number: (-scores[number], number))[: self._top_k]
        return "\n\n".join(self._passages[number] for number in best)

    def scores(self, words: Sequence[str]) -> dict[int, float]:
        """Number of a passage -> BM25 score, for passages with a word of the query."""
        scores: dict[int, float] = {}
        for word in dict.fromkeys(words):
            found = self._postings.get(word, [])
            without = len(self._passages) - len(found)
            weight = math.log(1 + (without + 0.5) / (len(found) + 0.5))
            for number, count in found:
                norm = 1 - _B + _B * self._lens[number] / self._mean_len
                gain = weight * count * (_K1 + 1) / (count + _K1 * norm)
                scores[number] = scores.get(number, 0.0) + gain
        return scores


def words_of(text: str) -> list[str]:
    """Words in lower case, in order."""
    return _WORD.findall(text.lower())
