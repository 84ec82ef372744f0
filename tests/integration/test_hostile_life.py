"""The processes of the fifth set:

Ctrl-C, closed streams, wrong variables, rewards, resumes, servers, two of everything.

Written before the code was changed for it.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.test_hostile_files import PREVIEW, folder, link, pipe, text, together
from tests.integration.test_hostile_verbs import BENCHMARK, TWO
from tests.support.hostile import (
    Arrange,
    Cases,
    World,
    check,
    check_case,
    copy_world,
    make_world,
    run,
    serve,
)
from tests.support.tiers import in_tiers

pytestmark = pytest.mark.full
CASES = Cases()
case = CASES.add
TRAIN = ("train", "{r}", "parallel.tp=1")
EVAL = ("eval", "{r}", *BENCHMARK)


# ------------------------------------------------------------------------------------------------------------
# evaluation
for _name, _words, _arrange in (
    ("a model that is a dangling link", ("--model", "{w}/l"), link("l", "nowhere")),
    ("a model that is a pipe", ("--model", "{w}/p"), pipe("p")),
    ("a model of no name", ("--model", ""), TWO),
    ("results into a pipe", ("--out", "{w}/p"), pipe("p")),
    ("results of no name", ("--out", ""), TWO),
    ("samples that are true", ("evaluation.samples_per_prompt=true",), TWO),
    ("k of 1e400", ("evaluation.k=[1e400]",), TWO),
    (
        "a benchmark in UTF-16",
        (),
        text("train.jsonl", '{"problem": "x", "answer": "1"}'.encode("utf-16")),
    ),
    ("an empty benchmark", (), text("train.jsonl", "")),
    ("a benchmark that is a pipe", (), pipe("train.jsonl")),
    ("a tokenizer that is a pipe", (), pipe("model/tokenizer.json")),
    ("weights that are a pipe", (), pipe("model/model.safetensors")),
    (
        "no rejudging of damage",
        ("--rejudge", "--out", "{w}/e"),
        text("e/results.json", '{"samples": "../x"'),
    ),
):
    case(f"eval: {_name}", *EVAL, *_words, arrange=_arrange)
case(
    "eval: a name with a slash",
    "eval",
    "{r}",
    BENCHMARK[0].replace("[{{", "[{{name: a/../../b, "),
    BENCHMARK[1],
)
case(
    "eval: a name of 300 letters",
    "eval",
    "{r}",
    BENCHMARK[0].replace("[{{", "[{{name: " + "n" * 300 + ", "),
    BENCHMARK[1],
)

# ----------------------------------------------------------------------------------------------
# certify, preflight, fetch
for _name, _words, _arrange in (
    ("into the model", ("--out", "{m}"), TWO),
    ("into a pipe", ("--out", "{w}/p"), pipe("p")),
    ("into no name", ("--out", ""), TWO),
    ("over an export's certificate", ("--out", "{w}/e"), text("e/certificate.json", '{"kind": "export", "tensors": {}}')),
    ("over a folder of notes", ("--out", "{w}/e"), text("e/certificate.json", "my diploma")),
    ("a model in UTF-16", (), text("model/config.json", '{"model_type": "qwen3"}'.encode("utf-16"))),
):  # fmt: skip
    case(f"certify: {_name}", "certify", "{r}", *_words, arrange=_arrange)
for _name, _words, _arrange, _environ in (
    ("a cluster that is a pipe", ("--cluster", "{w}/c.yaml"), pipe("c.yaml"), {}),
    ("a cluster that is a folder", ("--cluster", "{m}"), TWO, {}),
    ("data that is a pipe", (), pipe("train.jsonl"), {}),
    ("a run folder that is a file", (), text("runs", "x"), {}),
    ("no temporary folder", (), TWO, {"TMPDIR": "/nonexistent"}),
    ("an objective of nan", ("objective.beta=.nan",), TWO, {}),
    ("a closed reward server", ("reward={{name: http, url: 'http://127.0.0.1:9/x'}}",), TWO, {}),
    ("a closed rollout server", ("rollout={{engine: sglang, urls: ['http://127.0.0.1:9'], "
                                 "sampling: {{max_response_tokens: 12}}, sync: {{transport: "
                                 "disk}}}}",), TWO, {}),
):  # fmt: skip
    case(f"preflight: {_name}", "preflight", "{r}", *_words, arrange=_arrange, environ=_environ)
ONLINE = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}
for _name, _words, _environ in (
    ("a cache that is a file", ("model.path=some/model",), ONLINE | {"HF_HOME": "/etc/passwd"}),
    ("a cache that is read-only", ("model.path=some/model",), ONLINE | {"HF_HOME": "/proc/x"}),
    ("without a network", ("model.path=some/model",), {"HF_HUB_OFFLINE": "1"}),
    ("a model upwards", ("model.path=../x/y",), ONLINE),
    (
        "an address of no name",
        ("model.path=some/model",),
        {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": ""},
    ),
    ("data that is not there", ("data.train.path=some/../../data",), ONLINE),
    ("no timeout", ("model.path=some/model",), ONLINE | {"HF_HUB_DOWNLOAD_TIMEOUT": "soon"}),
):
    case(f"fetch: {_name}", "fetch", "{r}", *_words, environ=_environ)

# ----------------------------------------------------------------------------------------------------------
# surroundings
for _name, _environ in {
    "no temporary folder": {"TMPDIR": "/nonexistent"},
    "threads of a word": {"OMP_NUM_THREADS": "abc"},
    "no home": {"HOME": "/nonexistent", "XDG_CACHE_HOME": "/dev/null", "HF_HOME": "/dev/null"},
    "devices of a word": {"CUDA_VISIBLE_DEVICES": "abc"},
    "a time zone of nonsense": {"TZ": "Nowhere/Else"},
    "letters of one byte": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "latin-1"},
}.items():
    case(f"train: steps of 0, {_name}", "train", "{r}", "run.steps=0", environ=_environ)
for _name, _script in {
    "train in a removed folder": "mkdir g && cd g && rmdir ../g && $P train {r}",
    "eval in a removed folder": "mkdir g && cd g && rmdir ../g && $P eval x.yaml",
    "conversion in a removed folder": "mkdir g && cd g && rmdir ../g && $P convert to-megatron "
                                      "--hf {m} --out o",
    "a script without arguments": "${{P%% *}} $PYTHONPATH/conversion/hf_to_megatron.py",
    "a script with a wrong folder": "${{P%% *}} $PYTHONPATH/conversion/megatron_to_hf.py "
                                    "--checkpoint {m} --out o",
    "a script with a wrong option": "${{P%% *}} $PYTHONPATH/conversion/verify.py --hf {m} "
                                    "--checkpoint {c} --certificate o --fast",
    "a configuration from a process": "cat {r} | $P config show /dev/fd/0",
    "output to a full disk, plan": "$P plan {r} > /dev/full",
    "output to a full disk, preview": "$P data preview {r} > /dev/full",
    "output to a full disk, doctor": "$P doctor > /dev/full",
    "closed output, plan": "$P plan {r} >&-",
    "closed output, doctor": "$P doctor >&-",
    "closed output, help": "$P --help >&-",
    "sbatch is missing": "PATH={w} $P submit {r} --cluster local",
    "sbatch prints nonsense": "PATH={w}/bin:$PATH $P submit {r} --cluster local",
    **{
        f"sbatch {name}": f"printf '{content}' > {{w}}/bin2/sbatch; chmod 755 {{w}}/bin2/sbatch; "
                          f"PATH={{w}}/bin2:$PATH exec $P submit {{r}} --cluster local"
        for name, content in (
            *(("fails", "#!/bin/sh\\necho no account >&2\\nexit 1\\n"), ("prints nothing", "#!/bin/sh\\n")),
            *(("prints megabytes", "#!/bin/sh\\nhead -c 50000000 /dev/zero\\n"), ("is no program", "hello")),
            *(("ends by a signal", "#!/bin/sh\\nkill -9 $$\\n"),),
        )
    },
}.items():  # fmt: skip

    def _sbatch(world: World) -> None:
        world.text("bin/sbatch", "#!/bin/sh\necho 'Submitted batch job abc; rm -rf x'\n").chmod(
            0o755
        )
        (world.folder / "bin2").mkdir()

    case(f"shell: {_name}", "sh", "-c", _script, arrange=_sbatch)

# ---------------------------------------------------------------------------------------------------------------
# rewards
for _name, _content in {
    "nan": "def reward(prompt, response):\n    return float('nan')\n",
    "text": "def reward(prompt, response):\n    return '1'\n",
    "a complex number": "def reward(prompt, response):\n    return 1j\n",
    "a deep recursion": "import sys\nsys.setrecursionlimit(10**9)\n\n\ndef reward(prompt, "
    "response):\n    return reward(prompt, response) + 1\n",
    "standard output of its own": "import sys\nsys.stdout = sys.stderr = None\n\n\ndef "
    "reward(prompt, response):\n    print(1)\n    raise "
    "ValueError(1)\n",
    "threads that stay": "import threading, time\n\n\ndef reward(prompt, response):\n    "
    "threading.Thread(target=time.sleep, args=(9999,)).start()\n    raise "
    "OSError('x')\n",
    "an exit handler": "import atexit, time\natexit.register(time.sleep, 9999)\n\n\ndef "
    "reward(prompt, response):\n    return 7j\n",
}.items():
    case(
        f"reward: {_name}",
        *TRAIN,
        "reward.memory_limit_gib=0.5",
        arrange=text("reward.py", _content),
    )
for _name, _content in {
    "in UTF-16": "def reward(prompt, response):\n    return 1.0\n".encode("utf-16"),
    "with a NUL": b"def reward(prompt, response):\n    return 1.0\n\0",
    "a class": "class reward:\n    pass\n",
    "an import of itself": "from reward import reward\n",
    "three arguments": "def reward(prompt, response, model):\n    return 1.0\n",
    "compiled": b"\xa7\r\r\n" + bytes(64),
}.items():
    case(f"reward file: {_name}", *PREVIEW, arrange=text("reward.py", _content))


@pytest.mark.parametrize("name", in_tiers(CASES, every=2))
def test_one_clear_line(name: str, original: World, tmp_path: Path) -> None:
    check_case(name, CASES[name], original, tmp_path)


# --------------------------------------------------------------------------------------- commands
# that work, and Ctrl-C
INT = "timeout --preserve-status -s INT"
SLOW = "import time\ntime.sleep(30)\n\n\ndef reward(prompt, response):\n    return 1.0\n"
QUIET: dict[str, tuple[str, Arrange, tuple[int, ...]]] = {
    **{
        f"Ctrl-C after {seconds} s: {words.split()[0]} "
        f"{words.split()[1] if words.split()[0] in ('config', 'data', 'convert') else ''}": (
            f"{INT} {seconds} $P {words}", together(TWO, text("reward.py", SLOW)), (130, 0, 1, 2, 75),
        )
        for seconds, words in (
            *((0.2, "config show {r}"), (0.6, "plan {r}"), (1.5, "data preview {r}"), (3, "data preview {r} "), (1, "doctor")),
            *((4, "doctor "), (2, "convert to-megatron --hf {m} --out {w}/out"), (1, "convert verify --hf {m} --checkpoint {c} --certificate {w}/cert --logits")),
            *((5, "convert verify --hf {m} --checkpoint {c} --certificate {w}/cert --logits --tp 2"), (2, "compare {w}/runs/a {w}/runs/b --out {w}/page")),
            *((4, "diversity {w}/runs/a --embedder {m} --out {w}/page"), (3, "preflight {r}"), (7, "preflight {r} "), (3, "certify {r}"), (9, "certify {r} ")),
            *((2, "eval {r} --model {m} " + " ".join(f'"{word}"' for word in BENCHMARK)), (9, "eval  {r} " + " ".join(f'"{word}"' for word in BENCHMARK))),
            *((2, "train {r}"), (9, "train {r} parallel.tp=1"), (2, "fetch {r}"), (0.4, "submit {r} --cluster local --dry-run"), (1, "paper all --scale laptop --dry-run")),
        )
    },
    "head: help": ("$P --help | head -n 1", TWO, (0,)),
    "head: schema": ("$P config schema | head -c 10", TWO, (0,)),
    "head: plan": ("$P plan {r} --search | head -n 1", TWO, (0,)),
    "head: preview": ("$P data preview {r} | head -n 1", TWO, (0,)),
    "head: doctor": ("$P doctor | head -n 1", TWO, (0,)),
    "head: preflight": ("$P preflight {r} --json | head -n 1", TWO, (0,)),
    "head: status": ("$P status {w}/runs/a | head -n 1", TWO, (0,)),
    "head: submission": ("$P submit {r} --cluster local --dry-run --seeds 9 | head -n 1", TWO, (0,)),
    "head: paper": ("$P paper all --scale laptop --dry-run | head -n 1", TWO, (0,)),
    "a byte order mark": ("printf '\\357\\273\\277' > {w}/b.yaml; cat {r} >> {w}/b.yaml; $P config show {w}/b.yaml", TWO, (0, 2)),
    "line ends of Windows": ("sed 's/$/\\r/' {r} > {w}/b.yaml; $P config show {w}/b.yaml", TWO, (0,)),
    "no end of the last line": ("printf %s \"$(cat {w}/train.jsonl)\" > {w}/d.jsonl; $P data "
                                "preview {r} data.train.path={w}/d.jsonl", TWO, (0,)),
    "line ends of Windows in data": ("sed 's/$/\\r/' {w}/train.jsonl > {w}/d.jsonl; $P data "
                                     "preview {r} data.train.path={w}/d.jsonl", TWO, (0,)),
    "a run with a line end in its name": ("cp -r {w}/runs/a \"$(printf '{w}/runs/x\\ny')\"; $P "
                                          "compare \"$(printf '{w}/runs/x\\ny')\" --out {w}/h", TWO, (0, 1, 2)),
    "a run in another language": ("cp -r {w}/runs/a {w}/runs/训练; LC_ALL=C PYTHONIOENCODING=ascii "
                                  "PYTHONUTF8=0 $P compare {w}/runs/训练 --out {w}/h", TWO, (2,)),
    "letters of another language, ascii": ("printf '{{\"problem\": \"训练\", \"answer\": "
                                           "\"1\"}}\\n' > {w}/d.jsonl; LC_ALL=C "
                                           "PYTHONIOENCODING=ascii PYTHONUTF8=0 $P data preview "
                                           "{r} data.train.path={w}/d.jsonl data.train.limit=1 "
                                           "batch.prompts_per_step=1 batch.updates_per_step=1", TWO, (0, 2)),
    "a row being written": ("printf '{{\"step\": 3, \"rew' >> {w}/runs/a/metrics.jsonl; $P "
                            "compare {w}/runs/a --out {w}/h", TWO, (0, 1)),
    "status of a row being written": ("printf '{{\"step\": 3, \"rew' >> {w}/runs/a/metrics.jsonl; "
                                      "$P status {w}/runs/a", TWO, (0, 1)),
    "a terabyte of log": ("mkdir -p {w}/runs/a/logs; truncate -s 1T {w}/runs/a/logs/rank0.log; $P "
                          "logs {w}/runs/a --lines 3 | head -c 100", TWO, (0,)),
    "two pages into one file": ("$P compare {w}/runs/a --out {w}/h & $P compare {w}/runs/b --out "
                                "{w}/h; a=$?; wait $!; b=$?; grep -q '</html>' {w}/h && exit "
                                "$(($a + $b))", TWO, (0, 1, 2)),
    "two evaluations into one folder": ("$P eval {r} " + " ".join(f'"{word}"' for word in BENCHMARK) + " --out {w}/e & $P eval {r} " + " ".join(f'"{word}"' for word in BENCHMARK) + " --out {w}/e; a=$?; wait $!; b=$?; test $a = 0 -o $b = 0 && test -s {w}/e/results.json && exit $(($a + $b))", TWO, (0, 2)),
    "all streams are closed": ("$P config show {r} <&- >&- 2>&-", TWO, (1, 2)),
    "closed errors, train": ("$P train {r} run.steps=0 2>&-", TWO, (2,)),
    "closed errors, conversion": ("$P convert to-megatron --hf {w}/none --out {w}/o 2>&-", TWO, (1,)),
    "closed errors, usage": ("$P trian 2>&-", TWO, (2,)),
    "errors to a full disk": ("$P train {r} run.steps=0 2> /dev/full", TWO, (2,)),
    "errors into a closed pipe": ("($P train {r} run.steps=0; echo $? > {w}/code) 2>&1 | true; "
                                  "sleep 3; exit $(cat {w}/code)", TWO, (2, 141)),
    "threads of 0": ("OMP_NUM_THREADS=0 $P data preview {r}", TWO, (0, 1, 2)),
    "a home that is not there": ("HOME=/nonexistent XDG_CACHE_HOME=/dev/null $P data preview {r}", TWO, (0, 1, 2)),
    "a cache that is a file": ("HF_HOME=/etc/passwd $P data preview {r}", TWO, (0, 1, 2)),
    "no temporary folder": ("TMPDIR=/nonexistent $P convert to-megatron --hf {m} --out {w}/out", TWO, (0, 1, 2)),
    "warnings are errors": ("PYTHONWARNINGS=error $P config show {r}", TWO, (0,)),
    "a terminal of nonsense": ("TERM=nonsense COLUMNS=abc LINES=-1 $P config show {r}", TWO, (0,)),
    "a rendezvous of another program": ("MASTER_ADDR=10.255.255.1 MASTER_PORT=1 $P train {r} "
                                        "parallel.tp=1", TWO, (0,)),
    "devices of a word": ("CUDA_VISIBLE_DEVICES=abc $P train {r} parallel.tp=1", TWO, (0, 1, 2)),
    "names with spaces": ("mkdir '{w}/a b'; cp -r {m} '{w}/a b/my model'; cd '{w}/a b'; $P "
                          "convert to-megatron --hf 'my model' --out 'my checkpoint' && $P "
                          "convert to-hf --checkpoint 'my checkpoint' --out '-back' || $P convert "
                          "to-hf --checkpoint 'my checkpoint' --out ./-back", TWO, (0,)),
    "squeue hangs": ("mkdir -p {w}/bin; printf '#!/bin/sh\\nsleep 100\\n' > {w}/bin/squeue; cp "
                     "{w}/bin/squeue {w}/bin/sacct; chmod 755 {w}/bin/*; PATH={w}/bin:$PATH $P "
                     "status {w}/runs/a", TWO, (0, 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", in_tiers(QUIET, every=2))
def test_odd_surroundings(name: str, original: World, tmp_path: Path) -> None:
    """No traceback, an exit code that fits, and no file changed that was there."""
    world = copy_world(original, tmp_path / "world")
    script, arrange, codes = QUIET[name]
    arrange(world)
    script = script.format(r=world.run, m=world.model, w=world.folder, c=world.checkpoint)
    outcome = run(["sh", "-c", script], world.folder, {})
    assert outcome.code in codes, f"{outcome.code}: {outcome.text}"
    for word in ("Traceback", "InternalError", "Exception ignored", "BrokenPipe"):
        assert word not in outcome.text, outcome.text
    assert outcome.silence_s - outcome.starved_s < 30, outcome.text


# ------------------------------------------------------------------------------------------- a run
# that continues, changed
class Trained:
    """A run of two steps, restored before every case."""

    def __init__(self, folder: Path) -> None:
        self.world = make_world(folder / "world")
        ended = run(["train", self.world.run, "parallel.tp=1"], self.world.folder, {})
        assert ended.code == 0, ended.text
        shutil.copytree(self.world.folder, folder / "copy", symlinks=True)
        self.copy = folder / "copy"

    def restore(self) -> World:
        shutil.rmtree(self.world.folder)
        shutil.copytree(self.copy, self.world.folder, symlinks=True)
        return self.world


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("trained"))


STEP = "runs/tiny/checkpoints/step_000002"
AGAIN = (*TRAIN, "run.steps=3")


def _edit(name: str, old: str, new: str) -> Arrange:
    def edit(world: World) -> None:
        path = world.folder / name
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    return edit


def _flip(name: str) -> Arrange:
    def flip(world: World) -> None:
        path = world.folder / name
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 0x40
        path.write_bytes(bytes(data))

    return flip


def _swap(world: World) -> None:
    steps = world.folder / "runs" / "tiny" / "checkpoints"
    for old, new in (("step_000001", "x"), ("step_000002", "step_000001"), ("x", "step_000002")):
        (steps / old).rename(steps / new)


EXPORT = ("export", "{w}/runs/tiny", "--out", "{w}/o")
RESUMES: dict[str, tuple[tuple[str, ...], Arrange]] = {
    "another seed": ((*AGAIN, "run.seed=6"), TWO),
    "another group size": ((*AGAIN, "batch.samples_per_prompt=2"), TWO),
    "another model": (AGAIN, lambda w: w.model_json("config.json", rope_theta=12345.0)),
    "fewer data": (AGAIN, text("train.jsonl", '{"problem": "1 + 1 = ?", "answer": "2"}\n' * 9)),
    "no data": (AGAIN, lambda w: (w.folder / "train.jsonl").unlink()),
    "a state with a flipped bit": (AGAIN, _flip(f"{STEP}/state.json")),
    "a generator with a flipped bit": (AGAIN, _flip(f"{STEP}/rng/rank_00000.safetensors")),
    "a generator that is missing": (AGAIN, lambda w: (w.folder / STEP / "rng/rank_00000.safetensors").unlink()),
    "a tokenizer with a flipped bit": (AGAIN, _flip(f"{STEP}/hf/tokenizer.json")),
    "an identity of another run": (AGAIN, text("runs/tiny/run_id", "0123456789abcdef")),
    "an empty identity": (AGAIN, text("runs/tiny/run_id", "")),
    "an identity that is a pipe": (AGAIN, pipe("runs/tiny/run_id")),
    "a lock that is a pipe": (AGAIN, pipe("runs/tiny/run.lock")),
    "a configuration that is a pipe": (AGAIN, pipe("runs/tiny/config.yaml")),
    "metrics that are a pipe": (AGAIN, pipe("runs/tiny/metrics.jsonl")),
    "checkpoints in each other's folder": (AGAIN, _swap),
    "export of checkpoints in each other's folder": (EXPORT, _swap),
    "export of a flipped bit": (EXPORT, _flip(f"{STEP}/dist/__0_0.distcp")),
    "export of a flipped tokenizer": (EXPORT, _flip(f"{STEP}/hf/tokenizer.json")),
    "export into the checkpoint": ((*EXPORT[:2], "--out", "{w}/" + STEP + "/x"), TWO),
    "export over the model": ((*EXPORT[:2], "--out", "{m}"), TWO),
    "export over the last export": ((*EXPORT[:2], "--out", "{w}/runs/tiny/hf"), TWO),
    "export of a step that is not there": ((*EXPORT, "--step", "7"), TWO),
    "certify into an export": (("certify", "{r}", "--out", "{w}/e"), lambda w: shutil.copytree(w.folder / "runs/tiny/hf", w.folder / "e") and w.text("e/certificate.json", '{"tensors": {}, "source": "x"}')),
    "eval of an export with a flipped bit": ((*EVAL, "--model", "{w}/e"), lambda w: _exported(w)),
    "rollouts that are a pipe": (AGAIN, lambda w: [pipe(f"runs/tiny/rollouts/step_00000{n}.jsonl")(w) for n in (1, 2, 3)]),
    "a report that is a folder": (AGAIN, folder("runs/tiny/report.html")),
    "an exit code that is a folder": (AGAIN, folder("runs/tiny/exit_code")),
}  # fmt: skip


def _exported(world: World) -> None:
    done = run(
        ["export", world.folder / "runs" / "tiny", "--out", world.folder / "e"], world.folder, {}
    )
    assert done.code == 0, done.text
    path = world.folder / "e" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-5000] ^= 0x01
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("name", in_tiers(RESUMES))
def test_one_clear_line_for_a_changed_run(name: str, trained: Trained) -> None:
    words, arrange = RESUMES[name]
    world = trained.restore()
    arrange(world)
    places = {"m": world.model, "c": world.checkpoint, "r": world.run, "w": world.folder}
    check(f"resume: {name}", world, [word.format(**places) for word in words], {})


CONTINUES: dict[str, Arrange] = {
    "metrics with half a line": lambda w: (w.folder / "runs/tiny/metrics.jsonl").open("a").write('{"step": 3, "rew'),
    "a half-written checkpoint": lambda w: shutil.copytree(w.folder / STEP, w.folder / "runs/tiny/checkpoints/step_000003.partial"),
    "a clock in the past": lambda w: [os.utime(path, (10**9 * 4, 10**9 * 4)) for path in w.folder.rglob("*")],
    "rollouts of binary": text("runs/tiny/rollouts/step_000002.jsonl", bytes(range(256))),
    "heartbeats of nonsense": text("runs/tiny/heartbeats/rank0.json", '{"time": "yesterday"'),
    "a lock of nonsense": text("runs/tiny/run.lock", bytes(range(256))),
}  # fmt: skip


@pytest.mark.parametrize("name", in_tiers(CONTINUES, every=2))
def test_a_run_continues(name: str, trained: Trained) -> None:
    """No line of the metrics before is lost."""
    world = trained.restore()
    CONTINUES[name](world)
    ended = run([word.format(r=world.run) for word in AGAIN], world.folder, {})
    assert ended.code == 0 and "Traceback" not in ended.text, ended.text
    rows = [
        json.loads(line)
        for line in (world.folder / "runs/tiny/metrics.jsonl").read_text().splitlines()
    ]
    assert [row["step"] for row in rows] == [1, 2, 3]


# ---------------------------------------------------------------------------------------------
# servers that answer garbage
REPLIES = {
    "nothing": b"",
    "text": b"hello\r\n\r\n",
    "a page": b"HTTP/1.1 200 OK\r\nContent-Length: 13\r\n\r\n<html></html>",
    "deep json": b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: "
    b"200000\r\n\r\n" + b"[" * 200_000,
    "another address": b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:9/\r\nContent-Length: "
    b"0\r\n\r\n",
    "an endless header": b"HTTP/1.1 200 OK\r\n" + b"X-A: " + b"a" * 1_000_000,
    "a terabyte": b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000000\r\n\r\n" + b"x" * 1000,
    "an error": b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 9\r\n\r\n\xff\xfe\x00\x1b[2Jab",
}


@pytest.fixture
def garbage(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a server that sends one reply to everyone."""
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        thread = threading.Thread(target=serve, args=(REPLIES[request.param], stop, server))
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        stop.set()
        thread.join()


@pytest.mark.parametrize("garbage", in_tiers(REPLIES), indirect=True)
def test_train_with_servers_that_send_garbage(
    garbage: str, original: World, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    world = copy_world(original, tmp_path / "world")
    rollout = (
        f"rollout={{engine: sglang, urls: ['{garbage}'], sampling: {{max_response_tokens: 12}}, "
        "sync: {transport: disk}, all_down_after_s: 8}"
    )
    check(
        f"servers: {request.node.callspec.id}",
        world,
        ["train", world.run, "parallel.tp=1", rollout],
        {},
    )


@pytest.mark.parametrize("garbage", in_tiers(REPLIES), indirect=True)
def test_train_with_rewards_of_garbage(
    garbage: str, original: World, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    world = copy_world(original, tmp_path / "world")
    reward = f"reward={{name: http, url: '{garbage}', timeout_s: 5}}"
    check(
        f"rewards: {request.node.callspec.id}",
        world,
        ["train", world.run, "parallel.tp=1", reward],
        {},
    )
