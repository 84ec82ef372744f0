"""The second half of the seventh set: reward servers, other services, clusters, tokenizers,
variables, odd files, clocks.

Written before the code was read for it; `test_hostile_states.py` has the other half.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_hostile_files import link, pipe, text, together
from tests.integration.test_hostile_states import REJUDGE, judged, unix_socket
from tests.integration.test_hostile_verbs import SUBMIT
from tests.support.hostile import Arrange, Cases, World, check, check_case, copy_world

__all__ = ["judged"]
CASES = Cases()
case = CASES.add
QUIET = Cases()
"""Cases that may work, or end with one clear line."""
quiet = QUIET.add
PREVIEW = ("data", "preview", "{r}")
SHOW = ("config", "show", "{r}")

# -----------------------------------------------------------------------------------------------
# servers of other people
Behaviour = Callable[[socket.socket, bytes], None]
"""Responds to a request, its head and body."""


@contextmanager
def serving(behaviour: Behaviour) -> Iterator[str]:
    """The address of a server; every connection has a thread."""
    stop = threading.Event()

    def connected(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.settimeout(20)
            request = b""
            while b"\r\n\r\n" not in request:
                piece = connection.recv(65536)
                if not piece:
                    return
                request += piece
            head, _, body = request.partition(b"\r\n\r\n")
            size = next(
                (
                    int(line[15:])
                    for line in head.lower().split(b"\r\n")
                    if line[:15] == b"content-length:"
                ),
                0,
            )
            while len(body) < size:
                body += connection.recv(65536)
            behaviour(connection, body)

    def accept() -> None:
        while not stop.is_set():
            with suppress(OSError):
                connection, _ = server.accept()
                threading.Thread(target=connected, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}/x"
        finally:
            stop.set()
            thread.join()


def reply(body: bytes | str, *headers: str, status: str = "200 OK") -> bytes:
    data = body if isinstance(body, bytes) else body.encode("utf-8", "surrogatepass")
    lines = [
        f"HTTP/1.1 {status}",
        f"Content-Length: {len(data)}",
        "Connection: close",
        *headers,
        "",
        "",
    ]
    return "\r\n".join(lines).encode() + data


def always(body: bytes | str, *headers: str, status: str = "200 OK") -> Behaviour:
    return lambda connection, _: connection.sendall(reply(body, *headers, status=status))


def rewards(
    of: Callable[[int], Any], *headers: str, encode: Callable[[bytes], bytes] = lambda data: data
) -> Behaviour:
    """A body for the number of samples of the request."""

    def respond(connection: socket.socket, body: bytes) -> None:
        found = of(len(json.loads(body)["samples"]))
        data = found if isinstance(found, str) else json.dumps(found)
        connection.sendall(reply(encode(data.encode("utf-8", "surrogatepass")), *headers))

    return respond


def drip(connection: socket.socket, _: bytes) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    for _ in range(1000):
        connection.sendall(b" ")
        time.sleep(0.5)


def chunks(connection: socket.socket, _: bytes) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        connection.sendall(b"10000\r\n" + b"[" * 65536 + b"\r\n")


def continued(connection: socket.socket, _: bytes) -> None:
    while True:
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        time.sleep(0.01)


def silent(connection: socket.socket, _: bytes) -> None:
    time.sleep(60)


SERVERS: dict[str, Behaviour] = {
    "one reward too many": rewards(lambda n: {"rewards": [1] * (n + 1)}),
    "no reward": rewards(lambda n: {"rewards": []}),
    "nan": rewards(lambda n: '{"rewards": [' + ", ".join(["NaN"] * n) + "]}"),
    "1e400": rewards(lambda n: '{"rewards": [' + ", ".join(["1e400"] * n) + "]}"),
    "numbers of 5,000 digits": rewards(lambda n: '{"rewards": [' + ", ".join(["9" * 5000] * n) + "]}"),
    "text": rewards(lambda n: {"rewards": ["1"] * n}),
    "null": rewards(lambda n: {"rewards": [None] * n}),
    "lists": rewards(lambda n: {"rewards": [[1]] * n}),
    "a list alone": rewards(lambda n: [1] * n),
    "a half": rewards(lambda n: {"rewards": [0.5] * n}),
    "the key twice": rewards(lambda n: '{"rewards": [], "rewards": ' + str([1] * n) + "}"),
    "text after the object": rewards(lambda n: json.dumps({"rewards": [1] * n}) + "x"),
    "UTF-16": rewards(lambda n: {"rewards": [1] * n}, encode=lambda data: data.decode().encode("utf-16")),
    "a name of the model with a lone surrogate": rewards(lambda n: '{"model": "\\ud800", "rewards": ' + str([1] * n) + "}"),
    "a name of the model that is a list": rewards(lambda n: {"rewards": [1] * n, "model": ["x"], "version": {"a": 1}}),
    "4 TiB compressed": rewards(lambda n: "x", "Content-Encoding: gzip", encode=lambda _: gzip.compress(bytes(50_000_000))),
    "no content": always("", status="204 No Content"),
    "unauthorized": always('{"error": "\x1b[2J"}', status="401 Unauthorized"),
    "too many requests for a year": always("", "Retry-After: 31536000", status="429 Too Many "
                                                                               "Requests"),
    "a redirect to itself": always("", "Location: /x", status="307 Temporary Redirect"),
    "a redirect to a file": always("", "Location: file:///etc/passwd", status="302 Found"),
    "status 999": always("{}", status="999 \xff"),
    "a drip": drip,
    "chunks without an end": chunks,
    "continue without an end": continued,
    "a length of -1": lambda connection, _: connection.sendall(b"HTTP/1.1 200 "
                                                               b"OK\r\nContent-Length: "
                                                               b"-1\r\n\r\n{}"),
    "a version of 0.9": lambda connection, _: connection.sendall(b'{"rewards": [1]}'),
    "a banner of ssh": lambda connection, _: connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n"),
    "a cut body": lambda connection, _: connection.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: '
                                                           b'99\r\n\r\n{"rewards": [1'),
    "a million headers": lambda connection, _: connection.sendall(b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 1_000_000),
}  # fmt: skip
HTTP = "reward={{name: http, url: '{url}', timeout_s: 6}}"


@pytest.mark.full
@pytest.mark.parametrize("name", SERVERS)
def test_reward_servers(name: str, judged: World, tmp_path: Path) -> None:
    """Existing samples are judged by a server; nothing of the earlier results changes."""
    world = copy_world(judged, tmp_path / "world")
    with serving(SERVERS[name]) as url:
        words = [
            word.format(r=world.run, w=world.folder)
            for word in (*REJUDGE, HTTP.replace("{url}", url))
        ]
        check(f"reward server: {name}", world, words, {})
    shutil.rmtree(world.folder, ignore_errors=True)


def _json_for_all(body: str) -> Behaviour:
    return always(body, "Content-Type: application/json")


OTHERS: dict[str, Behaviour] = {
    "an empty object for everything": _json_for_all("{}"),
    "a list for everything": _json_for_all("[]"),
    "another kind of server": _json_for_all(
        '{"object": "list", "data": [{"id": "gpt-4", "object": "model"}]}'
    ),
    "a page of a proxy": always("<html>log in</html>", "Content-Type: text/html"),
    "a server that is silent": silent,
    "a drip": drip,
}


@pytest.mark.campaign
@pytest.mark.parametrize("name", OTHERS)
def test_services_in_place_of_sglang(name: str, original: World, tmp_path: Path) -> None:
    world = copy_world(original, tmp_path / "world")
    with serving(OTHERS[name]) as url:
        rollout = (
            f"rollout={{engine: sglang, urls: ['{url[:-2]}'], sampling: {{max_response_tokens: "
            f"12}}, "
            "sync: {transport: disk}, all_down_after_s: 8}"
        )
        check(f"sglang: {name}", world, ["train", world.run, "parallel.tp=1", rollout], {})
    shutil.rmtree(world.folder, ignore_errors=True)


for _name, _urls in {
    "a user and a password": ["http://user:pass@127.0.0.1:1"],
    "a path": ["http://127.0.0.1:1/v1/"],
    "the same twice": ["http://127.0.0.1:1", "http://127.0.0.1:1/"],
    "port 0": ["http://127.0.0.1:0"],
    "a host of 300 letters": ["http://" + "a" * 300 + ":1"],
    "a host of dots": ["http://..:1"],
    "a line end": ["http://127.0.0.1:1\nX: y"],
    "no host": ["http://:8000"],
    "a wildcard": ["http://*:8000"],
    "half an address of version 6": ["http://[::1:8000"],
}.items():
    _value = json.dumps(_urls).replace("{", "{{").replace("}", "}}")
    case(
        f"urls: {_name}",
        *SHOW,
        f"rollout={{{{engine: sglang, urls: {_value}, sampling: {{{{max_response_tokens: 9}}}}, "
        f"sync: {{{{transport: disk}}}}}}}}",
    )
FORMAT = "{{name: format, pattern: x}}"
for _name, _value in {
    "no components": "{{name: weighted, components: []}}",
    "a weight of nan": "{{name: weighted, label_threshold: 0.5, components: [{{weight: .nan, "
                       "reward: " + FORMAT + "}}]}}",
    "a weight of 1e308 twice": "{{name: weighted, label_threshold: 0.5, components: [{{weight: "
                               "1e308, reward: " + FORMAT + "}}, {{weight: 1e308, reward: " + FORMAT + "}}]}}",
    "weighted in weighted": "{{name: weighted, label_threshold: 0.5, components: [{{weight: 1, "
                            "reward: {{name: weighted, components: [{{weight: 1, reward: " + FORMAT + "}}]}}}}]}}",
    "a threshold that nothing reaches": "{{name: weighted, label_threshold: 9, components: "
                                        "[{{weight: 1, reward: " + FORMAT + "}}]}}",
    "a component without its weight": "{{name: weighted, label_threshold: 0.5, components: "
                                      "[{{reward: " + FORMAT + "}}]}}",
    "weights as a map": "{{name: weighted, label_threshold: 0.5, components: {{format: 1}}}}",
    "a threshold of infinity": "{{name: http, url: 'http://a:1/x', label_threshold: .inf}}",
    "a key in the address": "{{name: http, url: 'http://user:secret@a:1/x'}}",
    "the name of a variable with a space": "{{name: http, url: 'http://a:1/x', api_key_env: 'MY "
                                           "KEY'}}",
    "an address of a file": "{{name: http, url: 'file:///etc/passwd'}}",
    "a pattern without an end": "{{name: format, pattern: '(a|b'}}",
    "a pattern of 100,000 groups": "{{name: format, pattern: '" + "(" * 5000 + ")" * 5000 + "'}}",
}.items():  # fmt: skip
    case(f"reward: {_name}", *SHOW, "reward=" + _value)

# -----------------------------------------------------------------------------------------------------
# clusters and sweeps
for _name, _content in {
    "a container of no runtime": "name: c\npython: [python]\ncontainer: {image: x}\n",
    "a runtime of no name": "name: c\npython: [python]\ncontainer: {image: x, runtime: lxd, "
    "mounts: []}\n",
    "a mount without a target": "name: c\npython: [python]\ncontainer: {image: x, runtime: pyxis, "
    "mounts: ['']}\n",
    "a variable with a line end": 'name: c\npython: [python]\nenv: {A: "x\\ny", "B=C": d}\n',
    "a variable with an equals sign": "name: c\npython: [python]\nenv: {'B=C': d}\n",
    "no interpreter": "name: c\npython: []\n",
    "an interpreter of nothing": "name: c\npython: ['']\n",
    "a thousand million cores": "name: c\npython: [python]\ncpus_per_task: 1000000000000\n",
    "memory of a word": "name: c\npython: [python]\nmem: lots\n",
    "arguments of numbers": "name: c\npython: [python]\nsrun_args: [1, 2]\n",
    "an argument with a NUL": 'name: c\npython: [python]\nsrun_args: ["a\\0b"]\n',
    "a partition of two lines": 'name: c\npython: [python]\npartition: "a\\n#SBATCH --account=b"\n',
    "a launcher of no name": "name: c\npython: [python]\nlauncher: mpirun\n",
    "an interface with a command": "name: c\npython: [python]\nnetwork_interface: 'lo; touch "
    "canary'\n",
}.items():
    case(f"cluster: {_name}", *SUBMIT, "{w}/cluster.yaml", arrange=text("cluster.yaml", _content))
for _words in (
    *(("--sweep", "run.nothing=1,2"), ("--sweep", "optimizer.lr=.inf,1e-3"), ("--sweep", "=1,2")),
    *(("--sweep", "run.name=a,a"), ("--sweep", "run.seed=1,1"), ("--seeds", "1e3"), ("--seeds", "-3"), ("--sweep", "run.seed")),
    ("--sweep", "batch.updates_per_step=" + ",".join(map(str, range(3, 3000)))),
    ("--sweep", "optimizer.lr=1e-3,1e-4", "--sweep", "optimizer.lr=1e-5,1e-6"),
):  # fmt: skip
    case(f"submit: {' '.join(_words)[:50]}", *SUBMIT, "local", *_words)
quiet("submit: --sweep run.dir=a,b", *SUBMIT, "local", "--sweep", "run.dir=a,b")


# ---------------------------------------------------------------------------------------------
# tokenizers, chat templates
def tokenizer(change: Callable[[dict[str, Any]], object]) -> Arrange:
    def edit(world: World) -> None:
        path = world.model / "tokenizer.json"
        tree = json.loads(path.read_text())
        change(tree)
        path.write_text(json.dumps(tree))

    return edit


def settings(**changes: Any) -> Arrange:
    return lambda w: w.model_json("tokenizer_config.json", **changes)


SPLIT = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}
LONG = text("train.jsonl", json.dumps({"problem": "x" * 3000, "answer": "1"}) + "\n")
for _name, _arrange in {
    "a template of a number": settings(chat_template=7),
    "a template of templates": settings(chat_template=[{"name": "default", "template": 7}]),
    "a template of NUL": settings(chat_template="a\0{{ messages }}"),
    "a template of a lone surrogate": settings(chat_template="{{ '\\ud800' }}"),
    "a template that raises": settings(chat_template="{{ raise_exception('\\n\x1b[2J') }}"),
    "a template of a million tokens": settings(chat_template="{{ 'a b ' * 1000000 }}"),
    "a template that imports": settings(chat_template="{% import 'os' as os %}{{ os }}"),
    "a template of nothing": settings(chat_template="{# #}"),
    "a template of 50 MB": text("model/chat_template.jinja", "{# " + "x" * 50_000_000 + " #}{{ messages }}"),
    "an unknown class": settings(tokenizer_class="NobodysTokenizer"),
    "a class of its own code": together(settings(auto_map={"AutoTokenizer": ["evil.T", "evil.T"]}, tokenizer_class="T"), text("model/evil.py", "open('canary', 'w')\n")),
    "a length of text": settings(model_max_length="long"),
    "end tokens of a list": settings(eos_token=["a", "b"]),
    "added tokens of a word": settings(added_tokens_decoder={"x": "y"}),
    "an added token of 2**40": tokenizer(lambda t: t["added_tokens"].append({"id": 2**40, "content": "<far>", "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False})),
    "a vocabulary of nothing": tokenizer(lambda t: t["model"].update(vocab={}, merges=[])),
    "a version of 9": tokenizer(lambda t: t.update(version="9.0")),
    "an unknown normalizer": tokenizer(lambda t: t.update(normalizer={"type": "Nobody"})),
    "a charsmap of noise": tokenizer(lambda t: t.update(normalizer={"type": "Precompiled", "precompiled_charsmap": base64.b64encode(os.urandom(64)).decode()})),
    "a pattern without an end": tokenizer(lambda t: t.update(pre_tokenizer={**SPLIT, "pattern": {"Regex": "("}})),
    "a tokenizer that is a list": text("model/tokenizer.json", "[]"),
    "a tokenizer of 10,000 lists": text("model/tokenizer.json", "[" * 10_000 + "]" * 10_000),
}.items():  # fmt: skip
    quiet(f"tokenizer: {_name}", *PREVIEW, arrange=_arrange)
quiet("tokenizer: a pattern of a million years", *PREVIEW, arrange=together(LONG, tokenizer(lambda t: t.update(pre_tokenizer=SPLIT))))  # fmt: skip

# ------------------------------------------------------------------------------------------------
# variables, odd files
for _name, _command, _environ in (
    ("offline of a word", PREVIEW, {"HF_HUB_OFFLINE": "maybe"}),
    ("a level of no name", PREVIEW, {"TRANSFORMERS_VERBOSITY": "loud"}),
    ("logs of nonsense", PREVIEW, {"TORCH_LOGS": "nonsense"}),
    ("a folder of torch that is a file", PREVIEW, {"TORCH_HOME": "/etc/passwd", "TRITON_CACHE_DIR": "/etc/passwd"}),
    ("a thousand million threads", PREVIEW, {"OMP_NUM_THREADS": "1000000000"}),
    ("a policy of a word", PREVIEW, {"OMP_WAIT_POLICY": "lazy", "KMP_BLOCKTIME": "x"}),
    ("no names in the environment", PREVIEW, {"HOME": "", "USER": "", "LOGNAME": "", "TMPDIR": ""}),
    ("a temporary folder that is a file", PREVIEW, {"TMPDIR": "/etc/passwd"}),
    ("a time zone without an end", ("status", "{w}/runs"), {"TZ": ":/dev/zero"}),
    ("a time zone of 100,000 letters", PREVIEW, {"TZ": "A" * 100_000}),
    ("a language of no country", PREVIEW, {"LC_ALL": "xx_YY.UTF-77", "LANG": "xx"}),
    ("bytes as a language", SHOW, {"LANGUAGE": "\udcff\udcfe"}),
    ("paths of Python that are files", SHOW, {"PYTHONSTARTUP": "/etc/passwd", "PYTHONUSERBASE": "/etc/passwd"}),
    ("warnings of an unknown class", SHOW, {"PYTHONWARNINGS": "error::Nobody"}),
    ("a folder of NeMo-Run with a command", ("submit", "{r}", "--cluster", "local", "--dry-run"), {"NEMORUN_HOME": "/tmp/$(touch canary)"}),
    ("a folder of NeMo-Run below a device", ("submit", "{r}", "--cluster", "local"), {"NEMORUN_HOME": "/dev/null/x"}),
    ("a job of a word", ("status", "{w}/runs"), {"SLURM_JOB_ID": "abc", "SLURM_PROCID": "-1"}),
    ("a proxy of nonsense", ("fetch", "{r}", "model.path=some/model"), {"HF_HUB_OFFLINE": "0", "https_proxy": "::::", "HF_ENDPOINT": "https://127.0.0.1:9"}),
    ("certificates that are not there", ("fetch", "{r}", "model.path=some/model"), {"HF_HUB_OFFLINE": "0", "SSL_CERT_FILE": "/nonexistent", "REQUESTS_CA_BUNDLE": "/nonexistent", "HF_ENDPOINT": "https://127.0.0.1:9"}),
    ("a key with a line end", ("fetch", "{r}", "model.path=some/model"), {"HF_HUB_OFFLINE": "0", "HF_TOKEN": "a\nb", "HF_ENDPOINT": "http://127.0.0.1:9"}),
):  # fmt: skip
    quiet(f"variables: {_name}", *_command, environ=_environ)
TO_MEGATRON = ("convert", "to-megatron", "--hf", "{m}", "--out", "{w}/o")
for _name, _command, _arrange in (
    ("a configuration behind a socket", ("config", "show", "{w}/s.yaml"), unix_socket("s.yaml")),
    ("an include behind a socket", ("config", "show", "{w}/i.yaml"), together(unix_socket("s.yaml"), text("i.yaml", "include: [s.yaml]\n"))),
    ("data behind a socket", PREVIEW, unix_socket("train.jsonl")),
    ("weights behind a socket", TO_MEGATRON, unix_socket("model/model.safetensors")),
    ("config.json behind a socket", TO_MEGATRON, unix_socket("model/config.json")),
    ("a tokenizer behind a socket", TO_MEGATRON, unix_socket("model/tokenizer.json")),
    ("a manifest behind a socket", ("convert", "to-hf", "--checkpoint", "{c}", "--out", "{w}/o"), unix_socket("checkpoint/manifest.json")),
    ("memory of the process as data", (*PREVIEW, "data.train.path=/proc/self/mem"), lambda w: None),
    ("a terminal as data", (*PREVIEW, "data.train.path=/dev/tty"), lambda w: None),
    ("random numbers as a configuration", ("config", "show", "/dev/urandom"), lambda w: None),
    ("a folder of processes as a model", ("convert", "to-megatron", "--hf", "/proc/self", "--out", "{w}/o"), lambda w: None),
    ("a path of 5,000 letters", ("config", "show", "{w}/" + "a/" * 2500), lambda w: None),
    ("links in a ring", TO_MEGATRON, together(link("model/config.json", "{w}/model/other.json"), link("model/other.json", "{w}/model/config.json"))),
    ("a name with a line end and an escape", ("config", "show", "{w}/a\n\x1b[2Jb.yaml"), lambda w: None),
    ("a cluster behind a socket", (*SUBMIT, "{w}/s.yaml"), unix_socket("s.yaml")),
    ("a run behind a socket", ("status", "{w}/s"), unix_socket("s")),
    ("logs of a pipe", ("logs", "{w}/runs/x"), together(text("runs/x/config.yaml", "run: {name: "
                                                                                   "x}\n"), text("runs/x/logs/y", ""), pipe("runs/x/logs/rank0.log"))),
):  # fmt: skip
    case(f"files: {_name}", *_command, arrange=_arrange)


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_one_clear_line(name: str, original: World, tmp_path: Path) -> None:
    check_case(name, CASES[name], original, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("name", QUIET)
def test_works_or_one_clear_line(name: str, original: World, tmp_path: Path) -> None:
    check_case(name, QUIET[name], original, tmp_path, may_work=True)


# ----------------------------------------------------------------------------------------------------------------
# clocks
CLOCKS = {
    "backwards": "import time\nreal = time.time\nstart = real()\ntime.time = lambda: 2 * start - "
    "real()\n",
    "of 1970": "import time\nreal = time.time\nstart = real()\ntime.time = lambda: real() - "
    "start\n",
    "of the year 9999": "import time\nreal = time.time\nstart = real()\ntime.time = lambda: "
    "253402200000 + real() - start\n",
    "that jumps": "import random, time\ntime.time = lambda: random.uniform(0, 4e9)\n",
}


@pytest.mark.full
@pytest.mark.parametrize("name", CLOCKS)
def test_a_run_with_a_clock(name: str, original: World, tmp_path: Path) -> None:
    """The run ends as with another clock."""
    world = copy_world(original, tmp_path / "world")
    world.text("site/sitecustomize.py", CLOCKS[name])
    environ = {
        "PYTHONPATH": os.pathsep.join([str(world.folder / "site"), str(Path(__file__).parents[2])])
    }
    outcome = check(
        f"clock: {name}", world, ["train", world.run, "parallel.tp=1"], environ, may_work=True
    )
    assert outcome.code == 0, outcome.text[-3000:]
    rows = [
        json.loads(line)
        for line in (world.folder / "runs/tiny/metrics.jsonl").read_text().splitlines()
    ]
    assert [row["step"] for row in rows] == [1, 2]
    assert not [
        key for row in rows for key, value in row.items() if key.startswith("time") and value < 0
    ]
