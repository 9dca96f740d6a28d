"""A hub on loopback that serves folders as repositories: as much of its interface as a download asks for."""

import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlparse

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def serve(repositories: dict[str, Path], gated: tuple[str, ...] = ()):
    """Serve {"models/owner/name" or "datasets/owner/name": folder}; gives the address and the requests as they come."""
    requests: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self):
            self.answer(body=False)

        def do_GET(self):
            self.answer(body=True)

        def answer(self, body: bool) -> None:
            path = unquote(urlparse(self.path).path).strip("/")
            requests.append(f"{self.command} {path}")
            if path.startswith("api/"):
                kind, owner, name, what, *rest = path.removeprefix("api/").split("/")
                folder = repositories.get(f"{kind}/{owner}/{name}")
                if folder is None:
                    return self.fail(404, "RepoNotFound")
                if rest and rest[0] not in ("main", COMMIT):
                    return self.fail(404, "RevisionNotFound")
                files = sorted(p for p in folder.rglob("*") if p.is_file())
                if what == "revision":
                    names = [{"rfilename": str(p.relative_to(folder))} for p in files]
                    return self.send({"id": f"{owner}/{name}", "sha": COMMIT, "siblings": names, "private": False}, body)
                return self.send([self.entry(p, folder) for p in files], body)
            parts = path.split("/")
            kind = "datasets" if parts[0] == "datasets" else "models"
            owner, name, _, revision, *rest = parts[1:] if kind == "datasets" else parts
            key = f"{kind}/{owner}/{name}"
            if key in gated:
                return self.fail(403, "GatedRepo", "Access to this repository is restricted: accept its licence.")
            file = repositories.get(key, Path("/nowhere")) / "/".join(rest)
            if not file.is_file():
                return self.fail(404, "EntryNotFound")
            data = file.read_bytes()
            self.send_response(200)
            self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if body:
                self.wfile.write(data)

        def entry(self, path: Path, folder: Path) -> dict:
            data = path.read_bytes()
            return {"type": "file", "path": str(path.relative_to(folder)), "size": len(data), "oid": hashlib.sha1(data).hexdigest()}

        def send(self, value, body: bool) -> None:
            data = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if body:
                self.wfile.write(data)

        def fail(self, code: int, reason: str, message: str = "") -> None:
            self.send_response(code)
            self.send_header("X-Error-Code", reason)
            self.send_header("X-Error-Message", message)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            """Not on the test's output."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        server.server_close()
