"""The first half of the seventh set: runs whose state was changed, results judged again,
certificates, two at once.

Written before the code was read for it; `test_hostile_services.py` has the other half.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash
import yaml

from tests.integration.test_hostile_files import folder, link, pipe, text, together
from tests.integration.test_hostile_life import STEP, TRAIN, Trained
from tests.integration.test_hostile_verbs import BENCHMARK, COMPARE, DIVERSITY, RUNS, SAMPLE, TWO
from tests.support.hostile import (
    Arrange,
    Cases,
    World,
    check,
    check_case,
    copy_world,
    make_world,
    run,
)

CASES = Cases()
case = CASES.add
AGAIN = (*TRAIN, "run.steps=3")
RUN = "runs/tiny"
STEPS = f"{RUN}/checkpoints"


def unix_socket(name: str) -> Arrange:
    def make(world: World) -> None:
        (world.folder / name).unlink(missing_ok=True)
        old = Path.cwd()
        os.chdir((world.folder / name).parent)  # an address has 108 bytes
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(Path(name).name)
        os.chdir(old)

    return make


# ------------------------------------------------------------------------------------------- a run
# that continues, changed
def copied(old: str, new: str) -> Arrange:
    def copy(world: World) -> None:
        target = world.folder / new
        if target.is_dir():
            shutil.rmtree(target)
        found = world.folder / old
        shutil.copytree(found, target, symlinks=True) if found.is_dir() else shutil.copyfile(
            found, target
        )

    return copy


def forged(name: str, **changes: object) -> Arrange:
    """A file of the newest checkpoint with other values, and a manifest that fits it."""

    def forge(world: World) -> None:
        path = world.folder / STEP / name
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        manifest = world.folder / STEP / "manifest.json"
        tree = json.loads(manifest.read_text())
        entry = tree["files"][name]
        digest = xxhash.xxh3_128_hexdigest(path.read_bytes())
        for key, value in entry.items() if isinstance(entry, dict) else ():
            entry[key] = len(path.read_bytes()) if isinstance(value, int) else digest
        if isinstance(entry, list):
            tree["files"][name] = [
                len(path.read_bytes()) if isinstance(value, int) else digest for value in entry
            ]
        manifest.write_text(json.dumps(tree))

    return forge


def manifest(**changes: object) -> Arrange:
    def change(world: World) -> None:
        path = world.folder / STEP / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Two runs; `other` has another seed and one update a step."""
    found = Trained(tmp_path_factory.mktemp("trained"))
    words = ("run.name=other", "run.seed=9", "batch.updates_per_step=1")
    ended = run(["train", found.world.run, "parallel.tp=1", *words], found.world.folder, {})
    assert ended.code == 0, ended.text
    copy = shutil.copytree(
        found.world.folder / "runs/other", found.copy / "runs/other", symlinks=True
    )
    assert (copy / "checkpoints/step_000002").is_dir()
    return found


def other_run(*moves: tuple[str, str]) -> Arrange:
    """Parts of the run `other` take the place of those of `tiny`."""
    return together(*(copied(old, new) for old, new in moves))


def half_of(name: str) -> Arrange:
    return lambda w: os.truncate(w.folder / name, (w.folder / name).stat().st_size - 20)


def zeros_after(name: str) -> Arrange:
    return lambda w: (w.folder / name).open("ab").write(bytes(4096))


def lease(**changes: object) -> Arrange:
    found = {
        "command": "train",
        "host": socket.gethostname(),
        "namespace": os.readlink("/proc/self/ns/pid"),
        "pid": 1,
        "started": "1",
        "since": "2026-01-01 00:00:00",
        "token": "a" * 32,
        "heartbeat": 1,
    }
    return text(f"{RUN}/run.lock", json.dumps(found | changes))


def in_future(*steps: Arrange) -> Arrange:
    return together(*steps, lambda w: os.utime(w.folder / RUN / "run.lock", (4e9, 4e9)))


RESUMES: dict[str, tuple[Arrange, tuple[str, ...]]] = {
    "the first step's files in the second's folder": (copied(f"{STEPS}/step_000001", STEP), AGAIN),
    "the first step's state": (copied(f"{STEPS}/step_000001/state.json", f"{STEP}/state.json"), AGAIN),
    "the first step's weights": (copied(f"{STEPS}/step_000001/dist", f"{STEP}/dist"), AGAIN),
    "a forged step of -1": (forged("state.json", step=-1), AGAIN),
    "a forged step of 1e30": (forged("state.json", step=10**30), AGAIN),
    "a forged state of text": (forged("state.json", step="two", version="x"), AGAIN),
    "a forged position of the data": (forged("state.json", data={"epoch": -1, "index": 10**12}, data_position=-5), AGAIN),
    "a manifest without files": (manifest(files={}), AGAIN),
    "a manifest of files upwards": (manifest(files={"../../../../train.jsonl": [1, "0" * 32]}), AGAIN),
    "a manifest of a later format": (manifest(format=99, version=99), AGAIN),
    "the checkpoints of another run": (other_run(("runs/other/checkpoints", STEPS)), AGAIN),
    "one checkpoint of another run": (other_run(("runs/other/checkpoints/step_000002", STEP)), AGAIN),
    "the identity and the checkpoints of another run": (other_run(("runs/other/checkpoints", STEPS), ("runs/other/run_id", f"{RUN}/run_id")), AGAIN),
    "the folder of another run": (other_run(("runs/other", RUN)), AGAIN),
    "a newest checkpoint that is a file": (lambda w: [shutil.rmtree(w.folder / STEP), w.text(STEP, "x")], AGAIN),
    "a checkpoint of a far step": (copied(STEP, f"{STEPS}/step_999999999999999999999"), AGAIN),
    "a checkpoint of letters": (copied(STEP, f"{STEPS}/step_newest"), AGAIN),
    "checkpoints that are a file": (together(lambda w: shutil.rmtree(w.folder / STEPS), text(STEPS, "x")), AGAIN),
    "checkpoints behind a dangling link": (link(STEPS, "nowhere"), AGAIN),
    "a stray critic": (folder(f"{STEP}/critic"), AGAIN),
    "a critic of a file": (text(f"{STEP}/critic", "x"), AGAIN),
    "a stray buffer": (text(f"{STEP}/buffer.json", '{"steps": [{"step": 99'), AGAIN),
    "a stray open step": (text(f"{STEP}/open_step.json", "[]"), AGAIN),
    "a stray shard": (text(f"{STEP}/dist/__9_9.distcp", bytes(99)), AGAIN),
    "a row without its end": (half_of(f"{RUN}/metrics.jsonl"), AGAIN),
    "rows that end in zeros": (zeros_after(f"{RUN}/metrics.jsonl"), AGAIN),
    "rows of another run": (text(f"{RUN}/metrics.jsonl", '{"step": 7, "x": 1}\n{"step": 8, "x": '
                                                         '1}\n'), AGAIN),
    "rows in a wrong order": (lambda w: w.text(f"{RUN}/metrics.jsonl", "".join(sorted((w.folder / RUN / "metrics.jsonl").read_text().splitlines(keepends=True), reverse=True))), AGAIN),
    "no rows": (text(f"{RUN}/metrics.jsonl", ""), AGAIN),
    "rows in a folder": (folder(f"{RUN}/metrics.jsonl"), AGAIN),
    "rows behind a dangling link": (link(f"{RUN}/metrics.jsonl", "nowhere"), AGAIN),
    "rollouts in a file": (lambda w: [shutil.rmtree(w.folder / RUN / "rollouts"), w.text(f"{RUN}/rollouts", "x")], AGAIN),
    "rollouts of the next step in a folder": (folder(f"{RUN}/rollouts/step_000003.jsonl"), AGAIN),
    "a rollout without its end": (half_of(f"{RUN}/rollouts/step_000002.jsonl"), AGAIN),
    "a lock of another host": (lease(host="elsewhere", pid=77), AGAIN),
    "a lock of the year 2096": (in_future(lease(host="elsewhere", pid=77)), AGAIN),
    "a lock of pid -1": (lease(pid=-1), AGAIN),
    "a lock of pid 2**70": (lease(pid=2**70), AGAIN),
    "a lock of pid 1 at another time": (lease(), AGAIN),
    "a lock in a folder": (folder(f"{RUN}/run.lock"), AGAIN),
    "a lock without an end": (link(f"{RUN}/run.lock", "/dev/zero"), AGAIN),
    "a lock that is a socket": (unix_socket(f"{RUN}/run.lock"), AGAIN),
    "a stop file in a folder": (folder(f"{RUN}/STOP"), AGAIN),
    "heartbeats in a file": (lambda w: [shutil.rmtree(w.folder / RUN / "heartbeats", ignore_errors=True), w.text(f"{RUN}/heartbeats", "x")], AGAIN),
    "logs in a file": (lambda w: [shutil.rmtree(w.folder / RUN / "logs", ignore_errors=True), w.text(f"{RUN}/logs", "x")], AGAIN),
    "a report to a full disk": (link(f"{RUN}/report.html", "/dev/full"), AGAIN),
    "a red certificate": (text(f"{RUN}/certificate/certificate.json", '{"result": "red", '
                                                                      '"digest": "x"}'), AGAIN),
    "a certificate of a list": (text(f"{RUN}/certificate/certificate.json", "[1]"), AGAIN),
    "a certificate without keys": (text(f"{RUN}/certificate/certificate.json", "{}"), AGAIN),
    "an export in a file": (lambda w: [shutil.rmtree(w.folder / RUN / "hf"), w.text(f"{RUN}/hf", "x")], AGAIN),
    "fewer steps than there are": (TWO, (*TRAIN, "run.steps=1")),
    "curves in a file": (text(f"{RUN}/tensorboard", "x"), (*AGAIN, "logging.tensorboard=true")),
    "no reward function": (lambda w: (w.folder / "reward.py").unlink(), AGAIN),
    "another vocabulary": (lambda w: w.model_json("tokenizer_config.json", eos_token="0", pad_token="1"), AGAIN),
    "a clock of 1970": (lambda w: [os.utime(path, (1, 1)) for path in w.folder.rglob("*")], AGAIN),
}  # fmt: skip
FAILS = {
    *(
        "the first step's files in the second's folder",
        "the first step's state",
        "the first step's weights",
    ),
    *(
        "a forged step of -1",
        "a forged step of 1e30",
        "a forged state of text",
        "a manifest without files",
    ),
    *(
        "a manifest of files upwards",
        "a manifest of a later format",
        "the checkpoints of another run",
    ),
    *(
        "one checkpoint of another run",
        "the folder of another run",
        "rows in a folder",
        "rows behind a dangling link",
    ),
    *(
        "rollouts in a file",
        "a lock in a folder",
        "a lock without an end",
        "a lock that is a socket",
    ),
    *(
        "a red certificate",
        "a certificate of a list",
        "a certificate without keys",
        "checkpoints that are a file",
    ),
    *("no reward function", "the identity and the checkpoints of another run"),
}
"""Those that have to fail. The others may continue with rows 1, 2, 3, or end with one line."""


@pytest.mark.campaign
@pytest.mark.parametrize("name", RESUMES)
def test_a_changed_run(name: str, trained: Trained) -> None:
    """One clear line and nothing changed, or a run that continues with all rows."""
    world = trained.restore()
    arrange, words = RESUMES[name]
    arrange(world)
    kept = ("checkpoints", "rollouts", "metrics.jsonl", "hf")

    def state() -> dict[Path, bytes]:
        found = (
            path
            for part in kept
            for path in (world.folder / RUN / part, *(world.folder / RUN / part).rglob("*"))
        )
        return {path: path.read_bytes() for path in found if path.is_file()}

    before = state()
    outcome = check(
        f"resume: {name}",
        world,
        [word.format(r=world.run) for word in words],
        {},
        may_work=name not in FAILS,
    )
    if outcome.code:
        lost = [path.name for path, content in before.items() if state().get(path) != content]
        assert not lost, f"{lost}\n{outcome.text[-3000:]}"
    elif words == AGAIN:
        rows = [
            json.loads(line)
            for line in (world.folder / RUN / "metrics.jsonl").read_text().splitlines()
        ]
        assert rows[-1]["step"] == 3, outcome.text[-3000:]


EXPORTS: dict[str, tuple[str, ...]] = {
    "step 1 of another run's folder": ("export", "{w}/other", "--step", "1", "--out", "{w}/o"),
    "into a socket": ("export", "{w}/" + RUN, "--out", "{w}/s"),
    "a name of 300 letters": ("export", "{w}/" + RUN, "--out", "{w}/" + "o" * 300),
    "a step of the year": (
        "export",
        "{w}/" + RUN,
        "--step",
        "99999999999999999999",
        "--out",
        "{w}/o",
    ),
    "the newest of swapped weights": ("export", "{w}/other", "--out", "{w}/o"),
}


@pytest.mark.full
@pytest.mark.parametrize("name", EXPORTS)
def test_exports(name: str, trained: Trained) -> None:
    world = trained.restore()
    copied(RUN, "other")(world)
    copied(f"{STEPS}/step_000001/dist", "other/checkpoints/step_000002/dist")(world)
    (world.folder / "other/run_id").write_text("0123456789abcdef\n")
    unix_socket("s")(world)
    check(f"export: {name}", world, [word.format(w=world.folder) for word in EXPORTS[name]], {})


# -------------------------------------------------------------------------------------------------
# results judged again
EVALUATE = (
    "eval",
    "{r}",
    BENCHMARK[0].replace("path:", "limit: 4, path:"),
    BENCHMARK[1],
    "evaluation.samples_per_prompt=1",
    "--out",
    "{w}/e",
)
REJUDGE = (*EVALUATE, "--rejudge")


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A world with an evaluation's samples in `e`."""
    world = make_world(tmp_path_factory.mktemp("judged"))
    ended = run([word.format(r=world.run, w=world.folder) for word in EVALUATE], world.folder, {})
    assert ended.code == 0, ended.text
    return world


def lines(change: Callable[[list[dict[str, object]]], object]) -> Arrange:
    """Changes the rows of the samples in place."""

    def write(world: World) -> None:
        path = next((world.folder / "e").glob("samples*.jsonl"))
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        change(rows)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    return write


def samples(change: Callable[[Path], object]) -> Arrange:
    return lambda w: change(next((w.folder / "e").glob("samples*.jsonl")))


JUDGED: dict[str, tuple[Arrange, tuple[str, ...]]] = {
    "half a sample": (samples(lambda p: os.truncate(p, p.stat().st_size - 30)), REJUDGE),
    "a response of null": (lines(lambda rows: rows[1].update(response=None)), REJUDGE),
    "a response of a list": (lines(lambda rows: rows[1].update(response=["1"])), REJUDGE),
    "prompt tokens of -9": (lines(lambda rows: rows[1].update(prompt_tokens=-9)), REJUDGE),
    "a stop of no kind": (lines(lambda rows: rows[1].update(stop="tired")), REJUDGE),
    "a prompt that the benchmark lacks": (lines(lambda rows: rows[1].update(prompt_id="x/99")), REJUDGE),
    "a sample twice": (lines(lambda rows: rows.append(rows[1])), REJUDGE),
    "no sample of a prompt": (lines(lambda rows: rows.pop()), REJUDGE),
    "no header": (lines(lambda rows: rows.pop(0)), REJUDGE),
    "a header of another run": (lines(lambda rows: rows[0].update(digest="0" * 32)), REJUDGE),
    "samples in a folder": (samples(lambda p: (p.unlink(), p.mkdir())), REJUDGE),
    "samples behind a socket": (lambda w: unix_socket("e/" + next((w.folder / "e").glob("samples*")).name)(w), REJUDGE),
    "samples of 2 GiB": (samples(lambda p: os.truncate(p, 2**31)), REJUDGE),
    "another benchmark": (text("train.jsonl", '{"problem": "7 + 7 = ?", "answer": "14"}\n'), REJUDGE),
    "more samples a prompt": (TWO, (*REJUDGE, "evaluation.samples_per_prompt=3")),
    "a reward that prints and ends": (text("reward.py", "import os\n\n\ndef reward(p, r):\n    "
                                                        "print('x' * 10**6)\n    os._exit(0)\n"), REJUDGE),
    "a reward that raises": (text("reward.py", "def reward(p, r):\n    raise KeyError('\\n\\x1b[2J')\n"), REJUDGE),
    "a reward of infinity": (text("reward.py", "def reward(p, r):\n    return float('inf')\n"), REJUDGE),
    "a reward of half": (text("reward.py", "def reward(p, r):\n    return 0.5\n"), REJUDGE),
    "a coroutine": (text("reward.py", "async def reward(p, r):\n    return 1.0\n"), REJUDGE),
    "a generator": (text("reward.py", "def reward(p, r):\n    yield 1.0\n"), REJUDGE),
    "details without an end": (text("reward.py", "from pacs_megatron.contracts import "
                                                 "Judgement\nA = {}\nA['a'] = A\n\n\ndef "
                                                 "reward(p, r):\n    return Judgement(1.0, A)\n"), REJUDGE),
    "details of nan": (text("reward.py", "from pacs_megatron.contracts import Judgement\n\n\ndef reward(p, r):\n    return Judgement(1.0, {'a': float('nan'), 'b': b'x', 'c': '\\ud800'})\n"), REJUDGE),
    "details of 300 MB": (text("reward.py", "from pacs_megatron.contracts import "
                                            "Judgement\n\n\ndef reward(p, r):\n    return "
                                            "Judgement(1.0, {'a': 'x' * 300_000_000})\n"), REJUDGE),
    "json replaced": (text("reward.py", "import json\njson.dumps = lambda *a, **k: 'x'\n\n\ndef "
                                        "reward(p, r):\n    return 1.0\n"), REJUDGE),
    "all descriptors closed": (text("reward.py", "import os\n\n\ndef reward(p, r):\n    "
                                                 "os.closerange(0, 999)\n    return 1.0\n"), REJUDGE),
    "KeyboardInterrupt": (text("reward.py", "def reward(p, r):\n    raise KeyboardInterrupt\n"), REJUDGE),
    "a module that hangs": (text("reward.py", "import time\ntime.sleep(20)\nraise SystemExit(0)\n"), REJUDGE),
    "a module that prints without end": (text("reward.py", "import sys\nsys.stdout.write('x' * "
                                                           "200_000_000)\nraise "
                                                           "ImportError('no\\nmodule')\n"), REJUDGE),
    "a module named as a library": (together(text("json.py", "raise SystemExit('mine')"), text("random.py", "import os; open('canary', 'w')"), text("reward.py", "def reward(p, r):\n    return 'x'\n")), REJUDGE),
    "a file with a name of 250 letters": (text("r" * 250 + ".py", "def reward(p, r):\n    return "
                                                                  "[]\n"), (*REJUDGE, "reward.function={w}/" + "r" * 250 + ".py:reward")),
    "a file that is a folder": (folder("reward.py"), REJUDGE),
    "a file that is a socket": (unix_socket("reward.py"), REJUDGE),
}  # fmt: skip
MAY_WORK = {
    *(
        "json replaced",
        "all descriptors closed",
        "details of nan",
        "details of 300 MB",
        "details without an end",
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("name", JUDGED)
def test_judged_again(name: str, judged: World, tmp_path: Path) -> None:
    world = copy_world(judged, tmp_path / "world")
    arrange, words = JUDGED[name]
    arrange(world)
    places = [word.format(r=world.run, w=world.folder) for word in words]
    check(f"rejudge: {name}", world, places, {}, may_work=name in MAY_WORK)
    shutil.rmtree(world.folder, ignore_errors=True)


# ------------------------------------------------------------------------------------------------
# certify, compare, paper
def certified(*words: str) -> tuple[str, ...]:
    return ("certify", "{r}", "parallel.tp=1", *words)


for _name, _words, _arrange in (
    ("a folder of work that is a link", (), together(text("notes/years.txt", "x"), link(f"{RUN}/certificate/.work", "{w}/notes"))),
    ("notes in the folder of work", ("--out", "{w}/e"), text("e/.work/years.txt", "x")),
    ("a certificate's folder that is a file", (), text(f"{RUN}/certificate", "x")),
    ("a certificate's folder that is a socket", ("--out", "{w}/s"), unix_socket("s")),
    ("a name of 300 letters", ("run.name=" + "n" * 300,), TWO),
    ("below /proc", ("--out", "/proc/x"), TWO),
    ("a lock that is a folder", ("--out", "{w}/e"), folder("e/run.lock")),
    ("a lock that is a pipe", ("--out", "{w}/e"), pipe("e/run.lock")),
    ("a temporary folder as the certificate", ("--out", "{w}/tiny.yaml/x"), TWO),
):  # fmt: skip
    case(f"certify: {_name}", *certified(*_words), arrange=_arrange)
for _name, _file, _content in (
    ("a step of 1.5", "metrics.jsonl", '{"step": 1.5, "reward/mean": 0.1}\n'),
    ("a step of true", "metrics.jsonl", '{"step": true, "reward/mean": 0.1}\n'),
    ("a negative step", "metrics.jsonl", '{"step": -1, "reward/mean": 0.1}\n'),
    ("a score of true", "metrics.jsonl", '{"step": 1, "eval/x/pass@1": true}\n'),
    (
        "a score of a thousand digits",
        "metrics.jsonl",
        '{"step": 1, "reward/mean": ' + "9" * 1000 + "}\n",
    ),
    ("a step far away", "metrics.jsonl", '{"step": 1000000000000000000000, "reward/mean": 0.1}\n'),
    ("a name that is a list", "config.yaml", "run: {name: [a], seed: 1}\n"),
    ("a configuration of a number", "config.yaml", "7\n"),
    (
        "a configuration with a tag",
        "config.yaml",
        "run: !!python/object/apply:os.system ['touch canary']\n",
    ),
):
    case(f"compare: {_name}", *COMPARE, arrange=together(TWO, text(f"runs/b/{_file}", _content)))
case(
    "compare: metrics behind a socket",
    *COMPARE,
    arrange=together(TWO, unix_socket("runs/b/metrics.jsonl")),
)
case("compare: a page of 300 letters", "compare", *RUNS, "--out", "{w}/" + "o" * 300, arrange=TWO)
for _name, _change in {
    "a label of a half": {"label": 0.5},
    "a label of true": {"label": True},
    "a lone surrogate": {"response": "\ud800"},
    "negative tokens": {"response_tokens": -7},
    "a problem of null": {"prompt": None},
    "a label and a failure": {"failure": ["x"]},
}.items():
    _rows = [
        {"digest": "1", "judged_by": {}},
        SAMPLE | _change,
        SAMPLE | _change | {"id": "1:x/0#1"},
    ]
    case(f"diversity: {_name}", *DIVERSITY, arrange=together(TWO, text("runs/b/eval/samples-1.jsonl", "".join(json.dumps(row) + "\n" for row in _rows))))  # fmt: skip
case(
    "diversity: a checkpoint as embedder",
    *DIVERSITY[:3],
    "--embedder",
    "{c}",
    "--out",
    "{w}/o",
    arrange=TWO,
)


def _own_code(world: World) -> None:
    """A model whose own code writes a file."""
    TWO(world)
    world.model_json(
        "config.json", model_type="evil", auto_map={"AutoConfig": "evil.C", "AutoModel": "evil.M"}
    )
    world.text(
        "model/evil.py",
        "open('canary', 'w')\nfrom transformers import Qwen3Config as C, Qwen3Model as M\n",
    )


case(
    "diversity: an embedder of its own code",
    *("sh", "-c", "yes | $P diversity {w}/runs/a --embedder {m} --out {w}/o"),
    arrange=_own_code,
)
PAPER = ("paper", "table1", "--scale", "laptop", "--dir")
case(
    "paper: a folder that is a link to nothing",
    *PAPER,
    "{w}/l",
    "--dry-run",
    arrange=link("l", "nowhere/x"),
)
case("paper: a folder that is a socket", *PAPER, "{w}/s", arrange=unix_socket("s"))
case("paper: below a device", *PAPER, "/dev/null/x")
case("paper: a folder of 300 letters", *PAPER, "{w}/" + "p" * 300)
case("paper: a folder in use", *PAPER, "{w}/p", arrange=together(text("p/x", ""), lambda w: (w.folder / "p/run.lock").mkdir()))  # fmt: skip


UNREAD = {"compare: a name that is a list", "diversity: a lone surrogate"}
"""No part of the result, and what a model may write."""


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_one_clear_line(name: str, original: World, tmp_path: Path) -> None:
    check_case(name, CASES[name], original, tmp_path, may_work=name in UNREAD)


# ----------------------------------------------------------------------------------------------------------
# two at once
BOTH = "a=$?; wait $!; b=$?; "
AT_ONCE: dict[str, str] = {
    "two certificates into one folder": "$P certify {r} parallel.tp=1 & $P certify {r} "
                                        "parallel.tp=1; " + BOTH + "test $(($a * $b)) = 0 -a "
                                                                   "$(($a + $b)) != 0 && exit 7",
    "two exports into one folder": "$P export {w}/runs/tiny --out {w}/x & $P export {w}/runs/tiny "
                                   "--out {w}/x; " + BOTH + "test $(($a * $b)) = 0 -a -s "
                                                            "{w}/x/config.json && exit 7",
    "an export while the run trains": "$P train {r} parallel.tp=1 run.steps=6 & sleep 3; $P "
                                      "export {w}/runs/tiny --step 1 --out {w}/x; " + BOTH + "test $b = 0 && exit 7",
    "two runs in one folder": "$P train {r} parallel.tp=1 run.steps=6 & $P train {r} "
                              "parallel.tp=1 run.steps=6; " + BOTH + "test $(($a * $b)) = 0 -a "
                                                                     "$(($a + $b)) != 0 && exit 7",
    "a cancel during the start": "$P train {r} parallel.tp=1 run.steps=900 & for i in $(seq 60); "
                                 "do $P cancel {w}/runs/tiny --save && break; sleep 1; done; " + BOTH + "test $b = 75 -o $b = 0 && exit 7",
    "a STOP file before the start": "touch {w}/runs/tiny/STOP; timeout 120 $P train {r} "
                                    "parallel.tp=1 run.steps=5; test $? = 75 -o $? = 0 && exit 7",
    "a status while the lock is taken": "$P train {r} parallel.tp=1 run.steps=5 & for i in 1 2 3; "
                                        "do $P status {w}/runs/tiny || exit 1; done; wait $! && "
                                        "exit 7",
    "a comparison while a run writes": "$P train {r} parallel.tp=1 run.steps=5 & for i in 1 2 3; "
                                       "do $P compare {w}/runs/tiny --out {w}/x || exit 1; done; "
                                       "wait $! && exit 7",
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("name", AT_ONCE)
def test_two_at_once(name: str, trained: Trained) -> None:
    """No traceback, one of both works, and the steps that were there stay."""
    world = trained.restore()
    before = json.loads((world.folder / STEP / "manifest.json").read_text())
    script = AT_ONCE[name].format(r=world.run, w=world.folder)
    outcome = run(["sh", "-c", script], world.folder, {})
    _note(f"at once: {name}", outcome.code == 7 and "Traceback" not in outcome.text, outcome.text)
    assert outcome.code == 7, outcome.text[-4000:]
    assert "Traceback" not in outcome.text and "InternalError" not in outcome.text, outcome.text
    manifest = world.folder / STEP / "manifest.json"
    assert (
        not manifest.exists() or json.loads(manifest.read_text()) == before
    )  # a run that went on keeps the newest
    for line in (world.folder / RUN / "metrics.jsonl").read_text().splitlines():
        json.loads(line)


def _note(name: str, is_good: bool, output: str) -> None:
    from tests.support.hostile import LOG

    if LOG:
        with Path(LOG).open("a") as file:
            file.write(f"{'ok' if is_good else 'failed'} | {name} | {output[-300:]!r}\n")


# -------------------------------------------------------------------------------------------- a
# configuration of two folders
@pytest.mark.full
def test_one_run_with_the_folder_of_another(trained: Trained, tmp_path: Path) -> None:
    """Another world's configuration with the run folder of this one: rejected, or a run that
    reports the changes.
    """
    world = trained.restore()
    other = copy_world(trained.world, tmp_path / "world")
    tree = yaml.safe_load(other.run.read_text())
    tree["run"] |= {"dir": str(world.folder / "runs"), "seed": 11}
    tree["model"]["path"] = str(other.model)
    other.model_json("config.json", rope_theta=54321.0)
    other.run.write_text(yaml.safe_dump(tree))
    check(
        "resume: the folder of another configuration",
        world,
        ["train", other.run, "parallel.tp=1", "run.steps=3"],
        {},
    )
