"""Replaces `python -m sglang.launch_server` in tests of start and end: responds to /ready and has
children.

Like the real one it leaves children that keep running. `--dummy-exit N` exits at once with status
N, `--dummy-never-ready` sends no response, `--dummy-shared TAG` maps shared memory of its own and
of a trainer. `--dummy-first-request FILE` writes the body of its first request to a file,
`--dummy-no-answer` closes its connection, `--dummy-dies` exits with status 5.
"""

import mmap
import multiprocessing
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if "--dummy-no-answer" in sys.argv or "--dummy-dies" in sys.argv:
            print("dummy server: a kernel does not compile", flush=True)
            if "--dummy-dies" in sys.argv:
                os._exit(5)
            return
        if "--dummy-first-request" in sys.argv:
            with open(sys.argv[sys.argv.index("--dummy-first-request") + 1], "wb") as file:
                file.write(body)
        answer = b'{"meta_info": {"finish_reason": {"type": "length"}}}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args: object) -> None:
        pass


def stubborn() -> None:
    """A child that ignores SIGTERM, like a scheduler in a long kernel."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(0.5)


if __name__ == "__main__":
    args = sys.argv[1:]
    if "--dummy-exit" in args:
        print("dummy server: --dummy-exit")
        sys.exit(int(args[args.index("--dummy-exit") + 1]))
    for _ in range(2):
        multiprocessing.get_context("fork").Process(target=stubborn).start()
    if "--dummy-shared" in args:
        tag = args[args.index("--dummy-shared") + 1]
        mapped = []
        for family in ("sglang_loads_", "torch_"):
            with open(f"/dev/shm/{family}{tag}", "w+b") as file:
                file.truncate(4096)
                mapped.append(mmap.mmap(file.fileno(), 4096))
    if "--dummy-never-ready" in args:
        time.sleep(3600)
    HTTPServer(("127.0.0.1", int(args[args.index("--port") + 1])), Handler).serve_forever()
