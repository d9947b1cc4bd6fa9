"""`kvasir why`, `kvasir workers` and `kvasir top` against a running frontend, as an operator uses them."""

import json
import os
import pty
import select
import shutil
import signal
import socket
import subprocess
import time

import httpx
import pytest

from conftest import Kvasir, until
from engines import frontend_before
from test_cli import kvasir

MODEL = "kvasir-demo"


def ask(url, text, **headers):
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 8}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer


def test_why_tells_candidates_prediction_and_report(demo):
    text = "why did this one go there? " * 40
    ask(demo.url, text)
    answer = ask(demo.url, text)
    told = kvasir("why", answer.json()["id"], "--url", demo.url)
    assert told.returncode == 0 and not told.stderr, told.stderr
    lines = told.stdout.splitlines()
    assert lines[0].split() == ["request", answer.json()["id"].removeprefix("chatcmpl-")]
    facts = {line.split()[0]: line for line in lines[:12] if line}
    assert "lowest cost of 4" in facts["went"]
    cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0 and f"{cached} of {answer.json()['usage']['prompt_tokens']} tokens cached" in facts["reported"]
    assert "status 200, 8 tokens" in facts["answer"]
    rows = [line for line in lines if line.startswith((">", "   ")) and "WORKER" not in line]
    assert len(rows) == 4 and sum(row.startswith(">") for row in rows) == 1


def test_a_whole_prompt_in_the_cache_is_foretold_as_the_engine_reports_it(demo):
    """All four blocks are cached; an engine computes the last token, so it finds three of them."""
    body = {"model": MODEL, "prompt": list(range(300, 364)), "max_tokens": 2}
    first, again = (httpx.post(f"{demo.url}/v1/completions", json=body, timeout=30).json() for _ in range(2))
    outcome = json.loads(kvasir("why", again["id"], "--json", "--url", demo.url).stdout)["outcome"]
    assert outcome["prompt_tokens"] == 64, first
    assert (outcome["predicted_cached_tokens"], outcome["reported_cached_tokens"]) == (48, 48)
    assert "48 of 64 tokens cached" in kvasir("why", again["id"], "--url", demo.url).stdout


def test_why_by_the_clients_own_name_and_as_json(demo):
    answer = ask(demo.url, "my own name", **{"x-request-id": "order 66"})
    assert answer.headers["x-request-id"] == "order 66"
    told = kvasir("why", "order 66", "--json", KVASIR_URL=demo.url)
    decision = json.loads(told.stdout)
    assert decision["id"] == answer.json()["id"].removeprefix("chatcmpl-")
    assert decision["outcome"]["client_request_id"] == "order 66"
    assert decision["outcome"]["predicted_cached_tokens"] is not None
    assert len(decision["candidates"]) == 4


def test_why_without_an_id_lists_the_latest(demo):
    newest = ask(demo.url, "the newest").json()["id"].removeprefix("chatcmpl-")
    told = kvasir("why", "--limit", "2", "--url", demo.url)
    lines = told.stdout.splitlines()
    assert lines[0].split()[:3] == ["REQUEST", "WHEN", "MODEL"] and len(lines) == 3
    assert lines[1].startswith(newest)
    rows = json.loads(kvasir("why", "--json", "--limit", "1", "--url", demo.url).stdout)["decisions"]
    assert [row["id"] for row in rows] == [newest]


def test_a_request_that_nobody_knows(demo):
    told = kvasir("why", "nobody", "--url", demo.url)
    assert told.returncode == 1 and not told.stdout
    assert told.stderr.startswith("error: nobody: no decision about this request is remembered")


def test_workers(demo):
    told = kvasir("workers", "--url", demo.url)
    lines = told.stdout.splitlines()
    assert lines[0].split()[:3] == ["WORKER", "RANK", "STATE"] and len(lines) == 5
    assert {line.split()[2] for line in lines[1:]} == {"serving"}
    rows = json.loads(kvasir("workers", "--json", "--url", demo.url).stdout)["workers"]
    assert sorted(row["worker_id"] for row in rows) == [1, 2, 3, 4]
    for wrong in (["workers", "ad"], ["workers", "add"], ["workers", "a", "b", "c"]):
        assert kvasir(*wrong, "--url", demo.url).returncode == 2, wrong


def test_workers_are_added_and_removed():
    """Two engines, one of them unknown at the start; it is added, serves, drains and is forced out."""
    loopback = ["--http-host", "127.0.0.1", "--http-port", "0"]
    mocker = Kvasir("mocker", *loopback, "--workers", "2", "--model-name", "tiny", "--speedup", "50", "--events", "tcp://127.0.0.1:0")
    one, two = [mocker.wait_for(r"on (http://127\.0\.0\.1:\d+)").group(1) for _ in range(2)]
    frontend = frontend_before([one])
    try:
        states = lambda: {row["url"]: row["state"] for row in json.loads(
            kvasir("workers", "--json", "--url", frontend.url).stdout)["workers"]}  # fmt: skip
        told = kvasir("workers", "add", two, "--url", frontend.url)
        assert told.returncode == 0 and f"at {two} is watched" in told.stdout, told.stderr
        until(lambda: states() == {one: "serving", two: "serving"})
        listed = lambda: kvasir("workers", "--url", frontend.url).stdout
        assert "CACHE VIEW" in listed()
        until(lambda: listed().count("listening") + listed().count("complete") == 2)
        worker = json.loads(kvasir("workers", "--json", "--url", frontend.url).stdout)["workers"]
        ids = {row["url"]: str(row["worker_id"]) for row in worker}
        told = kvasir("workers", "remove", ids[two], "--url", frontend.url)
        assert told.returncode == 0 and "gets nothing new" in told.stdout, told.stderr
        until(lambda: two not in states())
        again = kvasir("workers", "remove", ids[two], "--url", frontend.url)
        assert again.returncode == 1 and "No such worker" in again.stderr
        assert json.loads(kvasir("workers", "add", two, "--json", "--url", frontend.url).stdout)["url"] == two
        assert kvasir("workers", "remove", two, "--force", "--url", frontend.url).returncode == 0
        wrong = kvasir("workers", "add", "nonsense", "--url", frontend.url)
        assert wrong.returncode == 1 and "error: Validation" in wrong.stderr
    finally:
        assert frontend.stop() == 0, frontend.log()
        mocker.stop()


def test_the_workers_of_a_demo_are_fixed(demo):
    told = kvasir("workers", "add", "http://127.0.0.1:9", "--url", demo.url)
    assert told.returncode == 1 and told.stderr.startswith("error: "), told


@pytest.mark.skipif(shutil.which("openssl") is None, reason="NO openssl here: operators over TLS are NOT tried")
def test_https_is_spoken(tmp_path):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost", "-keyout", key,
         "-out", cert, "-addext", "basicConstraints=critical,CA:FALSE", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"], check=True, capture_output=True)  # fmt: skip
    frontend = Kvasir("demo", "--http-host", "127.0.0.1", "--http-port", "0", "--tls-cert-path", str(cert), "--tls-key-path", str(key))
    url = frontend.wait_for(r"at (https?://127\.0\.0\.1:\d+)").group(1)
    assert url.startswith("https://")
    told = kvasir("workers", "--url", url, "--tls-ca-path", str(cert))
    assert told.returncode == 0 and len(told.stdout.splitlines()) == 5, told.stderr
    doubted = kvasir("workers", "--url", url)
    assert doubted.returncode in (1, 2) and "--tls-ca-path" in doubted.stderr
    assert kvasir("workers", "--url", url, "--tls-ca-path", str(key)).returncode == 2
    assert frontend.stop() == 0


def test_top_once_when_nobody_watches(demo):
    ask(demo.url, "something to see")
    told = kvasir("top", "--url", demo.url)
    assert told.returncode == 0 and "\x1b" not in told.stdout
    assert told.stdout.startswith("kvasir top  http://") and "in flight" in told.stdout
    assert len([line for line in told.stdout.splitlines() if " serving " in line]) == 4
    data = json.loads(kvasir("top", "--json", "--url", demo.url).stdout)
    assert data["requests"]["done"] >= 1 and data["latest"]["requests"] >= 1 and len(data["workers"]) == 4


def terminal(command, columns, until, timeout=20, key=None):
    """Runs a command on a terminal of its own and presses a key, or else interrupts it; what it wrote and its exit code."""
    leader, follower = pty.openpty()
    subprocess.run(["stty", "rows", "24", "cols", str(columns)], stdin=follower, check=True)
    before = subprocess.run(["stty", "-g"], stdin=follower, capture_output=True, check=True).stdout
    env = {name: value for name, value in os.environ.items() if not name.startswith(("DYN_", "KVASIR_"))}
    process = subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, env=env)
    seen, end = b"", time.monotonic() + timeout
    while not until(seen) and time.monotonic() < end:
        if select.select([leader], [], [], 0.1)[0]:
            seen += os.read(leader, 65536)
    if key:
        os.write(leader, key)
    else:
        process.send_signal(signal.SIGINT)
    code = process.wait(10)
    while select.select([leader], [], [], 0.2)[0]:
        seen += os.read(leader, 65536)
    after = subprocess.run(["stty", "-g"], stdin=follower, capture_output=True, check=True).stdout
    os.close(leader)
    os.close(follower)
    assert before == after
    return seen.decode(), code


def test_q_leaves_top(demo):
    """Other keys do not, and none is seen on the screen."""
    command = [os.environ["KVASIR_BIN"], "top", "--url", demo.url, "--interval", "0.1"]
    seen, code = terminal(command, 120, lambda seen: seen.count(b"\x1b[H") >= 2, key=b"x\x1b[Aq")
    assert code == 0 and "q leaves" in seen and "x^[" not in seen
    assert seen.rstrip().endswith("\x1b[?25h\x1b[?1049l")


def test_an_unknown_path_is_no_failed_request_and_the_root_says_what_this_is(demo):
    requests = lambda: json.loads(kvasir("top", "--json", "--url", demo.url).stdout)["requests"]  # noqa: E731
    before = requests()["failed"]
    for path in ["/favicon.ico", "/robots.txt", "/v2/nothing"]:
        assert httpx.get(demo.url + path).status_code == 404
    assert requests()["failed"] == before
    root = httpx.get(demo.url)
    assert root.status_code == 200 and root.json()["name"] == "kvasir" and root.json()["version"]
    for page in ["models", "metrics", "api", "health"]:
        assert httpx.get(demo.url + root.json()[page]).status_code == 200, page


@pytest.mark.parametrize("columns", [20, 60, 200])
def test_top_on_a_terminal_leaves_it_as_it_was(demo, columns):
    command = [os.environ["KVASIR_BIN"], "top", "--url", demo.url, "--interval", "0.1"]
    seen, code = terminal(command, columns, lambda seen: seen.count(b"\x1b[H") >= 3)
    assert code == 0
    assert seen.startswith("\x1b[?1049h\x1b[?25l") and seen.rstrip().endswith("\x1b[?25h\x1b[?1049l")
    frame = seen.split("\x1b[H")[2]
    lines = [line.replace("\x1b[K", "").replace("\x1b[J", "").strip("\r") for line in frame.split("\n")]
    assert lines[0].startswith("kvasir top") and max(len(line) for line in lines) <= columns, lines


def test_a_frontend_that_is_not_there_says_what_to_do():
    for command in ("why", "workers", "top"):
        told = kvasir(command, "--url", "http://127.0.0.1:9")
        assert told.returncode == 1 and not told.stdout
        assert "no frontend answers at http://127.0.0.1:9" in told.stderr and "kvasir frontend --worker" in told.stderr


def test_a_frontend_that_does_not_answer_is_given_up():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        told = kvasir("workers", "--url", url, "--timeout-secs", "0.3")
    assert told.returncode == 1 and "did not answer within 0.3 s" in told.stderr


def test_a_token_is_sent_where_one_is_needed(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# operators\nhush-hush\n")
    frontend = Kvasir("demo", "--http-host", "127.0.0.1", "--http-port", "0", "--http-api-key-file", str(keys))
    url = frontend.wait_for(r"at (http://127\.0\.0\.1:\d+)").group(1)
    bare = kvasir("workers", "--url", url)
    assert bare.returncode == 1 and "--admin-token-file" in bare.stderr
    assert kvasir("workers", "--url", url, "--admin-token-file", str(keys)).returncode == 0
    assert kvasir("workers", "--url", url, KVASIR_ADMIN_TOKEN="hush-hush").returncode == 0
    wrong = kvasir("workers", "--url", url, KVASIR_ADMIN_TOKEN="wrong")
    assert wrong.returncode == 1 and "does not accept the token" in wrong.stderr and "wrong" not in wrong.stderr
    assert frontend.stop() == 0 and "hush-hush" not in frontend.log()


def test_a_frontend_without_admin_routes_says_so():
    frontend = Kvasir("demo", "--http-host", "127.0.0.1", "--http-port", "0", "--disable-frontend-admin-api")
    url = frontend.wait_for(r"at (http://127\.0\.0\.1:\d+)").group(1)
    for command in (["workers"], ["top"], ["why", "x"]):
        told = kvasir(*command, "--url", url)
        assert told.returncode == 1 and "admin routes are switched off" in told.stderr, told.stderr
    assert frontend.stop() == 0


def test_health_is_told_by_the_exit_code(demo):
    well = kvasir("health", "--url", demo.url)
    assert well.returncode == 0 and well.stdout.startswith(f"{demo.url}/health: 200"), well.stderr
    assert json.loads(kvasir("health", "--json", "--url", demo.url).stdout)["status"] == "healthy"
    empty = Kvasir("frontend", "--http-host", "127.0.0.1", "--http-port", "0")
    url = "http://" + empty.wait_for(r"address\W+(127\.0\.0\.1:\d+)").group(1)
    # It lives and cannot serve.
    assert kvasir("health", "--live", "--url", url).returncode == 0
    until(lambda: "no_workers" in httpx.get(f"{url}/health", timeout=30).text)
    unwell = kvasir("health", "--url", url)
    assert unwell.returncode == 1 and "503, no workers" in unwell.stderr, unwell.stderr
    assert empty.stop() == 0
    gone = kvasir("health", "--url", url)
    assert gone.returncode == 1 and "no frontend answers" in gone.stderr
