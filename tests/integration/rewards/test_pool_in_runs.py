"""A real run whose rewards come from a server and from several components; its rollout file shows
both.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny_models import make_tiny_qwen3
from tests.support.tiny_run import write_tiny_run

pytestmark = pytest.mark.full
ROOT = Path(__file__).parents[3]
SERVER = """
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Handler(BaseHTTPRequestHandler):
    calls = 0
    def do_POST(self):
        Handler.calls += 1
        samples = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["samples"]
        rewards = [float(sum(sample["response"].encode()) % 2) for sample in samples]
        self.send_response(503 if Handler.calls == 2 else 200)
        self.end_headers()
        reply = {"rewards": rewards, "model": "parity", "version": "7"}
        self.wfile.write(json.dumps(reply).encode())
    def log_message(self, *args): pass
server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


def test_rewards_of_a_server_and_of_a_format(tmp_path: Path) -> None:
    config = write_tiny_run(tmp_path, make_tiny_qwen3(tmp_path / "model"))
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            url = f"http://127.0.0.1:{server.stdout.readline().strip()}/"
            parts = [{"weight": 0.75, "reward": {"name": "http", "url": url, "batch_size": 8}}]
            parts += [{"weight": 0.25, "reward": {"name": "format", "pattern": ".{3,}"}}]
            reward = {"name": "weighted", "label_threshold": 0.7, "components": parts}
            command = [
                sys.executable,
                "-m",
                "pacs_megatron",
                "train",
                str(config),
                f"reward={json.dumps(reward)}",
            ]
            command += ["parallel.tp=1", "objective={name: rloo}"]
            done = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=850, check=False
            )
        finally:
            server.kill()
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (tmp_path / "runs" / "tiny" / "rollouts" / "step_000001.jsonl").read_text().splitlines()
    attempts = set()
    for row in map(json.loads, lines):
        served, form = row["reward_details"]["components"]
        expected = float(sum(row["response"].encode()) % 2)
        assert (served["name"], served["weight"], served["reward"]) == ("http", 0.75, expected)
        assert (served["details"]["server"], served["details"]["model"]) == (url, "parity")
        assert served["details"]["version"] == "7"
        assert row["reward"] == 0.75 * expected + 0.25 * form["reward"]
        assert row["label"] == int(row["reward"] >= 0.7 and row["stop"] != "length")
        attempts.add(served["details"]["attempts"])
    assert len(lines) == 16 and attempts == {1, 2}
