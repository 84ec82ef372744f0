import math

import pytest

from pacs_megatron.agents.retrieval import Retrieval
from pacs_megatron.errors import ConfigError, ToolError

PASSAGES = [
    "The otter swims in the river.",
    "A river flows. The river is long, and the river is old.",
    "Mountains are high.",
    "Otters, otters and one otter.\nTwo lines.",
]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "passages.txt"
    path.write_text("\n\n".join(PASSAGES) + "\n \n\n")
    return path


def test_scores_are_those_of_the_paper(file):
    """BM25 as written in the review of Robertson and Zaragoza, computed passage by passage."""
    words = [
        "".join(letter if letter.isalnum() else " " for letter in passage.lower()).split()
        for passage in PASSAGES
    ]
    mean = sum(map(len, words)) / len(words)
    expected = {}
    for number, passage in enumerate(words):
        for term in ("otter", "river"):
            tf = passage.count(term)
            df = sum(term in other for other in words)
            idf = math.log((len(words) - df + 0.5) / (df + 0.5) + 1)
            saturated = tf * 2.2 / (tf + 1.2 * (0.25 + 0.75 * len(passage) / mean))
            if tf:
                expected[number] = expected.get(number, 0) + idf * saturated
    found = Retrieval(file, 3).scores(["otter", "river", "otter"])
    assert found == pytest.approx(expected)


def test_the_best_passages(file):
    index = Retrieval(file, 2)
    assert index.search("an OTTER in a river") == f"{PASSAGES[0]}\n\n{PASSAGES[1]}"
    assert index.search("two lines?") == PASSAGES[3]
    assert index.search("nothing fits") == "no passage contains a word of the query"
    assert index.search("\x00") == "no passage contains a word of the query"


@pytest.mark.parametrize(("query", "problem"), [(5, "expected text"), ("x" * 3000, "3000")])
def test_a_query_that_is_none(file, query, problem):
    with pytest.raises(ToolError, match=problem):
        Retrieval(file, 1).search(query)


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"", b"\n\n \n"])
def test_a_file_without_passages(tmp_path, content):
    path = tmp_path / "passages.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"passages\.txt"):
        Retrieval(path, 1)
