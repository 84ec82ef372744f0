"""JSON from outside:
every fault is one line that names the file, and nothing else is ever raised.
"""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacs_megatron.errors import CheckpointError, DataError
from pacs_megatron.runtime.files import complete_lines, parse_lines, read_rows
from pacs_megatron.runtime.json_reader import (
    MAX_JSON_DEPTH,
    MAX_JSON_DIGITS,
    parse_json,
    read_lines,
    read_object,
    read_text,
)
from tests.support.fuzz import fuzz, json_documents

REFUSED = {
    "empty": ("", "malformed JSON at column 1"),
    "open_object": ('{"a": 1', "malformed JSON at column 8"),
    "second_line": ('{"a": 1,\n  "b" 2}', "f.json:2: malformed JSON at column 7"),
    "text_after_value": ('{"a": 1} x', "text after the JSON value ('x')"),
    "second_value": ("[1]\n[2]", "f.json:2: text after the JSON value"),
    "repeated_key": ('{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' is repeated"),
    "deep_list": (
        "[" * (MAX_JSON_DEPTH + 1) + "]" * (MAX_JSON_DEPTH + 1),
        "nested deeper than 64 levels",
    ),
    "deep_object": ('{"a":' * 100_000 + "1" + "}" * 100_000, "nested deeper than 64 levels"),
    "long_integer": ("1" * (MAX_JSON_DIGITS + 1), "a number of 301 characters"),
    "long_fraction": ("0." + "1" * 5000, "a number of 5002 characters"),
    "overflow": ("1e400", "too large for a 64-bit float"),
    "nan": ('{"a": NaN}', "NaN is no JSON number"),
    "infinity": ("[-Infinity]", "-Infinity is no JSON number"),
    "lone_surrogate": (r'{"a": "\ud800"}', "lone surrogate"),
    "lone_surrogate_in_key": (r'{"\udfff": 1}', "lone surrogate"),
    "nul": (r'["a\u0000b"]', "NUL character"),
    "control_character": ('["a\nb"]', "malformed JSON at column 4"),
    "not_utf8": (b'{"a": "\xff"}', "byte 7 is not UTF-8"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_rejected_document_is_one_line_with_its_place(name: str) -> None:
    text, message = REFUSED[name]
    with pytest.raises(CheckpointError) as caught:
        parse_json(text, "f.json", error=CheckpointError)
    assert message in str(caught.value)
    assert str(caught.value).startswith("f.json")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


@given(json_documents())
def test_what_python_writes_is_read_back(value: object) -> None:
    assert parse_json(json.dumps(value), "f.json") == value
    assert parse_json(json.dumps(value, ensure_ascii=False, indent=1).encode(), "f.json") == value


def test_the_limits_themselves_are_read() -> None:
    nested = parse_json("[" * MAX_JSON_DEPTH + "]" * MAX_JSON_DEPTH, "f.json")
    for _ in range(MAX_JSON_DEPTH - 1):
        [nested] = nested
    assert nested == []
    assert parse_json("9" * MAX_JSON_DIGITS, "f.json") == 10**MAX_JSON_DIGITS - 1


def test_a_model_s_own_text_is_read_where_the_caller_allows_it() -> None:
    assert parse_json(r'["\ud800 \u0000"]', "f.json", any_text=True) == ["\ud800 \0"]


def test_json_lines_name_their_own_line() -> None:
    with pytest.raises(DataError, match=r"^rows\.jsonl:7: the key 'a' is repeated"):
        parse_json('{"a": 1, "a": 2}', "rows.jsonl", line=7)
    with pytest.raises(DataError, match=r"^rows\.jsonl:7: malformed JSON at column 2"):
        parse_json("{", "rows.jsonl", line=7)


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "f.json").write_bytes(b"\xef\xbb\xbf{}")
    assert read_object(tmp_path / "f.json") == {}


@pytest.mark.parametrize("name", ["missing", "a_folder", "a_pipe", "x" * 300, "n\0ul"])
def test_what_is_no_regular_file_is_rejected_at_once(tmp_path: Path, name: str) -> None:
    (tmp_path / "a_folder").mkdir()
    os.mkfifo(tmp_path / "a_pipe")
    with pytest.raises(DataError) as caught:
        read_object(tmp_path / name)
    assert "\n" not in str(caught.value) and "\0" not in str(caught.value)


def test_a_large_file_is_rejected_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "f.json").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(DataError, match="1099511627776 bytes; at most 268435456 are read"):
        read_text(tmp_path / "f.json")


def test_lines_of_a_file_of_any_size_are_read_one_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    path.write_bytes(b"{}\n\ncut")
    with path.open("r+b") as file:
        file.truncate(2**40)
    lines = read_lines(path, max_bytes=1000)
    assert (next(lines), next(lines)) == (b"{}\n", b"\n")
    with pytest.raises(DataError, match=r"f\.jsonl:3: a line of more than 1000 bytes"):
        next(lines)
    path.write_bytes(b"12345\n" * 3 + b"12345")
    assert list(read_lines(path, max_bytes=6)) == [b"12345\n"] * 3 + [b"12345"]


def test_an_array_is_no_object(tmp_path: Path) -> None:
    (tmp_path / "f.json").write_text("[]")
    with pytest.raises(DataError, match="expected a JSON object, got an array"):
        read_object(tmp_path / "f.json")


@fuzz
@given(
    st.one_of(
        st.binary(max_size=200),
        st.text(alphabet='[]{}":,0123456789.eE-\\ntrufalsd \n\ud800\0', max_size=80),
    )
)
def test_any_bytes_give_a_value_or_the_named_error(document: str | bytes) -> None:
    try:
        parse_json(document, "f.json")
    except DataError as error:
        assert "\n" not in str(error) and len(str(error)) < 300


@fuzz
@given(
    lines=st.lists(
        st.binary(max_size=60) | st.sampled_from([b"[" * 5000, b"9" * 5000, b'{"step": 1}']),
        max_size=5,
    )
)
def test_any_file_of_lines_gives_rows_or_the_named_error(
    lines: list[bytes], tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join(lines))
    assert all("step" in row for row in read_rows(path, {"step": int}))
    try:
        assert all(isinstance(row, dict) for row in parse_lines(complete_lines(path), path))
    except DataError as error:
        assert "\n" not in str(error)


def test_a_pointer_of_git_lfs_is_named(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 3945\n")
    for read in (read_object, lambda path: list(read_lines(path))):
        with pytest.raises(DataError, match=r"pointer of git-lfs.*run `git lfs pull`"):
            read(file)
