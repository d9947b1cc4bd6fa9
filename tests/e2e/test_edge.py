"""The edge of the frontend with real clients: TLS, HTTP/2, operators' door, workers that come and go, the end under load."""

import json
import os
import pathlib
import signal
import subprocess
import threading
import time

import httpx
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from conftest import Kvasir
from test_cli import kvasir as run

MODEL = "tiny"
TLS = pathlib.Path(__file__).parents[2] / "testdata" / "tls"
LOOPBACK = ["--http-host", "127.0.0.1", "--http-port", "0"]
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}


@pytest.fixture(scope="module")
def engines():
    """Three mock servers; each address."""
    mocker = Kvasir("mocker", *LOOPBACK, "--workers", "3", "--model-name", MODEL, "--speedup", "20")
    yield [mocker.wait_for(r"on (http://127\.0\.0\.1:\d+)").group(1) for _ in range(3)]
    assert mocker.stop() == 0, mocker.log()


def frontend(*options, scheme="http", env=None, workers=()):
    flags = [word for url in workers for word in ("--worker", url)]
    kvasir = Kvasir("frontend", *LOOPBACK, *flags, *options, env=env)
    kvasir.port = kvasir.wait_for(r"listening.*address\W+127\.0\.0\.1:(\d+)").group(1)
    kvasir.url = f"{scheme}://localhost:{kvasir.port}"
    return kvasir


def soon(what, holds, seconds=20):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := holds():
            return found
        threading.Event().wait(0.05)
    raise AssertionError(f"{what}: not within {seconds} s")


def workers(http, key="workers"):
    return http.get("/workers").json()[key]


def curl(*args):
    done = subprocess.run(["curl", "-sS", "--max-time", "20", *args], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_curl_and_httpx_speak_http2_without_tls(engines):
    kvasir = frontend(workers=engines[:1])
    with httpx.Client(base_url=kvasir.url, http1=False, http2=True, timeout=20) as http:
        soon("a worker", lambda: workers(http))
        answer = http.post("/v1/chat/completions", json=CHAT)
        assert (answer.status_code, answer.http_version) == (200, "HTTP/2")
        assert answer.json()["usage"]["completion_tokens"] == 8
        with http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as stream:
            assert list(stream.iter_lines())[-2] == "data: [DONE]"
    body = ["-H", "content-type: application/json", "-d", json.dumps({**CHAT, "stream": True})]
    told = curl("--http2-prior-knowledge", "-w", "%{http_version} %{http_code}", *body, f"{kvasir.url}/v1/chat/completions")
    assert told.endswith("2 200") and "data: [DONE]" in told
    assert kvasir.stop() == 0, kvasir.log()


def test_clients_come_in_by_https(engines):
    files = ["--tls-cert-path", str(TLS / "server.pem"), "--tls-key-path", str(TLS / "server-key.pem")]
    kvasir = frontend(*files, "--admin-port", "0", scheme="https", workers=engines[:2])
    admin = kvasir.wait_for(r"operators.*address\W+127\.0\.0\.1:(\d+)").group(1)
    for flag, version in (("--http1.1", "1.1"), ("--http2", "2")):
        told = curl("--cacert", str(TLS / "ca.pem"), flag, "-w", "%{http_version} %{http_code}", f"{kvasir.url}/health")
        assert told.endswith(f"{version} 200"), told
    import ssl

    context = ssl.create_default_context(cafile=str(TLS / "ca.pem"))
    with httpx.Client(base_url=f"https://localhost:{admin}", verify=context, http2=True, timeout=20) as http:
        soon("workers", lambda: len(workers(http)) == 2)
    with httpx.Client(base_url=kvasir.url, verify=context, http2=True, timeout=20) as http:
        answer = http.post("/v1/chat/completions", json=CHAT)
        assert (answer.status_code, answer.http_version) == (200, "HTTP/2")
        assert http.get("/workers").status_code == 404
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{kvasir.url}/health")  # nobody vouches for our test authority
    # A frontend is a worker too: one behind the other, over TLS.
    second = frontend("--worker-tls-ca-path", str(TLS / "ca.pem"), workers=[kvasir.url])
    with httpx.Client(base_url=second.url, timeout=20) as http:
        soon("the first as a worker", lambda: workers(http))
        assert http.post("/v1/chat/completions", json=CHAT).status_code == 200
    assert second.stop() == 0, second.log()
    assert kvasir.stop() == 0, kvasir.log()


def test_files_that_cannot_be_used_are_named_at_the_start(tmp_path):
    cert, key, other = (str(TLS / name) for name in ("server.pem", "server-key.pem", "second-key.pem"))
    bad_workers = tmp_path / "workers"
    bad_workers.write_text("http://127.0.0.1:1\nrubbish\n")
    for options, words in (
        (["--tls-cert-path", cert], ["--tls-key-path"]),
        (["--tls-cert-path", cert, "--tls-key-path", other], ["--tls-key-path", other, "not the key of"]),
        (["--tls-cert-path", key, "--tls-key-path", key], ["--tls-cert-path", key, "no certificate"]),
        (["--tls-cert-path", cert, "--tls-key-path", "/none"], ["--tls-key-path /none", "No such file"]),
        (["--worker-tls-ca-path", key], ["--worker-tls-ca-path", "no certificate"]),
        (["--workers-file", str(bad_workers)], ["--workers-file", "line 2"]),
        (["--workers-file", "/none"], ["--workers-file /none", "No such file"]),
        (["--admin-token-file", "/none"], ["--admin-token-file /none"]),
    ):
        told = run("frontend", *LOOPBACK, *options)
        assert told.returncode == 2 and not told.stdout, (options, told)
        assert all(word in told.stderr for word in words), (options, told.stderr)


def test_both_doors_are_described_and_the_description_is_valid(engines):
    kvasir = frontend("--admin-port", "0", env={"KVASIR_ADMIN_TOKEN": "root-token"}, workers=engines[:1])
    admin = kvasir.wait_for(r"operators.*address\W+127\.0\.0\.1:(\d+)").group(1)
    inner = f"http://127.0.0.1:{admin}"
    for url, there, elsewhere in ((kvasir.url, "/v1/chat/completions", "/workers"), (inner, "/workers", "/v1/chat/completions")):
        document = httpx.get(f"{url}/openapi.json").json()
        OpenAPIV31SpecValidator(document).validate()
        assert there in document["paths"] and elsewhere not in document["paths"]
        for path in ("/health", "/live", "/metrics"):
            assert path in document["paths"] and httpx.get(url + path).status_code == 200
    assert httpx.get(f"{inner}/workers").status_code == 401
    told = {"authorization": "Bearer root-token"}
    assert httpx.get(f"{inner}/workers", headers=told).status_code == 200
    assert kvasir.stop() == 0
    assert "root-token" not in kvasir.log()


def test_no_secret_is_shown(engines, tmp_path):
    keys, own = tmp_path / "keys", tmp_path / "own"
    keys.write_text("client-secret\n")
    own.write_text("worker-secret\n")
    env = {"KVASIR_ADMIN_TOKEN": "root-secret", "KVASIR_WORKER_API_KEY": "fleet-secret"}
    dump = tmp_path / "dump"
    options = ["--http-api-key-file", str(keys), "--dump-config-to", str(dump), "--log-level", "trace"]
    kvasir = frontend(*options, env=env, workers=[f"{engines[0]},api-key-file={own}", engines[1]])
    root = {"authorization": "Bearer root-secret"}
    with httpx.Client(base_url=kvasir.url, timeout=20) as http:
        soon("workers", lambda: len(http.get("/workers", headers=root).json()["workers"]) == 2)
        body = {"url": engines[2], "api_key": "third-secret"}
        assert http.post("/workers", json=body, headers=root).status_code == 201
        for _ in range(6):
            client = {"authorization": "Bearer client-secret"}
            assert http.post("/v1/chat/completions", json=CHAT, headers=client).status_code == 200
        page = http.get("/workers", headers=root).text + http.get("/metrics").text
    seen = [request for url in engines for request in httpx.get(f"{url}/mock/received").json()["requests"]]
    shown = {value for request in seen for name, value in request["headers"] if name == "authorization"}
    assert shown <= {"Bearer worker-secret", "Bearer fleet-secret", "Bearer third-secret"} and shown
    assert kvasir.stop() == 0
    for secret in ("root", "fleet", "client", "worker", "third"):
        for place in (page, kvasir.log(), dump.read_text()):
            assert f"{secret}-secret" not in place


def descriptors(kvasir):
    return len(os.listdir(f"/proc/{kvasir.process.pid}/fd"))


class Load:
    """Clients that ask without pause until told to stop; every answer must be whole."""

    def __init__(self, url, clients=4, **more):
        self.done, self.asked, self.wrong = threading.Event(), 0, []
        body = {**CHAT, "stream": True, **more}
        self.threads = [threading.Thread(target=self._ask, args=(url, body)) for _ in range(clients)]
        for thread in self.threads:
            thread.start()

    def _ask(self, url, body):
        with httpx.Client(base_url=url, timeout=30) as http:
            while not self.done.is_set():
                try:
                    with http.stream("POST", "/v1/chat/completions", json=body) as answer:
                        lines = [line for line in answer.iter_lines() if line]
                    if answer.status_code != 200 or lines[-1] != "data: [DONE]" or any("error" in line for line in lines):
                        self.wrong.append((answer.status_code, lines[-2:]))
                except httpx.HTTPError as error:
                    self.wrong.append(repr(error))
                self.asked += 1

    def stop(self):
        self.done.set()
        for thread in self.threads:
            thread.join(30)
        return self.wrong


def test_workers_come_and_go_by_file_and_by_api_under_load(engines, tmp_path):
    file = tmp_path / "workers.txt"
    file.write_text(f"# the fleet\n{engines[0]}\n")
    kvasir = frontend("--workers-file", str(file))
    http = httpx.Client(base_url=kvasir.url, timeout=20)
    soon("the first", lambda: len(workers(http)) == 1)
    warm = Load(kvasir.url)
    soon("connections", lambda: warm.asked > 40)
    assert warm.stop() == []
    before = descriptors(kvasir)
    load = Load(kvasir.url)
    for _ in range(2):
        file.write_text(f"{engines[0]}\n{engines[1]},kv-blocks=100\n")
        soon("two", lambda: len(workers(http)) == 2)
        added = http.post("/workers", json={"url": engines[2], "kv_blocks": 200})
        assert added.status_code == 201 and added.json()["origins"] == ["api"]
        soon("three", lambda: len(workers(http)) == 3)
        asked = load.asked
        soon("load", lambda: load.asked > asked + 8)
        file.write_text("not a worker\n")
        kvasir.wait_for(r"line 1: .not a worker. is not a URL.*stay as they were")
        assert len(workers(http)) == 3
        assert http.delete(f"/workers/{added.json()['worker_id']}").status_code == 202
        file.write_text(f"{engines[0]}\n")
        soon("one", lambda: len(workers(http)) == 1 and not workers(http, "absent"))
    assert load.stop() == [] and load.asked > 30
    http.close()
    soon("descriptors", lambda: descriptors(kvasir) <= before)
    with httpx.Client(base_url=kvasir.url, timeout=20) as http:
        free = lambda: all(rank["active_requests"] == 0 for row in workers(http) for rank in row["ranks"])  # noqa: E731
        soon("nothing under way", free)
    assert kvasir.stop() == 0, kvasir.log()


def test_sigterm_under_load_loses_nothing(engines):
    kvasir = frontend(workers=engines)
    with httpx.Client(base_url=kvasir.url, timeout=20) as http:
        soon("workers", lambda: len(workers(http)) == 3)
    answers, begun = [], threading.Barrier(9)

    def ask():
        body = {**CHAT, "stream": True, "max_tokens": 400, "ignore_eos": True}
        with httpx.stream("POST", f"{kvasir.url}/v1/chat/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            first = next(lines)
            begun.wait(20)
            answers.append([first, *(line for line in lines if line)])

    clients = [threading.Thread(target=ask) for _ in range(8)]
    for client in clients:
        client.start()
    begun.wait(20)
    kvasir.process.send_signal(signal.SIGTERM)
    soon("it drains", lambda: refused(kvasir.url))
    for client in clients:
        client.join(60)
    assert len(answers) == 8
    for lines in answers:
        assert lines[-1] == "data: [DONE]" and not any('"error"' in line for line in lines)
    assert kvasir.process.wait(20) == 0, kvasir.log()


def test_after_sigterm_requests_are_served_until_balancers_have_noticed(engines):
    kvasir = frontend("--graceful-shutdown-grace-period-secs", "6", workers=engines[:1])
    with httpx.Client(base_url=kvasir.url, timeout=20) as kept:
        soon("a worker", lambda: workers(kept))
        assert kept.get("/health").status_code == 200
        kvasir.process.send_signal(signal.SIGTERM)
        kvasir.wait_for("leaving; a second signal drains at once")
        health = httpx.get(f"{kvasir.url}/health")
        assert (health.status_code, health.json()["stage"]) == (503, "draining")
        answer = kept.post("/v1/chat/completions", json=CHAT)
        assert (answer.status_code, answer.headers["connection"]) == (200, "close")
        assert httpx.get(f"{kvasir.url}/live").status_code == 200
    soon("it drains", lambda: refused(kvasir.url))
    assert kvasir.process.wait(20) == 0, kvasir.log()


def test_sigint_does_not_wait(engines):
    kvasir = frontend("--graceful-shutdown-grace-period-secs", "600", workers=engines[:1])
    kvasir.process.send_signal(signal.SIGINT)
    assert kvasir.process.wait(20) == 0, kvasir.log()


def test_each_refusal_has_a_line_in_the_log(engines, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    kvasir = frontend("--http-api-key-file", str(keys), "--log-format", "json", workers=engines[:1])
    with httpx.Client(base_url=kvasir.url, timeout=20) as http:
        wrong = http.post("/v1/chat/completions", json=CHAT, headers={"authorization": "Bearer no"})
        assert wrong.status_code == 401 and "not valid" in wrong.json()["message"]
        lost = http.get("/" + "x" * 9000, headers={"x-request-id": "mine"})
        assert lost.status_code == 404 and lost.headers["x-request-id"] == "mine"
        assert http.get("/live", headers={f"x-{n}": "1" for n in range(120)}).status_code == 431
    soon("all lines", lambda: kvasir.log().count("request refused") == 3)
    first, second, third = [json.loads(line) for line in kvasir.lines if "request refused" in line]
    assert wrong.headers["x-request-id"] == first["request"]
    assert first["status"] == 401 and first["endpoint"] == "chat_completions"
    assert second["client_request"] == "mine" and len(second["error"]) < 300
    assert third["status"] == 431
    page = httpx.get(f"{kvasir.url}/metrics").text
    assert 'kvasir_limit_reached_total{limit="header_bytes"} 1' in page
    assert kvasir.stop() == 0, kvasir.log()


def refused(url):
    try:
        return httpx.post(f"{url}/v1/chat/completions", json=CHAT, timeout=20).status_code == 503
    except httpx.TransportError:
        return True


def test_a_second_signal_ends_at_once(engines):
    kvasir = frontend(workers=engines[:1])
    with httpx.Client(base_url=kvasir.url, timeout=60) as http:
        soon("a worker", lambda: workers(http))
        body = {**CHAT, "stream": True, "max_tokens": 4000, "ignore_eos": True}
        with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            kvasir.process.send_signal(signal.SIGTERM)
            kvasir.wait_for("a second signal ends at once")
            kvasir.process.send_signal(signal.SIGTERM)
            assert kvasir.process.wait(10) == 1, kvasir.log()
