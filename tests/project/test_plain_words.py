"""The words to avoid of CONTRIBUTING.md: in documents, and in docstrings, comments and texts of the
code.
"""

import io
import itertools
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = ("pacs_megatron", "benchmarks", "conversion", "examples", "tools", "tests")
DOCUMENTS = ("docs", "conversion", "examples", "slurm")
WORDS = {
    r"ask(s|ed|ing)?": "request",
    r"tell(s|ing)?|told": "report, notify; distinguish",
    r"speak(s|ing)?|spoke|spoken": "report",
    r"says?|said": "states, reports, shows",
    r"hears?|heard": "receives",
    r"believes?": "assumes",
    r"that word|without a word": "notification, message",
    r"mend(s|ed|ing)?": "fix",
    r"anew": "again, new",
    r"for ever|forever": "always",
    r"begun": "started",
    r"whoever|whatever|whichever": "any, every",
    r"nobody": "no",
    r"at its end": "at the end",
    r"so that (it|they|we) may": "so that ... can",
    r"for so long": "for ... seconds",
    r"the other way round": "vice versa",
    r"bears?": "has",
    r"(has|have|is|are) gone": "no longer exists",
    r"room": "space",
    r"(?<!connection )(?<!connections )(?<!connections are )(?<!['\"])"
    r"refus(e|es|ed|ing|als?)": "reject, error",
}
"""Regular expression -> words to use instead."""
AVOID = re.compile("|".join(rf"\b({word})\b" for word in WORDS), re.IGNORECASE)
STARTS_WITH_WHAT = re.compile(r"[rf]*\"{3}what\b", re.IGNORECASE)
EXEMPT = ("CONTRIBUTING.md", "tests/project/test_plain_words.py")
"""They list the words."""


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of the comments, docstrings, texts and test names; a string without a space is a
    key or a name.
    """
    if path.suffix == ".md":
        lines = path.read_text(encoding="utf-8").splitlines()
        yield from ((number, re.sub(r"`[^`]*`", "", line)) for number, line in enumerate(lines, 1))
        return
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        is_text = token.type == tokenize.STRING or tokenize.tok_name[token.type] == "FSTRING_MIDDLE"
        if token.type == tokenize.COMMENT or (is_text and " " in token.string):
            yield token.start[0], token.string
        elif token.type == tokenize.NAME and token.string.startswith("test_"):
            yield token.start[0], token.string.replace("_", " ")


def complaints(path: Path) -> Iterator[str]:
    """One line for each word to avoid."""
    for line, text in texts(path):
        found = [match[0] for match in AVOID.finditer(text)]
        if path.suffix == ".py" and STARTS_WITH_WHAT.match(text):
            found.append("What (as the first word)")
        yield from (
            f"{path.relative_to(ROOT)}:{line}: {word!r} in {' '.join(text.split())[:120]}"
            for word in found
        )


def files(suffix: str, folders: Iterable[str]) -> list[Path]:
    found = itertools.chain.from_iterable((ROOT / folder).rglob(f"*{suffix}") for folder in folders)
    names = {path: str(path.relative_to(ROOT)) for path in [*found, *ROOT.glob(f"*{suffix}")]}
    return sorted(path for path, name in names.items() if name not in EXEMPT)


@pytest.mark.parametrize(
    ("suffix", "folders"), [(".md", DOCUMENTS), (".py", CODE)], ids=["documents", "code"]
)
def test_no_word_to_avoid(suffix: str, folders: tuple[str, ...]) -> None:
    found = []
    for path in files(suffix, folders):
        for complaint in complaints(path):
            found.append(complaint)
    assert not found, "\n".join(["CONTRIBUTING.md lists the words to use instead:", *found])


def test_words_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    path = tmp_path / "x.py"
    path.write_text('"""What is told."""\nbegun = "begun"  # asked anew\n')
    assert [text.split(":")[1] + text.split("'")[1] for text in complaints(path)] == [
        "1told",
        "1What (as the first word)",
        "2asked",
        "2anew",
    ]
