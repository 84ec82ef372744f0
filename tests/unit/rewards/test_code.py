"""Programs in the real sandbox. Those that attack it are in sandbox_programs.py."""

import contextlib
import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from pacs_megatron.config.reward_options import CodeReward
from pacs_megatron.errors import ConfigError, RewardError
from pacs_megatron.rewards import build_reward, sandbox
from pacs_megatron.rewards.code import last_block, read_tests
from tests.support.needs import require
from tests.support.rewards import CollectingPool
from tests.support.sandbox_programs import PROGRAMS, QUICK, SECRET, Attack

needs_sandbox = pytest.mark.usefixtures("bubblewrap")
SUM = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"], "fn_name": None}
CALL = {"inputs": [[[1, 2], 1]], "outputs": [[[1, 2, 1]]], "fn_name": "push"}
LEETCODE = {"inputs": ["[1, 2]\n1", "[]\n0"], "outputs": ["[1, 2, 1]", "[0]"], "fn_name": "push"}
GOOD_SUM = "a, b = map(int, input().split())\nprint(a + b)"
GOOD_CALL = "def push(a, b):\n    return (*a, b)"
GOOD_CLASS = (
    "class Solution:\n    def push(self, a: List[int], b: int) -> List[int]:\n        return a + "
    "[b]"
)
FLOATS = {"inputs": ["", ""], "outputs": ["1.50 2\n", "a\nb"]}


def fenced(code: str) -> str:
    return f"Some thought.\n```python\n{code}\n```\nDone."


def options(**more) -> CodeReward:
    return CodeReward(name="code", **{"timeout_s": 20.0, "test_timeout_s": 2.0, **more})


@functools.cache
def usual_judge():
    return build_reward(options())


@pytest.fixture(scope="module")
def bubblewrap() -> None:
    """Skips where bubblewrap does not work.

    Under PACS_CI=1 it fails: a run with the fallback only is no pass.
    """
    problem = sandbox.find_problem()
    require(problem is None, f"a working sandbox ({problem})")


@needs_sandbox
@pytest.mark.parametrize(
    ("tests", "code", "reward", "reason"),
    [
        (SUM, GOOD_SUM, 1.0, None),
        (
            SUM,
            "if __name__ == '__main__':\n    import sys\n    print(sum(map(int, "
            "sys.stdin.read().split())))",
            1.0,
            None,
        ),
        (SUM, GOOD_SUM + "\nexit(1)", 1.0, None),  # as LiveCodeBench
        (
            SUM,
            "import atexit\natexit.register(lambda: print(sum(map(int, input().split()))))",
            1.0,
            None,
        ),
        (SUM, "print(3)", 0.0, "wrong output"),
        (SUM, "print(", 0.0, "exit code 1"),
        (SUM, GOOD_SUM + "\nraise ValueError", 0.0, "exit code 1"),
        (CALL, GOOD_CALL, 1.0, None),
        (LEETCODE, GOOD_CLASS, 1.0, None),
        (LEETCODE, GOOD_CLASS + "\nprint('noise')", 1.0, None),
        (LEETCODE, "def push(a, b): return a", 0.0, "wrong output"),
        (LEETCODE, "def pull(a, b): return a", 0.0, "exit code 1"),
        (FLOATS, "print('1.5 2.0' if 0 else 'a \\nb')", 0.0, "wrong output"),
        (FLOATS, "import os\nprint('1.5  2.0 ')", 0.0, "wrong output"),
        ({"inputs": [""], "outputs": ["1.50 2\n"]}, "print('\\n 1.5  2.0 ')", 1.0, None),
        (SUM, "import numpy\nprint(int(numpy.array(input().split(), int).sum()))", 1.0, None),
    ],
)
def test_verdicts(make_prompt, tests, code, reward, reason) -> None:
    judged = usual_judge()(make_prompt(json.dumps(tests)), fenced(code))
    assert (judged.reward, judged.details.get("reason")) == (reward, reason)
    assert judged.details["tests"] == len(tests["inputs"])
    if reward == 1.0:
        assert judged.details["passed"] == len(tests["inputs"])


@needs_sandbox
def test_the_first_failed_test_is_recorded_and_no_program_is_wrong(make_prompt) -> None:
    judge = usual_judge()
    prompt = make_prompt(json.dumps(SUM))
    assert judge(prompt, fenced("print(3)")).details == {
        "passed": 1,
        "tests": 2,
        "reason": "wrong output",
    }
    assert judge(prompt, "a = 1").details == {"passed": 0, "tests": 2, "reason": "no program"}


def test_the_program_is_the_last_closed_block() -> None:
    assert last_block("```\na\n```\ntext\n```python\nb\n```") == "b\n"
    assert last_block("```python\na\n```\n```python\nb") == "a\n"
    assert last_block("```python\na") is None


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "5",
        "[]",
        "{}",
        '{"inputs": ["1"], "outputs": []}',
        '{"inputs": [], "outputs": []}',
        "[" * 100_000,
    ]
    + [json.dumps(SUM | {"fn_name": name}) for name in ("a.b", 3, "")]
    + [
        json.dumps({"inputs": [5], "outputs": ["5"]}),
        json.dumps({"inputs": ["x"], "outputs": ["5"], "fn_name": "f"}),
    ],
)
def test_malformed_tests_are_one_error(make_prompt, answer) -> None:
    with pytest.raises(RewardError, match=r"the tests \(answer\) of prompt train/7 are malformed"):
        read_tests(make_prompt(answer))


def test_without_a_sandbox_only_the_named_fallback_runs(make_prompt, monkeypatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(
        ConfigError,
        match=r"reward.sandbox=bubblewrap does not work on this host: bwrap is not installed",
    ):
        build_reward(options())
    judge = build_reward(options(sandbox="none"))
    assert judge(make_prompt(json.dumps(SUM)), fenced(GOOD_SUM)).reward == 1.0
    assert (
        judge(make_prompt(json.dumps(SUM)), fenced("while True: pass")).details["reason"]
        == "time limit"
    )


@needs_sandbox
def test_a_slow_program_is_wrong_and_not_unjudged(make_prompt) -> None:
    tests = {"inputs": ["1"] * 9, "outputs": ["1"] * 9}
    with CollectingPool(options(timeout_s=1.5)) as pool:
        pool.submit(
            "a", make_prompt(json.dumps(tests)), fenced("import time\ntime.sleep(0.4)\nprint(1)")
        )
        (verdict,) = pool.results()
    assert verdict.reward == 0.0
    assert verdict.details["reason"] == "time limit"
    assert verdict.details["passed"] < 9


def survivors(pool: CollectingPool) -> list[int]:
    """The sandboxes of the pool's worker.

    The kernel ends everything in one with its bwrap processes.
    """
    mark = pool._workers[0]._mark
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.name() == "bwrap" and mark in process.environ().values():
                found.append(process.pid)
    return found


def has_no_survivors(pool: CollectingPool) -> bool:
    deadline = time.monotonic() + 20
    while found := survivors(pool):
        if time.monotonic() > deadline:
            return not found
        time.sleep(0.05)
    return True


@pytest.fixture(scope="module")
def bait(tmp_path_factory):
    """A file that only the host has, and a listening server."""
    folder = tmp_path_factory.mktemp("bait")
    (folder / "secret").write_text(SECRET)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield folder, server


def run_attack(case: Attack, bait, make_prompt, pool: CollectingPool) -> None:
    folder, server = bait
    code = case.code.replace("FOLDER", str(folder)).replace("PORT", str(server.getsockname()[1]))
    code = code.replace("PARENT", str(os.getpid()))
    started = time.monotonic()
    pool.submit("attack", make_prompt(json.dumps(case.tests)), fenced(code))
    pool.submit("good", make_prompt(json.dumps(SUM)), fenced(GOOD_SUM))
    verdicts = {verdict.key: verdict for verdict in pool.results()}
    assert verdicts["good"].reward == 1.0, verdicts["good"]
    assert verdicts["attack"].failure is None, verdicts["attack"]
    assert verdicts["attack"].reward == case.reward, verdicts["attack"].details
    assert time.monotonic() - started < 60
    assert (folder / "secret").read_text() == SECRET
    assert os.listdir(folder) == ["secret"]
    with pytest.raises(BlockingIOError):
        server.accept()
    assert has_no_survivors(pool)


@pytest.fixture(scope="module")
def pool():
    with CollectingPool(options(test_timeout_s=1.0, test_memory_gib=0.5)) as found:
        yield found


@needs_sandbox
@pytest.mark.parametrize("name", QUICK)
def test_programs_that_attack_quick(name, bait, make_prompt, pool) -> None:
    run_attack(PROGRAMS[name], bait, make_prompt, pool)


@needs_sandbox
@pytest.mark.full
@pytest.mark.parametrize("name", sorted(set(PROGRAMS) - set(QUICK)))
def test_programs_that_attack(name, bait, make_prompt, pool) -> None:
    run_attack(PROGRAMS[name], bait, make_prompt, pool)


LEAVES = """
import builtins, ctypes, os, socket, sys, time
for folder in ('/tmp', '/dev/shm', '/var/tmp', '/run', '/', '.'):
    try: open(folder + '/left', 'w').write('left')
    except OSError: pass
os.environ['LEFT'] = '1'
os.umask(0o77)
builtins.left = sys.modules['left'] = sys
ctypes.CDLL(None).shmget(0x1EF7, 4096, 0o1666)
if os.fork() == 0:
    os.setsid()
    if os.fork(): os._exit(0)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind('\\0left')
    listener.listen()
    os.dup2(listener.fileno(), 0)
    os.closerange(1, 64)
    time.sleep(999)
time.sleep(0.2)
print(3)
"""
"""Leaves files, an environment, modules, shared memory, a process, and its socket behind."""
INVENTORY = """
import builtins, ctypes, os, socket, sys
def alive(pid):
    try: os.kill(pid, 0)
    except PermissionError: pass
    except ProcessLookupError: return False
    return True
print([folder + name for folder in ('/', '/tmp/', '/dev/', '/dev/shm/', '/var/tmp/', '/run/')
       if os.path.isdir(folder) for name in sorted(os.listdir(folder))])
print(sorted(os.environ.items()), os.getcwd(), hasattr(builtins, 'left'), 'left' in sys.modules)
print([pid for pid in range(1, 300) if alive(pid)], ctypes.CDLL(None).shmget(0x1EF7, 4096, 0))
try: print('a socket', socket.socket(socket.AF_UNIX).connect('\\0left'))
except OSError: print('no socket')
"""


def inventory() -> str:
    """The output of INVENTORY: everything that a program finds in its sandbox."""
    limits = sandbox.Limits(time.monotonic() + 20, 5.0, 0.5)
    [result] = sandbox.run_tests(sandbox.Program(INVENTORY, [""], None), limits, "bubblewrap")
    return str(result["output"])


@needs_sandbox
def test_a_program_finds_nothing_of_the_one_before_it(make_prompt, monkeypatch, tmp_path) -> None:
    """Programs of one worker: files, processes, shared memory, sockets, environment, and modules of
    the interpreter.
    """
    before = inventory()
    shared_memory = Path("/proc/sysvipc/shm").read_text()
    assert "no socket" in before and "left" not in before
    clean = {"inputs": [""], "outputs": [before], "fn_name": None}
    with CollectingPool(options()) as pool:
        for number in range(3):
            pool.submit(
                f"leaves {number}",
                make_prompt(json.dumps({"inputs": [""], "outputs": ["3"]})),
                fenced(LEAVES),
            )
            pool.submit(f"next {number}", make_prompt(json.dumps(clean)), fenced(INVENTORY))
        verdicts = {verdict.key: verdict for verdict in pool.results()}
        assert len(verdicts) == 6
        assert all(verdict.reward == 1.0 for verdict in verdicts.values()), verdicts
        assert has_no_survivors(pool)
    assert Path("/proc/sysvipc/shm").read_text() == shared_memory

    # The opposite: with a /tmp of the host, the next program finds the file.
    real = sandbox._bubblewrap
    host = tmp_path / "tmp"
    host.mkdir()
    host.chmod(0o1777)

    def with_tmp_of_the_host(rules: int) -> list[str]:
        command = real(rules)
        at = command.index("--tmpfs")
        assert command[at - 4] == "--perms"
        return [*command[: at - 4], "--bind", str(host), *command[at + 1 :]]

    monkeypatch.setattr(sandbox, "_bubblewrap", with_tmp_of_the_host)
    judged = usual_judge()(
        make_prompt(json.dumps({"inputs": [""], "outputs": ["3"]})), fenced(LEAVES)
    )
    assert judged.reward == 1.0
    assert "/tmp/left" in inventory()


@needs_sandbox
def test_the_sandbox_ends_with_its_worker(make_prompt) -> None:
    with CollectingPool(options(test_timeout_s=20.0)) as pool:
        pool.submit("a", make_prompt(json.dumps(SUM)), fenced("import time\ntime.sleep(20)"))
        deadline = time.monotonic() + 20
        while not survivors(pool) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert survivors(pool)
    assert has_no_survivors(pool)


@needs_sandbox
@pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/usr/bin/python3").exists(),
    reason="needs root and /usr/bin/python3",
)
def test_users_other_than_root_have_a_sandbox_by_a_user_namespace(monkeypatch) -> None:
    """With the distribution's interpreter: another user may not read root's own."""
    program = "import socket\nsocket.create_connection(('127.0.0.1', PORT), 1)"
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as server:
        os.chmod(folder, 0o755)  # noqa: S103
        runner = shutil.copy(sandbox.RUNNER, folder)
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        monkeypatch.setattr(sys, "base_prefix", "/usr")
        monkeypatch.setattr(sandbox, "RUNNER", Path(runner))
        monkeypatch.setattr(
            sandbox, "_interpreter", lambda: str(Path("/usr/bin/python3").resolve())
        )
        monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
        job = {
            "code": program.replace("PORT", str(server.getsockname()[1])),
            "inputs": [""],
            "function": None,
            "uid": None,
        }
        job |= {"isolated": True, "seconds": 5.0, "memory_bytes": 2**29}
        with tempfile.TemporaryFile() as rules:
            rules.write(sandbox._filter())
            rules.seek(0)
            command = [
                *sandbox._bubblewrap(rules.fileno()),
                sandbox._interpreter(),
                "-I",
                "-S",
                "-B",
                "/runner.py",
            ]
            done = subprocess.run(
                command,
                input=json.dumps(job).encode(),
                capture_output=True,
                pass_fds=(rules.fileno(),),
                user=65534,
                group=65534,
                extra_groups=[],
                cwd="/",
                timeout=60,
                check=True,
            )
    assert done.stdout.splitlines() == [b'{"ready": true}', b'{"error": "exit code 1"}'], done
