"""A local stand-in for the hub: metadata, files, and network failures.

Serves `/api/models/{repo}/revision/{rev}` and `/{repo}/resolve/{commit}/{file}` with ranges. Data
sets have the same under `/api/datasets/…` and `/datasets/…`. Files come through a redirect from a
second host (another port), like the hub's. A `Fault` decides how each request is answered.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Request:
    """One request for the bytes of a file."""

    file: str
    start: int
    stop: int
    number: int  # 0, 1, … over all requests for bytes
    token: str | None


@dataclass
class Answer:
    """The answer to a request: an error status, or bytes that are cut, changed or late."""

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    cut_after: int | None = None
    flip_at: int | None = None
    change: Callable[[bytes], bytes] | None = None
    stall: threading.Event | None = None
    ignore_range: bool = False


Fault = Callable[[Request], Answer | None]
Says = tuple[int, dict[str, str], bytes]  # status, headers and body of the metadata answer


def dumped(document: object) -> bytes:
    return json.dumps(document).encode()


class Hub:
    """One repository, served from a folder."""

    def __init__(
        self, repo: str, folder: Path, *, redirect: bool = True, dataset: bool = False
    ) -> None:
        self.repo = repo
        self.api = f"/api/{'datasets' if dataset else 'models'}/{repo}"
        self.home = f"/datasets/{repo}" if dataset else f"/{repo}"
        self.folder = folder
        self.fault: Fault = lambda _: None
        self.gate: int | None = None  # replaces the status of every metadata answer
        self.says: Callable[[dict[str, object]], Says] = lambda info: (200, {}, dumped(info))
        self.commit = COMMIT
        self.requests: list[Request] = []
        self.sent: list[tuple[str, int, int]] = []  # file, start, number of bytes really sent
        self.tokens: dict[str, set[str | None]] = {"hub": set(), "files": set()}
        self.strange: list[str] = []  # paths outside the repository
        self.redirect = redirect
        self.lfs = True
        self.lock = threading.Lock()
        self.beside: list[Hub] = []  # other repositories of the same hub
        self.card: dict[str, object] = {}
        self.endpoint = ""
        self.files_host = ""

    def info(self) -> dict[str, object]:
        siblings = []
        for path in sorted(p for p in self.folder.rglob("*") if p.is_file()):
            data = path.read_bytes()
            entry: dict[str, object] = {
                "rfilename": str(path.relative_to(self.folder)),
                "size": len(data),
                "blobId": hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest(),
            }
            if path.suffix in (".safetensors", ".parquet", ".gguf") and self.lfs:
                sha = hashlib.sha256(data).hexdigest()
                entry["lfs"] = {"size": len(data), "sha256": sha, "pointerSize": 1}
            siblings.append(entry)
        about: dict[str, object] = {"id": self.repo, "modelId": self.repo, "sha": self.commit}
        return {**about, "siblings": siblings, "cardData": self.card}

    def bytes_sent(self, file: str) -> int:
        return sum(count for name, _, count in self.sent if name == file)


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    serves_files: bool
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise every answer waits 40 ms for an acknowledgement

    def log_message(self, *_: object) -> None:
        """Print nothing: tests read `requests`."""

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        kind = "files" if self.serves_files else "hub"
        token = self.headers.get("authorization")
        first = type(self).hub
        self.hub = next((h for h in first.beside if f"/{h.repo}/" in f"{path}/"), first)
        with self.hub.lock:
            if self.hub.repo in path:
                self.hub.tokens[kind].add(token)
            else:
                self.hub.strange.append(path)
        api = self.hub.api
        if not self.serves_files and path.startswith("/api/"):
            if self.hub.gate is not None:
                codes = {401: "RepoNotFound", 403: "GatedRepo", 404: "RepoNotFound"}
                code = codes.get(self.hub.gate, "")
                self._send(self.hub.gate, b"{}", {"X-Error-Code": code})
            elif path in (api, f"{api}/revision/main", f"{api}/revision/{self.hub.commit}"):
                status, headers, body = self.hub.says(self.hub.info())
                self._send(status, body, headers)
            else:
                code = "RevisionNotFound" if path.startswith(f"{api}/revision/") else "RepoNotFound"
                self._send(404, b"{}", {"X-Error-Code": code})
            return
        prefix = f"{self.hub.home}/resolve/{self.hub.commit}/"
        if not path.startswith(prefix):
            self._send(404, b"")
        elif self.hub.redirect and not self.serves_files:
            self._send(302, b"", {"Location": f"{type(self).hub.files_host}{self.path}"})
        else:
            self._file(path.removeprefix(prefix), token)

    def _file(self, name: str, token: str | None) -> None:
        data = (self.hub.folder / name).read_bytes()
        start, stop = 0, len(data)
        asked = self.headers.get("range")
        if asked is not None:
            first, last = asked.removeprefix("bytes=").split("-")
            start, stop = int(first), min(int(last) + 1, len(data))
        with self.hub.lock:
            request = Request(name, start, stop, len(self.hub.requests), token)
            self.hub.requests.append(request)
        answer = self.hub.fault(request) or Answer()
        if answer.status is not None:
            self._send(answer.status, b"", answer.headers)
            return
        if answer.ignore_range:
            start, stop = 0, len(data)
        body = bytearray(data[start:stop])
        if answer.flip_at is not None:
            body[answer.flip_at] ^= 1
        if answer.change is not None:
            body = bytearray(answer.change(bytes(body)))
        self.send_response(206 if asked is not None and not answer.ignore_range else 200)
        self.send_header("Content-Length", str(len(body)))
        if asked is not None and not answer.ignore_range:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
        self.end_headers()
        sent = len(body) if answer.cut_after is None else answer.cut_after
        try:
            for at in range(0, sent, 1 << 16):
                self.wfile.write(body[at : min(at + (1 << 16), sent)])
            self.wfile.flush()
        except OSError:
            return
        with self.hub.lock:
            self.hub.sent.append((name, start, sent))
        if answer.stall is not None:
            answer.stall.wait(60)
        if sent < len(body):
            self.close_connection = True

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """Ignore broken connections: some tests kill their clients."""


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    """Run the hub and its file host on loopback until the block ends."""
    servers = []
    for serves_files in (False, True):
        handler = type("Handler", (_Handler,), {"hub": hub, "serves_files": serves_files})
        server = _Server(("127.0.0.1", 0), handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}).start()
        servers.append(server)
    hub.endpoint = f"http://127.0.0.1:{servers[0].server_port}"
    hub.files_host = f"http://127.0.0.1:{servers[1].server_port}"
    try:
        yield hub
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
