"""Engines that misbehave: dead ones behind servers that live, answers that come twice or unasked, requests that kill."""

import json
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from conftest import until
from engines import frontend_before

MODELS = json.dumps({"object": "list", "data": [{"id": "m", "object": "model", "max_model_len": 4096}]}).encode()
DEAD = json.dumps({"error": {"message": "EngineCore encountered an issue.", "type": "InternalServerError", "code": 500}}).encode()
TIMED_OUT = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


def sized(body, status="200 OK", request_id=None):
    named = b"x-request-id: %s\r\n" % request_id if request_id else b""
    head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\n%scontent-length: %d\r\n\r\n"
    return head % (status.encode(), named, len(body)) + body


def completion(text, id="x"):
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "text": text, "finish_reason": "stop"}
    usage = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
    return json.dumps({"id": id, "object": "chat.completion", "choices": [choice], "usage": usage}).encode()


def event(text, finish=None):
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return b"data: %s\n\n" % json.dumps({"id": "x", "object": "chat.completion.chunk", "choices": [choice]}).encode()


def chunk(data):
    return b"%x\r\n%s\r\n" % (len(data), data)


STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"
# One for all: making one takes longer than a request.
CLIENT = httpx.Client(timeout=30, limits=httpx.Limits(max_connections=64))


def shut(connection):
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass


class RawEngine:
    """An engine that speaks HTTP by hand: `answer(engine, send, body)` writes what it likes for each request, and closes the
    connection by returning False; `body["id"]` is the request's id."""

    def __init__(self, answer):
        self.answer, self.asked, self.probed = answer, [], 0
        self.open, self.lock = set(), threading.Lock()
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.url = "http://127.0.0.1:%d" % self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self.lock:
                self.open.add(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection):
        reader = connection.makefile("rb")
        try:
            while (line := reader.readline()) not in (b"", b"\r\n"):
                method, path, _ = line.decode().split(" ", 2)
                fields = {}
                while (field := reader.readline()) not in (b"", b"\r\n"):
                    name, _, value = field.partition(b":")
                    fields[name.lower()] = value.strip()
                body = reader.read(int(fields.get(b"content-length", 0)))
                if method == "GET":
                    connection.sendall(sized(MODELS) if path == "/v1/models" else sized(b"{}", "404 Not Found"))
                elif path == "/tokenize":
                    connection.sendall(sized(b"{}", "404 Not Found"))
                elif self.answer(self, connection.sendall, {**json.loads(body), "id": fields.get(b"x-request-id")}) is False:
                    return
        except (OSError, ValueError):
            pass
        finally:
            with self.lock:
                self.open.discard(connection)
            shut(connection)
            reader.close()
            connection.close()

    def send_unasked(self, data):
        """Writes to every open connection, whatever is under way there."""
        with self.lock:
            for connection in self.open:
                try:
                    connection.sendall(data)
                except OSError:
                    pass

    def die(self):
        # Closing alone does not wake who waits in accept or reads.
        shut(self.listener)
        self.listener.close()
        with self.lock:
            for connection in self.open:
                shut(connection)

    stop = die


def is_probe(body):
    return body.get("max_tokens") == 1 and (body.get("prompt") == "1" or body.get("messages", [{}])[0].get("content") == "1")


def said(body):
    return body["messages"][-1]["content"] if "messages" in body else body["prompt"]


def ask(url, text, stream=False):
    body = {"model": "m", "messages": [{"role": "user", "content": text}], "stream": stream}
    return CLIENT.post(f"{url}/v1/chat/completions", json=body)


def echo(engine, send, body):
    engine.asked.append(said(body))
    send(sized(completion(said(body))))


def booked(url):
    rows = CLIENT.get(f"{url}/workers").json()["workers"]
    return sum(rank["active_requests"] for row in rows for rank in row["ranks"])


def is_down(url, engine):
    rows = CLIENT.get(f"{url}/workers").json()["workers"]
    return next(row["down"] for row in rows if row["url"] == engine.url)


@pytest.fixture
def started():
    """What a test starts, stopped in the end."""
    parts = []
    yield parts
    for part in reversed(parts):
        part.stop()


def fleet(started, engines, *options):
    started.extend(engines)
    frontend = frontend_before([engine.url for engine in engines], *options)
    started.append(frontend)
    return frontend


def test_an_engine_that_dies_behind_its_server_is_no_black_hole(started):
    """It answers 500 in 2 ms and looks idle: no client sees it, few requests go there, and a token brings it back."""
    dead = threading.Event()

    def dying(engine, send, body):
        if is_probe(body):
            engine.probed += 1
            return send(sized(DEAD, "500 Internal Server Error") if dead.is_set() else sized(completion("1")))
        engine.asked.append(said(body))
        time.sleep(0.002 if dead.is_set() else 0.03)
        send(sized(DEAD, "500 Internal Server Error") if dead.is_set() else sized(completion(said(body))))

    def alive(engine, send, body):
        time.sleep(0.03)
        echo(engine, send, body)

    engines = [RawEngine(dying), RawEngine(alive), RawEngine(alive)]
    frontend = fleet(started, engines, "--router-mode", "least-loaded")
    with ThreadPoolExecutor(16) as pool:
        assert all(answer.status_code == 200 for answer in pool.map(lambda n: ask(frontend.url, f"warm {n}"), range(30)))
        assert engines[0].asked
        dead.set()
        before = len(engines[0].asked)
        answers = list(pool.map(lambda n: ask(frontend.url, f"dead {n}"), range(200)))
    assert [answer.status_code for answer in answers] == [200] * 200
    assert [answer.json()["choices"][0]["message"]["content"] for answer in answers] == [f"dead {n}" for n in range(200)]
    # What was under way when it died, and what was sent in the 2 ms of its first error.
    assert len(engines[0].asked) - before <= 16
    assert is_down(frontend.url, engines[0])
    until(lambda: engines[0].probed >= 2)
    assert is_down(frontend.url, engines[0]), "its server is well, its engine is not"
    dead.clear()
    until(lambda: not is_down(frontend.url, engines[0]))
    before = len(engines[0].asked)
    until(lambda: ask(frontend.url, "again").status_code == 200 and len(engines[0].asked) > before)


def test_an_error_that_two_engines_give_is_the_answer(started):
    def fails(engine, send, body):
        if is_probe(body):
            return send(sized(completion("1")))
        engine.asked.append(said(body))
        send(sized(DEAD, "500 Internal Server Error"))

    engines = [RawEngine(fails) for _ in range(4)]
    frontend = fleet(started, engines)
    answer = ask(frontend.url, "odd")
    assert (answer.status_code, answer.content) == (500, DEAD)
    assert sum(len(engine.asked) for engine in engines) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_kills_engines_takes_two_of_eight(started, stream):
    def fragile(engine, send, body):
        if said(body) == "kill":
            engine.asked.append("kill")
            engine.die()
            return False
        echo(engine, send, body)

    engines = [RawEngine(fragile) for _ in range(8)]
    frontend = fleet(started, engines, "--retry-limit", "7", "--migration-limit", "7")
    answer = ask(frontend.url, "kill", stream)
    assert answer.status_code == 502, answer.text
    assert "Two workers failed" in answer.text
    assert sum(len(engine.asked) for engine in engines) == 2
    line = frontend.until_logged("it is not sent to a third")
    assert answer.headers["x-request-id"] in line
    assert [ask(frontend.url, f"fine {n}").status_code for n in range(20)] == [200] * 20


def twice_at_once(send, data):
    send(data + data)


def twice_apart(send, data):
    send(data)
    send(data)


def twice_later(send, data):
    send(data)
    threading.Timer(0.003, lambda: quietly(send, data)).start()


def quietly(send, data):
    try:
        send(data)
    except OSError:
        pass


def reuses_connections(url):
    """Whether connections to every worker serve more than one request."""
    return all(row["reuses_connections"] for row in CLIENT.get(f"{url}/workers").json()["workers"])


def mixed_up(url, prompts):
    """Asks all of them, eight at a time; those whose answer is another's."""
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda n: ask(url, str(n)), prompts))
    assert {answer.status_code for answer in answers} == {200}
    got = [answer.json()["choices"][0]["message"]["content"] for answer in answers]
    return [(n, text) for n, text in zip(prompts, got, strict=True) if text != str(n)]


@pytest.mark.parametrize("twice", [twice_at_once, twice_later])
@pytest.mark.parametrize("where", ["head", "body"])
def test_an_engine_that_sends_answers_twice_with_their_ids_mixes_none_up(started, twice, where):
    """The second one may come when the connection has its next request: its id says whose it is, in the head, or in the body as vLLM
    writes it."""

    def doubling(engine, send, body):
        match where:
            case "head":
                twice(send, sized(completion(said(body)), request_id=body["id"]))
            case "body":
                twice(send, sized(completion(said(body), f"chatcmpl-{body['id'].decode()}")))

    frontend = fleet(started, [RawEngine(doubling)])
    assert mixed_up(frontend.url, range(400)) == []


@pytest.mark.parametrize("twice", [twice_at_once, twice_apart, twice_later])
def test_an_engine_that_sends_answers_twice_gets_a_connection_for_each_request(started, twice):
    """Without an id nobody can tell whose an answer is that comes when the connection has its next request. The first surplus byte
    that is seen ends the reuse of connections, and from then on none is mixed up."""
    frontend = fleet(started, [RawEngine(lambda engine, send, body: twice(send, sized(completion(said(body)))))])

    def noticed():
        ask(frontend.url, "anything")
        return not reuses_connections(frontend.url)

    until(noticed, told=frontend.log)
    assert mixed_up(frontend.url, range(400)) == []
    assert not reuses_connections(frontend.url)
    assert frontend.until_logged("belong to no request") and frontend.log().count("belong to no request") == 1


def test_a_timeout_on_an_idle_connection_is_nobodys_answer(started):
    engine = RawEngine(echo)
    frontend = fleet(started, [engine])
    for n in range(120):
        answer = ask(frontend.url, str(n))
        assert answer.status_code == 200, (n, answer.text)
        assert answer.json()["choices"][0]["message"]["content"] == str(n)
        engine.send_unasked(TIMED_OUT)


def test_nothing_passes_after_done(started):
    """More events, a second `[DONE]`, or a connection that is held: the answer has ended, and nothing is booked."""
    held = threading.Event()
    whole = event("a") + event("b", "stop") + DONE

    def talkative(engine, send, body):
        match said(body):
            case "more":
                send(STREAM + chunk(whole + event("c") + DONE) + b"0\r\n\r\n")
            case "later":
                send(STREAM + chunk(whole))
                time.sleep(0.05)
                send(chunk(event("c")) + chunk(DONE) + b"0\r\n\r\n")
            case "held":
                send(STREAM + chunk(whole))
                held.wait(20)
            case _:
                echo(engine, send, body)

    frontend = fleet(started, [RawEngine(talkative)])
    for how in ("more", "later", "held"):
        began = time.monotonic()
        answer = ask(frontend.url, how, stream=True)
        assert answer.content == whole, how
        assert time.monotonic() - began < 10, "it waited for the engine"
        until(lambda: booked(frontend.url) == 0, seconds=5)
        assert ask(frontend.url, "next").json()["choices"][0]["message"]["content"] == "next"
    held.set()
    until(lambda: len(re.findall("request done", frontend.log())) == 6, told=frontend.log)
    assert "client left" not in frontend.log()


def test_clients_that_leave_at_done_are_served(started):
    """The closing chunk comes apart, as vLLM sends it: the request is done, with its tokens, whoever leaves first."""
    usage = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
    last = b"data: %s\n\n" % json.dumps({"id": "x", "choices": [], "usage": usage}).encode()

    def apart(engine, send, body):
        send(STREAM + chunk(event("a")) + chunk(event("b", "stop")) + chunk(last))
        send(chunk(DONE))
        time.sleep(0.02)
        send(b"0\r\n\r\n")

    frontend = fleet(started, [RawEngine(apart)])

    def leave_at_done(number):
        body = {"model": "m", "messages": [{"role": "user", "content": str(number)}], "stream": True}
        with CLIENT.stream("POST", f"{frontend.url}/v1/chat/completions", json=body) as answer:
            text = ""
            for piece in answer.iter_text():
                text += piece
                if "[DONE]" in text:
                    return

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(leave_at_done, range(120)))
    until(lambda: frontend.log().count("request done") == 120, told=frontend.log)
    assert "client left" not in frontend.log()
    assert len(re.findall(r"output\S*=\S*2\b", re.sub(r"\x1b\[[0-9;]*m", "", frontend.log()))) == 120
