"""A sixth set of hostile and careless users, written after the faults of the fifth were fixed:
other kinds of mistakes.

Values that look right, folders of other programs, results that do not belong together, damaged
parts of a checkpoint.
"""

from __future__ import annotations

import json
import shutil
import struct
from typing import Any

import pytest
import yaml

from tests.integration.test_hostile_files import (
    CLUSTER,
    COMPARE,
    PREVIEW,
    SHOW,
    TO_HF,
    TO_MEGATRON,
    VERIFY,
    encoded,
    folder,
    link,
    text,
    together,
)
from tests.integration.test_hostile_verbs import BENCHMARK, DIVERSITY, RUNS, SAMPLE, SUBMIT, TWO
from tests.support.hostile import Arrange, Cases, World, check_case
from tests.support.tiers import in_tiers

pytestmark = pytest.mark.full
CASES = Cases()
case = CASES.add


# ------------------------------------------------------------------------------------- YAML with
# another meaning
def _yaml(old: str, new: str) -> Arrange:
    def write(world: World) -> None:
        content = world.run.read_text()
        assert old in content
        world.run.write_text(content.replace(old, new, 1))

    return write


for _name, _old, _new in (
    ("steps of base 60", "steps: 2", "steps: 1:30"),
    ("steps with a tag", "steps: 2", "steps: !!int 2"),
    ("steps in quotes", "steps: 2", 'steps: "2"'),
    ("steps of base 8", "steps: 2", "steps: 0o7"),
    ("steps of a date", "steps: 2", "steps: 2026-01-01"),
    ("steps yes", "steps: 2", "steps: yes"),
    ("a name of several lines", "name: tiny", "name: |\n    tiny\n    x"),
    ("a name that turns the text", "name: tiny", 'name: "ti\\u202eny"'),
    ("a section in capitals", "run:\n", "Run:\n"),
    ("a key with a dot", "run:\n", "run.seed: 4\nrun:\n"),
    ("a key indented too far", "  steps: 2", "   steps: 2"),
    ("a section as a list", "parallel:\n", "parallel:\n- "),
    ("a value after a value", "steps: 2", "steps: 2 3"),
    ("an include below a section", "run:\n", "run:\n  include: x.yaml\n"),
    ("environment variables", "name: tiny", "name: ${{HOME}}"),
):
    case(f"YAML: {_name}", *SHOW, arrange=_yaml(_old, _new.replace("{{", "{").replace("}}", "}")))
for _word in (
    *(
        "run.steps=3,",
        'run.steps="3"',
        "run.steps={{value: 3}}",
        "optimizer.lr='1e-3'",
    ),
    *(
        "data.train.columns={{problem: problem, answer: nothing}}",
        "checkpoint.keep_last=-1",
        "evaluation.k=1",
        "run.steps=$STEPS",
    ),
    *(
        "checkpoint.every=.nan",
        "reward.timeout_s=10s",
        "reward.memory_limit_gib=4GiB",
        "resources.gpu=H100",
        "parallel.tp=1,2",
    ),
    *(
        "model.trust_remote_code=maybe",
        "data.shuffle=0",
        "objective.score=RLOO",
        "rollout.sampling.stop='\\n",
        "data.train.limit=-1",
    ),
):
    case(f"preview {_word}", *PREVIEW, _word)

# ------------------------------------------------------------------------------------- results that
# do not fit together
case("compare: the folder of the runs", "compare", "{w}/runs", "--out", "{w}/o", arrange=TWO)
case("compare: a page among the runs", "compare", *RUNS, "{w}/runs/page.html", "--out", "{w}/o", arrange=together(TWO, text("runs/page.html", "<html>")))  # fmt: skip
case(
    "compare: one run through a link",
    *COMPARE[:3],
    "{w}/l",
    "--out",
    "{w}/o",
    arrange=together(TWO, link("l", "runs/a")),
)
case("compare: a checkpoint", "compare", RUNS[0], "{c}", "--out", "{w}/o", arrange=TWO)
case("compare: steps that go back", *COMPARE, arrange=together(TWO, text("runs/b/metrics.jsonl", '{"step": 2}\n{"step": 1}\n')))  # fmt: skip
case(
    "compare: a step twice",
    *COMPARE,
    arrange=together(TWO, text("runs/b/metrics.jsonl", '{"step": 2}\n{"step": 2}\n')),
)
case("compare: no common benchmark", *COMPARE, arrange=together(TWO, text("runs/b/metrics.jsonl", '{"step": 1, "eval/y/pass@1": 0.1}\n'), text("runs/b/eval/results.json", '{"metrics": {}}')))  # fmt: skip
case("compare: metrics with a key twice", *COMPARE, arrange=together(TWO, text("runs/b/metrics.jsonl", '{"step": 1, "step": 2}\n')))  # fmt: skip
case("compare: metrics of objects", *COMPARE, arrange=together(TWO, text("runs/b/metrics.jsonl", '{"step": 1, "reward/mean": {"a": 1}}\n')))  # fmt: skip
case("compare: a configuration with two seeds", *COMPARE, arrange=together(TWO, text("runs/b/config.yaml", "run: {seed: 1}\nrun: {seed: 2}\n")))  # fmt: skip
case(
    "compare: a seed of true",
    *COMPARE,
    arrange=together(TWO, text("runs/b/config.yaml", "run: {seed: true}\n")),
)
case(
    "compare: a seed of 0.5",
    *COMPARE,
    arrange=together(TWO, text("runs/b/config.yaml", "run: {seed: 0.5}\n")),
)
case("diversity: the results as a file", "diversity", "{w}/runs/a/eval/results.json", "--embedder", "hashed", "--out", "{w}/o", arrange=TWO)  # fmt: skip
case("diversity: a run without an evaluation", *DIVERSITY, arrange=together(TWO, lambda w: shutil.rmtree(w.folder / "runs/b/eval")))  # fmt: skip
case("diversity: an embedder without weights", *DIVERSITY[:3], "--embedder", "{w}/e", "--out", "{w}/o", arrange=together(TWO, lambda w: shutil.copytree(w.model, w.folder / "e") and (w.folder / "e/model.safetensors").unlink()))  # fmt: skip
case("diversity: an embedder of noise", *DIVERSITY[:3], "--embedder", "{w}/e", "--out", "{w}/o", arrange=together(TWO, lambda w: shutil.copytree(w.model, w.folder / "e"), text("e/model.safetensors", b"\xff" * 999)))  # fmt: skip
case("diversity: an embedder of an unknown kind", *DIVERSITY[:3], "--embedder", "{w}/e", "--out", "{w}/o", arrange=together(TWO, lambda w: shutil.copytree(w.model, w.folder / "e"), text("e/config.json", '{"model_type": "magic"}')))  # fmt: skip
case("diversity: an embedder with a broken tokenizer", *DIVERSITY[:3], "--embedder", "{w}/e", "--out", "{w}/o", arrange=together(TWO, lambda w: shutil.copytree(w.model, w.folder / "e"), text("e/tokenizer.json", "{}")))  # fmt: skip


def _nan_embedder(world: World) -> None:
    shutil.copytree(world.model, world.folder / "e")
    world.text("e/modules.json", '[{"type": "x.Transformer"}, {"type": "x.Pooling"}]')
    world.text("e/1_Pooling/config.json", '{"pooling_mode": "mean"}')
    path = world.folder / "e" / "model.safetensors"
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    path.write_bytes(data[: 8 + length] + b"\xff" * (len(data) - 8 - length))


case("diversity: an embedder of nan", *DIVERSITY[:3], "--embedder", "{w}/e", "--out", "{w}/o", arrange=together(TWO, lambda w: w.text("runs/b/eval/samples-1.jsonl", "".join(json.dumps(line) + "\n" for line in [{"digest": "1"}, SAMPLE, SAMPLE | {"id": "y", "response": "other"}])), _nan_embedder))  # fmt: skip

# ------------------------------------------------------------------------------------------------
# models of other programs
for _name, _arrange in {
    "an adapter": lambda w: [path.unlink() for path in w.model.glob("*.safetensors")] and w.text("model/adapter_config.json", '{"peft_type": "LORA"}') and w.text("model/adapter_model.safetensors", b"\x02\0\0\0\0\0\0\0{}"),
    "one file for llama.cpp": lambda w: [path.unlink() for path in w.model.glob("*.safetensors")] and w.text("model/model.gguf", b"GGUF" + bytes(99)),
    "weights of PyTorch": lambda w: (w.model / "model.safetensors").rename(w.model / "consolidated.00.pth"),
    "a name of a download that runs": lambda w: (w.model / "model.safetensors").rename(w.model / "model.safetensors.incomplete"),
    "a header of no bytes": text("model/model.safetensors", bytes(8) + bytes(99)),
    "a header longer than the file": text("model/model.safetensors", struct.pack("<Q", 10**6) + b"{}"),
    "a header of blanks": text("model/model.safetensors", struct.pack("<Q", 64) + b" " * 64),
    "a header in UTF-16": text("model/model.safetensors", struct.pack("<Q", 6) + "{}".encode("utf-16")),
    "a tensor in another shape": lambda w: w.header(lambda h: h["model.norm.weight"].update(shape=[32, 2])),
    "a scalar": lambda w: w.header(lambda h: h["model.norm.weight"].update(shape=[])),
    "a shape of true": lambda w: w.header(lambda h: h["model.norm.weight"].update(shape=[True, 64])),
    "offsets of floats": lambda w: w.header(lambda h: h["model.norm.weight"].update(data_offsets=[float(x) for x in h["model.norm.weight"]["data_offsets"]])),
    "two tensors of one place": lambda w: w.header(lambda h: h["model.layers.0.input_layernorm.weight"].update(data_offsets=h["model.layers.1.input_layernorm.weight"]["data_offsets"])),
    "a head beside tied weights": lambda w: w.model_json("config.json", tie_word_embeddings=not json.loads((w.model / "config.json").read_text())["tie_word_embeddings"]),
    "a config.json of a vision model": lambda w: w.model_json("config.json", vision_config={"depth": 2}, model_type="qwen3_vl"),
    "experts of zero": lambda w: w.model_json("config.json", num_experts=0, model_type="qwen3_moe"),
    "scaling by 0": lambda w: w.model_json("config.json", rope_scaling={"rope_type": "linear", "factor": 0}),
    "scaling by 1e400": lambda w: w.model_json("config.json", rope_scaling={"rope_type": "linear", "factor": 1e308 * 10}),
    "scaling that is dynamic": lambda w: w.model_json("config.json", rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
}.items():  # fmt: skip
    case(f"model: {_name}", *TO_MEGATRON, arrange=_arrange)
for _words in (
    ("--hf", "https://huggingface.co/a/b"),
    ("--hf", "{m}/"),
    ("--hf", "{w}"),
    ("--hf", "{m}/tokenizer.json"),
):
    case(f"convert {' '.join(_words)}", "convert", "to-megatron", *_words, "--out", "{m}/../model")


# ------------------------------------------------------------------------------------------------
# parts of a checkpoint
def _manifest(change: Any) -> Arrange:
    def write(world: World) -> None:
        path = world.checkpoint / "manifest.json"
        tree = json.loads(path.read_text())
        change(tree)
        path.write_text(json.dumps(tree))

    return write


def _renamed(old: str, new: str) -> Arrange:
    return _manifest(lambda tree: tree["files"].update({new: tree["files"].pop(old)}))


for _name, _arrange in {
    "a format of the future": _manifest(lambda t: t.update(format=999)),
    "a format of text": _manifest(lambda t: t.update(format="1")),
    "no format": _manifest(lambda t: t.pop("format")),
    "a step of text": _manifest(lambda t: t.update(step="3")),
    "a step of -1": _manifest(lambda t: t.update(step=-1)),
    "a name upwards": _renamed("hf/config.json", "hf/../../tiny.yaml"),
    "a name with a backslash": _renamed("hf/config.json", "hf\\config.json"),
    "an empty name": _renamed("hf/config.json", ""),
    "digests of text": _manifest(lambda t: [entry.update(xxh3_128="x" * 32) for entry in t["files"].values()]),
    "no hf": lambda w: shutil.rmtree(w.checkpoint / "hf"),
    "no dist": lambda w: shutil.rmtree(w.checkpoint / "dist"),
    "an empty part": text("checkpoint/dist/__0_0.distcp", ""),
    "no common part": lambda w: (w.checkpoint / "dist/common.pt").unlink(),
    "no index": lambda w: (w.checkpoint / "dist/.metadata").unlink(),
    "a part of another checkpoint": lambda w: shutil.copy(w.checkpoint / "dist/__0_0.distcp", w.checkpoint / "dist/__7_7.distcp"),
    "dist through a dangling link": lambda w: shutil.rmtree(w.checkpoint / "dist") or (w.checkpoint / "dist").symlink_to("gone"),
    "half of the tokenizer": encoded("checkpoint/hf/tokenizer.json", lambda data: data[: len(data) // 2]),
}.items():  # fmt: skip
    case(f"checkpoint: {_name}", *TO_HF, arrange=_arrange)
case("verify: weights of another model", *VERIFY, arrange=lambda w: (w.model / "model.safetensors").write_bytes((w.model / "model.safetensors").read_bytes()[:-4] + b"\0\0\0\x40"))  # fmt: skip
case(
    "verify: one layer less",
    *VERIFY,
    arrange=lambda w: w.model_json("config.json", num_hidden_layers=1),
)
case("verify: a certificate below a file", *VERIFY[:-1], "{r}/x/y")

# -------------------------------------------------------------------------------------------
# clusters, sweeps, run folders
for _key, _value in (
    *(
        ("container", {"runtime": "pyxis", "image": ""}),
        ("container", {"runtime": "pyxis", "image": "x", "mounts": "/a"}),
    ),
    *(
        ("container", {"runtime": "pyxis", "image": "x", "mounts": ["/a:/b:/c:/d"]}),
        ("account", "räu"),
        ("modules", [""]),
    ),
    *(
        ("env", {"1A": "x"}),
        ("env", {"A": 5}),
        ("setup", [5]),
        ("cpu_bind", "cores"),
        ("mem", "5XB"),
        ("exclusive", "true"),
    ),
    *(("partition", "a,b;c"), ("qos", ""), ("include", "other.yaml"), ("constraint", "")),
):
    case(f"cluster of {_key}={_value!r}", *SUBMIT, "{w}/c.yaml", arrange=text("c.yaml", yaml.safe_dump(CLUSTER | {_key: _value}, allow_unicode=True)))  # fmt: skip
for _words in (
    *(
        ("--sweep", "run.seed=1,2", "--sweep", "run.seed=3,4"),
        ("--sweep", "run.dir=a,b", "--seeds", "0x2"),
        ("--sweep", "objective.beta=1,one"),
    ),
    *(
        ("--sweep", "objective=pacs,grpo"),
        ("--sweep", "optimizer.lr=1e-3,-1"),
        ("--seeds", "257"),
        ("resources.time_limit=00:00:01",),
    ),
    *(
        ("--sweep", "run.steps=1,2", "run.steps=0"),
        ("--sweep", "run.steps=1;2"),
    ),
):
    case(f"submit with {' '.join(_words)}", *SUBMIT, "local", *_words)
for _name, _file, _content in (
    ("attempts of nonsense", "logs/attempts.jsonl", "nonsense\n"),
    ("no attempts, no log", "logs/x", ""),
):
    case(f"logs: {_name}", "logs", "{w}/runs/tiny", arrange=text(f"runs/tiny/{_file}", _content))
case("export: a run of a configuration only", "export", "{w}/runs/a", "--out", "{w}/o", arrange=TWO)

# -----------------------------------------------------------------------------------------------------
# data, tokenizers
for _name, _arrange, _word in (
    ("an empty folder", folder("d"), "data.train.path={w}/d"),
    ("a folder of other files", text("d/readme.md", "x"), "data.train.path={w}/d"),
    ("a column that is nested", text("d.jsonl", '{"a": {"problem": "x"}, "answer": "1"}\n'), "data.train.path={w}/d.jsonl"),
    ("no answer in the second row", text("d.jsonl", '{"problem": "x", "answer": "1"}\n{"problem": '
                                                    '"y"}\n'), "data.train.path={w}/d.jsonl"),
    ("an answer of 10^7 letters in a row", text("d.jsonl", b'{"problem": "x", "answer": "' + b"1" * 10**7 + b'"}\n{'), "data.train.path={w}/d.jsonl"),
    ("a revision of a file", text("d.jsonl", '{"problem": "x", "answer": "1"}\n'), "data.train.revision=main"),
    ("a subset of a file", text("d.jsonl", '{"problem": "x", "answer": "1"}\n'), "data.train.subset=main"),
    ("a preset and columns", lambda w: None, "data.train.preset=gsm8k"),
):  # fmt: skip
    case(f"data: {_name}", *PREVIEW, _word, arrange=_arrange)
for _name, _file, _content in (
    ("ends of true", "generation_config.json", '{"eos_token_id": true}'),
    ("ends of nested lists", "generation_config.json", '{"eos_token_id": [[1]]}'),
    ("ends of 2^63", "generation_config.json", '{"eos_token_id": 9223372036854775808}'),
    ("ends of 1.5", "generation_config.json", '{"eos_token_id": 1.5}'),
    ("half of the generation settings", "generation_config.json", '{"eos_token_id": 1'),
):
    case(
        f"tokenizer: {_name}",
        "train",
        "{r}",
        "parallel.tp=1",
        arrange=text(f"model/{_file}", _content),
    )
for _name, _content in (
    ("calls what is not there", "{{ messages[0].text.upper() }}"),
    ("reads a user's name", "{{ messages[0].name | upper }}{{ undefined_name.x }}"),
    ("loops over a number", "{% for m in 7 %}x{% endfor %}"),
    ("ends in the middle", "{% for m in messages %}{{ m.content "),
    ("writes the same for all", "<|im_start|>user hello<|im_end|>"),
    ("adds ten million letters", "{{ 'x' * 10000000 }}{{ messages[0].content }}"),
):
    case(f"template: {_name}", *PREVIEW, arrange=text("model/chat_template.jinja", _content))
for _words in (
    ("evaluation.samples_per_prompt=0",),
    ("--model", "{m}", "{m}/../model"),
    ("--no-verify", "--model", "{w}"),
    ("--out", "{w}/train.jsonl/x"),
):
    case(f"eval {' '.join(_words)}", "eval", "{r}", *BENCHMARK, *_words)


@pytest.mark.parametrize("name", in_tiers(CASES, every=2))
def test_one_clear_line(name: str, original: World, tmp_path: Any) -> None:
    check_case(name, CASES[name], original, tmp_path)
