"""Real worker processes, killed and orphaned for real."""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest

from pacs_megatron.config.reward_options import ArithmeticReward, CustomReward, MathReward
from pacs_megatron.errors import ConfigError, RewardError
from pacs_megatron.rewards import build_reward
from pacs_megatron.rewards.judging import JudgeInput
from pacs_megatron.rewards.worker import encode_inputs
from tests.support.rewards import CollectingPool

CUSTOM = """
import ctypes, os, pathlib, signal, subprocess, sys, time
import numpy as np
from pacs_megatron.contracts import Judgement
class Mute(Exception):
    def __str__(self): return 1 / 0
def judge(prompt, response):
    if response.startswith("killed"):
        mark = pathlib.Path(response.split()[-1])
        if not mark.exists():
            if mark.is_absolute(): mark.touch()
            os.kill(os.getpid(), 9)
    match response:
        case "hang": time.sleep(3600)
        case "spin":
            while True: pass
        case "exit": os._exit(3)
        case "segfault": ctypes.string_at(0)
        case "raise": raise ValueError("no")
        case "nan": return float("nan")
        case "hog": return float(len(bytearray(8 << 30)))
        case "family":
            if all(os.fork() for _ in range(4)): time.sleep(3600)
            block = bytearray(os.urandom(1)) * (120 << 20)
            time.sleep(3600)
        case "fork" | "session" | "stopped":
            own_session = response == "session"
            command = ["sleep", "3600"]
            child = subprocess.Popen(command, start_new_session=own_session, close_fds=False)
            if response == "stopped": os.kill(child.pid, 19)
            time.sleep(3600)
        case "leave":
            if os.fork() == 0: time.sleep(3600)  # keeps the worker's socket
            os._exit(3)
        case "daemon" | "orphan":
            # Sleeps in a session of its own, deaf, without a parent or open files.
            if os.fork() == 0:
                os.setsid()
                if os.fork(): os._exit(0)
                for number in (1, 2, 15): signal.signal(number, signal.SIG_IGN)
                os.closerange(0, 1024)
                os.execvp("sleep", ["sleep", "3600"])
            time.sleep(0.3)
            if response == "orphan": os._exit(3)
            time.sleep(3600)
        case "flood":
            while True: print("x" * 1000)
        case "close":
            os.closerange(0, 1024)
            time.sleep(3600)
        case "mute": raise Mute
        case "huge": return 10**400
        case "numpy": return np.float32(1)
        case "print": print('{"reward": 0.0}', flush=True)
        case "torch": return float("torch" in sys.modules)
        case "pid": return float(os.getpid())
        case "dumps":
            import json
            json.dumps = lambda *values, **options: "x"
        case "circle":
            details = {}
            details["a"] = details
            return Judgement(1.0, details)
        case "bulky": return Judgement(1.0, {"a": "x" * 2**21})
        case "bytes": return Judgement(1.0, {"a": b"x"})
        case "not a number": return Judgement(1.0, {"a": float("nan")})
        case "details": return Judgement(0.0, {"a": [1, None, "\\ud800"]})
        case "ids":
            ids = prompt.token_ids
            return float(ids.dtype == "int32" and ids.tolist() == [3, 1, 2])
    return 1.0
"""


@pytest.fixture
def custom(tmp_path):
    file = tmp_path / "verifier.py"
    file.write_text(CUSTOM)

    def options(**changes):
        return CustomReward(name="custom", function=f"{file}:judge", **changes)

    return options


_others: set[int] = set()


@pytest.fixture(autouse=True)
def other_children() -> None:
    """Servers of other tests' session fixtures are children of this process too."""
    _others.clear()
    _others.update(child.pid for child in psutil.Process().children(recursive=True))


def workers() -> list[psutil.Process]:
    """Processes that this test started, zombies included."""
    return [
        child for child in psutil.Process().children(recursive=True) if child.pid not in _others
    ]


def sleepers() -> list[psutil.Process]:
    """Processes that a reward function of this module started, orphans included."""
    found = []
    for process in psutil.process_iter(["cmdline", "environ"]):
        named = process.info["cmdline"] and process.info["cmdline"][-2:] == ["sleep", "3600"]
        if (
            named
            and (process.info["environ"] or {}).get("PYTEST_CURRENT_TEST")
            == os.environ["PYTEST_CURRENT_TEST"]
        ):
            found.append(process)
    return found


def assert_no_sleepers() -> None:
    """SIGKILL was sent; on a busy host the end of an orphan takes a moment."""
    deadline = time.monotonic() + 60
    while sleepers() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert sleepers() == []


def test_a_pool_whose_functions_forked_closes_at_once(custom, make_prompt):
    """Grandchildren keep the socket open and ignore signals; each limit would be an hour."""
    pool = CollectingPool(custom(timeout_s=3600.0, workers=4))
    for number, response in enumerate(["fork", "session", "stopped", "spin"]):
        pool.submit(str(number), make_prompt("5"), response)
    deadline = time.monotonic() + 600
    while len(sleepers()) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    closed = threading.Thread(target=pool.close)
    closed.start()
    closed.join(600)
    assert not closed.is_alive() and workers() == []
    assert_no_sleepers()


def test_numpy_scalars_are_rewards(custom, make_prompt):
    with CollectingPool(custom()) as pool:
        pool.submit("a", make_prompt("5"), "numpy")
        assert pool.next_finished() == ("a", 1.0, None, None)


def test_a_call_of_a_local_verifier_starts_no_thread(custom, make_prompt, monkeypatch):
    """A thread that could report a wait takes as long as the call."""
    with CollectingPool(custom()) as pool:
        monkeypatch.setattr("pacs_megatron.rewards.pool.report_wait", None)
        pool.submit("a", make_prompt("5"), "numpy")
        assert pool._answers.get(timeout=600) == ("a", 1.0, None, None)


def test_verdicts_equal_direct_calls(make_prompt):
    options = MathReward(name="math", workers=2)
    judge = build_reward(options)
    cases = {
        f"0:train/{n}#{n}": (make_prompt(str(n % 5)), f"so \\boxed{{{n % 3}}} \u2028 é\ud83d")
        for n in range(40)
    }
    with CollectingPool(options) as pool:
        for key, (prompt, response) in cases.items():
            pool.submit(key, prompt, response)
        got = {key: (reward, failure) for key, reward, failure, _ in pool.results()}
        assert pool.num_pending == 0
    assert got == {key: (judge(*case).reward, None) for key, case in cases.items()}
    assert 0 < sum(reward for reward, _ in got.values()) < 40
    assert workers() == []


@pytest.mark.parametrize("answer", ["10^{10^{10}}", "5!!!!!", "9^{9^{9^{9}}}"])
def test_a_tower_of_powers_is_wrong(make_prompt, answer):
    with CollectingPool(MathReward(name="math")) as pool:
        pool.submit("a", make_prompt("5"), f"So \\boxed{{{answer}}}.")
        [verdict] = pool.results()
    assert (verdict.reward, verdict.failure) == (0.0, None)


HANG_IN_MATH = """
import time
import pacs_megatron.rewards.math as module
judge = module.judge
def hang(prompt, response, time_limit_s):
    while "hang" in response:
        time.sleep(3600)
    return judge(prompt, response, time_limit_s)
module.judge = hang
"""


@pytest.mark.parametrize("gold", ["5", "hang"])
def test_a_response_that_hangs_is_wrong_if_the_gold_answer_does_not(
    make_prompt, tmp_path, monkeypatch, gold
):
    (tmp_path / "sitecustomize.py").write_text(HANG_IN_MATH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with CollectingPool(MathReward(name="math", timeout_s=5.0)) as pool:
        pool.submit("a", make_prompt(gold), r"So \boxed{hang}.")
        pool.submit("b", make_prompt("5"), r"So \boxed{5}.")
        verdicts = {verdict.key: verdict for verdict in pool.results()}
    if gold == "5":
        assert (verdicts["a"].reward, verdicts["a"].failure) == (0.0, None)
        assert "no verdict within 5 s" in verdicts["a"].details["answer"]
    else:
        assert "no verdict within 5 s" in verdicts["a"].failure
    assert verdicts["b"].reward == 1.0


def test_unreadable_gold_is_a_failure_not_zero(make_prompt):
    with CollectingPool(ArithmeticReward(name="arithmetic")) as pool:
        pool.submit("a", make_prompt("x"), r"\boxed{x}")
        key, reward, failure, _ = pool.next_finished()
    assert (key, reward) == ("a", None)
    assert "gold answer 'x'" in failure


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("hang", "no verdict within 1 s"),
        pytest.param("spin", "no verdict within 1 s", marks=pytest.mark.full),
        ("exit", "worker died (exit code 3)"),
        pytest.param("segfault", "worker died (signal 11)", marks=pytest.mark.full),
        ("raise", "raised ValueError: no"),
        ("fork", "no verdict within 1 s"),
        pytest.param("session", "no verdict within 1 s", marks=pytest.mark.full),
        pytest.param("stopped", "no verdict within 1 s", marks=pytest.mark.full),
        ("leave", "worker died (exit code 3)"),
        ("daemon", "no verdict within 1 s"),
        pytest.param("orphan", "worker died (exit code 3)", marks=pytest.mark.full),
        ("flood", "no verdict within 1 s"),
        ("close", "worker died (signal 9)"),
        ("mute", "raised Mute: no text"),
        ("huge", "returned an integer"),
        ("nan", "the reward is nan"),
        ("hog", "out of memory"),
        ("dumps", "the worker sent no verdict"),
        ("circle", "Circular reference"),
        pytest.param(
            "bulky",
            "details of 2097161 characters, expected at most 1048576",
            marks=pytest.mark.full,
        ),
        pytest.param("bytes", "not JSON serializable", marks=pytest.mark.full),
        pytest.param("not a number", "NaN is no JSON number", marks=pytest.mark.full),
    ],
)
def test_broken_verifiers_fail_their_sample_only(custom, make_prompt, caplog, response, reason):
    started = time.monotonic()
    limit_s = 1.0 if reason.startswith("no verdict") else 600.0
    with caplog.at_level(logging.WARNING), CollectingPool(custom(timeout_s=limit_s)) as pool:
        pool.submit("3:train/7#1", make_prompt("5"), response)
        pool.submit("3:train/7#2", make_prompt("5"), "fine")
        verdicts = {verdict.key: verdict for verdict in pool.results()}
    assert verdicts["3:train/7#1"].reward is None
    if response == "hog":
        assert "memory" in verdicts["3:train/7#1"].failure.lower()
    else:
        assert reason in verdicts["3:train/7#1"].failure
    assert verdicts["3:train/7#2"] == ("3:train/7#2", 1.0, None, None)
    assert workers() == []
    assert_no_sleepers()
    assert time.monotonic() - started < 600, (
        "a process that the function started held up the verdict or the end"
    )
    (record,) = [found for found in caplog.records if "reward failed" in found.getMessage()]
    for part in ("train/7", "3:train/7#1", repr(response)):
        assert part in record.getMessage()


def test_the_limit_of_memory_counts_what_the_function_forks(custom, make_prompt):
    """Each of the five processes is within the limit."""
    with CollectingPool(custom(timeout_s=3600.0, memory_limit_gib=0.4)) as pool:
        pool.submit("a", make_prompt("5"), "family")
        pool.submit("b", make_prompt("5"), "fine")
        failed, whole = pool.results()
    assert failed.failure == (
        "its processes use more than reward.memory_limit_gib=0.4 together; the worker was killed"
    )
    assert whole == ("b", 1.0, None, None) and workers() == []


def test_a_function_may_return_details(custom, make_prompt):
    with CollectingPool(custom()) as pool:
        pool.submit("a", make_prompt("5"), "details")
        assert pool.next_finished() == ("a", 0.0, None, {"a": [1, None, "\ud800"]})


def test_a_hung_worker_holds_up_no_other(custom, make_prompt):
    with CollectingPool(custom(timeout_s=3600.0, workers=2)) as pool:
        pool.submit("slow", make_prompt("5"), "hang")
        for n in range(20):
            pool.submit(str(n), make_prompt("5"), "fine")
        found = [pool.next_finished() for _ in range(20)]
    assert {verdict.key for verdict in found if verdict is not None} == {str(n) for n in range(20)}


def test_output_of_the_function_does_not_mix_with_verdicts(custom, make_prompt):
    with CollectingPool(custom()) as pool:
        pool.submit("a", make_prompt("5"), "print")
        assert pool.next_finished() == ("a", 1.0, None, None)


def test_a_worker_whose_pool_has_closed_the_socket_ends_quietly(make_prompt):
    """The pool does so after noise in the place of a verdict."""
    ours, theirs = socket.socketpair()
    program = "from pacs_megatron.rewards.worker import main; main()"
    words = [sys.executable, "-c", program, str(os.getpid()), str(theirs.fileno())]
    worker = subprocess.Popen(words, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, text=True)
    theirs.close()
    options = ArithmeticReward(name="arithmetic").model_dump_json()
    setup = {"options": options, "sys_path": sys.path, "memory_limit_bytes": 8 << 30}
    ours.sendall(json.dumps(setup).encode() + b"\n")
    assert b"ready" in ours.recv(4096)
    ours.sendall(encode_inputs([JudgeInput(make_prompt("5"), "5")], with_token_ids=False))
    ours.close()
    assert "Traceback" not in worker.communicate(timeout=120)[1]


def test_a_flood_of_output_is_cut(custom, make_prompt, capfd):
    with CollectingPool(custom(timeout_s=1.0)) as pool:
        pool.submit("a", make_prompt("5"), "flood")
        assert pool.next_finished().reward is None
    output = capfd.readouterr().err
    assert (
        "xxx" in output
        and len(output) < 100_000
        and "the rest of this response's output is left out" in output
    )


def test_prompt_arrives_whole_and_torch_is_not_imported(custom, make_prompt):
    with CollectingPool(custom()) as pool:
        pool.submit("ids", make_prompt("5"), "ids")
        pool.submit("torch", make_prompt("5"), "torch")
        assert {verdict.key: verdict.reward for verdict in pool.results()} == {
            "ids": 1.0,
            "torch": 0.0,
        }


def test_bad_options_end_in_one_error_and_no_process(tmp_path):
    with pytest.raises(ConfigError, match="no file"):
        CollectingPool(CustomReward(name="custom", function=f"{tmp_path}/absent.py:f"))
    with pytest.raises(ConfigError, match="absent_module"):
        CollectingPool(CustomReward(name="custom", function="absent_module:f"))
    assert workers() == []


def test_a_killed_worker_loses_no_sample(custom, make_prompt, tmp_path):
    with CollectingPool(custom()) as pool:
        (worker,) = workers()
        worker.send_signal(signal.SIGKILL)
        while worker.status() != psutil.STATUS_ZOMBIE:  # the pool reaps it
            time.sleep(0.01)
        pool.submit("idle", make_prompt("5"), "fine")
        pool.submit("judging", make_prompt("5"), f"killed once {tmp_path / 'was_killed'}")
        pool.submit("always", make_prompt("5"), "killed")
        pool.submit("next", make_prompt("5"), "fine")
        verdicts = {verdict.key: verdict for verdict in pool.results()}
    assert verdicts["always"].failure == "the worker died (signal 9)"
    assert {key: verdict.reward for key, verdict in verdicts.items() if key != "always"} == {
        "idle": 1.0,
        "judging": 1.0,
        "next": 1.0,
    }


def test_close_leaves_nothing_even_in_the_middle_of_work(custom, make_prompt):
    pool = CollectingPool(custom(workers=2))
    for n in range(4):
        pool.submit(str(n), make_prompt("5"), "spin")
    pool.close()
    pool.close()
    assert workers() == []
    with pytest.raises(RewardError, match="closed"):
        pool.submit("late", make_prompt("5"), "fine")
    for _ in range(4):
        with pytest.raises(RewardError, match="closed"):
            pool.next_finished()


def test_workers_end_with_a_killed_parent(custom, tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import time, numpy as np, psutil
            from pacs_megatron.config.reward_options import CustomReward
            from pacs_megatron.contracts import Prompt
            from pacs_megatron.rewards import RewardPool
            function = {str(custom().function)!r}
            pool = RewardPool(CustomReward(name="custom", function=function, workers=2))
            ids = np.zeros(1, np.int32)
            prompt = Prompt(id="a/0", text="", token_ids=ids, answer="1", problem="")
            pool.submit("a", prompt, "spin", print)
            time.sleep(0.3)
            print(*[child.pid for child in psutil.Process().children()], flush=True)
            time.sleep(600)
            """
        )
    )
    root = Path(__file__).resolve().parents[3]
    parent = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    try:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    deadline = time.monotonic() + 600
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
        assert time.monotonic() < deadline, "workers outlived their parent"
        time.sleep(0.05)


def test_a_worker_ends_silently_when_the_pool_closes_with_an_unread_reply() -> None:
    ours, theirs = socket.socketpair()
    command = "from pacs_megatron.rewards.worker import main; main()"
    words = [sys.executable, "-P", "-c", command, str(os.getpid()), str(theirs.fileno())]
    process = subprocess.Popen(
        words, pass_fds=(theirs.fileno(),), stderr=subprocess.PIPE, text=True
    )
    theirs.close()
    options = ArithmeticReward(name="arithmetic").model_dump_json()
    setup = {"options": options, "sys_path": sys.path, "memory_limit_bytes": 4 << 30}
    ours.sendall(json.dumps(setup).encode() + b"\n")
    ours.recv(1, socket.MSG_PEEK)  # the reply is there
    ours.close()
    assert process.communicate(timeout=600) == (None, "")
    assert process.returncode == 0
