import datetime
import functools
import json
import os
import tempfile
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pacs_megatron.config.schema import DatasetOptions
from pacs_megatron.data import sources
from pacs_megatron.data.sources import read_rows
from pacs_megatron.errors import ConfigError, DataError
from tests.support.fuzz import damaged, fuzz, json_documents

ROWS = [{"problem": f"p{n}\u2028", "answer": n if n % 2 else float(n) / 2} for n in range(5)]


def read(path, **changes):
    return read_rows(DatasetOptions(path=str(path), preset="deepscaler", **changes)).used


def write(folder, kind, rows=ROWS):
    path = folder / f"rows.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    else:
        path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return path


@pytest.mark.parametrize("kind", ["json", "jsonl", "parquet"])
def test_local_files(tmp_path, kind):
    rows = read(write(tmp_path, kind))
    assert [row.values for row in rows] == ROWS
    assert [row.index for row in rows] == [0, 1, 2, 3, 4]
    assert [row.values for row in read(tmp_path / f"rows.{kind}", limit=2)] == ROWS[:2]


def test_local_reading_leaves_no_cache(tmp_path):
    """In a process of its own: the libraries read HF_HOME at import."""
    import subprocess
    import sys

    (tmp_path / "set").mkdir()
    write(tmp_path, "json")
    write(tmp_path / "set", "jsonl")
    code = (
        "import sys\nfrom pacs_megatron.config.schema import DatasetOptions\n"
        "from pacs_megatron.data.sources import read_rows\n"
        "for path in sys.argv[1:]:\n    print(len(read_rows(DatasetOptions(path=path, "
        "preset='deepscaler')).used))\n"
    )
    home = tmp_path / "home"
    home.mkdir()
    environment = {**os.environ, "HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")}
    for name in ("HF_HOME", "HF_DATASETS_CACHE"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "rows.json"), str(tmp_path / "set")],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["5", "5"]
    assert [path for path in home.rglob("*") if path.is_file()] == []


def test_rows_know_their_lines(tmp_path):
    assert [row.where.rpartition(":")[2] for row in read(write(tmp_path, "jsonl"))] == [
        "1",
        "2",
        "3",
        "4",
        "5",
    ]
    text = '[\n{"a": 1},\n\n{"a":\n 2}\n]'
    (tmp_path / "rows.json").write_text(text)
    assert [row.where for row in read(tmp_path / "rows.json")] == [
        f"{tmp_path}/rows.json (row 0)",
        f"{tmp_path}/rows.json (row 1)",
    ]


@settings(suppress_health_check=[HealthCheck.too_slow])  # of the host
@given(
    rows=st.lists(
        st.dictionaries(st.text("abc\u2028", max_size=5), json_documents(), max_size=3), min_size=1
    )
)
@pytest.mark.parametrize("indent", [None, 2])
def test_any_json_array_reads_as_json_does(rows, indent, tmp_path_factory):
    path = tmp_path_factory.mktemp("json") / "rows.json"
    path.write_text(json.dumps(rows, indent=indent), encoding="utf-8")
    assert [row.values for row in read(path)] == rows


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"a": 1}\n{"a": \n', r"a\.jsonl:2: malformed JSON at column"),
        ("a.jsonl", '{"a": 1}\n\n[1]\n', r"a\.jsonl:3: expected a JSON object, got an array"),
        ("a.jsonl", '{"a": 1}\n{"a": 1, "a": 2}\n', r"a\.jsonl:2: the key 'a' is repeated"),
        ("a.jsonl", '{"a": 1} {"b": 2}\n', r"a\.jsonl:1: text after the JSON value"),
        ("a.jsonl", "", "is empty or has no rows"),
        ("a.jsonl", " \n \n", "is empty or has no rows"),
        ("a.json", "", "expected an array of objects, got '' first"),
        ("a.json", "[]", "has no rows"),
        ("a.json", '[{"a": 1},\n{"a": x}]', r"a\.json:2: malformed JSON at column 7"),
        ("a.json", '[{"a": 1},\n{"a": NaN}]', r"a\.json: NaN is no JSON number"),
        ("a.json", '[{"a": 1}]\n, {"a": 2}', r"a\.json:2: text after the JSON value \(', \{"),
        ("a.json", "[[" + "[" * 5000, "nested deeper than 64 levels"),
        (
            "a.json",
            '[{"a": 1}\n{"a": 2}]',
            r"a\.json:2: malformed JSON at column 1: Expecting ',' delimiter",
        ),
        ("a.json", '[{"a": 1}', r"malformed JSON at column 10: Expecting ',' delimiter"),
        ("a.json", '[{"a": 1},', "malformed JSON"),
        (
            "a.json",
            '{"a": 1}\n{"a": 2}',
            r"expected an array of objects, got '\{' first; is it \.jsonl",
        ),
        ("a.json", "[1]", r"a\.json \(row 0\): expected a JSON object, got a number"),
        ("a.jsonl", "PAR1\x15\x04", r"a\.jsonl:1: the file is a parquet file"),
        ("a.jsonl", "PK\x03\x04", r"a\.jsonl:1: the file is a zip archive"),
        ("a.jsonl", "\n<!DOCTYPE html>", r"a\.jsonl:2: the file is a web page"),
        ("a.parquet", "", "file size is 0 bytes"),
        ("a.parquet", "PAR1 and nothing else PAR1", "not a readable parquet file"),
        ("a.csv", "a,b\n1,2\n", r"\.csv is no supported data file"),
    ],
)
def test_bad_files_end_in_one_line(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(DataError, match=message) as caught:
        read(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_truncated_parquet(tmp_path):
    path = write(tmp_path, "parquet")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="not a readable parquet file"):
        read(path)


def test_a_parquet_file_with_huge_values_is_not_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_MAX_CELL_BYTES", 1000)
    path = tmp_path / "a.parquet"
    few = {"a": ["x" * 2500, "y"], "b": [1, 2]}
    many = {"a": ["x" * 2500, *"abcdefghij"]}
    pyarrow.parquet.write_table(pyarrow.table(few), path, compression="zstd")
    with pytest.raises(
        DataError, match=r"column 'a' has \d{4} bytes in 2 values; at most 1000 bytes a value"
    ):
        read(path)
    pyarrow.parquet.write_table(pyarrow.table(many), path)
    assert [row.values for row in read(path)] == [{"a": text} for text in many["a"]]


def test_not_utf8(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"a": "\xff"}\n')
    with pytest.raises(DataError, match="byte 7 is not UTF-8"):
        read(tmp_path / "a.jsonl")


def test_missing(tmp_path):
    with pytest.raises(DataError, match="no such data file"):
        read(tmp_path / "absent.jsonl")
    with pytest.raises(DataError, match="no such file or folder"):
        read(tmp_path / "absent")


def test_a_path_that_no_file_can_have_ends_in_one_line():
    """The schema rejects other such paths: tests/unit/config/test_text.py."""
    with pytest.raises(DataError) as caught:
        read("~nobody-of-this-name/a.json")
    assert str(caught.value).isprintable()


@functools.cache
def _whole(kind):
    with tempfile.TemporaryDirectory() as folder:
        return write(
            Path(folder), kind, [{"problem": f"p{n}", "answer": n} for n in range(3)]
        ).read_bytes()


@pytest.mark.parametrize("kind", ["json", "jsonl", "parquet"])
@fuzz
@given(data=st.data())
def test_damaged_data_files_give_rows_or_one_line(data, kind, tmp_path):
    path = tmp_path / f"damaged.{kind}"
    path.write_bytes(data.draw(damaged(_whole(kind))))
    try:
        rows = read(path)
    except DataError as error:
        assert "\n" not in str(error)
    else:
        assert all(row.index == index for index, row in enumerate(rows))


def test_a_folder_goes_through_the_library(tmp_path):
    write(tmp_path, "parquet")
    assert [row.values for row in read(tmp_path)] == ROWS
    with pytest.raises(DataError, match="split test: ValueError"):
        read(tmp_path, split="test")


def test_unreachable_hub_id_ends_in_one_line():
    with pytest.raises(DataError, match="`datasets` could not load") as caught:
        read("nobody/nothing-of-this-name")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("changes", [{"split": "test"}, {"subset": "main"}, {"revision": "v1"}])
def test_options_that_a_file_does_not_use_are_rejected(tmp_path, changes):
    with pytest.raises(ConfigError, match=f"{next(iter(changes))}=.* is not used by a file"):
        read(write(tmp_path, "json"), **changes)


# ------------------------------------------------------------------------------- where, more_paths
DATED = [
    {"problem": f"p{n}", "answer": "1", "day": day, "level": level, "rank": n}
    for n, (day, level) in enumerate(
        [
            ("2024-06-30T23:59:59", "hard"),
            ("2024-07-01T00:00:00", "easy"),
            ("2024-09-15", "hard"),
            ("2025-01-01T12:00:00", "hard"),
            ("2025-01-02T00:00:00", "easy"),
        ]
    )
]


def filtered(path, where, **changes):
    return read_rows(DatasetOptions(path=str(path), preset="deepscaler", where=where, **changes))


@pytest.mark.parametrize("kind", ["json", "jsonl", "parquet"])
@pytest.mark.parametrize(
    ("where", "wanted"),
    [
        ({"day": {"min": "2024-07-01", "max": "2025-01-01"}}, [1, 2, 3]),
        ({"day": {"min": "2024-09-15"}}, [2, 3, 4]),
        ({"day": {"max": "2024-06-30"}}, [0]),
        ({"rank": {"min": 1, "max": 3.5}}, [1, 2, 3]),
        ({"level": {"one_of": ["easy"]}}, [1, 4]),
        ({"rank": {"one_of": [True, 4]}}, [4]),  # True is not 1
        ({"level": {"one_of": ["hard"]}, "day": {"min": "2024-07-01"}}, [2, 3]),
    ],
)
def test_where_keeps_rows_by_their_columns(tmp_path, kind, where, wanted):
    found = filtered(write(tmp_path, kind, DATED), where)
    assert [row.index for row in found.used] == wanted
    assert found.num_filtered == len(DATED) - len(wanted)


def test_where_reads_places_inside_columns(tmp_path):
    rows = [{"problem": "p", "answer": "1", "info": {"level": n}} for n in range(4)]
    found = filtered(write(tmp_path, "jsonl", rows), {"info.level": {"min": 2}})
    assert [row.index for row in found.used] == [2, 3]


def test_dates_of_parquet_compare_as_days(tmp_path):
    rows = [{**row, "day": datetime.datetime.fromisoformat(row["day"])} for row in DATED]
    found = filtered(
        write(tmp_path, "parquet", rows), {"day": {"min": "2024-07-01", "max": "2025-01-01"}}
    )
    assert [row.index for row in found.used] == [1, 2, 3]


def test_a_limit_counts_the_rows_that_match(tmp_path):
    found = filtered(write(tmp_path, "jsonl", DATED), {"level": {"one_of": ["hard"]}}, limit=2)
    assert [row.index for row in found.used] == [0, 2] and found.num_filtered == 1


def test_where_in_a_folder(tmp_path):
    (tmp_path / "set").mkdir()
    write(tmp_path / "set", "jsonl", DATED)
    found = filtered(tmp_path / "set", {"level": {"one_of": ["easy"]}}, limit=1)
    assert [row.values["problem"] for row in found.used] == ["p1"]


def test_more_paths_are_read_as_one_data_set(tmp_path):
    """The index counts the rows of all files, so that ids are unique."""
    first = write(tmp_path, "jsonl", DATED)
    second = write(tmp_path, "json", DATED[2:])
    more = {"more_paths": (str(second),)}
    found = filtered(first, {}, **more)
    assert [row.index for row in found.used] == list(range(8))
    assert [row.values["problem"] for row in found.used[5:]] == ["p2", "p3", "p4"]
    found = filtered(first, {"level": {"one_of": ["easy"]}}, **more)
    assert [row.index for row in found.used] == [1, 4, 7]
    assert f"{second} (row 2)" in found.used[2].where
    assert len(filtered(first, {}, limit=6, **more).used) == 6
    # A file that the limit does not reach is not read.
    (tmp_path / "damaged.jsonl").write_text("{")
    assert (
        len(filtered(first, {}, limit=5, more_paths=(str(tmp_path / "damaged.jsonl"),)).used) == 5
    )


@pytest.mark.parametrize(
    ("where", "complaint"),
    [
        (
            {"date": {"min": "2024-07-01"}},
            "no column 'date', it has 'problem', 'answer'",
        ),
        ({"level": {"min": "2024-07-01"}}, "column 'level' is 'hard' .* a date or time"),
        ({"rank": {"min": "2024-07-01"}}, "column 'rank' is 0 .* a date or time"),
        ({"day": {"max": 3}}, "column 'day' is .* expected a number"),
        ({"rank": {"min": 17}}, r"none of 5 rows matches `where` \(rank\)"),
    ],
)
def test_where_that_does_not_fit_the_data(tmp_path, where, complaint):
    with pytest.raises(DataError, match=complaint):
        filtered(write(tmp_path, "jsonl", DATED), where)


def test_more_paths_of_a_folder_are_an_error(tmp_path):
    (tmp_path / "set").mkdir()
    file = write(tmp_path, "jsonl", DATED)
    with pytest.raises(ConfigError, match="more_paths is for files"):
        filtered(tmp_path / "set", {}, more_paths=(str(file),))


@pytest.mark.parametrize(
    ("condition", "complaint"),
    [
        ({}, "expected `min`, `max` or both, or `one_of` alone"),
        ({"min": 1, "one_of": [1]}, "or `one_of` alone"),
        ({"min": "July"}, "expected a number or a day, such as 2024-07-01, got 'July'"),
        ({"max": "2024-02-30"}, "expected a number or a day"),
        ({"min": 1, "max": "2024-07-01"}, "are a number and a day"),
        ({"min": "2025-01-01", "max": "2024-07-01"}, "is above max"),
        ({"min": 2, "max": 1}, "min=2 is above max=1"),
        ({"one_of": []}, "at least 1 item"),
    ],
)
def test_a_condition_that_means_nothing(condition, complaint):
    with pytest.raises(ValueError, match=complaint):
        DatasetOptions(path="x.json", preset="deepscaler", where={"day": condition})
