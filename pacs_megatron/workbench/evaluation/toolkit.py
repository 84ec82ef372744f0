"""Rewards that read a multiple-choice answer as zai-org/glm-simple-evals does (commit db7fdc8,
`evals/gpqa_eval.py`), for `reward.name: custom` (configs/paper/eval-gpqa-toolkit.yaml).

With `--auto_extract_answer` the toolkit lets a language model read the letter. These rewards use
its regular expression in both modes.
"""

import hashlib
import re

from pacs_megatron.contracts import Prompt

_READ_CHARS = 1024
_LETTER = re.compile(r"ANSWER\s*:\s*([A-D])", re.IGNORECASE)
_CHOICES = "ABCD"


def gpqa_letter(prompt: Prompt, response: str) -> float:
    """1.0 if the first `ANSWER: <letter>` of the last 1,024 characters has the right letter."""
    letter = _letter_of(response)
    return float(letter is not None and letter == prompt.answer)


def gpqa_letter_or_random(prompt: Prompt, response: str) -> float:
    """`gpqa_letter`, with a random letter for a response without one (`--auto_extract_answer`).

    The draw depends on problem and response only, so judging again gives the same reward.
    """
    letter = _letter_of(response)
    if letter is None:
        text = f"{prompt.problem}\0{response}".encode("utf-8", "replace")
        letter = _CHOICES[hashlib.sha256(text).digest()[0] % len(_CHOICES)]
    return float(letter == prompt.answer)


def _letter_of(response: str) -> str | None:
    match = _LETTER.search(response[-_READ_CHARS:])
    return match[1].upper() if match else None
