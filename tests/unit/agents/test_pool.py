"""Agents in worker processes, with a policy from a script. Tools that fail are in
test_tool_worker.py.
"""

import gc
import os
import threading
import time

import numpy as np
import psutil
import pytest

from pacs_megatron.contracts import Stop
from pacs_megatron.errors import AgentError, ConfigError

LOOP = """
answer = await session.generate(max_tokens=20)
session.append(await session.call("calculate", expression=answer.text))
last = await session.generate()
"""
CALCULATOR = {"calculate": {"kind": "calculator"}}


@pytest.fixture(autouse=True)
def no_process_left():
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    left = {child.pid for child in psutil.Process().children(recursive=True)} - before
    assert not left


def text_of(tokenizer, sample):
    return tokenizer.decode(sample.response_ids.tolist(), skip_special_tokens=False)


def test_turns_and_a_tool(agent_file, running, tokenizer):
    with running(agent_file(LOOP), ["6 * 7", "42!"], tools=CALCULATOR, tool_workers=1) as run:
        [sample] = run.solve()
    between = "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"
    assert text_of(tokenizer, sample) == f"6 * 7<|im_end|>{between}42!<|im_end|>"
    first, second = run.requests
    assert second.token_ids.tolist() == sample.token_ids[: -len("42!") - 1].tolist()
    assert (first.params.max_response_tokens, second.seed != first.seed) == (20, True)

    [(start, end)] = sample.environment
    added = tokenizer(between, add_special_tokens=False)["input_ids"]
    assert sample.response_ids[start:end].tolist() == added
    assert [(span.start, span.end) for span in sample.spans] == [(0, start), (end, end + 4)]
    assert (sample.sampler_logprobs[start:end] == 0).all()
    np.testing.assert_array_equal(sample.sampler_logprobs[end:], np.linspace(-1, -2, 4, dtype="f4"))
    assert (sample.stop, sample.failure, len(sample.calls)) == (Stop.EOS, None, 1)


def test_one_turn_is_the_request_of_a_run_without_agent(agent_file, running):
    with running(agent_file("await session.generate()")) as run:
        [sample] = run.solve(max_tokens=30)
    [request] = run.requests
    assert (request.id, request.seed, request.params.max_response_tokens) == (sample.id, 0, 30)
    assert (sample.environment, sample.response_len) == ((), 3)


def test_more_trajectories_than_workers(agent_file, running):
    body = "assert problem.problem == 'problem ' + problem.id[2:]\nawait session.generate()"
    with running(agent_file(body)) as run:
        samples = run.solve(7)
    assert [sample.failure for sample in samples] == [None] * 7


def test_an_agent_knows_no_reference_answer(agent_file, running):
    body = "assert 'secret' not in repr(problem)\nawait session.generate()"
    with running(agent_file(body)) as run:
        [sample] = run.solve()
    assert sample.failure is None


@pytest.mark.parametrize(
    ("value", "expected"), [("0.25", 0.25), ("True", 1.0), ("np.float32(0.5)", 0.5), ("None", None)]
)
def test_an_agent_returns_its_own_reward(agent_file, running, value, expected):
    body = f"import numpy as np\nawait session.generate()\nreturn {value}"
    with running(agent_file(body)) as run:
        [sample] = run.solve()
    assert (sample.own_reward, sample.failure) == (expected, None)


def test_an_agent_that_reads_the_reference_answer(agent_file, running):
    body = "await session.generate()\nreturn problem.answer == 'secret' and problem.extra == {}"
    with running(agent_file(body), reads_answers=True) as run:
        [sample] = run.solve()
    assert sample.own_reward == 1.0


def test_a_blocking_agent_delays_only_its_own_trajectory(agent_file, running):
    body = """
await session.generate()
if problem.problem == "problem 0":
    time.sleep(3600)
"""
    with running(agent_file(body), timeout_s=3.0) as run:
        started = time.monotonic()
        blocked, *others = run.solve(5)
        assert time.monotonic() - started < 60
    assert blocked.failure.startswith("agent: it took longer than rollout.agent.timeout_s=3")
    assert [sample.failure for sample in others] == [None] * 4
    assert blocked.response_len == 3  # the turn that it has


FAILURES = {
    "raises": ("raise ValueError('no\\nluck')", "agent: it raised ValueError: no luck"),
    "exits": ("sys.exit(3)", "agent: it raised SystemExit: 3"),
    "interrupt": ("raise KeyboardInterrupt", "agent: it raised KeyboardInterrupt"),
    "returns": ("return 'x'", "agent: its own reward: returned str, expected a number"),
    "returns nan": ("return float('nan')", "agent: its own reward: the reward is nan"),
    "returns too much": ("return 10 ** 400", "agent: its own reward: returned an integer that"),
    "forged reward": (
        "session._exchange({'op': 'done', 'reward': 'x'})",
        "agent: it sent no operation (RewardError: returned str, expected a number)",
    ),
    "crash": ("os.kill(os.getpid(), signal.SIGSEGV)", "agent: its worker died (signal 11)"),
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", "agent: its worker died (signal 9)"),
    "exit code": ("os._exit(7)", "agent: its worker died (exit code 7)"),
    "cpu": ("while True: pass", "agent: it took longer than rollout.agent.timeout_s=1"),
    "sleeps": ("await asyncio.sleep(3600)", "agent: it took longer than"),
    "closes files": ("os.closerange(0, 1024); time.sleep(3600)", "agent: its worker died"),
    "no turn": ("pass", "agent: it ended without a turn of the policy"),
    "no text": ("session.append(5)", "agent: it raised AgentError: append(int"),
    "role": (
        "await session.generate()\nsession.append('x', role='system')\nawait session.generate()",
        "agent: it raised AgentError: append: role 'system', expected one of tool",
    ),
    "surrogate": (
        "await session.generate()\nsession.append('\\ud800')\nawait session.generate()",
        "agent: it raised AgentError: append: the text contains a lone surrogate",
    ),
    "message first": (
        "session.append('x')\nawait session.generate()",
        "agent: it raised AgentError: a message before the first turn",
    ),
    "turn after turn": (
        "await session.generate()\nawait session.generate()",
        "agent: it raised AgentError: the policy has ended its turn",
    ),
    "max_tokens": (
        "await session.generate(max_tokens=0)",
        "agent: it raised AgentError: max_tokens=0",
    ),
    "stop": ("await session.generate(stop='x')", "agent: it raised AgentError: stop='x'"),
    "stops": (
        "await session.generate(stop=list(map(str, range(40))))",
        "agent: it raised AgentError: 40 stop strings, at most 32",
    ),
    "no tool": ("await session.call('search')", "agent: it raised AgentError: call('search')"),
    "no json": (
        "await session.call('calculate', expression={1})",
        "agent: it raised AgentError: call('calculate'): the arguments are no JSON",
    ),
    "recursion": ("async def f(): await f()\nawait f()", "agent: it raised RecursionError"),
    "exception without text": (
        "class E(Exception):\n    def __str__(self): raise ValueError\nraise E",
        "agent: it raised E: no text",
    ),
    "forged operation": (
        "session._exchange({'op': 'label', 'label': 1})",
        "agent: it sent no operation",
    ),
    "flood of an operation": (
        "await session.generate()\nsession.append('x' * 10**8)\nawait session.generate()",
        "agent: it sent more than 8 MiB at once",
    ),
    "memory": ("x = bytearray(2 * 2**30)", "agent: it raised MemoryError"),
    "forks": (
        "if os.fork() == 0: time.sleep(3600)\nos._exit(1)",
        "agent: its worker died (exit code 1)",
    ),
}
SLOW = ("interrupt", "killed", "exit code", "cpu", "recursion", "exception without text", "memory")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name in SLOW)) for name in FAILURES]
)
def test_an_agent_that_fails_has_no_verdict(agent_file, running, name):
    body, failure = FAILURES[name]
    limits = {"timeout_s": 1.0 if name in ("cpu", "sleeps") else 60.0, "workers": 1}
    tools = CALCULATOR if name == "no json" else {}
    with running(agent_file(body), tools=tools, **limits) as run:
        [sample] = run.solve()
    assert sample.failure is not None and sample.failure.startswith(failure), sample.failure


def test_after_a_failure_the_next_trajectory_has_a_worker(agent_file, running):
    body = """
await session.generate()
if problem.problem in ("problem 0", "problem 1"):
    os._exit(1)
"""
    with running(agent_file(body)) as run:
        samples = run.solve(4)
    assert [sample.failure is None for sample in samples] == [False, False, True, True]


def test_output_of_an_agent_is_no_operation(agent_file, running):
    with running(agent_file('print(\'{"op": "done"}\')\nawait session.generate()')) as run:
        [sample] = run.solve()
    assert sample.failure is None


def test_the_limit_of_the_response_truncates(agent_file, running):
    body = """
for number in range(100):
    await session.generate()
    session.append("go on")
"""
    with running(agent_file(body)) as run:
        [sample] = run.solve(max_tokens=100)
    assert (sample.stop, sample.failure) == (Stop.LENGTH, None)
    assert len(sample.response_ids) <= 100
    assert sample.environment[-1][1] < len(sample.response_ids), "it ends with the policy's token"


def test_a_message_that_does_not_fit_is_not_encoded(agent_file, running):
    body = "await session.generate()\nsession.append('x' * 7_000_000)\nawait session.generate()"
    with running(agent_file(body)) as run:
        started = time.monotonic()
        [sample] = run.solve()
        assert time.monotonic() - started < 30
    assert (sample.stop, sample.failure, sample.environment) == (Stop.LENGTH, None, ())


def test_too_many_turns_truncate(agent_file, running):
    body = "while True:\n    await session.generate()\n    session.append('x')"
    with running(agent_file(body), max_turns=3) as run:
        [sample] = run.solve()
    assert (sample.stop, sample.failure, len(run.requests)) == (Stop.LENGTH, None, 3)


def test_a_message_after_the_last_turn_is_not_trained(agent_file, running):
    with running(agent_file("await session.generate()\nsession.append('x')")) as run:
        [sample] = run.solve()
    assert (sample.environment, sample.response_len, sample.stop) == ((), 3, Stop.EOS)


def test_an_agent_that_ignores_the_end_of_its_trajectory(agent_file, running):
    body = """
while True:
    try:
        await session.generate()
        session.append("x" * 50)
    except BaseException:
        pass
"""
    with running(agent_file(body), timeout_s=1.0, workers=1) as run:
        first, second = run.solve(2, max_tokens=60)
    assert (first.stop, second.stop) == (Stop.LENGTH, Stop.LENGTH)
    assert (first.failure, second.failure) == (None, None)


def test_cancelled_trajectories_have_no_sample(agent_file, running):
    with running(agent_file("await session.generate()"), [], workers=1) as run:
        waiting = threading.Thread(target=lambda: run.solve(2), daemon=True)
        waiting.start()
        while not run.requests:
            time.sleep(0.01)
        run.pool.cancel([request.id for request in run.requests])
        while len(run.requests) < 2:
            time.sleep(0.01)
    assert run.finished.empty()


def test_a_trajectory_cancelled_in_a_call_starts_again(agent_file, running, tmp_path):
    """The result of the abandoned call reaches no trajectory."""
    waits = tmp_path / "waits"
    waits.touch()
    tools = tmp_path / "my_tools.py"
    tools.write_text(
        f"import os, time\ndef wait(number):\n    while os.path.exists({str(waits)!r}):\n"
        "        time.sleep(0.01)\n    return number\n"
    )
    body = """
await session.generate()
number = "second" if os.path.exists(SEEN) else "first"
open(SEEN, "w").close()
session.append(await session.call("wait", number=number))
await session.generate()
"""
    start = f"SEEN = {str(tmp_path / 'seen')!r}"
    tool = {"wait": {"kind": "custom", "function": f"{tools}:wait"}}
    with running(agent_file(body, start), tools=tool, workers=1, tool_workers=1) as run:
        run.start(1)
        while not (tmp_path / "seen").exists():
            time.sleep(0.01)
        time.sleep(0.5)
        run.pool.cancel([run.requests[0].id])
        waits.unlink()
        [sample] = run.solve(1)
    assert sample.failure is None
    assert [call.arguments for call in sample.calls] == ['{"number": "second"}']
    assert run.finished.empty()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("def solve(problem, session): pass", "is no async function"),
        ("async def solve(problem): pass", "cannot be called as solve"),
        ("solve = 5", "is a int, expected a function"),
        ("", "has no 'solve'"),
        ("import nothing_of_that_name", "raised ModuleNotFoundError"),
    ],
)
def test_a_function_that_is_no_agent(tmp_path, running, text, problem):
    file = tmp_path / "my_agent.py"
    file.write_text(text)
    with pytest.raises(ConfigError, match=problem), running(f"{file}:solve"):
        pass


@pytest.mark.parametrize("function", ["solve", "nowhere.py:solve", ":", "nothing_here:solve"])
def test_a_function_that_does_not_exist(running, function):
    with pytest.raises(ConfigError, match=r"rollout\.agent\.function="), running(function):
        pass


def test_a_worker_that_dies_at_its_start(agent_file, running):
    with (
        pytest.raises(AgentError, match="did not start"),
        running(agent_file("pass", start="os._exit(3)")),
    ):
        pass


def test_the_pool_leaves_this_process_as_it_was(agent_file, running):
    gc.collect()  # files of earlier tests
    before = len(os.listdir("/proc/self/fd"))
    with running(agent_file("await session.generate()")) as run:
        run.solve()
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("kind", ["text", "end"])
def test_a_tool_that_fails(agent_file, running, tokenizer, kind):
    changes = {"tools": CALCULATOR, "on_tool_failure": kind, "max_calls": 1, "tool_workers": 1}
    body = """
answer = await session.generate()
session.append(await session.call("calculate", expression=answer.text))
session.append(await session.call("calculate", expression="1"))
await session.generate()
"""
    with running(agent_file(body), ["1/0", "ok"], **changes) as run:
        [sample] = run.solve()
    if kind == "text":
        text = text_of(tokenizer, sample)
        assert "[calculate failed: division by zero]" in text
        assert "[calculate failed: more than 1 calls]" in text and sample.failure is None
    else:
        assert sample.failure == "agent: tool calculate: division by zero"
    assert sample.calls[0].failure == "division by zero"
    assert sample.calls[0].arguments == '{"expression": "1/0"}'
