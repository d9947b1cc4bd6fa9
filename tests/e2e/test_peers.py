"""Replicas that name each other, without a broker: `--router-peers` in front of engine servers behind HTTP."""

import httpx
import pytest

from conftest import Kvasir, until
from planes_rig import free_port, is_open

MODEL = "qwen"
PROMPT = "What does the ferry carry on Sundays, and who pays for it? " * 20


def requests_on(http):
    rows = http.get("/workers").json()["workers"]
    return sum(rank["active_requests"] for row in rows for rank in row["ranks"])


def ask(http, prompt, **fields):
    answer = http.post("/v1/completions", json={"model": MODEL, "prompt": prompt, "max_tokens": 2, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def cached(answer):
    return (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0


class Fleet:
    """Mock engines, and frontends that know the same secret."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "secret").write_text("what all of us know\n")
        self.ports = [free_port() for _ in range(3)]
        self.engines = Kvasir("mocker", "--http-host", "127.0.0.1", "--http-port", "0", "--workers", "2", "--model-name", MODEL,
                              "--kv-events-port", "0", "--speedup", "2", "--num-blocks", "4096")  # fmt: skip
        self.urls = [self.engines.wait_for(r"on (http://127\.0\.0\.1:\d+)").group(1) for _ in range(2)]
        self.started = []

    def frontend(self, number, *args, urls=None, secret="secret"):
        workers = [part for url in (self.urls if urls is None else urls) for part in ("--worker", url)]
        peers = ",".join(f"127.0.0.1:{port}" for port in self.ports)
        kvasir = Kvasir("frontend", "--http-host", "127.0.0.1", "--http-port", "0", "--router-mode", "kv", "--discovery-backend", "static", *workers,
                        "--router-peers", peers, "--router-peer-listen", f"127.0.0.1:{self.ports[number]}",
                        "--router-peer-secret-file", str(self.folder / secret), *args)  # fmt: skip
        kvasir.url = "http://" + kvasir.wait_for(r"listening .*address=(127\.0\.0\.1:\d+)").group(1)
        kvasir.http = httpx.Client(base_url=kvasir.url, timeout=60)
        self.started.append(kvasir)
        until(lambda: kvasir.http.get("/health").status_code == 200, 60, kvasir.log)
        # At least: the others may already have told it of a worker that an operator added.
        until(lambda: len(kvasir.http.get("/workers").json()["workers"]) >= len(self.urls if urls is None else urls), 60, kvasir.log)
        return kvasir

    def linked(self, kvasir, count):
        rows = lambda: kvasir.http.get("/workers").json()["replicas"]  # noqa: E731
        return until(lambda: len(rows()) == count and rows() or count == 0 and rows() == [] and [1], 60, kvasir.log)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    fleet = Fleet(tmp_path_factory.mktemp("peers"))
    yield fleet
    for kvasir in [*fleet.started, fleet.engines]:
        if kvasir.process.poll() is None:
            assert kvasir.stop(60) == 0, kvasir.log()


@pytest.fixture(scope="module")
def pair(fleet):
    one, other = fleet.frontend(0), fleet.frontend(1)
    for kvasir in (one, other):
        fleet.linked(kvasir, 1)
    return one, other


def open_stream(http):
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4000, "stream": True, "ignore_eos": True}
    return http.stream("POST", "/v1/completions", json=body)


def test_load_is_seen_by_both(pair):
    for asked, other in (pair, pair[::-1]):
        with open_stream(asked.http) as answer:
            lines = answer.iter_lines()
            next(lines)
            until(lambda: requests_on(other.http) == 1, 20, other.log)
            del lines
        until(lambda: requests_on(other.http) == 0, 20, other.log)


def test_one_that_starts_takes_the_index_of_another_and_one_that_dies_its_load(fleet, pair):
    one, other = pair
    prompts = [f"{number} {PROMPT}" for number in range(8)]
    for prompt in prompts:
        ask(one.http, prompt)
    late = fleet.frontend(2)
    assert "the index of a peer is taken over" in late.log() and "index snapshot restored" in late.log()
    until(lambda: all(cached(ask(late.http, prompt)) > 100 for prompt in prompts), 20, late.log)
    fleet.linked(late, 2)
    with open_stream(late.http) as answer:
        lines = answer.iter_lines()
        next(lines)
        until(lambda: requests_on(other.http) == 1, 20, other.log)
        late.process.kill()
        late.process.wait()
        until(lambda: requests_on(other.http) == 0, 20, other.log)
        del lines
    fleet.linked(one, 1)


def test_ranks_are_compared_when_they_are_quiet(pair):
    one, other = pair
    ask(one.http, f"compare {PROMPT}")
    for kvasir in (one, other):
        rows = lambda: kvasir.http.get("/workers").json()["replicas"]  # noqa: B023, E731
        until(lambda: any(row["ranks_agreed"] >= 1 for row in rows()), 30, kvasir.log)
        assert all(row["ranks_differing"] == 0 for row in rows()), rows()


def test_what_an_operator_says_at_one_holds_at_all(fleet, pair):
    one, other = pair
    more = Kvasir("mocker", "--http-host", "127.0.0.1", "--http-port", "0", "--model-name", MODEL, "--kv-events-port", "0")
    url = more.wait_for(r"on (http://127\.0\.0\.1:\d+)").group(1)
    urls = lambda kvasir: {row["url"] for row in kvasir.http.get("/workers").json()["workers"]}  # noqa: E731
    assert one.http.post("/workers", json={"url": url}).status_code == 201
    until(lambda: url in urls(one) and url in urls(other), 30, other.log)
    late = fleet.frontend(2)
    until(lambda: url in urls(late), 30, late.log)
    name = url.replace(":", "%3A").replace("/", "%2F")
    assert other.http.delete(f"/workers/{name}").status_code == 202
    for kvasir in (one, other, late):
        until(lambda: url not in urls(kvasir), 30, kvasir.log)  # noqa: B023
    assert late.stop(60) == 0 and more.stop(60) == 0


def test_a_stranger_is_not_let_in_and_serves_alone(fleet, pair):
    (fleet.folder / "other").write_text("what nobody else knows\n")
    stranger = fleet.frontend(2, secret="other")
    until(lambda: "a replica is refused" in pair[0].log() or "a replica is refused" in stranger.log(), 30, stranger.log)
    assert stranger.http.get("/workers").json()["replicas"] == []
    ask(stranger.http, "hello")
    assert stranger.stop(60) == 0
    fleet.linked(pair[0], 1)


def test_a_secret_is_needed_and_must_not_be_short(tmp_path):
    (tmp_path / "short").write_text("abc")
    for args, told in (([], "--router-peer-secret-file"), (["--router-peer-secret-file", str(tmp_path / "short")], "16 characters")):
        kvasir = Kvasir("frontend", "--http-port", "0", "--worker", "http://127.0.0.1:1", "--router-peer-listen", f"127.0.0.1:{free_port()}", *args)
        assert kvasir.process.wait(60) != 0
        kvasir._reader.join(20)
        assert told in kvasir.log()


def test_ports_are_free_again(fleet):
    assert not is_open(fleet.ports[2])


def test_replicas_find_each_other_where_workers_are_found(fleet, tmp_path):
    workers = [part for url in fleet.urls for part in ("--worker", url)]
    started = []
    for _ in range(2):
        kvasir = Kvasir("frontend", "--http-host", "127.0.0.1", "--http-port", "0", "--router-mode", "kv", "--discovery-backend", "file",
                        "--file-kv", str(tmp_path), *workers, "--router-peer-listen", "127.0.0.1:0",
                        "--router-peer-secret-file", str(fleet.folder / "secret"))  # fmt: skip
        kvasir.url = "http://" + kvasir.wait_for(r"listening .*address=(127\.0\.0\.1:\d+)").group(1)
        kvasir.http = httpx.Client(base_url=kvasir.url, timeout=60)
        started.append(kvasir)
    one, other = started
    for kvasir in started:
        fleet.linked(kvasir, 1)
        until(lambda: kvasir.http.get("/v1/models").json()["data"], 60, kvasir.log)  # noqa: B023
    with open_stream(one.http) as answer:
        lines = answer.iter_lines()
        next(lines)
        until(lambda: requests_on(other.http) == 1, 20, other.log)
        del lines
    assert other.stop(60) == 0, other.log()
    fleet.linked(one, 0)
    assert len(list((tmp_path / "v1" / "instances").iterdir())) == 1
    assert one.stop(60) == 0, one.log()
    assert not list((tmp_path / "v1" / "instances").iterdir())
