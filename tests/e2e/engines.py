"""Fleets for tests: a frontend before mock engines, and an engine that says what a test tells it."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

from conftest import Kvasir, until


class Fleet:
    """A frontend before two mock servers; `url` is where it listens, `engines` where they do."""

    def __init__(self, model, mocker=(), frontend=(), env=None, token=None):
        loopback = ["--http-host", "127.0.0.1", "--http-port", "0"]
        self.mocker = Kvasir("mocker", *loopback, "--workers", "2", "--model-name", model, "--speedup", "50", *mocker)
        self.engines = [self.mocker.wait_for(r"on (http://127\.0\.0\.1:\d+)").group(1) for _ in range(2)]
        self.frontend = frontend_before(self.engines, *frontend, env=env, token=token)
        self.url = self.frontend.url

    def received(self, path=None):
        """Every request for an answer that an engine got, in no order: method, path, headers, body. The frontend's
        own questions for tokens are none, unless they are what is looked for."""
        found = []
        for engine in self.engines:
            for request in httpx.get(f"{engine}/mock/received", timeout=30).json()["requests"]:
                request["body"] = bytes.fromhex(request.pop("body_hex"))
                if request["path"] != "/tokenize" or path == "/tokenize":
                    found.append(request)
        return found

    def forget(self):
        for engine in self.engines:
            httpx.delete(f"{engine}/mock/received").raise_for_status()

    def stop(self):
        assert self.frontend.stop() == 0, self.frontend.log()
        assert self.mocker.stop() == 0, self.mocker.log()


def frontend_before(engines, *options, env=None, token=None, open_files=None):
    """A frontend whose workers have all joined."""
    workers = [word for url in engines for word in ("--worker", url)]
    frontend = Kvasir("frontend", "--http-host", "127.0.0.1", "--http-port", "0", *workers, *options, env=env, open_files=open_files)
    frontend.url = "http://" + frontend.wait_for(r"address\W+(127\.0\.0\.1:\d+)").group(1)
    shown = {"authorization": f"Bearer {token}"} if token else {}
    joined = lambda: len(httpx.get(f"{frontend.url}/workers", headers=shown, timeout=30).json()["workers"])  # noqa: E731
    # It listens before it has read its tokenizer.
    until(lambda: joined() == len(engines), seconds=60, told=frontend.log)
    return frontend


class ScriptedEngine:
    """An engine that answers each POST with the next thing it was told to: status, type, bytes, piece size. Beside the list
    of its models it has the `pages` that it is given."""

    def __init__(self, model, pages=None):
        engine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_GET(self):
                models = json.dumps({"object": "list", "data": [{"id": model, "object": "model", "max_model_len": 4096}]})
                page = {"/v1/models": models, **engine.pages}.get(self.path.partition("?")[0])
                self.answer(404 if page is None else 200, "application/json", (page or "{}").encode(), 0)

            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                engine.requests.append((self.path, dict(self.headers), body))
                self.answer(*engine.next)

            def answer(self, status, kind, body, piece):
                self.send_response(status)
                self.send_header("content-type", kind)
                if not piece:
                    self.send_header("content-length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)
                    return
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                for at in range(0, len(body), piece):
                    part = body[at : at + piece]
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
                    self.wfile.flush()
                self.wfile.write(b"0\r\n\r\n")

        self.requests, self.pages = [], pages or {}
        self.next = (200, "application/json", b"{}", 0)
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = "http://127.0.0.1:%d" % self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def say(self, body, status=200, kind="application/json", piece=0):
        self.next = (status, kind, body if isinstance(body, bytes) else json.dumps(body).encode(), piece)

    def stop(self):
        self.server.shutdown()
        self.server.server_close()
