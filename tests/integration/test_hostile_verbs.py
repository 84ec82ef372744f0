"""A fourth set of hostile and careless users: results of runs, outputs, other tools' habits,
clocks, terminals.

Written before the code was changed for it. Every verb that reads or writes files is here.
"""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.hostile import Arrange, Cases, World, check_case, copy_world, run
from tests.support.tiers import in_tiers

pytestmark = pytest.mark.full
CASES = Cases()
case = CASES.add


def text(name: str, content: str | bytes) -> Arrange:
    return lambda world: world.text(name, content)


def together(*steps: Arrange) -> Arrange:
    return lambda world: [step(world) for step in steps]


# ---------------------------------------------------------------------------------------------------
# results of two runs
SAMPLE = {
    "id": "1:x/0#0",
    "prompt_id": "x/0",
    "source": "x",
    "prompt": "p",
    "answer": "1",
    "response": "r",
    "label": 1,
    "failure": None,
    "stop": "eos",
    "prompt_tokens": 1,
    "response_tokens": 1,
}


def finished(world: World, name: str = "a", seed: Any = 0) -> None:
    """A run with three rows of metrics and an evaluation."""
    config = {"run": {"name": name, "seed": seed}, "objective": {"name": "pacs"}}
    world.text(f"runs/{name}/config.yaml", yaml.safe_dump(config))
    rows = [
        {"step": step, "reward/mean": 0.1 * step, "eval/x/pass@1": 0.2 * step} for step in range(3)
    ]
    world.text(f"runs/{name}/metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    world.text(
        f"runs/{name}/eval/results.json",
        json.dumps({"samples": "samples-1.jsonl", "metrics": {"eval/x/pass@1": 0.4}}),
    )
    lines = [{"digest": "1", "judged_by": {}}, SAMPLE, SAMPLE | {"id": "1:x/0#1", "response": "s"}]
    world.text(
        f"runs/{name}/eval/samples-1.jsonl", "".join(json.dumps(line) + "\n" for line in lines)
    )


TWO = together(finished, partial(finished, name="b", seed=1))
RUNS = ("{w}/runs/a", "{w}/runs/b")
COMPARE = ("compare", *RUNS, "--out", "{w}/o")
DIVERSITY = ("diversity", *RUNS, "--embedder", "hashed", "--out", "{w}/o")
for _name, _file, _content in (
    ("a line of metrics is cut", "metrics.jsonl", '{"step": 1, "reward/mean"\n{"step": 2}\n'),
    ("metrics are lists", "metrics.jsonl", "[1, 2]\n[3, 4]\n"),
    (
        "a score is text",
        "metrics.jsonl",
        '{"step": 1, "reward/mean": "high", "eval/x/pass@1": "high"}\n',
    ),
    (
        "a score is infinite",
        "metrics.jsonl",
        '{"step": 1, "reward/mean": Infinity, "eval/x/pass@1": NaN}\n',
    ),
    ("the configuration is binary", "config.yaml", bytes(range(256))),
    ("the seed is a list", "config.yaml", "run: {seed: [1]}\n"),
    ("the seed is a word", "config.yaml", "run: {seed: one}\n"),
    ("the configuration is a list", "config.yaml", "[1, 2]\n"),
    ("results are empty", "eval/results.json", ""),
    ("metrics of results are a list", "eval/results.json", '{"samples": "s", "metrics": [1]}'),
    (
        "a result is text",
        "eval/results.json",
        '{"samples": "s", "metrics": {"eval/x/pass@1": "0.5"}}',
    ),
    ("a result is 7", "eval/results.json", '{"samples": "s", "metrics": {"eval/x/pass@1": 7}}'),
):
    case(f"compare: {_name}", *COMPARE, arrange=together(TWO, text(f"runs/b/{_file}", _content)))
case(
    "compare: a run that is not there",
    "compare",
    RUNS[0],
    "{w}/runs/none",
    "--out",
    "{w}/o",
    arrange=TWO,
)
case("compare: a configuration as a run", "compare", RUNS[0], "{r}", "--out", "{w}/o", arrange=TWO)
case("compare: one run twice", "compare", RUNS[0], *RUNS, "--out", "{w}/o", arrange=TWO)
case("compare: the page below a file", "compare", *RUNS, "--out", "{r}/x", arrange=TWO)
case("compare: the page over a folder", "compare", *RUNS, "--out", "{m}", arrange=TWO)
case(
    "compare: into a pipe",
    *COMPARE[:3],
    "--out",
    "{w}/p",
    arrange=together(TWO, lambda w: os.mkfifo(w.folder / "p")),
)
case("compare: two outputs in one file", *COMPARE, "--json", "{w}/x", "--csv", "{w}/x", arrange=TWO)
case(
    "compare: output over a run's metrics",
    *COMPARE,
    "--json",
    "{w}/runs/a/metrics.jsonl",
    arrange=TWO,
)
case("compare: metrics are a folder", *COMPARE, arrange=together(TWO, lambda w: (w.folder / "runs/b/metrics.jsonl").unlink() or (w.folder / "runs/b/metrics.jsonl").mkdir()))  # fmt: skip
for _name, _file, _content in (
    ("results without samples", "eval/results.json", '{"metrics": {}}'),
    ("samples of another folder", "eval/results.json", '{"samples": "../../../tiny.yaml", '
                                                       '"metrics": {}}'),
    ("samples are a number", "eval/results.json", '{"samples": 7, "metrics": {}}'),
    ("results are a page", "eval/results.json", "<html></html>"),
    ("a sample without label", "eval/samples-1.jsonl", '{"digest": "1"}\n{"source": "x", '
                                                       '"prompt_id": "x/0"}\n'),
    ("a response of numbers", "eval/samples-1.jsonl", '{"digest": "1"}\n' + (json.dumps(SAMPLE | {"response": 7}) + "\n") * 2),
    ("a source of lists", "eval/samples-1.jsonl", '{"digest": "1"}\n' + (json.dumps(SAMPLE | {"source": []}) + "\n") * 2),
    ("samples are text", "eval/samples-1.jsonl", "hello\nworld\n"),
    ("samples are binary", "eval/samples-1.jsonl", bytes(range(256)) * 4),
):  # fmt: skip
    case(
        f"diversity: {_name}", *DIVERSITY, arrange=together(TWO, text(f"runs/b/{_file}", _content))
    )
case("diversity: without the samples", *DIVERSITY, arrange=together(TWO, lambda w: (w.folder / "runs/b/eval/samples-1.jsonl").unlink()))  # fmt: skip
case("diversity: no such benchmark", *DIVERSITY, "--benchmark", "aime99", arrange=TWO)
case(
    "diversity: no such embedder",
    *DIVERSITY[:3],
    "--embedder",
    "{w}/none",
    "--out",
    "{w}/o",
    arrange=TWO,
)
case(
    "diversity: a data file as embedder",
    *DIVERSITY[:3],
    "--embedder",
    "{w}/train.jsonl",
    "--out",
    "{w}/o",
    arrange=TWO,
)
case("diversity: vectors below a file", *DIVERSITY, "--save", "{r}/x", arrange=TWO)
case(
    "diversity: vectors over the samples",
    *DIVERSITY,
    "--save",
    "{w}/runs/a/eval/samples-1.jsonl",
    arrange=TWO,
)
for _words in (
    *(("table99",), ("all", "--scale", "huge"), ("all", "--seeds", "0"), ("all", "--seeds", "-1"), ("all", "run.nosuch=1")),
    *(("all", "--dir", "{r}"), ("all", "--cluster", "nowhere"), ("",), ("table1", "figure")),
    ("all", "--seeds", "1000000000"),
):  # fmt: skip
    case(
        f"paper {' '.join(_words)}",
        "paper",
        *_words,
        "--dry-run",
        *([] if "--scale" in _words else ["--scale", "laptop"]),
    )

# ---------------------------------------------------------------------------------------------
# habits of other programs
for _word in (
    *("--run.steps=3", "+run.steps=3", "~run.steps", "run.steps", "run.steps:3", "run.steps=", "run/steps=3", "run.ｓteps=3"),
    *("run.steps=３", "run.steps=2.0", "run.steps=1k", "run.steps=[1,2,3]", "optimizer.lr=1,0e-3", "optimizer.lr=-1e-6"),
    *("optimizer.lr=1e-3,1e-4", "rollout.sampling.max_response_tokens=12k", "precision.dtype=BF16", "objective.name=pacs,grpo"),
    *("batch.samples_per_prompt=4.0", "rollout.sampling.stop=x", "checkpoint.every=-1", "logging.tensorboard=2"),
    *("run.name='tiny '", "run.name=..", "run.name=~", "data.train.limit=1.5", "parallel.tp=two"),
    *("resources.time_limit=1d", "trainer.total_epochs=15", "--config-name=x"),
):  # fmt: skip
    case(f"config show {_word}", "config", "show", "{r}", _word)

# ------------------------------------------------------------------------------------------------------
# files and paths
TO_MEGATRON = ("convert", "to-megatron", "--hf", "{m}", "--out")
VERIFY = ("convert", "verify", "--hf", "{m}", "--checkpoint", "{c}", "--certificate")


def _target(world: World) -> None:
    world.text("full/notes.txt", "years of work")


def _link(name: str, to: str) -> Arrange:
    return lambda w: (w.folder / name).symlink_to(to.format(w=w.folder, m=w.model))


case("convert: into a folder with notes", *TO_MEGATRON, "{w}/full", arrange=_target)
case("convert: through a link into the source", *TO_MEGATRON, "{w}/l/x", arrange=_link("l", "{m}"))
case("convert: over a dangling link", *TO_MEGATRON, "{w}/l", arrange=_link("l", "nowhere"))
case("convert: over a file", *TO_MEGATRON, "{r}")
case("convert: into the working directory", *TO_MEGATRON, ".")
case("verify: certificate over config.json", *VERIFY, "{m}/config.json")
case("verify: certificate over the weights", *VERIFY, "{c}/manifest.json")
case(
    "verify: certificate into a pipe", *VERIFY, "{w}/p", arrange=lambda w: os.mkfifo(w.folder / "p")
)
case("verify: certificate over a folder", *VERIFY, "{w}")
case(
    "verify: another model",
    *VERIFY,
    "{w}/x.json",
    arrange=lambda w: w.model_json("config.json", rope_theta=12345.0),
)
for _name, _content in (
    ("half of config.json", '{"model_type": "qwen3", '),
    ("config.json in UTF-16", '{"model_type": "qwen3"}'.encode("utf-16")),
):
    case(f"model: {_name}", *TO_MEGATRON, "{w}/o", arrange=text("model/config.json", _content))
for _name, _changes in {
    "size as text": {"hidden_size": "64"},
    "theta as text": {"rope_theta": "1000000"},
    "quantized": {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    "another architecture": {"architectures": ["LlamaForCausalLM"]},
    "another type": {"model_type": "llama"},
    "one layer more": {"num_hidden_layers": 99},
    "tied, with a head": {"tie_word_embeddings": True},
}.items():
    case(
        f"config.json: {_name}",
        *TO_MEGATRON,
        "{w}/o",
        arrange=lambda w, c=_changes: w.model_json("config.json", **c),
    )  # type: ignore[misc]

# -----------------------------------------------------------------------------------------------------------------
# data
ROW = '{"problem": "1 + 1 = ?", "answer": "2"}'
for _name, _file, _content in (
    ("suffix in capitals", "d.JSONL", ROW),
    (
        "nested 10,000 times",
        "d.jsonl",
        '{"problem": "x", "answer": ' + "[" * 10_000 + "]" * 10_000 + "}",
    ),
    ("an answer of 6,000 digits", "d.jsonl", '{"problem": "x", "answer": ' + "9" * 6000 + "}"),
    ("an answer of keys", "d.jsonl", '{"problem": "x", "answer": {"value": 1}}'),
    ("a million empty lines", "d.jsonl", "\n" * 1_000_000),
    ("an archive", "d.tar", b"\0" * 1024),
    ("the same key twice", "d.jsonl", '{"problem": "x", "problem": "y", "answer": "1"}'),
    ("encrypted parquet", "d.parquet", b"PARE" + bytes(64) + b"PARE"),
    ("a letter of Latin-1", "d.jsonl", '{"problem": "caf\xe9", "answer": "1"}'.encode("latin-1")),
    ("json with comments", "d.json", "// problems\n[" + ROW + "]"),
):
    case(
        f"data: {_name}",
        "data",
        "preview",
        "{r}",
        f"data.train.path={{w}}/{_file}",
        arrange=text(_file, _content),
    )


def _nothing(name: str) -> Arrange:
    """Seven gigabytes of zeros, which take no space on the disk."""

    def write(world: World) -> None:
        with world.text(name, "").open("wb") as file:
            file.truncate(7 * 2**30)

    return write


for _file in ("d.jsonl", "d.json", "d.parquet"):
    case(f"data: gigabytes of nothing, {_file}", "data", "preview", "{r}", f"data.train.path={{w}}/{_file}", arrange=_nothing(_file))  # fmt: skip
for _file in ("metrics.jsonl", "config.yaml", "eval/results.json"):
    case(
        f"compare: gigabytes of {_file}",
        *COMPARE,
        arrange=together(TWO, _nothing(f"runs/b/{_file}")),
    )
    case(f"compare: {_file} without an end", *COMPARE, arrange=together(TWO, lambda w, f=_file: (w.folder / "runs/b" / f).unlink() or (w.folder / "runs/b" / f).symlink_to("/dev/zero")))  # type: ignore[misc]  # fmt: skip
for _file in ("eval/samples-1.jsonl", "eval/results.json"):
    case(
        f"diversity: gigabytes of {_file}",
        *DIVERSITY,
        arrange=together(TWO, _nothing(f"runs/b/{_file}")),
    )

# -------------------------------------------------------------------------------- clusters,
# submission, plan, evaluation
SUBMIT = ("submit", "{r}", "--dry-run", "--cluster")
for _name, _content in {
    "empty": "",
    "a list": "[a, b]",
    "null interpreter": "name: c\npython: [python, null]\n",
    "another tool's keys": "name: c\npython: [python]\ngpus: 8\nqueue: x\n",
    "binary": bytes(range(256)),
    "a link to a device": b"",
}.items():
    _arrange = (
        _link("cluster.yaml", "/dev/zero") if "device" in _name else text("cluster.yaml", _content)
    )
    case(f"cluster file: {_name}", *SUBMIT, "{w}/cluster.yaml", arrange=_arrange)
for _words in (
    *(
        ("--seeds", "2.5"),
        ("--seeds", "0"),
        ("--sweep", "optimizer.lr=1e-3,,2e-3"),
        ("--sweep", "optimizer.lr="),
    ),
    *(("--sweep", "run.seed=1,2", "--seeds", "2"), ("resources.nodes=1000000",)),
):
    case(f"submit {' '.join(_words)}", *SUBMIT, "local", *_words)
case("submit: a cluster by a path upwards", *SUBMIT, "../../etc/passwd")
for _words in (("resources.gpu=H9000",), ("model.path={r}",)):
    case(f"plan {' '.join(_words)}", "plan", "{r}", *_words)
BENCHMARK = (
    "evaluation.benchmarks=[{{path: '{w}/train.jsonl', columns: {{problem: problem, answer: "
    "answer}}}}]",
    "evaluation.sampling={{max_response_tokens: 4}}",
)
case("eval: one model twice", "eval", "{r}", *BENCHMARK, "--model", "{m}", "{m}")
case("eval: nothing to judge again", "eval", "{r}", *BENCHMARK, "--rejudge", "--out", "{w}/o")
case("eval: no samples", "eval", "{r}", *BENCHMARK, "evaluation.samples_per_prompt=0")
case("eval: results over a configuration", "eval", "{r}", *BENCHMARK, "--out", "{w}/train.jsonl")
case("preflight: no such cluster", "preflight", "{r}", "--cluster", "nowhere")
case("certify: an objective that is not there", "certify", "{r}", "objective.name=magic")
case("doctor: with arguments", "doctor", "{r}")
case("logs: a run of another kind", "logs", "{w}/runs/a", "--attempt", "-1", arrange=finished)
case(
    "status: heartbeats and metrics of another program",
    "status",
    "{w}/runs/x",
    arrange=text("runs/x/metrics.csv", "a,b\n"),
)


# ------------------------------------------------------------------------------ surroundings in
# which a command should work
QUIET: dict[str, tuple[str, Arrange, tuple[int, ...]]] = {
    "the reader of a pipe leaves": ("$P config explain {r} | true", TWO, (0,)),
    "the reader of a long list leaves": ("$P config show {r} | head -c 1", TWO, (0,)),
    "a terminal of one column": ("COLUMNS=1 $P train --help", TWO, (0,)),
    "a terminal of -5 columns": ("COLUMNS=-5 $P --help", TWO, (0,)),
    "python without docstrings": ("PYTHONOPTIMIZE=2 $P config explain {r}", TWO, (2,)),
    "no path": ("PY=$(command -v python3); PATH= $P doctor", TWO, (0, 1)),
    "a word as the number of threads": ("OMP_NUM_THREADS=many $P convert to-megatron --hf {m} "
                                        "--out {w}/out", TWO, (0, 1, 2)),
    "standard input is closed": ("$P plan {r} <&-", TWO, (0, 1)),
    "standard error is closed": ("$P config show {r} run.steps=0 2>&-", TWO, (1, 2)),
    "a language without UTF-8": ("LC_ALL=C LANG=C $P compare {w}/runs/a {w}/runs/b --out "
                                 "{w}/out.html", TWO, (0,)),
    "a run of the year 1970": ("touch -d 1970-01-02 {w}/runs/a/*; $P status {w}/runs/a", TWO, (0,)),
    "a run of the year 2099": ("touch -d 2099-01-02 {w}/runs/a/*; $P status {w}/runs/a", TWO, (0,)),
    "two conversions into one folder": ("$P convert to-megatron --hf {m} --out {w}/out & $P "
                                        "convert to-megatron --hf {m} --out {w}/out; a=$?; wait "
                                        "$!; b=$?; test $a = 0 -o $b = 0 && test -f "
                                        "{w}/out/manifest.json && exit $(($a + $b))", TWO, (0, 1, 2)),
    "a page through a link": ("touch {w}/real; ln -s real {w}/l; $P compare {w}/runs/a --out "
                              "{w}/l && test -s {w}/real", TWO, (0,)),
    "figures to standard output": ("ln -s /proc/self/fd/1 {w}/l; $P compare {w}/runs/a --out "
                                   "{w}/h --json {w}/l | cat; test -L {w}/l", TWO, (0,)),
}  # fmt: skip


@pytest.mark.parametrize("name", in_tiers(CASES, every=2))
def test_one_clear_line(name: str, original: World, tmp_path: Path) -> None:
    check_case(name, CASES[name], original, tmp_path)


@pytest.mark.parametrize("name", QUIET)
def test_odd_surroundings(name: str, original: World, tmp_path: Path) -> None:
    """No traceback, and an exit code that fits."""
    world = copy_world(original, tmp_path / "world")
    script, arrange, codes = QUIET[name]
    arrange(world)
    words: list[str | Path | bytes] = [
        "sh",
        "-c",
        script.format(r=world.run, m=world.model, w=world.folder),
    ]
    outcome = run(words, world.folder, {})
    assert outcome.code in codes, outcome.text
    assert (
        "Traceback" not in outcome.text
        and "InternalError" not in outcome.text
        and "Exception ignored" not in outcome.text
    )
