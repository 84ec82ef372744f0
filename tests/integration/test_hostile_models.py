"""The models, checkpoints, tokenizers and data of the fifth set; see `test_hostile_files.py`."""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_hostile_files import (
    PREVIEW,
    TO_HF,
    TO_MEGATRON,
    VERIFY,
    link,
    text,
    together,
)
from tests.integration.test_hostile_verbs import TWO
from tests.support.hostile import Arrange, Cases, World, check_case

pytestmark = pytest.mark.full
CASES = Cases()
case = CASES.add


# -------------------------------------------------------------------------------------------------------------
# conversion
for _words in (
    (*TO_MEGATRON[:4], "--out", ""),
    (*TO_MEGATRON, "--dtype", "fp8"),
    ("convert", "to-megatron", "--hf", "", "--out", "{w}/o"),
    ("convert", "to-megatron", "--hf", "{w}/model.tar", "--out", "{w}/o"),
    ("convert", "to-megatron", "--hf", "../..", "--out", "{w}/o"),
    (*TO_HF, "--step", "-1"),
    (*TO_HF, "--step", "1.5"),
    (*TO_HF, "--step", "9" * 30),
    (*TO_HF, "--step", "3"),
    (*TO_HF, "--dtype", "bf16", "--dtype", "float8"),
    ("convert", "to-hf", "--checkpoint", "", "--out", "{w}/o"),
    ("convert", "to-hf", "--checkpoint", "{w}/train.jsonl", "--out", "{w}/o"),
    (*VERIFY, "--logits", "--tp", "0"),
    (*VERIFY, "--logits", "--tp", "-1"),
    (*VERIFY, "--logits", "--pp", "9"),
    (*VERIFY, "--logits", "--ep", "2"),
    (*VERIFY, "--logits", "--tp", "1000000000"),
    (*VERIFY, "--logits-dtype", "fp64"),
    (*VERIFY, "--step", "1"),
    ("convert", "verify", "--hf", "{c}", "--checkpoint", "{m}", "--certificate", "{w}/o"),
    ("convert", "verify", "--hf", "{m}", "--checkpoint", "{m}", "--certificate", "{w}/o"),
    (*VERIFY[:-1], ""),
    (*VERIFY[:-1], "{c}/certificate.json"),
    (*VERIFY[:-1], "{w}/l"),
    ("export", "{c}", "--out", ""),
    ("export", "{w}/runs/a", "--step", "abc"),
    ("export", "{w}/runs/a", "--step", "-1"),
    ("export", "{w}/runs/a"),
    ("export", "{w}/l"),
    ("status", "{w}/l"),
    ("status", ""),
    ("cancel", "{w}/l"),
    ("logs", "{w}/l"),
    ("logs", ""),
):
    case(
        " ".join(_words).replace("\n", "\\n")[-90:], *_words, arrange=together(TWO, link("l", "l"))
    )


def _huge(world: World) -> None:
    """Finite in fp32, infinite in fp16."""
    path = world.model / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-400:] = struct.pack("<100f", *[1e38] * 100)
    path.write_bytes(bytes(data))


def _index(change: Callable[[dict[str, str]], Any], **more: Any) -> Arrange:
    """An index of all tensors of the model, changed."""

    def write(world: World) -> None:
        names: dict[str, str] = {}
        world.header(
            lambda h: names.update(
                {name: "model-00001-of-00001.safetensors" for name in h if name != "__metadata__"}
            )
        )
        (world.model / "model.safetensors").rename(world.model / "model-00001-of-00001.safetensors")
        tree: Any = {"metadata": {}, "weight_map": change(names) or names} | more
        world.text("model/model.safetensors.index.json", json.dumps(tree))

    return write


case("weights: too large for fp16", *TO_MEGATRON, "--dtype", "fp16", arrange=_huge)
for _name, _arrange in {
    "an absolute shard": _index(lambda n: dict.fromkeys(n, "/etc/passwd")),
    "a shard with a line end": _index(lambda n: dict.fromkeys(n, "a\nb.safetensors")),
    "a shard of no name": _index(lambda n: dict.fromkeys(n, "")),
    "a shard that is a list": _index(lambda n: {key: ["x"] for key in n}),
    "a shard with a NUL": _index(lambda n: dict.fromkeys(n, "a\0")),
    "a tensor too much": _index(
        lambda n: n.update({"model.ghost.weight": "model-00001-of-00001.safetensors"})
    ),
    "a tensor too few": _index(lambda n: n.pop("model.norm.weight") and None),
    "a map of nothing": _index(lambda n: n.clear()),
    "a map of text": _index(lambda n: None, weight_map="x"),
}.items():
    case(f"index: {_name}", *TO_MEGATRON, arrange=_arrange)


def _manifest(**change: Any) -> Arrange:
    """Every entry of the manifest's files with other values."""

    def write(world: World) -> None:
        path = world.checkpoint / "manifest.json"
        tree = json.loads(path.read_text())
        for entry in tree["files"].values():
            entry.update(change)
        path.write_text(json.dumps(tree))

    return write


for _name, _arrange in {
    "sizes that are true": _manifest(bytes=True),
    "sizes of -1": _manifest(bytes=-1),
    "sizes of 2^70": _manifest(bytes=2**70),
    "sizes of nan": _manifest(bytes=float("nan")),
    "a file is missing": lambda w: (w.checkpoint / "dist" / "__0_1.distcp").unlink(),
    "another model's config.json": lambda w: (w.checkpoint / "hf" / "config.json").write_text(json.dumps(json.loads((w.checkpoint / "hf" / "config.json").read_text()) | {"rope_theta": 7.0})),
    "two weights changed places": lambda w: [(w.checkpoint / "dist" / a).rename(w.checkpoint / "dist" / b) for a, b in (("__0_0.distcp", "x"), ("__0_1.distcp", "__0_0.distcp"), ("x", "__0_1.distcp"))],
}.items():  # fmt: skip
    case(f"checkpoint: {_name}", *TO_HF, arrange=_arrange)


# -------------------------------------------------------------------------------------------
# tokenizers, templates, data
def _tokenizer(change: Callable[[dict[str, Any]], Any]) -> Arrange:
    def write(world: World) -> None:
        path = world.model / "tokenizer.json"
        tree = json.loads(path.read_text())
        change(tree)
        path.write_text(json.dumps(tree))

    return write


for _name, _arrange in {
    "an id of -1": _tokenizer(lambda t: t["model"]["vocab"].update({"!": -1})),
    "an id of text": _tokenizer(lambda t: t["model"]["vocab"].update({"!": "5"})),
    "an added id of 10^12": _tokenizer(lambda t: t["added_tokens"][0].update(id=10**12)),
    "a normalizer that removes all": _tokenizer(lambda t: t.update(normalizer={"type": "Replace", "pattern": {"Regex": "[\\s\\S]"}, "content": ""})),
    "a pattern without an end": _tokenizer(lambda t: t.update(normalizer={"type": "Replace", "pattern": {"Regex": "("}, "content": ""})),
    "an end token that is unknown": text("model/tokenizer_config.json", '{"tokenizer_class": '
                                                                        '"PreTrainedTokenizerFast", "eos_token": {"a": 1}}'),
    "an empty template": text("model/chat_template.jinja", ""),
    "a template of blanks": text("model/chat_template.jinja", "  \n"),
    "a template that needs tools": text("model/chat_template.jinja", "{{ tools[0].name }}"),
    "a template that wants a system": text("model/chat_template.jinja", "{{ raise_exception('system prompt required') if messages[0].role != 'system' }}x"),
    "a template that formats": text("model/chat_template.jinja", "{{ '%9999999999d' % 1 }}"),
    "a template of a long range": text("model/chat_template.jinja", "{{ range(10**12) | list }}"),
    "a template that sorts without an end": text("model/chat_template.jinja", "{% for a in "
                                                                              "range(10**5) %}{{ "
                                                                              "range(10**5) | sum "
                                                                              "}}{% endfor %}"),
}.items():  # fmt: skip
    case(f"tokenizer: {_name}", *PREVIEW, arrange=_arrange)
for _name, _file, _content in (
    ("answer is true", "d.jsonl", '{"problem": "x", "answer": true}\n'),
    ("answer is nan as text after", "d.json", '[{"problem": "x", "answer": "1"}, NaN]'),
    ("gz as json", "d.json", gzip.compress(b"[]")),
    ("a NUL as the end", "d.jsonl", b'{"problem": "x", "answer": "1"}\n\0\0\0\0'),
    ("utf-32", "d.jsonl", '{"problem": "x", "answer": "1"}\n'.encode("utf-32")),
    ("an object, not a list", "d.json", '{"problem": "x", "answer": "1"}'),
    ("a problem of nothing but ends", "d.jsonl", '{"problem": "\\n\\n", "answer": "1"}\n'),
):
    case(
        f"data: {_name}", *PREVIEW, f"data.train.path={{w}}/{_file}", arrange=text(_file, _content)
    )


def _parquet(change: Callable[[Any], Any]) -> Arrange:
    def write(world: World) -> None:
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(change(pyarrow), world.folder / "d.parquet")

    return write


for _name, _table in {
    "floats as problems": lambda pa: pa.table({"problem": [1.5], "answer": ["1"]}),
    "a column twice": lambda pa: pa.Table.from_arrays([pa.array(["x"]), pa.array(["y"]), pa.array(["1"])], names=["problem", "problem", "answer"]),
    "answers of nan": lambda pa: pa.table({"problem": ["x"], "answer": [float("nan")]}),
    "answers of lists": lambda pa: pa.table({"problem": ["x"], "answer": [["1"]]}),
    "problems of times": lambda pa: pa.table({"problem": pa.array([1], pa.timestamp("us")), "answer": ["1"]}),
}.items():  # fmt: skip
    case(f"parquet: {_name}", *PREVIEW, "data.train.path={w}/d.parquet", arrange=_parquet(_table))
case("data: rows of a negative number", *PREVIEW, "--rows", "1e3")


@pytest.mark.parametrize("name", CASES)
def test_one_clear_line(name: str, original: World, tmp_path: Path) -> None:
    check_case(name, CASES[name], original, tmp_path)
