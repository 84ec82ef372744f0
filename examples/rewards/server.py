"""A reward server for `reward.name: http`, with Python's standard library: right, and not too long.

    python examples/rewards/server.py [--port 8123]
    pacs-megatron train examples/rewards/http.yaml

Replace `judge` by your own: a model, a rubric, a service.
"""

import argparse
import json
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MAX_BYTES = 64 << 20
KEY = os.environ.get("JUDGE_KEY")
"""Expected key; without one every client of the host is served"""


def judge(sample: dict[str, Any]) -> float:
    """`sample` has prompt_id, problem, prompt, answer, response, and the map extra."""
    is_right = f"\\boxed{{{sample['answer']}}}" in sample["response"]
    if not is_right:
        return 0.0
    return 1.0 if len(sample["response"]) <= 200 else 0.5


class Handler(BaseHTTPRequestHandler):
    """POST {"samples": [...]} -> {"rewards": [...], "model": ..., "version": ...}."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        if KEY and self.headers.get("Authorization") != f"Bearer {KEY}":
            self._answer(401, {"error": "wrong key"})
        elif length > MAX_BYTES:
            self._answer(413, {"error": "too long"})
        else:
            samples = json.loads(self.rfile.read(length))["samples"]
            rewards = [judge(sample) for sample in samples]
            self._answer(200, {"rewards": rewards, "model": "example", "version": "1"})

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port", type=int, default=8123)
    server = ThreadingHTTPServer(("127.0.0.1", parser.parse_args().port), Handler)
    print(f"http://127.0.0.1:{server.server_port}/", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
