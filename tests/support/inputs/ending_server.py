"""ending_server.py FILE: a reward server that writes its port to FILE and ends at request 4."""

import http.server
import json
import os
import sys


class Judge(http.server.BaseHTTPRequestHandler):
    """Rewards 0 and 1 in turn."""

    count = 0

    def do_POST(self) -> None:
        Judge.count += 1
        if Judge.count > 3:
            os._exit(0)
        samples = json.loads(self.rfile.read(int(self.headers["content-length"])))["samples"]
        body = json.dumps({"rewards": [n % 2 for n, _ in enumerate(samples)]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        """Prints nothing."""


if __name__ == "__main__":
    server = http.server.HTTPServer(("127.0.0.1", 0), Judge)
    with open(sys.argv[1] + ".new", "w") as file:
        file.write(str(server.server_port))
    os.rename(sys.argv[1] + ".new", sys.argv[1])
    server.serve_forever()
