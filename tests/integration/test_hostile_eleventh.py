"""An eleventh set, of exactly 100 cases: what a careless colleague writes down and what a malicious
one hides in it.

Commands in names, files that are swapped or damaged, numbers that mean nothing, late errors, two of
everything. Written before a case of it ran.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_hostile_files import encoded, half, text, together
from tests.integration.test_hostile_life import STEP, Trained, _flip, trained
from tests.integration.test_hostile_ninth import (
    PARQUET,
    PREVIEW,
    SHOW,
    USER,
    D,
    Try,
    count,
    in_copy,
    judge,
    lines,
    parquet,
    submitted,
)
from tests.integration.test_hostile_ninth import ROWS as PROBLEMS
from tests.integration.test_hostile_ninth_runs import (
    AWAIT,
    DONE,
    DRIVEN,
    EVAL,
    LONG,
    ROWS,
    SLOW,
    TRAIN,
    drive,
    if_works,
    reward,
    rows,
    whole_rows,
)
from tests.integration.test_hostile_ninth_states import AGAIN, RUN, THREE, _says, fitted
from tests.integration.test_hostile_services import always, reply, rewards, serving, tokenizer
from tests.integration.test_hostile_states import copied, judged
from tests.integration.test_hostile_tenth import (
    COMMIT,
    DISK,
    LISTED,
    REJUDGE,
    in_checkpoint,
    moved,
    no_ones,
    not_nine,
)
from tests.integration.test_hostile_verbs import RUNS, SAMPLE, TWO, finished
from tests.support.hostile import Outcome, World
from tests.support.tiny_models import make_tiny_qwen3

__all__ = ["judged", "trained"]
Check = Callable[[World, Outcome], object]


# ------------------------------------------------------------------------------------------------------------
# arrangements
def dry(world: World, outcome: Outcome) -> None:
    """A dry run touches nothing but standard output."""
    assert not (world.folder / "runs").exists(), "a dry run made a folder"


def there(name: str) -> Check:
    def found(world: World, outcome: Outcome) -> None:
        assert (world.folder / name).exists(), f"{name} is missing"

    return found


def gone(name: str) -> Check:
    def missing(world: World, outcome: Outcome) -> None:
        assert not (world.folder / name).exists(), f"{name} was made"

    return missing


def no_job(world: World, outcome: Outcome) -> None:
    assert not (world.folder / "count").exists(), "a job is in the queue"


def one_direction(world: World, outcome: Outcome) -> None:
    """The folder is a whole checkpoint or a whole model."""
    names = {path.name for path in (world.folder / "x").iterdir()}
    assert ("manifest.json" in names) != ("config.json" in names), names


def is_json(name: str = "") -> Check:
    """The output, or the file, is JSON, unless there was no output."""

    def parsed(world: World, outcome: Outcome) -> None:
        found = (world.folder / name).read_text() if name else outcome.text.strip()
        try:
            assert not found or json.loads(found) is not None
        except ValueError:
            raise AssertionError(f"no JSON: {found[:200]}") from None

    return parsed


def recorded(world: World, outcome: Outcome) -> None:
    """The certificate states that the digests were not compared."""
    assert outcome.code or "--no-verify" in (world.folder / "x/certificate.json").read_text()


def short(world: World, outcome: Outcome) -> None:
    assert len(outcome.text) < 20_000, f"an error of {len(outcome.text)} letters"


def escaped(world: World, outcome: Outcome) -> None:
    DONE(world, outcome)  # type: ignore[operator]
    page = (world.folder / RUN / "report.html").read_text()
    assert "<script>alert(1)" not in page and "<img src=x" not in page, (
        "the report runs a problem's text"
    )


def swapped(world: World) -> None:
    folder = world.checkpoint / "hf"
    for old, new in (
        ("config.json", "x"),
        ("tokenizer.json", "config.json"),
        ("x", "tokenizer.json"),
    ):
        (folder / old).rename(folder / new)


def other_layer(name: str) -> str:
    return (
        name.replace("layers.0.", "layers.x.")
        .replace("layers.1.", "layers.0.")
        .replace("layers.x.", "layers.1.")
    )


def relabelled(world: World) -> None:
    """Weights in bfloat16 whose header calls them float16."""
    shutil.rmtree(world.model)
    make_tiny_qwen3(world.model, dtype="bfloat16")
    world.header(
        lambda h: (
            [entry.update(dtype="F16") for key, entry in h.items() if key != "__metadata__"]
            and None
        )
    )


def raw_header(change: Callable[[str, dict[str, Any]], str]) -> Callable[[World], None]:
    """The header's text, changed as text."""

    def write(world: World) -> None:
        path = world.model / "model.safetensors"
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        old = data[8 : 8 + length].decode()
        new = change(old, json.loads(old)).encode()
        path.write_bytes(struct.pack("<Q", len(new)) + new + data[8 + length :])

    return write


def twice(header: str, entries: dict[str, Any]) -> str:
    """Two tensors of one shape are listed a second time, each with the bytes of the other."""
    first = "model.norm.weight"
    second = "model.layers.0.input_layernorm.weight"
    more = {first: entries[second], second: entries[first]}
    return header.rstrip()[:-1] + ", " + json.dumps(more)[1:]


def chain(world: World) -> None:
    for n in range(150):
        world.text(f"f{n}.yaml", f"include: [f{n + 1}.yaml]\n")
    world.text("f150.yaml", world.run.read_text())


def many_runs(world: World) -> None:
    for n in range(64):
        finished(world, f"r{n}", n)


def evaluation_in_file(world: World) -> None:
    """The benchmark of REJUDGE, in the run's file."""
    columns = {"problem": "problem", "answer": "answer"}
    world.config(
        evaluation__benchmarks=[
            {"limit": 4, "path": f"{world.folder}/train.jsonl", "columns": columns}
        ],
        evaluation__sampling={"max_response_tokens": 4},
        evaluation__samples_per_prompt=1,
    )


def killed_once(world: World) -> None:
    """The worker is killed with its first sample, as by the kernel when memory is short."""
    mark = repr(str(world.folder / "killed"))
    reward(
        f"if not os.path.exists({mark}):",
        f"    open({mark}, 'w').close()",
        "    os.kill(os.getpid(), 9)",
    )(world)


DRY = ("submit", "{r}", "--cluster", "local", "--dry-run")
CLUSTERED = ("submit", "{r}", "--cluster", "{w}/c.yaml", "--dry-run")
EXECUTED = submitted('for f; do :; done; timeout 20 bash "$f" > /dev/null 2>&1; echo 7', srun="true", scontrol="true", squeue="true")  # fmt: skip
"""An `sbatch` that executes the batch script at once"""
SUBMIT = "export CANARY={w}/canary PATH={w}/bin:$PATH; $P submit "
COMMAND = "$(touch $CANARY)"
TO_MEGATRON = ("convert", "to-megatron", "--hf", "{m}", "--out", "{w}/o")
TO_HF = ("convert", "to-hf", "--checkpoint", "{c}", "--out", "{w}/o")
VERIFY = ("convert", "verify", "--hf", "{m}", "--checkpoint", "{c}", "--certificate", "{w}/x.json")
BOTH = "a=$?; wait $!; b=$?; "
COMPARE = ("compare", *RUNS, "--out", "{w}/o")
DIVERSITY = ("diversity", *RUNS, "--embedder", "hashed", "--out", "{w}/o")
PAPER = ("paper", "table1", "--scale", "laptop", "--dry-run", "--dir", "{w}/p")
SGLANG = (
    "rollout={engine: sglang, urls: ['http://h:1'], sampling: {max_response_tokens: 12}, sync: "
)
INDEX = "dist/.metadata"
PART = "dist/__0_0.distcp"
COMMON = "dist/common.pt"
ENDLESS = "{% set l = [1] %}{% for x in l %}{% set y = l.append(x) %}{% endfor %}{{ messages[0].content }}"
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e6, "factor": -8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}  # fmt: skip
MARKUP = [{"problem": f"<script>alert(1)</script><img src=x onerror=alert(2)> {n}", "answer": "</script><script>alert(1)"} for n in range(16)]  # fmt: skip
QUICK: dict[str, Try] = {
    # ----------------------------------------------------------------------------------------------------------
    # injection
    "submit: stop strings with commands": Try((*DRY, 'rollout.sampling.stop=["$(touch canary)", '
                                                     '"`touch canary`", "; touch canary #"]'), end="works", after=dry),
    "submit: data in a file whose name is a command": Try(SUBMIT + "{r} --cluster local "
                                                                   "'data.train.path={w}/d;touch "
                                                                   "$CANARY;" + COMMAND + ".jsonl'", together(EXECUTED, lines(f"d;touch $CANARY;{COMMAND}.jsonl", PROBLEMS)), "either"),
    "submit: a run file whose name is a command": Try(SUBMIT + "'{w}/" + COMMAND + ".yaml' --cluster local", together(EXECUTED, lambda w: w.text(COMMAND + ".yaml", w.run.read_text())), "either"),
    "submit: a name with a command": Try((*DRY, "run.name=tiny$(touch canary)"), after=_says("run.name")),
    "submit: a cluster that is a command": Try((*DRY[:3], "$(touch canary)", "--dry-run")),
    "cluster: a variable with a command": Try(SUBMIT + "{r} --cluster {w}/c.yaml", together(EXECUTED, text("c.yaml", f"name: c\npython: [python]\ngpu_request: none\nexclusive: false\nenv: {{A: '{COMMAND}`touch $CANARY`'}}\n")), "either"),
    "cluster: an image and a mount with a command": Try(SUBMIT + "{r} --cluster {w}/c.yaml", together(EXECUTED, text("c.yaml", f"name: c\npython: [python]\ngpu_request: none\nexclusive: false\ncontainer: {{runtime: pyxis, image: '/a.sqsh;touch $CANARY', mounts: ['/a b:/{COMMAND}']}}\n")), "either"),
    "cluster: a quality of two lines": Try(CLUSTERED, text("c.yaml", 'name: c\npython: '
                                                                     '[python]\nqos: '
                                                                     '"high\\r\\n#SBATCH '
                                                                     '--wrap=id"\n'), after=_says("qos")),
    "sweep: a command in the folder of each run": Try((*DRY, "--sweep", "run.dir='a;touch "
                                                                        "canary','b$(touch "
                                                                        "canary)'"), after=dry),
    # ---------------------------------------------------------------------------------------------
    # two of everything, files
    "two directions of a conversion into one folder": Try("$P convert to-megatron --hf {m} --out "
                                                          "{w}/x > {w}/first 2>&1 & $P convert "
                                                          "to-hf --checkpoint {c} --out {w}/x; " + BOTH + "test $(($a * $b)) = 0 -a $(($a + $b)) != 0 && exit 7; exit 9", TWO, "works", one_direction, (7,)),
    "two certificates in one file": Try("$P convert verify --hf {m} --checkpoint {c} "
                                        "--certificate {w}/x.json > {w}/first 2>&1 & $P convert "
                                        "verify --hf {m} --checkpoint {c} --certificate "
                                        "{w}/x.json; " + BOTH + "test $(($a * $b)) = 0 && exit 7; "
                                                                "exit 9", TWO, "works", is_json("x.json"), (7,)),
    "submit: a file in the place of the run's folder": Try(SUBMIT + "{r} --cluster local", together(submitted("echo x >> $(dirname $0)/../count; echo 7"), text(RUN, "years of work")), after=no_job),
    "convert: the model is read-only": Try(USER + "chmod -R a-w {m}; $R $P convert to-megatron "
                                                  "--hf {m} --out {w}/x", end="works"),
    "compare: the page goes into a read-only folder": Try(USER + "mkdir {w}/ro; chmod 555 {w}/ro; "
                                                                 "$R $P compare {w}/runs/a "
                                                                 "{w}/runs/b --out {w}/ro/x.html", TWO, "error"),
    # ---------------------------------------------------------------------------------------------------------
    # checkpoints
    "checkpoint: two files have changed places": Try(TO_HF, swapped),
    "checkpoint: a byte behind the common part": Try(TO_HF, encoded("checkpoint/" + COMMON, lambda data: data + b"\0")),
    "checkpoint: an empty part and a manifest that fits it": Try(TO_HF, together(text("checkpoint/" + PART, ""), fitted("checkpoint", PART))),
    "checkpoint: one layer less in config.json, and a manifest that fits it": Try(TO_HF, in_checkpoint("hf/config.json", lambda w: json.dumps(json.loads((w.checkpoint / "hf/config.json").read_text()) | {"num_hidden_layers": 1}).encode())),
    "checkpoint: half of the index and a manifest that fits it": Try(TO_HF, in_checkpoint(INDEX, lambda w: half((w.checkpoint / INDEX).read_bytes()))),
    "checkpoint: an index that claims a terabyte": Try(TO_HF, in_checkpoint(INDEX, lambda w: b"\x80\x04\x8e" + (1 << 40).to_bytes(8, "little") + b"x.")),
    "checkpoint: a manifest with a key twice": Try(TO_HF, encoded("checkpoint/manifest.json", lambda data: data.replace(b"{", b'{"format": 1, ', 1))),
    "checkpoint: a manifest of 20,000 levels": Try(TO_HF, encoded("checkpoint/manifest.json", lambda data: data.replace(b"{", b'{"note": ' + b"[" * 20_000 + b"]" * 20_000 + b", ", 1))),
    "checkpoint: a file in the place of its parts": Try(TO_HF, together(lambda w: shutil.rmtree(w.checkpoint / "dist"), text("checkpoint/dist", "x"))),
    "checkpoint: a flipped bit without verification": Try((*TO_HF[:-1], "{w}/x", "--no-verify"), lambda w: w.flip(PART), "either", recorded),
    "convert: killed, and again": Try("timeout -s KILL 3 $P convert to-megatron --hf {m} --out "
                                      "{w}/x; test -e {w}/x/manifest.json || $P convert "
                                      "to-megatron --hf {m} --out {w}/x", end="works", after=there("x/manifest.json")),
    "convert: stopped, TERM, continued": Try("$P convert to-hf --checkpoint {c} --out {w}/x & "
                                             "p=$!; sleep 2; kill -STOP $p; sleep 1; kill -TERM "
                                             "$p; kill -CONT $p; wait $p", end="either", codes=(130, 143)),
    "verify: two layers have changed places": Try(VERIFY, lambda w: w.header(lambda h: {other_layer(name): entry for name, entry in h.items()})),
    # ------------------------------------------------------------------------------------------------
    # numbers of a model
    "weights: bfloat16 that is called float16": Try(TO_MEGATRON, relabelled),
    "weights: one norm of unsigned integers": Try(TO_MEGATRON, lambda w: w.header(lambda h: h["model.norm.weight"].update(dtype="U32"))),
    "weights: two names are listed twice": Try(TO_MEGATRON, raw_header(twice)),
    "weights: a header with blanks behind it": Try((*TO_MEGATRON[:-1], "{w}/x"), raw_header(lambda header, _: header.rstrip() + " " * 24), "works"),
    "weights: a place before the file": Try(TO_MEGATRON, lambda w: w.header(lambda h: h["model.norm.weight"].update(data_offsets=[-256, 0]))),
    "config.json: a negative theta": Try(TO_MEGATRON, lambda w: w.model_json("config.json", rope_theta=-1e6, rope_parameters={"rope_type": "default", "rope_theta": -1e6})),
    "config.json: a size twice": Try(TO_MEGATRON, encoded("model/config.json", lambda data: data.replace(b"{", b'{"hidden_size": 32, ', 1))),
    "config.json: a second object behind the first": Try(TO_MEGATRON, encoded("model/config.json", lambda data: data + b'\n{"hidden_size": 64}\n')),
    "config.json: a scaling by -8": Try(TO_MEGATRON, lambda w: w.model_json("config.json", rope_parameters=LLAMA3)),
    "plan: a million stages of two layers": Try(("plan", "{r}", "parallel.tp=1", "parallel.pp=2", "parallel.vpp=1000000"), after=_says("vpp")),
    "plan: what does not fit": Try("$P plan {r} parallel.tp=1 resources.gpus_per_node=1 "
                                   "resources.gpu=a100 batch.tokens_per_microbatch=2000000000 2> "
                                   "/dev/null", end="either", codes=(1, 2)),
    "plan: a run without a checkpoint as the model": Try(("plan", "{r}", "model.path={w}/runs/a"), TWO),
    # ------------------------------------------------------------------------------------------------
    # hangs and explosions
    "include: 150 files, one after the other": Try(("config", "show", "{w}/f0.yaml"), chain),
    "YAML: 300 kB of comments": Try(SHOW, encoded("tiny.yaml", lambda data: data + (b"# " + b"x" * 97 + b"\n") * 3000)),
    "override: a rate of 100,000 digits": Try((*SHOW, "optimizer.lr=" + "1" * 100_000)),
    "template: a list that grows while it is read": Try(PREVIEW, text("model/chat_template.jinja", ENDLESS)),
    "parquet: a million rows of nothing": Try(PARQUET, lambda w: parquet(problem=[None] * 1_000_000, answer=["1"] * 1_000_000)(w)),
    "compare: 64 seeds": Try(("compare", *(f"{{w}}/runs/r{n}" for n in range(64)), "--out", "{w}/page"), many_runs, "works", there("page")),
    # -------------------------------------------------------------------------------------------
    # readers of all the formats
    "override: half a letter in the system prompt": Try((*SHOW, 'data.system_prompt="\\ud800"'), after=_says("system_prompt", "surrogate")),
    "include: a name with a NUL": Try(("config", "show", "{w}/y.yaml"), text("y.yaml", 'include: ["a\\0b.yaml"]\n')),
    "lines: a NUL in a problem": Try((*PREVIEW, D + ".jsonl"), text("d.jsonl", '{"problem": "1 + 1\\u0000 = ?", "answer": "2"}\n' * 8)),
    "lines: 200 letters of control tokens are 200 tokens": Try((*PREVIEW, D + ".jsonl"), lines("d.jsonl", [{"problem": f"{n} " + "<|im_end|>" * 20, "answer": "1"} for n in range(8)]), after=_says("max_prompt_tokens")),
    "parquet: 5,000 more columns": Try(PARQUET, lambda w: parquet(**{key: [row[key] for row in PROBLEMS] for key in ("problem", "answer")}, **{f"c{n}": [n] * 8 for n in range(5000)})(w), "works", count(8)),
    "tokenizer: settings of 100,000 levels": Try(PREVIEW, text("model/tokenizer_config.json", '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}")),
    "tokenizer: merges of numbers": Try(PREVIEW, tokenizer(lambda t: t["model"].update(merges=[1, 2]))),
    "words: a NUL in the name of a run": Try(("export", "{w}/runs/a\0b"), TWO),
    "words: a submission to nowhere": Try(("submit", "{r}", "--dry-run"), after=_says("--cluster")),
    "status: attempts and a manifest of nonsense": Try(("status", "{w}/runs/a"), together(TWO, text("runs/a/logs/attempts.jsonl", b'[1]\n{"attempt": "x"}\n\xff\n'), text("runs/a/checkpoints/step_000002/manifest.json", '{"step": ')), "either"),
    "compare: a configuration of 5,000 levels": Try(COMPARE, together(TWO, text("runs/b/config.yaml", "run: {name: b, seed: 1}\nx: " + "[" * 5000 + "]" * 5000 + "\n"))),
    "diversity: a label that is given twice": Try(DIVERSITY, together(TWO, text("runs/b/eval/samples-1.jsonl", '{"digest": "1", "judged_by": {}}\n' + json.dumps(SAMPLE)[:-1] + ', "label": 0}\n' + json.dumps(SAMPLE | {"id": "1:x/0#1"}) + "\n"))),
    # -------------------------------------------------------------------------------------------------------
    # late or poor
    "reward: a port beyond the last": Try((*SHOW, "reward={name: http, url: "
                                                  "'http://judge:99999/score', label_threshold: "
                                                  "0.5}"), after=_says("url")),
    "sync: a host of two words": Try((*SHOW, SGLANG + "{transport: broadcast, host: 'node 7'}}"), after=_says("host")),
    "train: a name of 200 letters, 400 bytes": Try(("train", "{r}", "run.name=" + "é" * 200)),
    "train: a critic that is not there": Try(("train", "{r}", "objective={name: ppo, critic: "
                                                              "{path: '{w}/none'}}"), after=_says("critic")),
    "train: demonstrations without solutions": Try(("train", "{r}", "objective={name: sft}", "rollout={engine: demonstrations, max_response_tokens: 8}", "reward=null"), after=_says("solution")),
    "objective: a score without its floor": Try((*SHOW, "objective.score=grpo"), after=_says("score_std_floor")),
    "objective: the actor's term of two updates": Try((*SHOW, "objective.actor_term=0.5"), after=_says("updates_per_step")),
    "objective: an estimate without a gradient": Try((*SHOW, "objective={name: grpo, kl_coef: "
                                                             "0.1, kl_estimator: k1, kl_in: loss}"), after=_says("k1")),
    "admission: rounds of nothing": Try((*SHOW, "admission.refill_rounds=3"), after=_says("refill_rounds")),
    "preflight: JSON of a model that is not there": Try("$P preflight {r} model.path={w}/none "
                                                        "--json > {w}/j", end="either", after=is_json("j"), codes=(1, 2)),
    "paper: one table and one that is none": Try(("paper", "table1", "table999", *PAPER[2:]), after=gone("p")),
    "paper: a rate of a word": Try((*PAPER, "optimizer.lr=fast"), after=_says("optimizer.lr")),
    "certify: a run of no name": Try(("certify", "nosuch-run")),
    "certify: demonstrations that are sampled": Try(("certify", "{r}", "objective={name: sft}")),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("name", QUICK)
def test_without_a_run(name: str, original: World, tmp_path: Path) -> None:
    in_copy(name, QUICK[name], original, tmp_path)


# -----------------------------------------------------------------------------------------------------------
# hubs, servers
HEADERS = ("Content-Type: application/json", f"X-Repo-Commit: {COMMIT}", 'ETag: "abc"')
HUGE = LISTED | {
    "siblings": [
        {"rfilename": name, "size": 10**18} for name in ("config.json", "model.safetensors")
    ]
}
HUBS: dict[str, tuple[Any, Try]] = {
    "it sends to a local file": (always("", "Location: file:///etc/passwd", status="302 Found"), Try("")),
    "a model of an exabyte": (always(json.dumps(HUGE), *HEADERS), Try("")),
    "too many requests for a year": (always("", "Retry-After: 31536000", status="429 Too Many "
                                                                                "Requests"), Try("timeout -s INT 40 ", end="either", codes=(124, 130))),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("name", HUBS)
def test_hubs(name: str, original: World, tmp_path: Path) -> None:
    behaviour, attempt = HUBS[name]
    with serving(behaviour) as url:
        variables = f"HF_HUB_OFFLINE=0 HF_HOME={{w}}/hub HF_ENDPOINT={url[:-2]} "
        words = f"{variables}{attempt.words}$P fetch {{r}} model.path=some/model"
        in_copy(
            f"hub: {name}", Try(words, end=attempt.end, codes=attempt.codes), original, tmp_path
        )


ZEROS = rewards(lambda n: {"rewards": [0] * n})


def busy_once() -> Callable[[Any, bytes], None]:
    """Its first response is 503."""
    seen: list[int] = []

    def respond(connection: Any, body: bytes) -> None:
        seen.append(1)
        if len(seen) == 1:
            connection.sendall(reply("", status="503 Service Unavailable"))
        else:
            ZEROS(connection, body)

    return respond


def in_chunks(connection: Any, body: bytes) -> None:
    data = json.dumps({"rewards": [0] * len(json.loads(body)["samples"])}).encode()
    parts = [data[:5], data[5:], b""]
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    connection.sendall(head + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts))


SERVERS = {"busy for one request": busy_once, "a body in chunks": lambda: in_chunks}


@pytest.mark.full
@pytest.mark.parametrize("name", SERVERS)
def test_reward_servers(name: str, judged: World, tmp_path: Path) -> None:
    with serving(SERVERS[name]()) as url:
        words = (*REJUDGE, f"reward={{name: http, url: '{url}', timeout_s: 30}}")
        in_copy(f"reward server: {name}", Try(words, moved, "works", no_ones), judged, tmp_path)


# --------------------------------------------------------------------------------------------------
# samples judged again
PARTS = "reward={name: weighted, label_threshold: 0.5, components: [{weight: 1, reward: {name: format, pattern: '.*'}}, {weight: 1, reward: {name: custom, function: '{w}/reward.py:reward'}}]}"  # fmt: skip
FULL = "cp -r {w}/runs/e {w}/disk/e; cat {w}/disk/e/samples* > {w}/before; cat /dev/zero > {w}/disk/fill 2> /dev/null; $P eval {r} --rejudge --out {w}/disk/e"  # fmt: skip
JUDGED: dict[str, Try] = {
    "reward: the numbers of numpy": Try(REJUDGE, reward("return [np.float32(1), np.int64(0), "
                                                        "np.bool_(True), "
                                                        "np.float64(0)][len(response) % 4]", head="import numpy as np"), "works"),
    "reward: an integer beyond all floats": Try(REJUDGE, reward("return 10**400")),
    "reward: it leaves with success": Try(REJUDGE, reward("raise SystemExit(0)")),
    "reward: an error of ten million letters": Try(REJUDGE, reward("raise ValueError('x' * "
                                                                   "10_000_000)"), after=short),
    "reward: it reads standard input to its end": Try((*REJUDGE, "reward.timeout_s=3"), reward("sys.stdin.read()", head="import sys"), "either"),
    "reward: one of two parts fails": Try((*REJUDGE, PARTS), reward("raise OSError('no judge "
                                                                    "today')")),
    "rejudge: another temperature": Try((*REJUDGE, "evaluation.sampling.temperature=0.5")),
    "rejudge: another system prompt": Try((*REJUDGE, "data.system_prompt=Think twice.")),
    "rejudge: results of another program": Try(REJUDGE, text("e/results.json", '{"results": '
                                                                               '{"arc": {"acc": '
                                                                               '0.5}}, "config": '
                                                                               '{}}\n')),
    "rejudge: a disk without space": Try(DISK % ("size=8m", FULL, "cat {w}/disk/e/samples* | cmp - {w}/before || exit 9;"), evaluation_in_file, after=not_nine),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("name", JUDGED)
def test_judged_again(name: str, judged: World, tmp_path: Path) -> None:
    attempt = JUDGED[name]
    arrange = together(attempt.arrange, moved)
    in_copy(
        name,
        Try(attempt.words, arrange, attempt.end, attempt.after, attempt.codes),
        judged,
        tmp_path,
    )


# -------------------------------------------------------------------------------------------------------------
# processes
def undisturbed(world: World, outcome: Outcome) -> None:
    not_nine(world, outcome)
    whole_rows(world, outcome)


AFTER_KILL = "; echo waiting for the ranks; for i in 1 2 3 4 5 6 7 8; do sleep 5; echo waiting for the run; " + TRAIN + "run.steps=6 && exit 0; done; exit 1"  # fmt: skip
PROCESSES: dict[str, Try] = {
    "reward: its worker is killed once": Try(TRAIN + "reward.max_failure_frac=0.5", killed_once, "works", DONE),
    "reward: two workers, those with an odd id end": Try(TRAIN + "reward.workers=2", reward("if os.getpid() % 2: os._exit(3)", "time.sleep(0.05)"), "either", whole_rows),
    "train: the launcher is killed, then the same command": Try(DRIVEN + ROWS + " KILL " + LONG + AFTER_KILL, drive(SLOW), "works", rows(*range(1, 7))),
    "train: problems that are a page": Try(TRAIN, lines("train.jsonl", MARKUP), "works", escaped),
    "train: its certificate is made at the same time": Try("$P certify {r} parallel.tp=1 > {w}/first 2>&1 & " + TRAIN + "; a=$?; echo waiting for the certificate; wait $!; b=$?; test $(($a * $b)) = 0 && exit 7; exit 9", TWO, "works", whole_rows, (7,)),
    "eval: into the folder of a run that trains": Try(TRAIN + "run.steps=8 & echo waiting for its first step; " + AWAIT % ROWS + EVAL + "; a=$?; echo waiting for the run; wait $! || exit 9; exit $a", SLOW, "either", undisturbed),
    "eval: stopped, TERM, continued, then the rest": Try(DRIVEN + "{w}/e 6,-STOP,0.5,TERM,-CONT " + EVAL + "--out {w}/e; " + EVAL + "--out {w}/e", drive(reward("time.sleep(0.2)")), "works", there("e/results.json")),
}  # fmt: skip


@pytest.mark.campaign
@pytest.mark.parametrize("name", PROCESSES)
def test_processes(name: str, original: World, tmp_path: Path) -> None:
    in_copy(name, PROCESSES[name], original, tmp_path)


FIRST = f"{RUN}/checkpoints/step_000001"
CHANGED: dict[str, Try] = {
    "resume: half of the newest manifest": Try(AGAIN, encoded(f"{STEP}/manifest.json", half), "either", if_works(THREE)),
    "resume: the newest checkpoint has no manifest": Try(AGAIN, lambda w: (w.folder / STEP / "manifest.json").unlink(), "either", if_works(THREE)),
    "resume: the first step's state, and a manifest that fits it": Try(AGAIN, together(copied(f"{FIRST}/state.json", f"{STEP}/state.json"), fitted(STEP, "state.json")), "either", if_works(THREE)),
    "eval: a checkpoint with a flipped bit": Try(EVAL + "--model {w}/" + STEP + " --out {w}/x", _flip(f"{STEP}/{PART}")),
    "convert: the first step in the second's folder": Try(("convert", "to-hf", "--checkpoint", "{w}/" + RUN, "--out", "{w}/o"), copied(FIRST, STEP)),
    "export: a part of 4 GiB of nothing": Try(("export", "{w}/" + RUN, "--out", "{w}/o"), lambda w: os.truncate(w.folder / STEP / PART, 4 << 30)),
    "export: killed, and again": Try("timeout -s KILL 3 $P export {w}/runs/tiny --out {w}/x; test -e {w}/x/config.json || $P export {w}/runs/tiny --out {w}/x", TWO, "works", there("x/config.json")),
}  # fmt: skip


@pytest.mark.campaign
@pytest.mark.parametrize("name", CHANGED)
def test_changed_runs(name: str, trained: Trained) -> None:
    judge(name, CHANGED[name], trained.restore())


def test_there_are_100() -> None:
    assert sum(map(len, (QUICK, HUBS, SERVERS, JUDGED, PROCESSES, CHANGED))) == 100
