"""More hostile and careless users: other kinds of cases than test_hostile_inputs.py, written
without a look at the code.

Environment, streams and limits of the process, files that a download left broken, reward functions,
run folders, clusters.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.hostile import Cases, World, check_case, copy_world, run
from tests.support.tiers import in_tiers

pytestmark = pytest.mark.full
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 3945\n"
PAGE = "<!DOCTYPE html><html><head><title>404</title></head><body>Not found</body></html>\n"
ROW = '{"problem": "1 + 1 = ?", "answer": "2"}\n'
Words = list[str | Path | bytes]
CASES = Cases()
case = CASES.add


# --------------------------------------------------------------------------------------------------------
# command line
TO_HF = ("convert", "to-hf", "--checkpoint", "{c}", "--out", "{w}/o")
TO_MEGATRON = ("convert", "to-megatron", "--hf", "{m}", "--out", "{w}/o")
for _words in (
    *(("train", ""), ("status", ""), ("export", ""), ("eval", "{r}", "--model", ""), ("submit", "{r}", "--cluster", "")),
    *(("convert", "to-hf", "--checkpoint", "", "--out", "{w}/o"), ("convert", "to-megatron", "--hf", "", "--out", "{w}/o")),
    *(("convert", "to-megatron", "--hf", "{m}", "--out", ""), ("logs", "{w}", "--attempt", "99"), ("status", "/dev/null")),
    *(("export", "{w}", "--step", "99999999999"), ("export", "{w}/none", "--out", "{w}/o"), ("train", "~nobody/x.yaml")),
    *(("eval", "{r}", "--model", "/dev/zero"), ("eval", "{r}", "--out", "{r}")),
    *(("config", "explain", "{r}", "--ranks", "7"), ("config", "explain", "{r}", "--ranks", "٣"), ("train", "{r}", "{r}")),
    *(("data", "preview", "{r}", "--rows", "9" * 30), ("cancel", "/"), ("cancel", "{m}"), ("train", "http://a.b/x.yaml")),
    *(("train", "{r}", "run.name=" + "a" * 100_000), ("fetch", "{r}", "model.path=../../etc")),
    *(("submit", "{r}", "--cluster", "local", "--dry-run", "--sweep", "run.nosuch=1,2"), ("certify", "{r}", "--out", "{r}")),
    *(("submit", "{r}", "--cluster", "local", "--dry-run", "--sweep", "optimizer.lr=1e-3,1e-3"), ("data", "preview", "{m}")),
    *(("submit", "{r}", "--cluster", "local", "--dry-run", "--sweep", "optimizer=1,2"), ("preflight", "{r}", "--cluster", "{m}")),
    *(("submit", "{r}", "--cluster", "local", "--dry-run", "--seeds", "1e3"), ("export", "{m}"), ("status", "{m}")),
    ("submit", "{r}", "--cluster", "local", "--dry-run", "run.seed=9223372036854775807", "--seeds", "2"),
    ("convert", "verify", "--hf", "{m}", "--checkpoint", "{c}", "--certificate", "{w}"),
    ("convert", "verify", "--hf", "{c}", "--checkpoint", "{m}", "--certificate", "{w}/o"),
    (*TO_HF, "--dtype", "int8"),
    (*TO_HF, "--step", "3"),
    (*TO_HF, "--max-shard-size", "1e3GB"),
):  # fmt: skip
    case(" ".join(_words)[:70], *_words)

# -------------------------------------------------------------------------------------------------------
# configuration
for _word in (
    *("run.steps==3", "__class__=1", "run={{", "run.steps=0x10", "run.steps=1_000", "run.steps=true", "run.steps=null"),
    *("run.steps=1e3", "rollout=embedded", "objective=pacs", "reward=math", "data.train=[a]", "data.train.columns=problem"),
    *("run.nproc=1000000", "run.nproc=3", "resources.gpus_per_node=8", "resources.nodes=2", "run.dir={r}", "run.dir=/proc"),
    *("evaluation.k=[0]", "evaluation.k=[1000]", "evaluation.every=2", "optimizer.lr=1e999", "optimizer.adam_beta1=1"),
    *("optimizer.lr=1e-999", "rollout.sampling.stop=['']", "rollout.sampling.stop=[[]]", "rollout.sampling.temperature=.nan"),
    *("reward.timeout_s=0", "reward.timeout_s=.inf", "reward.timeout_s=1e300", "reward.memory_limit_gib=1e-9"),
    *("reward.workers=1000000", "logging.wandb={{project: x}}", "checkpoint.keep_last=0", "data.limit=0", "data.train.limit=0"),
    *("data.train.split=''", "data.chat_template_args={{messages: x}}", "data.chat_template_args={{max_length: -5}}"),
    *("data.chat_template_args={{tools: 3}}", "data.chat_template_args={{continue_final_message: "
                                              "true}}", "model.path=."),
    *("data.chat_template_args={{return_dict: true}}", 'run.name="\\e[2J"', 'run.name="a\\u202eb"', "model.path=s3://b/x", "model.path=~nobody-here/x"),
    *("model.path={w}/train.jsonl", "model.path=C:\\\\models\\\\x", "model.path=https://huggingface.co/Qwen/Qwen3-8B"),
    *("data.train.path=https://h/x.jsonl", "data.train.path={w}/*.jsonl", "data.train.path={w}/x.csv", "data.train.path=."),
    *("rollout.sampling.max_response_tokens=1000000000", "batch.tokens_per_microbatch=1"),
    *("parallel.hang_timeout_s=.inf", "parallel.control_timeout_s=1e300", "resources.signal_lead_s=100000000000000000000"),
    *("reward.function=os:system", "reward.function={w}/reward.py", "reward.function={w}/reward.py:missing", "reward.function=:f"),
    "reward={{name: format, pattern: '('}}",
):  # fmt: skip
    case(f"train {_word}"[:70], "train", "{r}", _word)

for _name, _content in {
    "two documents": "run: {name: x}\n---\nrun: {name: y}\n",
    "directive": "%YAML 9.9\n---\nrun: {name: x}\n",
    "merge key": "run:\n  <<: {name: x}\n",
    "key of nothing": "~: 1\n",
    "key of a list": "? [a, b]\n: 1\n",
    "key with a terminal escape": '"\\e[2Jrun": 1\n',
    "key of 10,000 letters": "k" * 10_000 + ": 1\n",
    "a page": PAGE,
    "a pointer": POINTER,
    "json with a comment": '{"run": {"name": "x"}} // x\n',
    "tabs and smart quotes": "run: {name: “x”}\nmodel:\t{path: x}\n",
    "a python file": "import os\nprint(1)\n",
    "only a comment": "# nothing\n",
    "windows-1252": "run: {name: 'caf\xe9'}\n".encode("latin-1"),
}.items():
    case(
        f"file: {_name}",
        "config",
        "show",
        "{r}",
        arrange=lambda w, c=_content: w.text("tiny.yaml", c),
    )  # type: ignore[misc]


def _loop(world: World) -> None:
    world.run.unlink()
    world.run.symlink_to(world.run)


def _pipe(world: World) -> None:
    world.run.unlink()
    os.mkfifo(world.run)


case("file: a symbolic link to itself", "config", "show", "{r}", arrange=_loop)
case("file: a pipe", "config", "show", "{r}", arrange=_pipe)

# ---------------------------------------------------------------------------------------
# environment, streams, limits
for _variables in (
    *({"WORLD_SIZE": "abc", "RANK": "0"}, {"WORLD_SIZE": "2", "RANK": "5", "LOCAL_RANK": "0"}),
    *({"HF_HOME": "/dev/null", "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"},),
    {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "-1", "SLURM_JOB_ID": "x", "SLURM_LOCALID": "0"},
    {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "x y", "MASTER_PORT": "1"},
    {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "99999"},
):  # fmt: skip
    _name = ", ".join(f"{key}={value}" for key, value in _variables.items())
    _words = (
        ("train", "{r}")
        if "HF_HOME" not in _variables
        else ("fetch", "{r}", "model.path=some/model")
    )
    case(f"environment {_name}"[:90], *_words, environ=_variables)
for _name, _script in {
    "standard output is a full disk": "$P config show {r} > /dev/full",
    "standard output is closed": "$P config show {r} >&-",
    "working directory was removed": "mkdir gone && cd gone && rmdir ../gone && $P train run.yaml",
    "sixteen open files": "ulimit -n 16; $P config show {r} run.steps=0",
    "little memory": "ulimit -v 60000; $P train {r}",
    "no file may grow": "ulimit -f 0; $P convert to-megatron --hf {m} --out {w}/o",
    "ascii terminal": "LC_ALL=C PYTHONIOENCODING=ascii PYTHONUTF8=0 $P config show {r} run.name=/é",
    "an old locale": "LC_ALL=xx_YY.ISO8859-1 PYTHONUTF8=0 $P train {w}/é.yaml",
    "home is unset": "env -u HOME $P train '~/x.yaml'",
    "a dead proxy": "HF_HUB_OFFLINE=0 HF_ENDPOINT=http://127.0.0.1:9 http_proxy=garbage $P fetch "
    "{r} model.path=some/model",
    "hub of another scheme": "HF_HUB_OFFLINE=0 HF_ENDPOINT=ftp://x $P fetch {r} "
    "model.path=some/model",
    "token with a line end": "HF_HUB_OFFLINE=0 HF_TOKEN=$(printf 'a\\nb') "
    "HF_ENDPOINT=http://127.0.0.1:9 $P fetch {r} model.path=some/model",
}.items():
    case(f"shell: {_name}", "sh", "-c", _script)

# -----------------------------------------------------------------------------------------------------------------
# data
PREVIEW = ("data", "preview", "{r}")
for _name, (_file, _content) in {
    "a pointer instead of lines": ("d.jsonl", POINTER),
    "a pointer instead of parquet": ("d.parquet", POINTER),
    "a page instead of lines": ("d.jsonl", PAGE),
    "a page instead of json": ("d.json", PAGE),
    "rows under a key": ("d.json", '{"data": [' + ROW.strip() + "]}"),
    "nan in a row": ("d.jsonl", '{"problem": "x", "answer": NaN}\n'),
    "utf-16 lines": ("d.jsonl", ROW.encode("utf-16")),
    "null answer": ("d.jsonl", '{"problem": "x", "answer": null}\n'),
    "blank problem": ("d.jsonl", '{"problem": "  ", "answer": "1"}\n'),
    "empty answer": ("d.jsonl", '{"problem": "x", "answer": ""}\n'),
    "single quotes": ("d.jsonl", "{'problem': 'x', 'answer': '1'}\n"),
    "a table with commas": ("d.csv", "problem,answer\nx,1\n"),
    "a compressed file": ("d.jsonl.gz", b"\x1f\x8b\x08\x00" + bytes(20)),
    "gzip under a plain name": ("d.jsonl", b"\x1f\x8b\x08\x00" + bytes(20)),
    "rows of rows": ("d.json", "[[" + ROW.strip() + "]]"),
    "a trailing comma": ("d.json", "[" + ROW.strip() + ",]"),
    "a parquet of zero bytes": ("d.parquet", b""),
    "one line of 40 MB": ("d.jsonl", b'{"problem": "' + b"x " * 20_000_000 + b'", "answer": "1"'),
}.items():
    case(
        f"data: {_name}",
        *PREVIEW,
        f"data.train.path={{w}}/{_file}",
        arrange=lambda w, f=_file, c=_content: w.text(f, c),
    )  # type: ignore[misc]


def _parquet(columns: dict[str, Any], cut: bool = False) -> Callable[[World], Any]:
    def write(world: World) -> None:
        import pyarrow
        from pyarrow import parquet

        path = world.folder / "d.parquet"
        parquet.write_table(pyarrow.table(columns), path)
        if cut:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    return write


for _name, _columns in {
    "without rows": {"problem": [], "answer": []},
    "of bytes": {"problem": [b"\xff\xfe"], "answer": ["1"]},
    "of structs": {"problem": [{"text": "x"}], "answer": ["1"]},
    "without the column": {"question": ["x"], "answer": ["1"]},
    "of nulls": {"problem": [None], "answer": ["1"]},
}.items():
    case(f"parquet {_name}", *PREVIEW, "data.train.path={w}/d.parquet", arrange=_parquet(_columns))
case("parquet cut off", *PREVIEW, "data.train.path={w}/d.parquet", arrange=_parquet({"problem": ["x"] * 99, "answer": ["1"] * 99}, cut=True))  # fmt: skip
case(
    "data: a dangling link",
    *PREVIEW,
    "data.train.path={w}/d.jsonl",
    arrange=lambda w: (w.folder / "d.jsonl").symlink_to("x"),
)
case(
    "data: a folder",
    *PREVIEW,
    "data.train.path={w}/d.jsonl",
    arrange=lambda w: (w.folder / "d.jsonl").mkdir(),
)

# ----------------------------------------------------------------------------------------------------------------
# model
for _name, _file, _content in (
    ("pointer as config.json", "config.json", POINTER),
    ("pointer as weights", "model.safetensors", POINTER),
    ("page as weights", "model.safetensors", PAGE),
    ("list as config.json", "config.json", "[]"),
    ("null as config.json", "config.json", "null"),
    ("empty weights", "model.safetensors", b""),
    ("eight bytes of weights", "model.safetensors", bytes(8)),
    ("index of a missing shard", "model.safetensors.index.json", '{"weight_map": '
                                                                 '{"model.norm.weight": '
                                                                 '"gone.safetensors"}}'),
    ("index without map", "model.safetensors.index.json", '{"metadata": {}}'),
    ("index to itself", "model.safetensors.index.json", '{"weight_map": {"a": '
                                                        '"model.safetensors.index.json"}}'),
):  # fmt: skip
    case(
        f"model: {_name}",
        *TO_MEGATRON,
        arrange=lambda w, f=_file, c=_content: w.text(f"model/{f}", c),
    )  # type: ignore[misc]


def _only_pickle(world: World) -> None:
    (world.model / "model.safetensors").rename(world.model / "pytorch_model.bin")


def _cut_weights(world: World) -> None:
    path = world.model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def _longer_weights(world: World) -> None:
    with (world.model / "model.safetensors").open("ab") as file:
        file.write(b"x" * 16)


case("model: only pickled weights", *TO_MEGATRON, arrange=_only_pickle)
case("model: last byte of the weights is missing", *TO_MEGATRON, arrange=_cut_weights)
case("model: bytes behind the weights", *TO_MEGATRON, arrange=_longer_weights)
case(
    "model: without config.json", *TO_MEGATRON, arrange=lambda w: (w.model / "config.json").unlink()
)
for _name, _changes in {
    "vocabulary of a billion": {"vocab_size": 10**9},
    "tied as text": {"tie_word_embeddings": "false"},
    "another activation": {"hidden_act": "gelu_new"},
    "three key heads": {"num_key_value_heads": 3},
    "head size zero": {"head_dim": 0},
    "bias": {"attention_bias": True},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "int8 weights": {"dtype": "int8", "torch_dtype": "int8"},
    "sliding window": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0},
    "layers as float": {"num_hidden_layers": 2.0},
    "layers as boolean": {"num_hidden_layers": True},
    "a family of 10,000 letters": {"model_type": "q" * 10_000},
}.items():
    case(
        f"config.json: {_name}",
        *TO_MEGATRON,
        arrange=lambda w, c=_changes: w.model_json("config.json", **c),
    )  # type: ignore[misc]
for _name, _change in {
    "metadata of numbers": lambda h: h.update({"__metadata__": {"a": 1}}),
    "metadata as text": lambda h: h.update({"__metadata__": "pt"}),
    "shape of floats": lambda h: h["model.norm.weight"].update(shape=[64.0]),
    "shape of a billion": lambda h: h["model.norm.weight"].update(shape=[2**40, 2**40]),
    "thousand axes": lambda h: h["model.norm.weight"].update(shape=[1] * 1000),
    "offsets backwards": lambda h: h["model.norm.weight"].update(data_offsets=[64, 0]),
    "one offset": lambda h: h["model.norm.weight"].update(data_offsets=[0]),
    "type of nothing": lambda h: h["model.norm.weight"].pop("dtype") and None,
    "eight bits": lambda h: h["model.norm.weight"].update(dtype="F8_E4M3"),
    "empty": lambda h: {"__metadata__": {}},
}.items():
    case(f"header: {_name}", *TO_MEGATRON, arrange=lambda w, c=_change: w.header(c))  # type: ignore[misc]

# -----------------------------------------------------------------------------------------------------------
# tokenizer
for _name, _file, _content in (
    ("pointer", "tokenizer.json", POINTER),
    ("list", "tokenizer.json", "[]"),
    ("unknown model", "tokenizer.json", '{"version": "1.0", "model": {"type": "Magic"}, '
                                        '"added_tokens": []}'),
    ("template that recurses", "chat_template.jinja", "{% macro f() %}{{ f() }}{% endmacro %}{{ "
                                                      "f() }}"),
    ("template that includes", "chat_template.jinja", "{% include '/etc/passwd' %}"),
    ("template that imports", "chat_template.jinja", "{% import 'os' as os %}{{ os }}"),
    ("template with its own error", "chat_template.jinja", "{{ raise_exception('a\nb\x1b[2Jc') }}"),
    ("template that divides by zero", "chat_template.jinja", "{{ 1 // 0 }}"),
    ("template of bytes", "chat_template.jinja", b"\xff\xfe{{ messages }}"),
    ("template of ten million letters", "chat_template.jinja", "{{ messages[0].content * 10000000 "
                                                               "}}"),
    ("template that changes its input", "chat_template.jinja", "{{ messages.clear() }}"),
    ("template with a surrogate", "chat_template.jinja", "{{ '\\ud800' }}{{ messages[0].content }}"),
    ("template of 2,000 levels", "chat_template.jinja", "{% if 1 %}" * 2000 + "x" + "{% endif %}" * 2000),
    ("settings as a list", "tokenizer_config.json", "[]"),
    ("end token as a number", "tokenizer_config.json", '{"tokenizer_class": '
                                                       '"PreTrainedTokenizerFast", "eos_token": 7}'),
):  # fmt: skip
    case(
        f"tokenizer: {_name}",
        *PREVIEW,
        arrange=lambda w, f=_file, c=_content: w.text(f"model/{f}", c),
    )  # type: ignore[misc]
for _name, _content in (
    ("end of -1", '{"eos_token_id": -1}'),
    ("end beyond", '{"eos_token_id": 999999}'),
    ("a list", "[]"),
):
    case(
        f"generation config: {_name}",
        "train",
        "{r}",
        arrange=lambda w, c=_content: w.text("model/generation_config.json", c),
    )  # type: ignore[misc]

# ----------------------------------------------------------------------------------------- rewards:
# code of the user
for _name, _content in {
    "syntax error": "def reward(prompt, response:\n",
    "import raises": "raise ValueError('a\\nb')\n",
    "import ends the process": "import os\nos._exit(0)\n",
    "import exits": "import sys\nsys.exit(0)\n",
    "import interrupts": "raise KeyboardInterrupt\n",
    "import floods": "print('x' * 10**8)\nraise ImportError('x')\n",
    "missing module": "import nosuchmodule\n",
    "not callable": "reward = 7\n",
    "no arguments": "def reward():\n    return 1.0\n",
    "coroutine": "async def reward(prompt, response):\n    return 1.0\n",
    "generator": "def reward(prompt, response):\n    yield 1.0\n",
    "none": "def reward(prompt, response):\n    return None\n",
    "half": "def reward(prompt, response):\n    return 0.5\n",
    "evil text": "class E(Exception):\n    def __str__(self):\n        raise self\n\n\ndef "
    "reward(prompt, response):\n    raise E\n",
    "interrupts": "def reward(prompt, response):\n    raise KeyboardInterrupt\n",
    "kills its parent's group": "import os, signal\n\n\ndef reward(prompt, response):\n    "
    "os.killpg(0, signal.SIGKILL)\n",
    "closes everything": "import os\n\n\ndef reward(prompt, response):\n    os.closerange(0, "
    "100)\n    return 1.0\n",
    "writes into the channel": "import os\n\n\ndef reward(prompt, response):\n    [os.write(fd, "
    "b'x\\n') for fd in range(3, 9)]\n    return 1.0\n",
}.items():
    _words = (
        PREVIEW
        if "def reward(prompt, response):" not in _content
        else ("train", "{r}", "parallel.tp=1")
    )
    case(f"reward: {_name}", *_words, arrange=lambda w, c=_content: w.text("reward.py", c))  # type: ignore[misc]

# -------------------------------------------------------------------------------------------------------------
# cluster
CLUSTER = {"name": "c", "python": ["python"]}
for _key, _value in (
    *(("account", "-x"), ("partition", "a b"), ("python", []), ("python", "python"), ("env", {"A B": "1"}), ("env", ["A=1"])),
    *(("mounts", ["/a"]), ("container", {"runtime": "docker", "image": "x"}), ("mem", "lots"), ("cpus_per_task", 0)),
    *(("srun_args", ["--x\n--y"]), ("setup", ["true\nid"]), ("modules", ["a; id"]), ("qos", "$(id)"), ("scratch", "")),
    *(("network_interface", "ib0; id"), ("cpu_bind", "$x"), ("constraint", "a b"), ("env", {"A": "x\ny"}), ("launcher", "mpirun")),
    ("container", {"runtime": "pyxis", "image": "x", "mounts": ["relative"]}),
):  # fmt: skip

    def _cluster(world: World, key: str = _key, value: Any = _value) -> None:
        world.text("cluster.yaml", yaml.safe_dump(CLUSTER | {key: value}))

    _words = ("submit", "{r}", "--cluster", "{w}/cluster.yaml", "--dry-run")
    case(f"cluster: {_key}={_value!r}"[:70], *_words, arrange=_cluster)


# ------------------------------------------------------------------------------------------------------------
# run folder
def _in_checkpoint(name: str, content: str | bytes) -> Callable[[World], Any]:
    return lambda w: w.text(f"checkpoint/{name}", content)


def _manifest(change: Callable[[dict[str, Any]], Any]) -> Callable[[World], Any]:
    def write(world: World) -> None:
        path = world.checkpoint / "manifest.json"
        tree = json.loads(path.read_text())
        path.write_text(json.dumps(change(tree) or tree))

    return write


for _name, _arrange in {
    "manifest of a list": _manifest(lambda t: [t]),
    "manifest of no files": _manifest(lambda t: t.update(files={})),
    "files as text": _manifest(lambda t: t.update(files="x")),
    "files of null": _manifest(lambda t: t.update(files=dict.fromkeys(t["files"]))),
    "sizes as text": _manifest(
        lambda t: [entry.update(bytes="1") for entry in t["files"].values()] and None
    ),
    "absolute file": _manifest(
        lambda t: t["files"].update({"/etc/passwd": next(iter(t["files"].values()))})
    ),
    "index of nothing": _in_checkpoint("dist/.metadata", b""),
    "index as page": _in_checkpoint("dist/.metadata", PAGE),
    "config.json is empty": _in_checkpoint("hf/config.json", ""),
    "weights as pointer": lambda w: [
        p.write_text(POINTER) for p in w.checkpoint.glob("dist/*.distcp")
    ],
    "common.pt runs code": _in_checkpoint("dist/common.pt", b"cos\nsystem\n(S'touch canary'\ntR."),
    "links into nowhere": lambda w: [
        p.unlink() or p.symlink_to("/nonexistent") for p in w.checkpoint.glob("dist/*.distcp")
    ],
}.items():
    case(f"checkpoint: {_name}", *TO_HF, arrange=_arrange)  # type: ignore[arg-type]


def _run_folder(name: str, content: str | bytes | None) -> Callable[[World], Any]:
    def write(world: World) -> None:
        path = world.folder / "runs" / "tiny" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir() if content is None else world.text(f"runs/tiny/{name}", content)

    return write


for _name, _file, _content in (
    ("lock is a folder", "run.lock", None),
    ("checkpoints are a file", "checkpoints", "x"),
    ("metrics are a folder", "metrics.jsonl", None),
    ("logs are a file", "logs", "x"),
    ("configuration is a folder", "config.yaml", None),
    ("newest checkpoint is empty", "checkpoints/step_000009/manifest.json", ""),
    ("newest checkpoint is a page", "checkpoints/step_000009/manifest.json", PAGE),
):
    case(
        f"run folder: {_name}",
        "train",
        "{r}",
        "parallel.tp=1",
        arrange=_run_folder(_file, _content),
    )
case("run folder: it is a file", "train", "{r}", arrange=lambda w: w.text("runs/tiny", "x"))
case(
    "run folder: status of damage",
    "status",
    "{w}/runs/tiny",
    arrange=_run_folder("metrics.jsonl", b"\xff" * 99),
)


@pytest.mark.parametrize("name", in_tiers(CASES, every=2))
def test_one_clear_line(name: str, original: World, tmp_path: Path) -> None:
    check_case(name, CASES[name], original, tmp_path)


def test_the_log_that_a_message_names_stays(original: World, tmp_path: Path) -> None:
    """A start that fails for another reason leaves no folder (`test_training.py`)."""
    world = copy_world(original, tmp_path / "world")
    world.text("reward.py", "import os\nos.write(2, b'the reason')\nos._exit(3)\n")
    outcome = run(["train", world.run, "parallel.tp=1"], world.folder, {})
    assert outcome.code == 1 and "RewardError: reward worker did not start" in outcome.text, (
        outcome.text
    )
    assert "the reason" in (world.folder / "runs" / "tiny" / "logs" / "driver.log").read_text()
