"""A loopback server with the parts of the hub's HTTP API that its real client uses to read
repositories, and to upload to them.
"""

from __future__ import annotations

import base64
import fnmatch
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_API = re.compile(
    r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+)(?:/(.*))?)?"
)
_FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_UPLOAD = re.compile(
    r"(?:/api/models)?/([^/]+/[^/]+?)(?:/|\.git/)(preupload/main|commit/main|info/lfs/objects/batch)"
)
LFS_SIZE = 4096
"""A file of at least this size is listed as a large file with its SHA-256."""


class Hub:
    """Folders by repository id; `gated`, `broken` and `cut` change the responses."""

    def __init__(self, models: Mapping[str, Path], datasets: Mapping[str, Path]) -> None:
        self.folders = {"models": dict(models), "datasets": dict(datasets)}
        self.gated: set[str] = set()
        self.broken = False
        """every response is a 500"""
        self.announced: dict[str, int] = {}
        """false sizes in listings, by file name"""
        self.cut: dict[str, int] = {}
        """bytes after which the connection breaks, every time, by file name"""
        self.cut_once: dict[str, int] = {}
        """the same, for the first download only"""
        self.ranges: list[tuple[str, str]] = []
        """(file name, Range header) of requests for a part"""
        self.downloads: list[str] = []
        self.uploads: dict[str, dict[str, bytes]] = {}
        """repository -> file name -> content"""
        self.created: list[dict[str, Any]] = []
        """requests for a new repository"""
        self.tokens: set[str | None] = set()
        """`Authorization` of the uploads"""
        self.objects: dict[str, bytes] = {}
        """SHA-256 -> content of large files"""
        self.url = ""

    def receive(self, path: str, body: bytes) -> dict[str, Any] | None:
        """The response to a request of an upload; None for another one."""
        if path == "/api/repos/create":
            self.created.append(json.loads(body))
            name = f"{self.created[-1]['organization']}/{self.created[-1]['name']}"
            self.uploads.setdefault(name, {})
            return {"url": f"{self.url}/{name}", "name": name, "id": name}
        if path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}

        match = _UPLOAD.fullmatch(path)
        if match is None or match[1] not in self.uploads:
            return None
        if match[2].startswith("preupload"):
            return {"files": [self._mode(file) for file in json.loads(body)["files"]]}
        if match[2].endswith("batch"):
            return {"objects": [self._place(each) for each in json.loads(body)["objects"]]}
        for line in body.splitlines():
            self._commit(match[1], **json.loads(line))
        address = f"{self.url}/{match[1]}/commit/{COMMIT}"
        return {"success": True, "commitOid": COMMIT, "commitUrl": address}

    def _mode(self, file: dict[str, Any]) -> dict[str, Any]:
        mode = "lfs" if file["size"] >= LFS_SIZE else "regular"
        return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False}

    def _place(self, entry: dict[str, Any]) -> dict[str, Any]:
        upload = {"href": f"{self.url}/objects/{entry['oid']}"}
        return {**entry, "actions": {"upload": upload}}

    def _commit(self, repo: str, *, key: str, value: dict[str, Any]) -> None:
        files = self.uploads[repo]
        if key == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        elif key == "lfsFile":
            files[value["path"]] = self.objects[value["oid"]]

    def files(self, kind: str, repo: str) -> dict[str, Path]:
        folder = self.folders[kind][repo]
        return {
            str(path.relative_to(folder)): path
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }

    def entry(self, name: str, path: Path) -> dict[str, Any]:
        size = self.announced.get(name, path.stat().st_size)
        entry: dict[str, Any] = {"type": "file", "path": name, "size": size, "oid": sha1(path)}
        if path.stat().st_size >= LFS_SIZE:
            entry["lfs"] = {"oid": sha256(path), "size": size, "pointerSize": 128}
        return entry


def sha1(path: Path) -> str:
    return hashlib.sha1(path.read_bytes(), usedforsecurity=False).hexdigest()


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextmanager
def serve(models: Mapping[str, Path], datasets: Mapping[str, Path] | None = None) -> Iterator[Hub]:
    """The server on a free port of 127.0.0.1 inside the block; `hub.url` is its HF_ENDPOINT."""
    hub = Hub(models, datasets or {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:  # noqa: C901  (its methods' branches count here)
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer()

        def do_HEAD(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            body = self._body()
            path = unquote(urlsplit(self.path).path)
            reply = None if hub.broken else hub.receive(path, body)
            if reply is not None:
                hub.tokens.add(self.headers.get("Authorization"))
                self._json(reply)
                return
            match = _API.fullmatch(unquote(urlsplit(self.path).path))
            if match is None or match[3] != "paths-info":
                self._error(404, "RepoNotFound")
                return
            text = body.decode()
            wanted = (
                json.loads(text)["paths"]
                if text.startswith("{")
                else parse_qs(text).get("paths", [])
            )
            files = hub.files(match[1], match[2])
            self._json([hub.entry(name, files[name]) for name in wanted if name in files])

        def do_PUT(self) -> None:
            """The content of a large file."""
            hub.objects[self.path.rpartition("/")[2]] = self._body()
            self._json({})

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def _answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            api = _API.fullmatch(path)
            file = _FILE.fullmatch(path)
            if hub.broken:
                self._error(500, "Oops")
            elif api is not None and api[2] in hub.folders[api[1]]:
                self._api(api)
            elif file is not None and file[2] in hub.folders["datasets" if file[1] else "models"]:
                self._file("datasets" if file[1] else "models", file[2], file[4])
            else:
                self._error(404, "RepoNotFound")

        def _api(self, match: re.Match[str]) -> None:
            kind = match[1]
            repo = match[2]
            what = match[3]
            below = match[5]
            files = hub.files(kind, repo)
            if what == "tree":
                inside = {
                    n: p
                    for n, p in files.items()
                    if not below or fnmatch.fnmatch(n, f"{below}/*") or n == below
                }
                recursive = "recursive=true" in self.path.lower()
                top = [
                    hub.entry(n, p)
                    for n, p in inside.items()
                    if recursive or "/" not in n.removeprefix(f"{below}/")
                ]
                self._json(top)
                return
            siblings = [{"rfilename": name} for name in files]
            gated = "manual" if repo in hub.gated else False
            info = {
                "id": repo,
                "sha": COMMIT,
                "private": False,
                "gated": gated,
                "siblings": siblings,
                "tags": [],
            }
            self._json(
                {
                    **info,
                    "_id": "1",
                    "downloads": 0,
                    "likes": 0,
                    "lastModified": "2026-01-01T00:00:00.000Z",
                }
            )

        def _file(self, kind: str, repo: str, name: str) -> None:
            path = hub.files(kind, repo).get(name)
            if path is None:
                self._error(404, "EntryNotFound")
                return
            if repo in hub.gated:
                self._error(403, "GatedRepo")
                return
            data = path.read_bytes()
            start = 0
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            if asked is not None:
                start = int(asked[1])
                hub.ranges.append((name, asked[0]))
            part = data[start : int(asked[2]) + 1 if asked is not None and asked[2] else None]
            self.send_response(206 if asked is not None else 200)
            self.send_header("Content-Length", str(len(part)))
            if asked is not None:
                self.send_header(
                    "Content-Range", f"bytes {start}-{start + len(part) - 1}/{len(data)}"
                )
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("X-Repo-Commit", COMMIT)
            etag = sha256(path) if len(data) >= LFS_SIZE else sha1(path)
            self.send_header("ETag", f'"{etag}"')
            if len(data) >= LFS_SIZE:
                self.send_header("X-Linked-Etag", f'"{etag}"')
                self.send_header("X-Linked-Size", str(hub.announced.get(name, len(data))))
            self.end_headers()
            if self.command == "GET":
                hub.downloads.append(name)
                limit = hub.cut_once.pop(name, hub.cut.get(name))
                self.wfile.write(part if limit is None else part[: max(0, limit - start)])
                if limit is not None:
                    self.wfile.flush()
                    self.close_connection = True

        def _json(self, value: Any) -> None:
            data = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def _error(self, status: int, code: str) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_args: object) -> None:
            pass

    return Handler
