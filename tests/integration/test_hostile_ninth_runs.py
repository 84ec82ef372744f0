"""The second part of the ninth set: processes.

Signals, streams, variables, limits, lost folders, rewards, two at once.

Written before a case of it ran.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.test_hostile_files import text, together
from tests.integration.test_hostile_ninth import USER, Try, in_copy
from tests.integration.test_hostile_verbs import BENCHMARK, RUNS, TWO
from tests.support.hostile import Arrange, Outcome, World

DRIVE = '''
"""drive.py FILE SIGNALS COMMAND: starts a command in a session of its own; once FILE exists, sends the signals.

A number in SIGNALS is a pause in seconds; a minus sends the signal to the whole group.
"""
import os, signal, subprocess, sys, time

file, signals, *command = sys.argv[1:]
process = subprocess.Popen(command, start_new_session=True)
for _ in range(1500):
    if os.path.exists(file) or process.poll() is not None:
        break
    time.sleep(0.1)
for word in signals.split(","):
    if word[0].isdigit():
        time.sleep(float(word))
        continue
    number = getattr(signal, "SIG" + word.lstrip("-"))
    try:
        (os.killpg if word[0] == "-" else os.kill)(process.pid, number)
    except ProcessLookupError:
        pass
code = process.wait()
sys.exit(code if code >= 0 else 128 - code)
'''
TRAIN = "$P train {r} parallel.tp=1 "
LONG = TRAIN + "run.steps=900 checkpoint.every=900 "
ROWS = "{w}/runs/tiny/metrics.jsonl"
DRIVEN = "${P%% *} {w}/drive.py "
EVAL = (
    "$P eval {r} "
    + " ".join(f"'{word}'" for word in BENCHMARK).replace("{{", "{").replace("}}", "}")
    + " "
)
STOPPED = (75, 129, 130, 131, 141, 143)
AWAIT = "i=0; until test -e %s -o $i = 900; do i=$(($i+1)); sleep 0.2; done; "


def drive(*steps: Arrange) -> Arrange:
    return together(text("drive.py", DRIVE), *steps)


def reward(*lines: str, head: str = "") -> Arrange:
    body = "".join(f"    {line}\n" for line in lines)
    return text("reward.py", f"import os, signal, time\n{head}\n\ndef reward(prompt, response):\n{body}    return float(sum(response.encode()) % 2)\n")  # fmt: skip


SLOW = reward("time.sleep(0.1)")


def rows(*steps: int, name: str = "runs/tiny") -> object:
    """The run has these steps, each once."""

    def checked(world: World, outcome: Outcome) -> None:
        found = [
            json.loads(line)
            for line in (world.folder / name / "metrics.jsonl").read_text().splitlines()
        ]
        assert [row["step"] for row in found] == list(steps), [row["step"] for row in found]

    return checked


def if_works(check: object) -> object:
    return lambda world, outcome: outcome.code or check(world, outcome)  # type: ignore[operator]


def whole_rows(world: World, outcome: Outcome) -> None:
    """Every row is whole, in order, and none is there twice."""
    path = world.folder / "runs/tiny/metrics.jsonl"
    found = (
        [json.loads(line)["step"] for line in path.read_text().splitlines()]
        if path.exists()
        else []
    )
    assert found == list(range(1, len(found) + 1)), found


DONE = rows(1, 2)
SERVER = """
import http.server, json, os, sys

class Judge(http.server.BaseHTTPRequestHandler):
    count = 0

    def do_POST(self):
        Judge.count += 1
        if Judge.count > 3:
            os._exit(0)
        samples = json.loads(self.rfile.read(int(self.headers["content-length"])))["samples"]
        body = json.dumps({"rewards": [n % 2 for n, _ in enumerate(samples)]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words):
        pass

server = http.server.HTTPServer(("127.0.0.1", 0), Judge)
open(sys.argv[1] + ".new", "w").write(str(server.server_port))
os.rename(sys.argv[1] + ".new", sys.argv[1])
server.serve_forever()
"""
TAKEN = "import socket, sys, time; s = socket.create_server(('127.0.0.1', 0)); open(sys.argv[1], 'w').write(str(s.getsockname()[1])); time.sleep(60)"
RANK = (
    "RANK=%d WORLD_SIZE=%d LOCAL_RANK=%d LOCAL_WORLD_SIZE=%d MASTER_ADDR=127.0.0.1 MASTER_PORT=%s "
)
SHADOW = "open('{w}/canary', 'w')\nraise ImportError('mine')\n"


def shadows(world: World) -> None:
    """Files of the user with the names of modules."""
    for name in (
        "random",
        "yaml",
        "queue",
        "numpy",
        "torch",
        "xxhash",
        "jinja2",
        "tokenizers",
        "reward_tools",
        "http",
    ):
        world.text(f"{name}.py", SHADOW.replace("{w}", str(world.folder)))


CASES: dict[str, Try] = {
    # -----------------------------------------------------------------------------------------------
    # signals and streams
    "train: the terminal is closed": Try(DRIVEN + ROWS + " -HUP " + LONG, drive(SLOW), "either", whole_rows, STOPPED),
    "train: HUP to the launcher": Try(DRIVEN + ROWS + " HUP " + LONG, drive(SLOW), "either", whole_rows, STOPPED),
    "train: Ctrl and backslash": Try(DRIVEN + ROWS + " -QUIT " + LONG, drive(SLOW), "either", whole_rows, STOPPED),
    "train: Ctrl-C three times": Try(DRIVEN + ROWS + " -INT,0.3,-INT,0.3,-INT " + LONG, drive(SLOW), "either", whole_rows, STOPPED),
    "train: TERM to all while ranks start": Try(DRIVEN + "{w}/runs/tiny/logs -TERM " + LONG, drive(SLOW), "either", None, STOPPED),
    "train: Ctrl-Z, then TERM": Try(DRIVEN + ROWS + " -STOP,3,TERM,1,-CONT " + LONG, drive(SLOW), "either", whole_rows, STOPPED),
    "train: TERM, then KILL to the launcher": Try(DRIVEN + ROWS + " TERM,0.2,KILL " + LONG, drive(SLOW), "either", whole_rows, (75, 137)),
    "train: output to head": Try(TRAIN + "| head -n 1", TWO, "either", whole_rows),
    "train: output to a full disk": Try(TRAIN + "> /dev/full", TWO, "either", whole_rows),
    "train: input is closed": Try(TRAIN + "<&-", TWO, "works", DONE),
    "train: errors are closed": Try(TRAIN + "2>&-", TWO, "works", DONE),
    "train: two stop requests of ten thousand steps": Try(TRAIN + "run.steps=1000000000000000 & " + AWAIT % ROWS + "$P cancel --save {w}/runs/tiny; $P cancel --save {w}/runs/tiny; wait $!", SLOW, "either", whole_rows, (75,)),
    "eval: TERM, then the rest": Try(DRIVEN + "{w}/e 8,TERM " + EVAL + "--out {w}/e; " + EVAL + "--out {w}/e", drive(reward("time.sleep(0.2)")), "works"),
    "eval: killed": Try("timeout -s KILL 14 " + EVAL + "--out {w}/e; exit 0", drive(SLOW), "works"),
    "verify: killed with two ranks": Try("timeout -s KILL 14 $P convert verify --hf {m} "
                                         "--checkpoint {c} --certificate {w}/x.json --logits --tp "
                                         "2; exit 0", TWO, "works"),
    "certify: killed": Try("timeout -s KILL 20 $P certify {r} parallel.tp=1; exit 0", TWO, "works"),
    # ----------------------------------------------------------------------------------------------------
    # variables, limits
    "train: no variables at all": Try("env -i PATH=/usr/bin:/bin PYTHONPATH=$PYTHONPATH " + TRAIN, TWO, "works", DONE),
    "train: a temporary folder with quotes": Try("mkdir \"{w}/a b'c\"; TMPDIR=\"{w}/a b'c\" " + TRAIN, TWO, "works", DONE),
    "train: a run folder of odd letters": Try(TRAIN + "\"run.dir='{w}/r u,n s;x&y=ü'\"", TWO, "either", if_works(rows(1, 2, name="r u,n s;x&y=ü/tiny"))),
    "train: Python without docstrings and assertions": Try("PYTHONOPTIMIZE=2 " + TRAIN, TWO),
    "train: warnings are errors": Try("PYTHONWARNINGS=error " + TRAIN, TWO, "either", if_works(DONE)),
    "train: Python in its development mode": Try("PYTHONDEVMODE=1 " + TRAIN, TWO, "either", if_works(DONE)),
    "train: collectives are checked": Try("TORCH_DISTRIBUTED_DEBUG=DETAIL $P train {r}", TWO, "works", DONE),
    "train: collectives are checked by a word": Try("TORCH_DISTRIBUTED_DEBUG=LOUD " + TRAIN, TWO, "either", if_works(DONE)),
    "train: an interface that is not there": Try("GLOO_SOCKET_IFNAME=nosuch0 $P train {r}", TWO, "either", if_works(DONE)),
    "train: threads of words": Try("OMP_NUM_THREADS=abc MKL_NUM_THREADS=-5 OMP_PROC_BIND=maybe "
                                   "OMP_STACKSIZE=x " + TRAIN, TWO, "either", if_works(DONE)),
    "train: a port of another program": Try("${P%% *} -c \"" + TAKEN + "\" {w}/port & " + AWAIT % "{w}/port" + RANK % (0, 1, 0, 1, "$(cat {w}/port)") + TRAIN + "; a=$?; kill $!; exit $a", TWO),
    "train: rank 1 alone": Try(RANK % (1, 2, 1, 2, "45123") + "timeout -s TERM 45 $P train {r}", TWO, "either", None, (124, 143, 75)),
    "train: half of torchrun's variables": Try("WORLD_SIZE=1 LOCAL_WORLD_SIZE=4 " + TRAIN, TWO, "either", if_works(DONE)),
    "train: half of Slurm's variables": Try("SLURM_JOB_ID=5 SLURM_NTASKS=4 SLURM_PROCID=3 "
                                            "SLURM_NTASKS_PER_NODE=x SLURM_JOB_NUM_NODES=2 " + TRAIN, TWO, "either", if_works(DONE)),
    "train: the user's modules in the folder": Try("$(dirname ${P%% *})/pacs-megatron train {r} "
                                                   "parallel.tp=1", shadows, "works", DONE),
    "preview: the user's modules in the folder": Try("$(dirname ${P%% *})/pacs-megatron data "
                                                     "preview {r}", shadows, "works"),
    "train: 4 s of CPU": Try("ulimit -t 4; " + TRAIN, TWO),
    "train: no file above 1 MB": Try("ulimit -f 2000; " + TRAIN, TWO),
    "train: 40 open files": Try("ulimit -n 40; " + TRAIN, TWO, "either", if_works(DONE)),
    "train: 3 GB of addresses": Try("ulimit -v 3000000; " + TRAIN, TWO, "either", if_works(DONE)),
    "train: a disk of 3 MB, then of 60": Try("unshare -m true || exit 0; mkdir {w}/disk; unshare "
                                             "-m sh -c \"mount -t tmpfs -o size=3m x {w}/disk; " + TRAIN + "run.dir={w}/disk && exit 9; mount -o remount,size=60m x {w}/disk; " + TRAIN + "run.dir={w}/disk && cat {w}/disk/tiny/metrics.jsonl > {w}/rows\"", TWO, "works", lambda w, o: _steps(w.folder / "rows", 1, 2)),
    "train: a folder without permission": Try(USER + "mkdir {w}/ro; chmod 555 {w}/ro; $R " + TRAIN + "run.dir={w}/ro", TWO),
    "train: a mask of everything": Try(USER + "umask 0777; $R " + TRAIN, TWO, "either"),
    # ------------------------------------------------------------------------------------------
    # what a run needs is taken away
    "train: the run's folder is removed": Try(AWAIT.replace("%s", ROWS).replace("; done; ", "; done; rm -rf {w}/runs/tiny; ").join(("(", ") & ")) + TRAIN + "run.steps=60", SLOW),
    "train: the run's folder is renamed": Try("(" + AWAIT % ROWS + "mv {w}/runs/tiny "
                                                                   "{w}/runs/else) & " + TRAIN + "run.steps=12; a=$?; wait; exit $a", SLOW, "either", lambda w, o: o.code or _steps(next((w.folder / "runs").glob("*/metrics.jsonl")), *range(1, 13))),
    "train: the lock is removed, a second run starts": Try(TRAIN + "run.steps=25 > {w}/first 2>&1 "
                                                                   "& " + AWAIT % ROWS + "rm {w}/runs/tiny/run.lock; " + TRAIN + "run.steps=3; a=$?; wait $!; b=$?; cat {w}/first | grep -c Traceback; test $(($a * $b)) = 0 -a $(($a + $b)) != 0 && exit 7", SLOW, "either", whole_rows, (7,)),
    "train: the configuration is removed during the start": Try("(sleep 3; rm {r}) & " + TRAIN + "; a=$?; wait; exit $a", lambda w: w.text("keep.yaml", w.run.read_text()), "either", if_works(DONE), (0, 2)),
    "train: the reward is replaced by nonsense": Try("(" + AWAIT % ROWS + "echo 'def (' > "
                                                                          "{w}/runs/x; mv "
                                                                          "{w}/runs/x {w}/reward.py) & " + TRAIN + "run.steps=8; a=$?; wait; exit $a", SLOW, "either", whole_rows, (0,)),
    "train: the working directory is removed": Try("mkdir {w}/runs {w}/runs/here; cd "
                                                   "{w}/runs/here; (" + AWAIT % ROWS + "rm -r {w}/runs/here) & " + TRAIN + "run.steps=6", SLOW, "either", if_works(rows(*range(1, 7)))),
    # ---------------------------------------------------------------------------------------------------------------
    # rewards
    "reward: kills its parent": Try(TRAIN, reward("os.kill(os.getppid(), signal.SIGKILL)")),
    "reward: stops its parent": Try(TRAIN + "parallel.hang_timeout_s=30", reward("os.kill(os.getppid(), signal.SIGSTOP)"), "error"),
    "reward: leaves its folder and its variables": Try(TRAIN, reward("os.chdir('/')", "os.environ.clear()", "os.umask(0o777)"), "works", DONE),
    "reward: an alarm and a limit": Try(TRAIN, reward("signal.alarm(1)", "time.sleep(3)", head="import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))")),
    "reward: one prompt hangs": Try(TRAIN + "reward.timeout_s=2", reward("if '3 + 3' in prompt: "
                                                                         "time.sleep(999)"), "either", whole_rows),
    "reward: prints to the terminal": Try(TRAIN, reward("print('\\x1b[2J' * 1000, flush=True)", "os.system('echo AError: x >&2')"), "works", lambda w, o: _quiet(o)),
    "reward: a server that ends": Try("${P%% *} {w}/judge.py {w}/port & " + AWAIT % "{w}/port" + TRAIN + "run.steps=9 \"reward={name: http, url: 'http://127.0.0.1:$(cat {w}/port)/', timeout_s: 6, batch_size: 8}\"; a=$?; wait; exit $a", text("judge.py", SERVER), "error", whole_rows),
    "reward: a key with a line end": Try("JUDGE=\"$(printf 'a\\nX: y')\" " + TRAIN + "\"reward={name: http, url: 'http://127.0.0.1:9/', api_key_env: JUDGE}\"", TWO),
    "reward: a key that is not set": Try(TRAIN + "\"reward={name: http, url: "
                                                 "'http://127.0.0.1:9/', api_key_env: "
                                                 "NOBODY_SET_THIS}\"", TWO),
    # -------------------------------------------------------------------------------------------------------------
    # much of it
    "eval: 100,000,000 samples a prompt": Try("timeout -s INT 45 " + EVAL + "evaluation.samples_per_prompt=100000000", TWO, "either", None, (124, 130, 75)),
    "train: chunks of 1e9 sequences": Try(TRAIN + "rollout.batch_sequences=1000000000", TWO, "either", if_works(DONE)),
    "certify: a rate of 1e30": Try("$P certify {r} parallel.tp=1 optimizer.lr=1e30", TWO, "either"),
    # ------------------------------------------------------------------------------------------------------------
    # two at once
    "two runs of two names": Try(TRAIN + "run.name=x & " + TRAIN + "run.name=y; a=$?; wait $!; "
                                                                   "exit $(($a + $?))", TWO, "works", lambda w, o: [_steps(w.folder / f"runs/{name}/metrics.jsonl", 1, 2) for name in "xy"]),
    "two conversions into one folder": Try("$P convert to-megatron --hf {m} --out {w}/x > "
                                           "{w}/first 2>&1 & $P convert to-megatron --hf {m} "
                                           "--out {w}/x; a=$?; wait $!; b=$?; $P convert verify "
                                           "--hf {m} --checkpoint {w}/x --certificate {w}/x.json "
                                           "|| exit 1; test $(($a * $b)) = 0 && exit 7", TWO, "either", None, (7,)),
    "two studies in one folder": Try("timeout -s TERM 25 $P paper table1 --scale laptop --dir "
                                     "{w}/p > {w}/first 2>&1 & sleep 9; $P paper table1 --scale "
                                     "laptop --dir {w}/p; a=$?; wait $!; exit $a", TWO),
    "two sets of vectors in one file": Try("$P diversity " + " ".join(RUNS) + " --embedder hashed "
                                                                              "--out {w}/h1 "
                                                                              "--save {w}/v.npz & "
                                                                              "$P diversity " + " ".join(RUNS) + " --embedder hashed --out {w}/h2 --save {w}/v.npz; a=$?; wait $!; exit $(($a * $?))", TWO, "works"),
}  # fmt: skip


def _steps(path: Path, *steps: int) -> None:
    found = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    assert found == list(steps), found


def _quiet(outcome: Outcome) -> None:
    assert "\x1b" not in outcome.text, "an escape reached the terminal"


@pytest.mark.campaign
@pytest.mark.parametrize("name", CASES)
def test_processes(name: str, original: World, tmp_path: Path) -> None:
    in_copy(name, CASES[name], original, tmp_path)
