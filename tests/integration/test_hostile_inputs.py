"""Hostile and careless inputs through the real command line: one clear line, a non-zero exit, no
traceback, no silence.

`PACS_HOSTILE_LOG=FILE` records every case. A campaign test: each case is a process of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.hostile import World, check, copy_world, make_world, serve

pytestmark = pytest.mark.campaign
Arrange = Callable[[World], list[str | Path | bytes]]
CASES: dict[str, Arrange] = {}


def case(name: str, *command: str) -> Callable[[Callable[[World], Any]], Callable[[World], Any]]:
    """Registers a case; the arrangement returns the command, or None for `command` with {m}odel,
    {c}heckpoint, {r}un.
    """

    def add(arrange: Callable[[World], Any]) -> Callable[[World], Any]:
        def complete(world: World) -> list[str | Path | bytes]:
            found = arrange(world)
            places = {
                "m": world.model,
                "c": world.checkpoint,
                "r": world.run,
                "w": world.folder,
                "s": world.server,
            }
            return found if isinstance(found, list) else [word.format(**places) for word in command]

        CASES[name] = complete
        return arrange

    return add


def plain(name: str, *command: str) -> None:
    case(name, *command)(lambda world: None)


# ---------------------------------------------------------------------------------------------------------
# command line
plain("no verb")
plain("unknown verb", "trian", "{r}")
plain("no configuration", "train")
plain("missing file", "train", "{w}/nowhere.yaml")
plain("folder as file", "train", "{w}")
plain("device as file", "train", "/dev/zero")
plain("override without value", "config", "show", "{r}", "run.steps")
plain("override without key", "config", "show", "{r}", "=1")
plain("override with empty part", "config", "show", "{r}", "run..steps=1")
plain("override below a number", "config", "show", "{r}", "run.steps.x=1")
plain("override of a list as object", "config", "show", "{r}", "run=[1]")
plain("unknown option", "train", "{r}", "--fast")
plain("ranks 0", "config", "explain", "{r}", "--ranks", "0")
plain("ranks as a word", "config", "explain", "{r}", "--ranks", "many")
plain("negative rows", "data", "preview", "{r}", "--rows", "-1")
plain("million seeds", "submit", "{r}", "--cluster", "local", "--dry-run", "--seeds", "1000000")
plain("no seeds", "submit", "{r}", "--cluster", "local", "--dry-run", "--seeds", "0")
plain(
    "sweep without values",
    "submit",
    "{r}",
    "--cluster",
    "local",
    "--dry-run",
    "--sweep",
    "run.steps=",
)
plain("sweep of a huge product", "submit", "{r}", "--cluster", "local", "--dry-run", *(
    word for key in ("run.steps", "run.seed", "optimizer.lr", "data.max_prompt_tokens")
    for word in ("--sweep", f"{key}=" + ",".join(map(str, range(1, 60))))
))  # fmt: skip
plain("cluster that is no cluster", "submit", "{r}", "--cluster", "/etc/passwd", "--dry-run")
plain("status of nothing", "status", "{w}/nothing")
plain("status of a file", "status", "{r}")
plain("export of a file", "export", "{r}")
plain("export of an empty folder", "export", "{w}")
plain("negative lines", "logs", "{w}", "--lines", "-1")
plain("cancel without run", "cancel", "{w}")
case("argument that is no text")(lambda w: ["train", w.run, b"run.name=\xff\xfe"])
plain("line end in a path", "train", "{r}\n")
plain("eval of a file", "eval", "{r}", "--model", "{r}")
plain("out is a file's child", "convert", "to-megatron", "--hf", "{m}", "--out", "{r}/out")
plain("out exists", "convert", "to-megatron", "--hf", "{m}", "--out", "{c}")
plain("out inside its source", "convert", "to-megatron", "--hf", "{m}", "--out", "{m}/out")
plain(
    "layout that does not fit",
    *[
        "convert",
        "verify",
        "--hf",
        "{m}",
        "--checkpoint",
        "{c}",
        "--certificate",
        "{w}/x",
        "--logits",
        "--tp",
        "3",
    ],
)
plain(
    "layout without its option",
    *[
        "convert",
        "verify",
        "--hf",
        "{m}",
        "--checkpoint",
        "{c}",
        "--certificate",
        "{w}/x",
        "--tp",
        "2",
    ],
)

# --------------------------------------------------------------------------------------------------------
# configuration
CONFIGS: dict[str, str | bytes] = {
    "empty": "",
    "a list": "- 1\n",
    "a tab": "run:\n\tname: x\n",
    "utf-16": "run: {name: x}\n".encode("utf-16"),
    "binary": bytes(range(256)) * 10,
    "aliases that multiply": "a: &a [x,x]\nb: &b [*a,*a]\nc: [*b,*b]\n",
    "python object": "run: !!python/object/apply:os.system [id]\n",
    "a key twice": "run: {name: a}\nrun: {name: b}\n",
    "ten thousand levels": "a: " + "[" * 10_000,
    "includes itself": "include: tiny.yaml\n",
    "includes a password file": "include: /etc/passwd\n",
    "includes a number": "include: 7\n",
}
for _name, _content in CONFIGS.items():
    case(f"file: {_name}", "train", "{r}")(
        lambda w, content=_content: w.text("tiny.yaml", content) and None
    )  # type: ignore[misc]

OVERRIDES = (
    *(
        "run.steps=-1",
        "run.steps=1.5",
        "run.steps=ten",
        "run.steps=" + "9" * 60,
        "run.seed=99999999999999999999999",
    ),
    *(
        "run.name=../x",
        "run.name=" + "n" * 300,
        "run.name=",
        "run.dir=",
        "run.dir=/dev/null/x",
        "model.path=",
    ),
    *("model.path=/dev/null", "optimizer.lr=.nan", "optimizer.lr=-1", "batch.samples_per_prompt=0"),
    *(
        "batch.prompts_per_step=1000000000000000000",
        "parallel.tp=3",
        "parallel.tp=-2",
        "parallel.tp=1048576",
    ),
    *(
        "objective.name=[pacs]",
        "objective.beta=.inf",
        "resources.time_limit=99:99:99",
        "data.train.path=file:///etc/passwd",
    ),
    *(
        "reward.function=nofile.py:reward",
        "data.max_prompt_tokens=10000000",
        "rollout.sampling.temperature=-1",
    ),
)
for _word in OVERRIDES:
    plain(f"override {_word[:60]}", "train", "{r}", _word)
URLS = (
    "file:///etc/passwd",
    "http://h:99999",
    "http://",
    "h",
    "http://user:pw@h:1",
    "http://h:1/$(id)",
)
for _word in URLS:
    plain(
        f"url {_word}",
        "config",
        "show",
        "{r}",
        "rollout={{engine: sglang, urls: ['"
        + _word
        + "'], sampling: {{max_response_tokens: 12}}, sync: {{transport: disk}}}}",
    )


# -----------------------------------------------------------------------------------------------------------------
# data
DATA: dict[str, tuple[str, str | bytes]] = {
    "empty": ("d.jsonl", ""),
    "only blank lines": ("d.jsonl", "\n\n \n"),
    "a list in a line": ("d.jsonl", "[1]\n"),
    "cut off": ("d.jsonl", '{"problem": "x", "answer": "1"}\n{"problem": "x", "ans'),
    "not utf-8": ("d.jsonl", b'{"problem": "\xff", "answer": "1"}\n'),
    "lone surrogate": ("d.jsonl", '{"problem": "\\ud83d", "answer": "1"}\n'),
    "deep": ("d.jsonl", '{"problem": ' + "[" * 100_000 + "]" * 100_000 + "}\n"),
    "thousand digits": ("d.jsonl", '{"problem": "x", "answer": ' + "7" * 5000 + "}\n"),
    "key twice": ("d.jsonl", '{"problem": "x", "problem": "y", "answer": "1"}\n'),
    "answer missing": ("d.jsonl", '{"problem": "x"}\n'),
    "answer is an object": ("d.jsonl", '{"problem": "x", "answer": {"value": 1}}\n'),
    "problem is a number": ("d.jsonl", '{"problem": 7, "answer": "1"}\n'),
    "text after the array": ("d.json", '[{"problem": "x", "answer": "1"}] and more'),
    "array never closed": ("d.json", '[{"problem": "x", "answer": "1"}'),
    "empty array": ("d.json", "[]"),
    "parquet of noise": ("d.parquet", b"PAR1" + bytes(range(256)) * 4 + b"PAR1"),
    "a spreadsheet": ("d.xlsx", b"PK\x03\x04"),
    "too long": ("d.jsonl", json.dumps({"problem": "x " * 5000, "answer": "1"}) + "\n"),
}
for _name, (_file, _content) in DATA.items():
    case(f"data: {_name}")(
        lambda w, file=_file, content=_content: [  # type: ignore[misc]
            *("data", "preview", w.run, f"data.train.path={w.text(file, content)}")
        ]
    )


@case("data: a pipe", "data", "preview", "{r}", "data.train.path={w}/d.jsonl")
def _pipe(world: World) -> None:
    os.mkfifo(world.folder / "d.jsonl")


# -------------------------------------------------------------------------------------------------
# models, checkpoints
MODEL_CONFIG: dict[str, dict[str, Any]] = {
    "a billion layers": {"num_hidden_layers": 10**9},
    "no heads": {"num_attention_heads": 0},
    "heads as text": {"num_attention_heads": "4"},
    "other hidden size": {"hidden_size": 66},
    "another family": {"model_type": "gpt2"},
    "family as object": {"model_type": {"a": 1}},
    "eps below zero": {"rms_norm_eps": -1e-6},
    "theta zero": {"rope_parameters": {"rope_type": "default", "rope_theta": 0}},
    "scaling as text": {"rope_parameters": "linear"},
    "vocabulary of one": {"vocab_size": 1},
    "quantised": {"quantization_config": {"bits": 4}},
}
for _name, _changes in MODEL_CONFIG.items():
    case(f"config.json: {_name}", "convert", "to-megatron", "--hf", "{m}", "--out", "{w}/o")(
        lambda w, changes=_changes: w.model_json("config.json", **changes)  # type: ignore[misc]
    )
MODEL_FILES: dict[str, tuple[str, str | bytes]] = {
    "config.json is text": ("config.json", "hello"),
    "config.json with nan": ("config.json", '{"model_type": "qwen3", "rms_norm_eps": NaN}'),
    "config.json is deep": ("config.json", '{"a":' * 50_000 + "1" + "}" * 50_000),
    "weights are text": ("model.safetensors", "hello, this is no file of weights"),
    "weights with an endless header": ("model.safetensors", b"\xff\xff\xff\xff\xff\xff\xff\x7f{}"),
    "index outside of the folder": (
        "model.safetensors.index.json",
        '{"weight_map": {"a": "../../etc/passwd"}}',
    ),
    "index of numbers": ("model.safetensors.index.json", '{"weight_map": {"a": 1}}'),
    "index is a list": ("model.safetensors.index.json", "[]"),
}
for _name, (_file, _content) in MODEL_FILES.items():
    case(f"model: {_name}", "convert", "to-megatron", "--hf", "{m}", "--out", "{w}/o")(
        lambda w, file=_file, content=_content: w.text(f"model/{file}", content) and None  # type: ignore[misc]
    )
HEADERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "integers": lambda h: h.update({k: v | {"dtype": "I32"} for k, v in h.items() if "dtype" in v}),
    "a list": lambda h: [1, 2],
    "an entry of text": lambda h: h.update({next(k for k in h if "norm" in k): "x"}),
    "negative shape": lambda h: h.update(
        {k: v | {"shape": [-1, -64]} for k, v in h.items() if "embed" in k}
    ),
    "overlapping tensors": lambda h: h.update(
        {k: v | {"data_offsets": [0, 64]} for k, v in h.items() if "norm" in k}
    ),
    "an unknown name": lambda h: h.update({"ghost.weight": h.pop("model.norm.weight")}),
}
for _name, _change in HEADERS.items():
    case(f"header: {_name}", "convert", "to-megatron", "--hf", "{m}", "--out", "{w}/o")(
        lambda w, change=_change: w.header(change)  # type: ignore[misc]
    )
TOKENIZERS: dict[str, tuple[str, str | bytes]] = {
    "no tokenizer": ("tokenizer.json", "{}"),
    "tokenizer of noise": ("tokenizer.json", bytes(range(256))),
    "endless template": (
        "chat_template.jinja",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    ),
    "template of a power": ("chat_template.jinja", "{{ 9 ** (9 ** 9) }}"),
    "template of terabytes": ("chat_template.jinja", "{{ 'x' * 10 ** 13 }}"),
    "template that reads files": (
        "chat_template.jinja",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    ),
    "template with a fault": ("chat_template.jinja", "{% if %}"),
    "end tokens as text": ("generation_config.json", '{"eos_token_id": ["a"]}'),
}
for _name, (_file, _content) in TOKENIZERS.items():
    case(
        f"tokenizer: {_name}",
        "preflight" if _name == "end tokens as text" else "data",
        *([] if _name == "end tokens as text" else ["preview"]),
        "{r}",
    )(
        lambda w, file=_file, content=_content: w.text(f"model/{file}", content) and None  # type: ignore[misc]
    )
CHECKPOINTS: dict[str, Callable[[World], Any]] = {
    "manifest of text": lambda w: w.text("checkpoint/manifest.json", "hello"),
    "manifest outside of the folder": lambda w: w.text("checkpoint/manifest.json", '{"files": {"../x": {"bytes": 1}}}'),
    "index of noise": lambda w: w.text("checkpoint/dist/.metadata", bytes(range(256))),
    "index that runs code": lambda w: w.text("checkpoint/dist/.metadata", b"cos\nsystem\n(S'touch "
                                                                          b"canary'\ntR."),
    "a bit of the weights": lambda w: w.flip("dist/*.distcp"),
    "a bit of the tokenizer": lambda w: w.flip("hf/tokenizer.json"),
    "no weights": lambda w: shutil.rmtree(w.checkpoint / "dist"),
}  # fmt: skip
for _name, _damage in CHECKPOINTS.items():
    case(f"checkpoint: {_name}", "convert", "to-hf", "--checkpoint", "{c}", "--out", "{w}/o")(
        lambda w, damage=_damage: damage(w) and None  # type: ignore[misc]
    )
plain("checkpoint: folder of nothing", "convert", "to-hf", "--checkpoint", "{w}", "--out", "{w}/o")

# --------------------------------------------------------------------------------------------------------------
# servers
REPLIES: dict[str, bytes] = {
    "noise": bytes(range(256)) * 8,
    "nothing": b"",
    "a page": b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: "
    b"13\r\n\r\n<html></html>",
    "an error": b"HTTP/1.1 500 No\r\nContent-Length: 2\r\n\r\nno",
    "a list": b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n[1, "
    b"2, 3]",
    "deep json": b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: "
    b"50000\r\n\r\n" + b"[" * 50_000,
    "less than announced": b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000000\r\n\r\n{",
    "a circle": b"HTTP/1.1 302 Found\r\nLocation: /\r\nContent-Length: 0\r\n\r\n",
}
for _name in REPLIES:
    plain(f"hub replies {_name}", "fetch", "{r}", "model.path=some/model")
    plain(
        f"server replies {_name}",
        "preflight",
        "{r}",
        "rollout={{engine: sglang, urls: ['{s}'], sampling: {{max_response_tokens: 12}}, sync: "
        "{{transport: disk}}}}",
    )
plain("hub rejects", "fetch", "{r}", "model.path=some/model")
plain("data of no hub", "data", "preview", "{r}", "data.train.path=some/data")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture
def world(original: World, tmp_path: Path) -> World:
    return copy_world(original, tmp_path / "world")


@pytest.fixture
def garbage(request: pytest.FixtureRequest) -> Iterator[str]:
    """URL of the server of this case."""
    name: str = request.getfixturevalue("name")
    stop = threading.Event()
    server = socket.create_server(("127.0.0.1", 0))
    server.settimeout(0.2)
    url = f"http://127.0.0.1:{server.getsockname()[1]}"
    thread = None
    if " replies " in name:
        thread = threading.Thread(
            target=serve, args=(REPLIES[name.partition(" replies ")[2]], stop, server)
        )
        thread.start()
    else:
        server.close()
    yield url
    stop.set()
    if thread is not None:
        thread.join()
        server.close()


@pytest.mark.parametrize("name", CASES)
def test_one_clear_line(name: str, world: World, garbage: str) -> None:
    command = CASES[name](World(world.folder, garbage))
    # Online, or the hub's reply is never read.
    environ = {"HF_ENDPOINT": garbage, "HF_HOME": str(world.folder / "hub"), "HF_HUB_OFFLINE": "0"}
    check(name, world, command, environ)
