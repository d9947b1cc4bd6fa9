"""Spans of requests at an OpenTelemetry collector, and what a build without OpenTelemetry says."""

import os
import pathlib
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from conftest import Kvasir
from engines import Fleet

TLS = pathlib.Path(__file__).parents[2] / "testdata/tls"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "trace me"}], "max_tokens": 3}


class Collector:
    """Takes what is posted to it."""

    def __init__(self, secure=False):
        collector = self
        self.posts = []
        self.news = threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.posts.append((self.path, self.headers["content-type"], body))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()
                collector.news.set()

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        scheme = "http"
        if secure:
            context, scheme = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), "https"
            context.load_cert_chain(TLS / "server.pem", TLS / "server-key.pem")
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.url = f"{scheme}://localhost:{self.server.server_address[1]}/v1/traces"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


def fields(message):
    """The fields of a protobuf message: number and value, submessages as bytes."""

    def varint(at):
        value = shift = 0
        while True:
            byte = message[at]
            value |= (byte & 127) << shift
            at, shift = at + 1, shift + 7
            if byte < 128:
                return value, at

    at = 0
    while at < len(message):
        key, at = varint(at)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, at = varint(at)
        elif kind == 2:
            length, at = varint(at)
            value, at = message[at : at + length], at + length
        else:
            width = {1: 8, 5: 4}[kind]
            value, at = int.from_bytes(message[at : at + width], "little"), at + width
        yield number, value


def all_of(message, number):
    return [value for found, value in fields(message) if found == number]


def attributes(message, number):
    out = {}
    for pair in all_of(message, number):
        (name,), (any_value,) = all_of(pair, 1), all_of(pair, 2)
        ((kind, value),) = fields(any_value)
        out[name.decode()] = value.decode() if kind == 1 else value
    return out


def spans(posts):
    """The spans of OTLP requests, with the resource that each belongs to."""
    for _, _, body in posts:
        for resource_spans in all_of(body, 1):
            (resource,) = all_of(resource_spans, 1)
            for scope_spans in all_of(resource_spans, 2):
                for span in all_of(scope_spans, 2):
                    first = lambda number: (all_of(span, number) or [b""])[0]
                    yield {
                        "trace": first(1).hex(), "id": first(2).hex(), "parent": first(4).hex(), "name": first(5).decode(),
                        "kind": first(6), "start": first(7), "end": first(8), "attributes": attributes(span, 9),
                        "resource": attributes(resource, 1),
                    }  # fmt: skip


@pytest.fixture
def otel(monkeypatch):
    """The binary built with `--features otel`, for as long as the test runs."""
    if "KVASIR_OTEL_BIN" not in os.environ:
        pytest.skip("NO build with --features otel here (KVASIR_OTEL_BIN): nothing is known of the export of spans")
    monkeypatch.setenv("KVASIR_BIN", os.environ["KVASIR_OTEL_BIN"])


def test_spans_reach_a_collector(otel):
    collector = Collector()
    env = {"OTEL_EXPORT_ENABLED": "1", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": collector.url, "OTEL_SERVICE_NAME": "edge"}
    fleet = Fleet("tiny", env=env)
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "authorization": "Bearer sesame-hush"}
    answer = httpx.post(f"{fleet.url}/v1/chat/completions", json=BODY, headers=headers)
    httpx.post(f"{fleet.url}/v1/chat/completions", json=BODY, headers={"traceparent": f"00-{'a' * 32}-{PARENT}-00"})
    httpx.post(f"{fleet.url}/v1/chat/completions", json=BODY)
    sent = [dict(request["headers"])["traceparent"].split("-") for request in fleet.received()]
    fleet.stop()
    assert {post[:2] for post in collector.posts} == {("/v1/traces", "application/x-protobuf")}
    seen = list(spans(collector.posts))
    assert all(span["resource"]["service.name"] == "edge" and span["end"] >= span["start"] > 0 for span in seen)
    assert not [span for span in seen if span["trace"] == "a" * 32], "the caller did not want it recorded"
    assert len(seen) == 4
    ours = {span["name"]: span for span in seen if span["trace"] == TRACE}
    server, engine = ours["chat_completions"], ours["engine"]
    assert (server["parent"], server["kind"], engine["parent"], engine["kind"]) == (PARENT, 2, server["id"], 3)
    assert [TRACE, engine["id"], "01"] in [[trace, span, flags] for _, trace, span, flags in sent]
    got = server["attributes"]
    assert got["kvasir.request.id"] in answer.json()["id"] and got["gen_ai.request.model"] == "tiny"
    assert (got["http.response.status_code"], got["gen_ai.usage.output_tokens"]) == (200, 3)
    assert got["kvasir.cached_tokens.reported"] == 0 and "kvasir.cached_tokens.predicted" in got
    roots = [span for span in seen if span["trace"] != TRACE and span["name"] == "chat_completions"]
    assert [span["parent"] for span in roots] == [""]
    assert b"sesame-hush" not in b"".join(post[2] for post in collector.posts)


def test_a_collector_that_is_away_costs_nobody_a_request(otel):
    env = {"OTEL_EXPORT_ENABLED": "1", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:9/v1/traces"}
    fleet = Fleet("tiny", env=env)
    assert httpx.post(f"{fleet.url}/v1/chat/completions", json=BODY).status_code == 200
    fleet.stop()
    told = Kvasir("frontend", "--otel-export-enabled", "--otel-exporter-otlp-traces-endpoint", "http://c:1/v1")
    assert told.process.wait(20) == 2 and "--otel-exporter-otlp-traces-endpoint: `http://c:1/v1`" in told.log()


def test_a_collector_behind_tls(otel):
    collector = Collector(secure=True)
    env = {"OTEL_EXPORT_ENABLED": "1", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": collector.url, "SSL_CERT_FILE": str(TLS / "ca.pem")}
    fleet = Fleet("tiny", env=env)
    assert httpx.post(f"{fleet.url}/v1/chat/completions", json=BODY).status_code == 200
    fleet.stop()
    assert {span["name"] for span in spans(collector.posts)} == {"chat_completions", "engine"}


def test_a_build_without_opentelemetry_says_so_and_passes_the_context_on():
    fleet = Fleet("tiny", env={"OTEL_EXPORT_ENABLED": "1"})
    context = f"00-{TRACE}-{PARENT}-01"
    httpx.post(f"{fleet.url}/v1/chat/completions", json=BODY, headers={"traceparent": context, "tracestate": "a=b"})
    got = dict(fleet.received()[0]["headers"])
    fleet.stop()
    assert (got["traceparent"], got["tracestate"]) == (context, "a=b")
    assert "this build has no OpenTelemetry; build with --features otel" in fleet.frontend.log()
