"""A second set of hostile and careless users, written after the faults of test_hostile_world.py
were fixed.

Includes, layouts, evaluation, run folders in use, servers that are other programs, paths of every
command.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.hostile import Cases, World, check_case
from tests.support.tiers import in_tiers

pytestmark = pytest.mark.full
CASES = Cases()
case = CASES.add


def text(name: str, content: str | bytes) -> Callable[[World], Any]:
    return lambda world: world.text(name, content)


# -------------------------------------------------------------------------------------------------------------
# includes
def _include(value: str) -> Callable[[World], Any]:
    return lambda w: w.text("tiny.yaml", f"include: {value}\n" + w.run.read_text())


def _fan(world: World) -> None:
    for number in range(120):
        world.text(f"part{number}.yaml", "{}")
    world.text(
        "tiny.yaml",
        f"include: [{', '.join(f'part{n}.yaml' for n in range(120))}]\n" + world.run.read_text(),
    )


def _two_links(world: World) -> None:
    (world.folder / "again.yaml").symlink_to(world.run)
    _include("again.yaml")(world)


for _name, _arrange in {
    "missing": _include("nowhere.yaml"),
    "a folder": _include("model"),
    "a url": _include("https://h/x.yaml"),
    "a pattern": _include("'*.yaml'"),
    "a mapping": _include("{a: b}"),
    "empty text": _include("''"),
    "null in a list": _include("[null]"),
    "data": _include("train.jsonl"),
    "weights": _include("model/model.safetensors"),
    "itself by a link": _two_links,
    "120 files": _fan,
}.items():
    case(f"include: {_name}", "config", "show", "{r}", arrange=_arrange)

# -------------------------------------------------------------------------------------------
# layouts and combinations
for _words in (
    *(("parallel.tp=0",), ("parallel.tp=1", "parallel.pp=3"), ("parallel.vpp=2",), ("parallel.ep=2",), ("parallel.cp=0",)),
    *(("parallel.tp=1", "parallel.sequence_parallel=true"), ("parallel.recompute.modules=[moe]",), ("parallel.recompute.modules=[]",)),
    *(("parallel.megatron.nosuch=1",), ("parallel.megatron.tp_comm_overlap=true",), ("parallel.megatron=[]",), ("parallel=2",)),
    *(("precision.fp8={{recipe: delayed}}",), ("precision.dtype=fp16",), ("precision.dtype=32",), ("policy.offload=all",)),
    *(("batch.prompts_per_step=0",), ("batch.updates_per_step=0",), ("batch.samples_per_prompt=1",), ("batch.groups=alone",)),
    *(("objective.beta=-1",), ("objective.nosuch=1",), ("objective={{name: grpo, beta: 2}}",), ("objective.clip_grad=-1",)),
    *(("objective={{name: PACS}}",), ("rollout={{engine: demonstrations, max_response_tokens: 8}}",), ("admission.oversample=0.5",)),
    *(("admission.oversample=2",), ("admission.truncated=maybe",), ("mismatch.max_score_noise=0.1",), ("mismatch.threshold=0",)),
    *(("rollout.engine=vllm",), ("rollout.sampling.top_p=0",), ("rollout.sampling.top_k=-1",), ("rollout.max_staleness=-1",)),
    *(("rollout.sampling=null",), ("reward=null",), ("reward={{name: math, nosuch: 1}}",), ("reward.label_threshold=.nan",)),
    *(("reward.max_failure_frac=2",), ("optimizer.schedule=exp",), ("optimizer.warmup_updates=-1",), ("optimizer=null",)),
    *(("checkpoint.every=0",), ("checkpoint.every=-1",), ("logging.tensorboard=yes",), ("run=null",), ("model=null",)),
    *(("data.max_prompt_tokens=0",), ("data.train.preset=gsm8k",), ("data.train.columns=null",), ("data.train.name=a/b",)),
    *(("evaluation.benchmarks=[{{path: x}}]",), ("evaluation.benchmarks.3.path=x",), ("evaluation.benchmarks=x",)),
    *(("resources.time_limit=4h",), ("resources.time_limit='00:00:10'",), ("resources.signal_lead_s=0",), ("resources.max_attempts=0",)),
    *(("run.name=.",), ("run.name=a/b",), ("run.name=-x",), ("run.dir='  '",), ('run.dir="a\\0b"',), ("run.seed=-1",), ("run.steps=[2]",)),
):  # fmt: skip
    case(f"train {' '.join(_words)}", "train", "{r}", *_words)
for _words in (
    *(
        ("--ranks", "3"),
        ("--ranks", "0x2"),
        ("--ranks", "-2"),
        ("--ranks",),
        ("--ranks", "2", "parallel.tp=4"),
    ),
):
    case(f"config explain {' '.join(_words)}", "config", "explain", "{r}", *_words)
for _words in (
    *(("model.path=no/such",), ("--search", "run.steps=0")),
    ("--search", "--compare", "resources.gpus_per_node=8", "resources.gpu=h800"),
):  # fmt: skip
    case(f"plan {' '.join(_words)}", "plan", "{r}", *_words)

# ------------------------------------------------------------------------------------------------------------
# evaluation
BENCHMARK = (
    "evaluation.benchmarks=[{{path: '{w}/train.jsonl', columns: {{problem: problem, answer: "
    "answer}}}}]",
    "evaluation.sampling={{max_response_tokens: 4}}",
)


def _nan_weights(world: World) -> None:
    path = world.model / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-4096:] = b"\xff" * 4096
    path.write_bytes(bytes(data))


case("eval: without benchmarks", "eval", "{r}")
case("eval: k above n", "eval", "{r}", *BENCHMARK, "evaluation.k=[64]")
case("eval: k of nothing", "eval", "{r}", *BENCHMARK, "evaluation.k=[]")
case("eval: without sampling", "eval", "{r}", BENCHMARK[0])
case(
    "eval: missing benchmark",
    "eval",
    "{r}",
    BENCHMARK[0].replace("train.jsonl", "none.jsonl"),
    BENCHMARK[1],
)
case("eval: data as model", "eval", "{r}", *BENCHMARK, "--model", "{w}/train.jsonl")
case(
    "eval: model without tokenizer",
    "eval",
    "{r}",
    *BENCHMARK,
    arrange=lambda w: (w.model / "tokenizer.json").unlink(),
)
case(
    "eval: model without weights",
    "eval",
    "{r}",
    *BENCHMARK,
    arrange=lambda w: (w.model / "model.safetensors").unlink(),
)
case("eval: checkpoint as model", "eval", "{r}", *BENCHMARK, "--model", "{c}")
case("eval: out below a file", "eval", "{r}", *BENCHMARK, "--out", "{r}/x")
case("eval: two benchmarks of one name", "eval", "{r}", BENCHMARK[0].replace("[{{", "[{{name: a, ").replace("}}]", "}}, {{name: a, path: '{w}/train.jsonl', columns: {{problem: problem, answer: answer}}}}]"), BENCHMARK[1])  # fmt: skip
case("train: weights of nan", "train", "{r}", "parallel.tp=1", arrange=_nan_weights)
case(
    "train: a model of another vocabulary",
    "train",
    "{r}",
    "parallel.tp=1",
    arrange=lambda w: w.model_json("config.json", vocab_size=64),
)

# ----------------------------------------------------------------------------------------------------------
# paths
for _words in (
    ("convert", "to-megatron", "--hf", "{m}", "--out", "/dev/full/x"),
    ("convert", "to-megatron", "--hf", "{m}", "--out", "/proc/o"),
    ("convert", "to-megatron", "--hf", "{m}", "--out", "{w}/" + "o" * 300),
    ("convert", "to-megatron", "--hf", "{m}/config.json", "--out", "{w}/o"),
    ("convert", "to-megatron", "--hf", "{m}/model.safetensors", "--out", "{w}/o"),
    ("convert", "to-megatron", "--hf", "a/b/c", "--out", "{w}/o"),
    ("convert", "to-megatron", "--hf", "{c}", "--out", "{w}/o"),
    ("convert", "to-hf", "--checkpoint", "{c}/manifest.json", "--out", "{w}/o"),
    ("convert", "to-hf", "--checkpoint", "{c}/dist", "--out", "{w}/o"),
    ("convert", "to-hf", "--checkpoint", "{m}", "--out", "{w}/o"),
    ("convert", "to-hf", "--checkpoint", "{c}", "--out", "{m}"),
    ("convert", "to-hf", "--checkpoint", "{c}", "--out", "{c}/hf/o"),
    ("convert", "to-hf", "--checkpoint", "{c}", "--out", "/"),
    ("convert", "verify", "--hf", "{m}", "--checkpoint", "{c}", "--certificate", "{r}/x"),
    ("convert", "verify", "--hf", "{m}", "--checkpoint", "{c}", "--certificate", "{w}/x", "--logits", "--tp", "100"),
    ("convert", "verify", "--hf", "{m}", "--checkpoint", "{w}/none", "--certificate", "{w}/x"),
    ("export", "{c}"),
    ("export", "{w}", "--out", "{r}"),
    ("logs", "{r}"),
    ("logs", "{w}"),
    ("logs", "{w}", "--lines", "9" * 20),
    ("status", "{w}/" + "s" * 300),
    ("cancel", "{r}"),
    ("cancel", "{w}", "--save"),
    ("certify", "{r}", "parallel.tp=3"),
    ("certify", "{r}", "--out", "/proc/x"),
    ("certify", "{r}", "model.path={w}/none"),
    ("train", "{r}", "run.dir=/proc"),
    ("train", "{r}", "run.dir=/dev/null"),
    ("train", "{r}", "run.dir={w}/" + "x/" * 3000),
    ("submit", "{r}", "--cluster", "{r}", "--dry-run"),
    ("submit", "{r}", "--cluster", "nowhere", "--dry-run"),
    ("submit", "{r}", "--cluster", "local", "--dry-run", "--evaluate"),
    ("submit", "{r}", "--cluster", "local", "--dry-run", "--sweep", "run.name=a,b", "--sweep", "run.name=c"),
    ("submit", "{r}", "--cluster", "local", "--dry-run", "--sweep", "run.steps"),
    ("submit", "{r}", "--cluster", "local", "--dry-run", "--sweep", "=1,2"),
    ("submit", "{r}", "--cluster", "local", "--dry-run", "--sweep", "run.dir=[a,b"),
    ("submit", "{r}", "--cluster", "local", "--dry-run", "run.name=" + "n" * 199, "--seeds", "3"),
):  # fmt: skip
    case(" ".join(_words)[:80], *_words)


# ------------------------------------------------------------------------------------------------------------
# run folder
def _lease(world: World) -> None:
    """The lock of this test's own process, which lives."""
    from dataclasses import asdict

    from pacs_megatron.runtime.run_lock import _own_lease

    world.text("runs/tiny/run.lock", json.dumps(asdict(_own_lease("train"))))


case("run folder: in use", "train", "{r}", arrange=_lease)
case("run folder: eval into one in use", "eval", "{r}", *BENCHMARK, arrange=_lease)
for _name, _file, _content in (
    ("configuration is a page", "config.yaml", "<html></html>"),
    ("configuration is binary", "config.yaml", bytes(range(256))),
    ("configuration of another model", "config.yaml", "run: {name: tiny}\nmodel: {path: other}\n"),
):
    case(
        f"run folder: {_name}",
        "train",
        "{r}",
        "parallel.tp=1",
        arrange=text(f"runs/tiny/{_file}", _content),
    )

case(
    "logs: an attempt of letters",
    "logs",
    "{w}/runs/tiny",
    "--attempt",
    "x",
    arrange=text("runs/tiny/config.yaml", "a: 1"),
)
case(
    "export: steps of letters",
    "export",
    "{w}/runs/tiny",
    arrange=text("runs/tiny/checkpoints/step_abc/manifest.json", "{}"),
)
case("export: a step of 30 digits", "export", "{w}/runs/tiny", arrange=text(f"runs/tiny/checkpoints/step_{'9' * 30}/manifest.json", "{}"))  # fmt: skip
case("export: an empty manifest", "export", "{w}/runs/tiny", arrange=text("runs/tiny/checkpoints/step_000001/manifest.json", "{}"))  # fmt: skip

# ------------------------------------------------------------------------------------------------------------
# preflight
SERVERS = "rollout={{engine: sglang, servers: {{python: %s, device: cpu, start_timeout_s: 5}}, sampling: {{max_response_tokens: 12}}, sync: {{transport: disk}}}}"  # fmt: skip
for _name, _python in {
    "nothing": "[/nonexistent/python]",
    "true": "[/bin/true]",
    "cat": "[/bin/cat]",
    "a folder": "[/etc]",
    "a text": "[/etc/passwd]",
    "python without sglang": f"[{sys.executable}, -S]",
    "empty": "[]",
    "text": "python",
    "words with a line end": '["a\\nb"]',
}.items():
    case(f"preflight: servers by {_name}", "preflight", "{r}", SERVERS % _python)
for _name, _environ in {
    "temporary folder is a file": {"TMPDIR": "/etc/passwd"},
    "port of letters": {"MASTER_PORT": "abc"},
    "port of six digits": {"MASTER_PORT": "123456"},
}.items():
    case(f"preflight: {_name}", "preflight", "{r}", environ=_environ)


# ----------------------------------------------------------------------------------------------------------------
# data
def _rows(*rows: str | bytes) -> Callable[[World], Any]:
    return lambda w: w.text(
        "d.jsonl", b"\n".join(row if isinstance(row, bytes) else row.encode() for row in rows)
    )


for _name, _arrange in {
    "nul bytes": _rows(b'{"problem": "a\0b", "answer": "1"}'),
    "old line ends": _rows('{"problem": "x", "answer": "1"}\r{"problem": "y", "answer": "1"}'),
    "tabs": _rows("problem\tanswer", "x\t1"),
    "two rows in a line": _rows('{"problem": "x", "answer": "1"}{"problem": "y", "answer": "1"}'),
    "answer of infinity": _rows('{"problem": "x", "answer": 1e999}'),
    "answer is a list": _rows('{"problem": "x", "answer": ["1", "2"]}'),
    "answer is a boolean": _rows('{"problem": "x", "answer": true}'),
    "problem is a list": _rows('{"problem": [{"role": "user"}], "answer": "1"}'),
    "keys in other letters": _rows('{"Problem": "x", "Answer": "1"}'),
    "only strings": _rows('"x"', '"y"'),
    "a row in the middle is cut": _rows('{"problem": "x", "answer": "1"}', '{"problem": "y"', '{"problem": "z", "answer": "1"}'),
    "all too long": _rows(json.dumps({"problem": "long " * 400, "answer": "1"})),
}.items():  # fmt: skip
    case(
        f"data: {_name}", "data", "preview", "{r}", "data.train.path={w}/d.jsonl", arrange=_arrange
    )


# ---------------------------------------------------------------------------------------------------------------
# weights
def _rename(change: Callable[[str], str]) -> Callable[[World], Any]:
    return lambda w: w.header(lambda h: {change(name): entry for name, entry in h.items()})


def _without(word: str) -> Callable[[World], Any]:
    return lambda w: w.header(
        lambda h: {name: entry for name, entry in h.items() if word not in name}
    )


for _name, _arrange in {
    "names with slashes": _rename(lambda name: name.replace(".", "/")),
    "names with a surrogate": _rename(lambda name: name + "\ud800"),
    "names of 100,000 letters": _rename(lambda name: name + "x" * 100_000),
    "names of a wrapped model": _rename(lambda name: f"module.{name}"),
    "without norms": _without("norm"),
    "without the embedding": _without("embed"),
    "a folder": lambda w: (w.model / "model.safetensors").unlink() or (w.model / "model.safetensors").mkdir(),
    "a pipe": lambda w: (w.model / "model.safetensors").unlink() or os.mkfifo(w.model / "model.safetensors"),
    "a link to itself": lambda w: (w.model / "model.safetensors").unlink() or (w.model / "model.safetensors").symlink_to("model.safetensors"),
}.items():  # fmt: skip
    case(
        f"weights: {_name}",
        "convert",
        "to-megatron",
        "--hf",
        "{m}",
        "--out",
        "{w}/o",
        arrange=_arrange,
    )


@pytest.mark.parametrize("name", in_tiers(CASES, every=2))
def test_one_clear_line(name: str, original: World, tmp_path: Path) -> None:
    check_case(name, CASES[name], original, tmp_path)
