"""A fifth set of hostile and careless users: kinds of files, numbers at their edges, names, outputs
over inputs.

Written before the code was changed for it; `test_hostile_life.py` has the processes of this set.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.integration.test_hostile_verbs import DIVERSITY, RUNS, SAMPLE, SUBMIT, TWO
from tests.support.hostile import Arrange, Cases, World, check_case
from tests.support.tiers import in_tiers

pytestmark = pytest.mark.full
CASES = Cases()
case = CASES.add
COMPARE = ("compare", *RUNS, "--out", "{w}/o")
TO_MEGATRON = ("convert", "to-megatron", "--hf", "{m}", "--out", "{w}/o")
TO_HF = ("convert", "to-hf", "--checkpoint", "{c}", "--out", "{w}/o")
VERIFY = ("convert", "verify", "--hf", "{m}", "--checkpoint", "{c}", "--certificate", "{w}/o")
PREVIEW = ("data", "preview", "{r}")
SHOW = ("config", "show", "{r}")


def text(name: str, content: str | bytes) -> Arrange:
    return lambda world: world.text(name, content)


def together(*steps: Arrange) -> Arrange:
    return lambda world: [step(world) for step in steps]


def _gone(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    return path


def pipe(name: str) -> Arrange:
    return lambda w: os.mkfifo(_gone(w.folder / name))


def folder(name: str) -> Arrange:
    return lambda w: _gone(w.folder / name).mkdir()


def link(name: str, to: str) -> Arrange:
    return lambda w: _gone(w.folder / name).symlink_to(to.format(w=w.folder))


def encoded(name: str, change: Callable[[bytes], bytes]) -> Arrange:
    return lambda w: (w.folder / name).write_bytes(change((w.folder / name).read_bytes()))


def utf16(data: bytes) -> bytes:
    return data.decode().encode("utf-16")


def half(data: bytes) -> bytes:
    return data[: len(data) // 2]


KINDS: dict[str, Callable[[str], Arrange]] = {
    "a pipe": pipe,
    "a folder": folder,
    "a link to itself": lambda name: link(name, Path(name).name),
    "a link to zeros": lambda name: link(name, "/dev/zero"),
    "a dangling link": lambda name: link(name, "nowhere"),
}

# ----------------------------------------------------------------------------------------------
# each file, of each kind
for _file, _words, _kinds in (
    ("runs/b/metrics.jsonl", COMPARE, ("a pipe", "a link to itself")),
    ("runs/b/eval/results.json", COMPARE, ("a pipe", "a folder", "a link to itself")),
    ("runs/b/config.yaml", COMPARE, ("a pipe", "a folder", "a link to itself")),
    (
        "runs/b/eval/samples-1.jsonl",
        DIVERSITY,
        ("a pipe", "a folder", "a dangling link", "a link to zeros"),
    ),
    (
        "model/config.json",
        TO_MEGATRON,
        ("a pipe", "a folder", "a link to zeros", "a dangling link"),
    ),
    (
        "model/tokenizer.json",
        TO_MEGATRON,
        ("a pipe", "a folder", "a link to zeros", "a dangling link"),
    ),
    ("model/chat_template.jinja", TO_MEGATRON, ("a pipe", "a link to zeros")),
    ("model/generation_config.json", TO_MEGATRON, ("a pipe", "a folder", "a link to zeros")),
    ("model/model.safetensors", TO_MEGATRON, ("a link to zeros", "a dangling link")),
    ("model/model.safetensors.index.json", TO_MEGATRON, ("a pipe", "a folder", "a link to zeros")),
    ("checkpoint/manifest.json", TO_HF, ("a pipe", "a folder", "a link to zeros")),
    ("checkpoint/dist/.metadata", TO_HF, ("a pipe", "a link to zeros")),
    ("checkpoint/dist/__0_0.distcp", TO_HF, ("a pipe", "a folder", "a link to zeros")),
    ("checkpoint/hf/config.json", TO_HF, ("a pipe", "a link to zeros")),
    ("checkpoint/hf/tokenizer.json", TO_HF, ("a pipe", "a dangling link")),
    ("tiny.yaml", SHOW, ("a folder", "a link to zeros", "a dangling link")),
    ("reward.py", PREVIEW, ("a pipe", "a folder", "a link to itself", "a link to zeros")),
    ("model/tokenizer.json", PREVIEW, ("a pipe", "a link to zeros", "a dangling link")),
    ("model/tokenizer_config.json", PREVIEW, ("a pipe", "a link to zeros")),
    ("model/chat_template.jinja", PREVIEW, ("a pipe", "a folder", "a link to zeros")),
    ("model/config.json", ("plan", "{r}"), ("a pipe", "a folder", "a link to itself")),
    ("cluster.yaml", (*SUBMIT, "{w}/cluster.yaml"), ("a pipe", "a folder", "a link to itself")),
):
    for _kind in _kinds:
        case(
            f"{_words[0]}: {_file} is {_kind}", *_words, arrange=together(TWO, KINDS[_kind](_file))
        )

# -----------------------------------------------------------------------------------------
# encodings and half-written files
for _file, _words in (
    ("runs/b/metrics.jsonl", COMPARE),
    ("runs/b/config.yaml", COMPARE),
    ("runs/b/eval/samples-1.jsonl", DIVERSITY),
    ("model/tokenizer_config.json", PREVIEW),
    ("model/chat_template.jinja", PREVIEW),
    ("model/generation_config.json", TO_MEGATRON),
    ("checkpoint/manifest.json", TO_HF),
    ("reward.py", PREVIEW),
    ("tiny.yaml", SHOW),
):
    case(f"{_words[0]}: {_file} in UTF-16", *_words, arrange=together(TWO, encoded(_file, utf16)))
for _file, _words in (
    ("runs/b/metrics.jsonl", COMPARE),
    ("runs/b/eval/results.json", COMPARE),
    ("runs/b/eval/samples-1.jsonl", DIVERSITY),
    ("model/tokenizer.json", PREVIEW),
    ("model/tokenizer_config.json", PREVIEW),
    ("model/generation_config.json", TO_MEGATRON),
    ("tiny.yaml", SHOW),
):
    case(
        f"{_words[0]}: {_file} is compressed",
        *_words,
        arrange=together(TWO, encoded(_file, gzip.compress)),
    )
for _file, _words in (
    ("runs/b/eval/results.json", COMPARE),
    ("model/tokenizer.json", PREVIEW),
    ("model/model.safetensors", TO_MEGATRON),
    ("checkpoint/manifest.json", TO_HF),
    ("checkpoint/dist/__0_0.distcp", TO_HF),
    ("checkpoint/dist/.metadata", TO_HF),
    ("checkpoint/hf/config.json", TO_HF),
):
    case(f"{_words[0]}: half of {_file}", *_words, arrange=together(TWO, encoded(_file, half)))

# -------------------------------------------------------------------------------------------------------
# results of runs
for _name, _row in {
    "a step of text": '{"step": "1", "reward/mean": 0.5}',
    "a negative step": '{"step": -1, "reward/mean": 0.5}',
    "a step of 30 digits": '{"step": 999999999999999999999999999999, "reward/mean": 0.5}',
    "a step that is true": '{"step": true, "reward/mean": 0.5}',
    "a score that is true": '{"step": 1, "eval/x/pass@1": true}',
    "a score of -0.1": '{"step": 1, "eval/x/pass@1": -0.1}',
    "a score of 1e400": '{"step": 1, "eval/x/pass@1": 1e400}',
    "a score of a list": '{"step": 1, "eval/x/pass@1": [0.5]}',
    "a reward of 1e400": '{"step": 1, "reward/mean": 1e400}',
    "a step of 1.5": '{"step": 1.5, "reward/mean": 0.5}',
}.items():
    case(
        f"compare: {_name}",
        *COMPARE,
        arrange=together(TWO, text("runs/b/metrics.jsonl", _row + "\n")),
    )
for _name, _results in {
    "a result is true": {"samples": "samples-1.jsonl", "metrics": {"eval/x/pass@1": True}},
    "a result is below 0": {"samples": "samples-1.jsonl", "metrics": {"eval/x/pass@1": -0.0001}},
    "a result is nothing": {"samples": "samples-1.jsonl", "metrics": {"eval/x/pass@1": None}},
    "metrics are missing": {"samples": "samples-1.jsonl"},
}.items():
    case(
        f"compare: {_name}",
        *COMPARE,
        arrange=together(TWO, text("runs/b/eval/results.json", json.dumps(_results))),
    )
for _name, _samples in {
    "samples with an absolute path": "/etc/passwd",
    "samples are the folder": ".",
    "samples of no name": "",
    "samples with a NUL": "a\0b",
    "samples with 5,000 letters": "s" * 5000,
    "samples are a list": ["samples-1.jsonl"],
}.items():
    case(f"diversity: {_name}", *DIVERSITY, arrange=together(TWO, text("runs/b/eval/results.json", json.dumps({"samples": _samples, "metrics": {}}))))  # fmt: skip
for _name, _change in {
    "a label of 2": {"label": 2},
    "a label of text": {"label": "1"},
    "a label of half": {"label": 0.5},
    "a prompt of nothing": {"prompt_id": None},
    "an id of numbers": {"id": 7},
}.items():
    _lines = [
        {"digest": "1", "judged_by": {}},
        SAMPLE | _change,
        SAMPLE | _change | {"id": "1:x/0#1"},
    ]
    if _name == "an id of numbers":
        _lines = [_lines[0], *(line | {"id": 7} for line in _lines[1:])]
    case(f"diversity: {_name}", *DIVERSITY, arrange=together(TWO, text("runs/b/eval/samples-1.jsonl", "".join(json.dumps(line) + "\n" for line in _lines))))  # fmt: skip
case("diversity: one response twice", *DIVERSITY, arrange=together(TWO, text("runs/b/eval/samples-1.jsonl", "".join(json.dumps(line) + "\n" for line in [{"digest": "1", "judged_by": {}}, SAMPLE, SAMPLE]))))  # fmt: skip
case(
    "diversity: an embedder of no name",
    *DIVERSITY[:3],
    "--embedder",
    "",
    "--out",
    "{w}/o",
    arrange=TWO,
)
case("diversity: no page", *DIVERSITY[:5], "--out", "", arrange=TWO)
case(
    "diversity: page over the samples",
    *DIVERSITY[:5],
    "--out",
    "{w}/runs/a/eval/samples-1.jsonl",
    arrange=TWO,
)
case(
    "diversity: page over results",
    *DIVERSITY[:5],
    "--out",
    "{w}/runs/a/eval/results.json",
    arrange=TWO,
)
case(
    "diversity: page and vectors in one file",
    *DIVERSITY[:5],
    "--out",
    "{w}/x",
    "--save",
    "{w}/x",
    arrange=TWO,
)
case(
    "diversity: one run twice",
    "diversity",
    RUNS[0],
    RUNS[0],
    "--embedder",
    "hashed",
    "--out",
    "{w}/o",
    arrange=TWO,
)
case("diversity: a benchmark of no name", *DIVERSITY, "--benchmark", "", arrange=TWO)
case("compare: no page", "compare", *RUNS, "--out", "", arrange=TWO)
case(
    "compare: page over the metrics",
    "compare",
    *RUNS,
    "--out",
    "{w}/runs/a/metrics.jsonl",
    arrange=TWO,
)
case("compare: page over the report", "compare", *RUNS, "--out", "{w}/runs/a/report.html", arrange=together(TWO, text("runs/a/report.html", "<html>my run</html>")))  # fmt: skip
case("compare: figures through a link into the run", *COMPARE, "--csv", "{w}/l", arrange=together(TWO, link("l", "runs/a/metrics.jsonl")))  # fmt: skip
case("compare: figures over a data set", *COMPARE, "--csv", "{w}/train.jsonl", arrange=TWO)
case("compare: figures over a table", *COMPARE, "--csv", "{w}/mine.csv", arrange=together(TWO, text("mine.csv", "a,b\n1,2\n")))  # fmt: skip
case("compare: figures over a paper", *COMPARE, "--latex", "{w}/paper.tex", arrange=together(TWO, text("paper.tex", "\\begin{document}\nyears\n\\end{document}\n")))  # fmt: skip
case("compare: figures over other json", *COMPARE, "--json", "{w}/x.json", arrange=together(TWO, text("x.json", '{"runs": []}')))  # fmt: skip
case(
    "compare: page through a link to itself",
    "compare",
    *RUNS,
    "--out",
    "{w}/l",
    arrange=together(TWO, link("l", "l")),
)
case(
    "compare: page into a kernel's folder",
    "compare",
    *RUNS,
    "--out",
    "/sys/kernel/x.html",
    arrange=TWO,
)
case(
    "compare: page with a name of 300 letters",
    "compare",
    *RUNS,
    "--out",
    "{w}/" + "x" * 300,
    arrange=TWO,
)
case("compare: an empty name", "compare", "", "--out", "{w}/o")
case("compare: an empty folder", "compare", "{w}/e", "--out", "{w}/o", arrange=folder("e"))

# ----------------------------------------------------------------------------------------------------------------
# paper
PAPER = ("paper", "table1", "--scale", "laptop", "--dry-run")
for _words in (
    *(
        ("--dir", ""),
        ("--dir", "{r}/x"),
        ("--dir", "{w}/l"),
        ("--dir", "/dev/null"),
        ("--seeds", "1.5"),
        ("--seeds", ""),
    ),
    *(
        ("--cluster", ""),
        ("--cluster", "{w}"),
        ("--cluster", "{r}"),
        ("run.steps=0",),
        ("run.seed=-1",),
        ("run.name=x",),
    ),
    *(("objective.name=grpo",), ("run.dir={w}/elsewhere",), ("model.path={w}/none",)),
):
    case(f"paper {' '.join(_words)}", *PAPER, *_words, arrange=link("l", "l"))

# ------------------------------------------------------------------------------------------------------
# plan and numbers
for _words in (
    *(
        ("resources.nodes=true",),
        ("resources.gpus_per_node=-8",),
        ("resources.nodes=1.0",),
    ),
    *(("resources.gpu=",), ("resources.gpu=[h200]",)),
):
    case(f"plan {' '.join(_words)}"[:60], "plan", "{r}", *_words)
for _name, _changes in {
    "layers are true": {"num_hidden_layers": True},
    "a size of 1e3": {"hidden_size": 64.0},
    "a size of 2^63": {"intermediate_size": 2**63},
    "a vocabulary of text": {"vocab_size": "272"},
    "an eps of text": {"rms_norm_eps": "1e-6"},
    "an eps of 1e400": {"rms_norm_eps": 1e308 * 10},
    "positions of -1": {"max_position_embeddings": -1},
    "positions of text": {"max_position_embeddings": "many"},
    "a dtype of 7": {"dtype": 7, "torch_dtype": 7},
    "ties are 1": {"tie_word_embeddings": 1},
    "an activation of a list": {"hidden_act": ["silu"]},
    "a head of -16": {"head_dim": -16},
}.items():
    case(
        f"plan: {_name}",
        "plan",
        "{r}",
        arrange=lambda w, c=_changes: w.model_json("config.json", **c),
    )  # type: ignore[misc]
for _word in (
    *(
        "run.steps=9223372036854775808",
        "run.seed=9223372036854775808",
        "run.seed=-0.0",
        "run.seed=1e400",
        "run.steps=.inf",
    ),
    *(
        "optimizer.lr=-0.0",
        "optimizer.lr=true",
        "optimizer.lr=1e400",
        "optimizer.lr=.inf",
        "checkpoint.every=true",
    ),
    *(
        "data.max_prompt_tokens=2147483648",
        "data.max_prompt_tokens=-0",
        "batch.tokens_per_microbatch=-1",
        "batch.epochs=0",
    ),
    *(
        "rollout.sampling.temperature=-0.5",
        "rollout.sampling.temperature=1e-400",
        "rollout.sampling.temperature=1e400",
    ),
    *(
        "rollout.sampling.top_p=1.0001",
        "reward.timeout_s=-1",
        "reward.timeout_s=true",
        "reward.workers=0",
        "reward.workers=1.5",
    ),
    *(
        "run.name='a\nb'",
        "run.name=''",
        "run.name='-rf'",
        "run.name='a/../b'",
        "model.path='-x'",
        "model.path=''",
    ),
    *(
        "data.train.path=''",
        "data.train.path='-'",
        "run.dir=" + "d" * 300,
        "objective.beta=-0.5",
        "objective.beta=[1]",
        "run={w}",
    ),
    *(
        "resources.time_limit=-1",
        "resources.time_limit=00:00:00",
        "resources.time_limit=1-99:00:00",
        "resources.time_limit=２:00:00",
    ),
    *(
        "rollout.sampling.stop=[1]",
        "rollout.sampling.stop={{a: b}}",
        "precision.dtype=true",
        "logging.tensorboard=1",
    ),
    *(
        "optimizer.weight_decay=-1",
        "optimizer.adam_beta2=1.5",
        "optimizer.adam_eps=0",
        "optimizer.warmup_updates=1e9",
    ),
):
    case(f"train {_word}"[:60], "train", "{r}", _word)
for _words in (
    *(
        ("--lines", "0"),
        ("--lines", "-5"),
        ("--lines", "1e3"),
        ("--attempt", "99"),
        ("--attempt", "0"),
        ("--attempt", str(2**63)),
    ),
):
    case(f"logs {' '.join(_words)}", "logs", "{w}/runs/a", *_words, arrange=TWO)

# ------------------------------------------------------------------------------------------------------------
# submission
CLUSTER = {"name": "c", "python": ["python"]}
for _key, _value in (
    *(
        ("partition", 5),
        ("account", True),
        ("name", ""),
        ("name", None),
        ("exclusive", "no"),
        ("mem", -1),
    ),
    *(
        ("cpus_per_task", True),
        ("cpus_per_task", 2**63),
        ("gpu_request", "magic"),
        ("modules", "cuda"),
        ("setup", "true"),
    ),
    *(
        ("env", {"A": None}),
        ("env", {"": "x"}),
        ("env", {"A": ["x"]}),
        ("scratch", "relative/x"),
        ("scratch", "/a\nb"),
    ),
    *(
        ("network_interface", ""),
        ("launcher", True),
        ("container", "x.sif"),
        ("container", {"runtime": "pyxis"}),
    ),
    *(
        ("srun_args", "--x"),
        ("srun_args", [1]),
        ("python", [""]),
        ("python", ["a\0b"]),
        ("reservation", "a b"),
    ),
):
    case(f"cluster: {_key}={_value!r}", *SUBMIT, "{w}/c.yaml", arrange=text("c.yaml", yaml.safe_dump(CLUSTER | {_key: _value})))  # fmt: skip
for _words in (
    *(
        ("--sweep", "run.seed=.nan"),
        ("--sweep", "run.seed=1e400"),
        ("--sweep", "run.seed=[1,2"),
        ("--sweep", "run.seed=1,1"),
    ),
    *(
        ("--sweep", ""),
        ("--sweep", "run.name=x,x"),
        ("--sweep", "nosuch.key=1,2"),
        ("--sweep", "run.seed=-1,2"),
        ("--seeds", ""),
    ),
    *(
        ("--seeds", "1e3"),
        ("--seeds", "3", "run.seed=9223372036854775806"),
        ("run.dir=-x\ny",),
        ("--sweep", "run.name=" + "n" * 300),
    ),
):
    case(f"submit {' '.join(_words)}"[:60].replace("\n", "\\n"), *SUBMIT, "local", *_words)
case("submit: a cluster of no name", *SUBMIT, "")
case("submit: a cluster in a folder of 300 letters", *SUBMIT, "{w}/" + "c" * 300)


@pytest.mark.parametrize("name", in_tiers(CASES, every=2))
def test_one_clear_line(name: str, original: World, tmp_path: Path) -> None:
    check_case(name, CASES[name], original, tmp_path)
