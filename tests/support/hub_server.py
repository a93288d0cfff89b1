"""A stand-in for the parts of a hub's HTTP API that a download uses, and a client process that talks to it."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


class HubServer:
    """Serves `repositories`: id -> {revision: {path: bytes}}, on 127.0.0.1.

    Attributes:
      gated: Ids whose files are refused as gated.
      token: The one token that private ids accept.
      private: Ids that need the token.
      cut: Path -> how many bytes of its next GET to send before the connection is dropped.
      shortened: Paths that are served with fewer bytes than the listing announces.
      requests: "METHOD path" of every request so far.
      ranges: Path -> the Range header of its last GET that had one.
    """

    def __init__(self, repositories):
        self.repositories = repositories
        self.gated, self.private, self.shortened = set(), set(), set()
        self.token = None
        self.cut = {}
        self.requests = []
        self.ranges = {}
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                hub.requests.append(f"{self.command} {self.path}")
                hub.answer(self)

            do_HEAD = do_GET

            def end_headers(self):
                self.send_header("Connection", "close")  # else a kept connection would outlive `close`
                super().end_headers()

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()

    @staticmethod
    def commit(revision):
        return hashlib.sha1(revision.encode()).hexdigest()

    def answer(self, request):
        parts = unquote(urlsplit(request.path).path).strip("/").split("/")
        api = parts[:1] == ["api"]
        parts = parts[2:] if api else parts[parts[0] == "datasets" :]
        name, action, revision, path = "/".join(parts[:2]), parts[2] if len(parts) > 2 else "", "main", ""
        if len(parts) > 3:
            revision, path = parts[3], "/".join(parts[4:])
        revisions = self.repositories.get(name)
        if revisions is None:
            return self.error(request, 404, "RepoNotFound")
        if name in self.private and request.headers.get("Authorization") != f"Bearer {self.token}":
            return self.error(request, 401, "RepoNotFound")
        known = {**revisions, **{self.commit(key): files for key, files in revisions.items()}}
        if revision not in known:
            return self.error(request, 404, "RevisionNotFound")
        files = known[revision]
        sha = revision if len(revision) == 40 else self.commit(revision)
        if api and action == "tree":
            entries = [
                {"type": "file", "path": key, "size": len(data), "oid": self.commit(key)} for key, data in files.items()
            ]
            return self.json(request, entries)
        if api:
            siblings = [{"rfilename": key} for key in files]
            return self.json(request, {"id": name, "modelId": name, "sha": sha, "siblings": siblings})
        if name in self.gated:
            return self.error(request, 403, "GatedRepo")
        if path not in files:
            return self.error(request, 404, "EntryNotFound")
        return self.file(request, path, files[path], sha)

    def file(self, request, path, data, sha):
        etag = hashlib.sha256(data).hexdigest()
        if request.command == "GET" and path in self.shortened:
            data = data[:-5]
        start = 0
        if given := request.headers.get("Range"):
            start = int(given.removeprefix("bytes=").split("-")[0])
            self.ranges[request.path] = given
        request.send_response(206 if given else 200)
        request.send_header("Content-Length", str(len(data) - start))
        if given:
            request.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        request.send_header("ETag", f'"{etag}"')
        request.send_header("X-Repo-Commit", sha)
        request.end_headers()
        if request.command == "GET":
            kept = self.cut.pop(path, None)
            request.wfile.write(data[start:] if kept is None else data[start : start + kept])

    def json(self, request, value):
        body = json.dumps(value).encode()
        request.send_response(200)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(body)

    def error(self, request, status, code):
        request.send_response(status)
        request.send_header("X-Error-Code", code)
        request.send_header("Content-Length", "0")
        request.end_headers()


_CLIENT = """
import json, sys
from jaxis.errors import CheckpointError
from jaxis.loading.hub import resolve_model
for line in sys.stdin:
    try:
        answer = {"folder": str(resolve_model(**json.loads(line)))}
    except CheckpointError as error:
        answer = {"error": str(error)}
    print(json.dumps(answer), flush=True)
"""


def client_environment(cache, **environment):
    """Environment of a process that talks to a HubServer: no proxies, no settings of the user's, a cache of its own."""
    inherited = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    inherited = {key: value for key, value in inherited.items() if not key.startswith("HF_")}
    return {**inherited, "PYTHONPATH": os.pathsep.join(sys.path), "HF_HOME": str(cache), **environment}


class HubClient:
    """A process in which `resolve_model` is called: huggingface_hub reads its environment once, when imported."""

    def __init__(self, cache, **environment):
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CLIENT],
            env=client_environment(cache, **environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def resolve(self, model, **arguments):
        """Returns {"folder": ...} or {"error": ...}."""
        self.process.stdin.write(json.dumps({"model": model, **arguments}) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self):
        self.process.stdin.close()
        self.process.wait(timeout=30)
        self.process.stdout.close()
