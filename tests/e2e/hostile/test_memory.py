"""Bodies that never end and dumps that nobody reads: what the frontend holds for them has a bound."""

import json
import select
import socket
import threading
import time

import httpx
import pytest

from conftest import until
from engines import Fleet, ScriptedEngine, frontend_before
from hostile.proc_memory import MB, grows_at_most, rss
from hostile.test_model_folder import ANSWER, folder

MODEL = "hostile/memory"
BUDGET_MB = 256


@pytest.fixture(scope="module")
def fleet():
    options = ["--http-body-budget-mb", str(BUDGET_MB), "--no-router-kv-events", "--router-mode", "kv"]
    fleet = Fleet(MODEL, frontend=options, mocker=["--block-size", "16"])
    yield fleet
    fleet.stop()


def metric(fleet, name, **labels):
    page = httpx.get(f"{fleet.url}/metrics", timeout=30).text
    lines = [line for line in page.splitlines() if line.startswith(name) and all(f'{k}="{v}"' in line for k, v in labels.items())]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def ask(fleet, prompt="hello", tokens=1):
    body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens}
    return httpx.post(f"{fleet.url}/v1/completions", json=body, timeout=60)


class Upload:
    """A body that is sent but for its last bytes, unless it is refused before."""

    def __init__(self, fleet, megabytes, chunked):
        host, port = fleet.url.removeprefix("http://").split(":")
        self.socket = socket.create_connection((host, int(port)), timeout=30)
        length = "transfer-encoding: chunked" if chunked else f"content-length: {megabytes * MB}"
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{length}\r\n\r\n"
        self.socket.sendall(head.encode())
        piece = b" " * MB
        piece = b"%x\r\n%s\r\n" % (len(piece), piece) if chunked else piece
        self.answer = b""
        for _ in range(megabytes - 1):
            if select.select([self.socket], [], [], 0)[0]:
                break
            try:
                self.socket.sendall(piece)
            except OSError:
                break
        if select.select([self.socket], [], [], 0.1)[0]:
            self.answer = self.socket.recv(4096)

    def close(self):
        self.socket.close()


def test_forty_unfinished_uploads_stay_within_the_budget(fleet):
    assert ask(fleet).status_code == 200
    before, uploads = rss(fleet.frontend), []
    with grows_at_most(fleet.frontend, BUDGET_MB + 128):
        for n in range(40):
            uploads.append(Upload(fleet, 40, chunked=n % 2 == 1))
            assert metric(fleet, "kvasir_http_body_bytes") <= BUDGET_MB * MB
        refused = [upload.answer for upload in uploads if upload.answer]
        held = metric(fleet, "kvasir_http_body_bytes")
        assert len(refused) >= 40 - BUDGET_MB // 39, len(refused)
        assert held >= BUDGET_MB * MB / 2, "what has room is taken"
        for answer in refused:
            assert answer.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1" in answer.lower(), answer
            assert b"connection: close" in answer.lower()
        # Others are served meanwhile, small ones always.
        for _ in range(20):
            assert ask(fleet, "small " * 9000).status_code == 200
    for upload in uploads:
        upload.close()
    until(lambda: metric(fleet, "kvasir_http_body_bytes") == 0)
    until(lambda: rss(fleet.frontend) < before + 64 * MB, told=lambda: f"{rss(fleet.frontend) / MB:.0f} MB")
    assert metric(fleet, "kvasir_limit_reached_total", limit="body_budget") == len(refused)
    # And there is room again.
    assert ask(fleet, "large " * 2_000_000).status_code in (200, 400)
    until(lambda: metric(fleet, "kvasir_http_body_bytes") == 0)


def test_ten_megabytes_of_tools_become_no_values(tmp_path):
    """Each `{}` would take near a kilobyte in the template: they are counted first, and the engine judges them."""
    engine = ScriptedEngine("m")
    kvasir = frontend_before([engine.url], "--model-path", str(folder(tmp_path)), "--router-mode", "kv", "--no-router-kv-events")
    tools = ",".join(["{}"] * (10 * MB // 3))
    body = f'{{"model":"m","messages":[{{"role":"user","content":"a"}}],"tools":[{tools}]}}'.encode()
    with grows_at_most(kvasir, 160):
        for _ in range(2):
            engine.say(ANSWER)
            headers = {"content-type": "application/json"}
            answer = httpx.post(f"{kvasir.url}/v1/chat/completions", content=body, headers=headers, timeout=60)
            assert answer.status_code == 200, answer.text
    assert kvasir.stop() == 0
    engine.stop()


def fill(fleet, requests=60, tokens=32_000):
    """Prompts of token ids that share nothing: 2,000 blocks each."""
    for n in range(requests):
        answer = ask(fleet, [n + 1, *((7 * n + 31 * i) % 4000 for i in range(1, tokens))])
        assert answer.status_code == 200, answer.text


def dumped(body):
    """Blocks in a dump, by rank."""
    events = json.loads(body)[f"{MODEL}:default"]["events"]
    return sum(len(event["event"]["data"]["stored"]["blocks"]) for event in events)


def test_a_dump_holds_little_and_there_is_one_at_a_time(fleet):
    fill(fleet)
    with grows_at_most(fleet.frontend, 64):
        # Nobody reads this one: it waits, and everything else goes on.
        host, port = fleet.url.removeprefix("http://").split(":")
        asleep = socket.create_connection((host, int(port)))
        asleep.sendall(b"GET /dump HTTP/1.1\r\nhost: x\r\n\r\n")
        assert asleep.recv(12) == b"HTTP/1.1 200"
        told = [httpx.get(f"{fleet.url}/dump", timeout=30) for _ in range(8)]
        assert {answer.status_code for answer in told} == {503}
        assert all(answer.headers["retry-after"] == "1" for answer in told)
        assert ask(fleet).status_code == 200
        asleep.close()
        # Eight at once, with requests beside them: one dump is whole, the others are told to wait.
        answers, lock = [], threading.Lock()

        def dump():
            answer = httpx.get(f"{fleet.url}/dump", timeout=60)
            with lock:
                answers.append(answer)

        def one_is_whole():
            threads = [threading.Thread(target=dump) for _ in range(8)]
            for thread in threads:
                thread.start()
            slowest = 0.0
            while any(thread.is_alive() for thread in threads):
                began = time.monotonic()
                assert ask(fleet).status_code == 200
                slowest = max(slowest, time.monotonic() - began)
            assert slowest < 5, slowest
            return [answer for answer in answers if answer.status_code == 200]

        whole = until(one_is_whole)
    assert {answer.status_code for answer in answers} <= {200, 503}
    # The approximate index is what is in use, and what is dumped.
    assert dumped(whole[0].content) >= 60 * 2000, dumped(whole[0].content)
    assert len(whole[0].content) > 8 * MB
