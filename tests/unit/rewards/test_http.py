"""A real HTTP server on loopback that responds well, badly, late, or not at all."""

import http.server
import json
import threading
import time
from dataclasses import replace

import pytest

from pacs_megatron.config.reward_options import HttpReward
from pacs_megatron.errors import ConfigError
from pacs_megatron.rewards import build_reward
from pacs_megatron.rewards.judging import JudgeInput, judge_all
from tests.support.rewards import CollectingPool


class Server:
    """`answers` maps the number of a request to (status, body); the last one repeats."""

    def __init__(self, *answers):
        self.requests = []
        self.keys = []
        self.hold_s = 0.0
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append(body["samples"])
                outer.keys.append(self.headers.get("Authorization"))
                outer.released.wait(outer.hold_s)
                status, answer = answers[min(len(outer.requests), len(answers)) - 1]
                data = answer(body["samples"]) if callable(answer) else answer
                self.send_response(status)
                self.send_header("Location", "/elsewhere")
                self.end_headers()
                try:
                    for start in range(0, len(data), 1 << 16):
                        self.wfile.write(data[start : start + (1 << 16)])
                except OSError:
                    pass  # the client gave up

            def log_message(self, *args):
                pass

        self.released = threading.Event()
        self.httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.httpd.server_port}/judge"
        threading.Thread(
            target=self.httpd.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.released.set()
        self.httpd.shutdown()
        self.httpd.server_close()


def good(samples):
    rewards = [float(sample["response"] == sample["answer"]) for sample in samples]
    return json.dumps({"rewards": rewards, "model": "judge-7b", "version": "3"}).encode()


def options(server, **more):
    return HttpReward(name="http", url=server.url, timeout_s=6.0, **more)


def test_the_pool_batches_and_keeps_order_and_provenance(make_prompt) -> None:
    with Server((200, good)) as server, CollectingPool(options(server, batch_size=4)) as pool:
        for number in range(9):
            pool.submit(str(number), make_prompt(str(number % 2)), "1")
        verdicts = {verdict.key: verdict for verdict in pool.results()}
    assert [verdicts[str(n)].reward for n in range(9)] == [float(n % 2) for n in range(9)]
    assert max(map(len, server.requests)) == 4
    assert sum(map(len, server.requests)) == 9
    details = verdicts["0"].details
    assert details["server"] == server.url
    assert (details["model"], details["version"], details["attempts"]) == ("judge-7b", "3", 1)
    assert 0 < details["latency_s"] < 6


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ((200, b"<html>"), "malformed JSON"),
        ((200, b'{"rewards": [NaN, 1]}'), "NaN"),
        ((200, b'{"rewards": [1]}'), "1 rewards, expected a list of 2"),
        ((200, b'{"rewards": [1, 1' + b"0" * 400 + b"]}"), "401 characters"),
        ((200, b'{"rewards": [1, "1"]}'), "expected a number"),
        ((200, b'{"rewards": [1, 1e999]}'), ""),
        ((200, b'{"reward": [1, 1]}'), "rewards of type NoneType"),
        ((200, b'{"rewards": [1, 1], "model": ["x"]}'), "model is ['x'], expected text"),
        ((200, b'{"rewards": [1, 1], "version": "\\ud800"}'), "surrogate"),
        ((200, b"[" * 10_000), ""),
        ((200, b" " * (5 << 20)), "response longer than 4194304 bytes"),
        ((200, b"\xff\xfe"), ""),
        ((404, b""), "status 404"),
        ((302, b""), "status 302"),
    ],
)
def test_a_bad_response_fails_its_samples_with_one_line(make_prompt, answer, reason) -> None:
    with Server(answer) as server:
        answers = judge_all(build_reward(options(server)), [JudgeInput(make_prompt("1"), "1")] * 2)
        assert len(server.requests) == 1  # a bad answer is not repeated
    assert len(answers) == 2
    for found in answers:
        assert set(found) == {"failure"}
        assert server.url in found["failure"]
        assert reason in found["failure"]
        assert "\n" not in found["failure"]


def test_errors_that_may_pass_are_retried(make_prompt) -> None:
    with Server((503, b" " * (5 << 20)), (429, b""), (200, good)) as server:
        (found,) = judge_all(build_reward(options(server)), [JudgeInput(make_prompt("1"), "1")])
    assert found["reward"] == 1.0
    assert found["details"]["attempts"] == 3
    with Server((500, b"")) as server:
        (found,) = judge_all(
            build_reward(options(server, attempts=2)), [JudgeInput(make_prompt("1"), "1")]
        )
    assert "2 attempts failed" in found["failure"]
    assert "status 500" in found["failure"]
    (found,) = judge_all(
        build_reward(options(server, attempts=1)), [JudgeInput(make_prompt("1"), "1")]
    )  # closed
    assert "1 attempts failed" in found["failure"]


def test_a_stuck_server_is_bounded_and_named(make_prompt, caplog, monkeypatch) -> None:
    monkeypatch.setattr("pacs_megatron.runtime.waiting.NOTICE_S", 0.2)
    with Server((200, good)) as server:
        server.hold_s = 60.0
        given = HttpReward(name="http", url=server.url, timeout_s=1.2, attempts=2)
        with CollectingPool(given) as pool:
            started = time.monotonic()
            pool.submit("a", make_prompt("1"), "1")
            (verdict,) = pool.results()
    assert time.monotonic() - started < 10
    assert (
        verdict.failure
        == f"reward server {server.url}: 2 attempts failed; the last one: no response within 0.6 s"
    )
    assert f"waiting for the reward server {server.url}" in caplog.text


def test_the_key_comes_from_the_environment_and_stays_out_of_messages(
    make_prompt, monkeypatch
) -> None:
    with Server((401, b"")) as server:
        given = options(server, api_key_env="JUDGE_KEY")
        monkeypatch.delenv("JUDGE_KEY", raising=False)
        with pytest.raises(ConfigError, match="api_key_env=JUDGE_KEY is not set"):
            build_reward(given)
        monkeypatch.setenv("JUDGE_KEY", "s3cret\n")
        with pytest.raises(ConfigError, match=r"api_key_env=JUDGE_KEY contains a line end") as bad:
            build_reward(given)
        assert "s3cret" not in str(bad.value)
        monkeypatch.setenv("JUDGE_KEY", "s3cret")
        (found,) = judge_all(build_reward(given), [JudgeInput(make_prompt("1"), "1")])
    assert server.keys == ["Bearer s3cret"]
    assert "s3cret" not in found["failure"]


def test_the_request_has_the_fields_of_the_sample(make_prompt) -> None:
    prompt = replace(make_prompt("1"), extra={"kind": "sum", "level": 3})
    with Server((200, good)) as server:
        [found] = judge_all(build_reward(options(server)), [JudgeInput(prompt, "1")])
    assert found["reward"] == 1.0
    names = ("prompt_id", "problem", "prompt", "answer", "response")
    texts = ("train/7", "What is it?", "<user>q</user>", "1", "1")
    assert server.requests == [[dict(zip(names, texts, strict=True)) | {"extra": prompt.extra}]]
