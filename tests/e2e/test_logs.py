"""The log of the real binary: nobody waits for its reader, and no client writes into it what it likes."""

import json
import os
import re
import signal
import socket
import subprocess

import httpx
import pytest

from conftest import Kvasir, until

# A pipe holds 64 kB; an answered request logs some 400 bytes at this level.
REQUESTS = 300
CHAT = {"model": "kvasir-demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_a_log_that_nobody_reads_stops_nothing():
    port = free_port()
    kvasir = subprocess.Popen(
        [os.environ["KVASIR_BIN"], "demo", "--http-host", "127.0.0.1", "--http-port", str(port), "--log-level", "debug"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20) as http:

            def up():
                try:
                    return http.get("/live").status_code == 200
                except httpx.TransportError:
                    return False

            until(up, 60)
            for _ in range(REQUESTS):
                assert http.post("/v1/chat/completions", json=CHAT).status_code == 200
            for path in ("/health", "/live", "/metrics"):
                assert http.get(path).status_code == 200
        kvasir.send_signal(signal.SIGTERM)
        assert kvasir.wait(20) == 0
        logged = kvasir.stderr.read()
        assert len(logged) >= 60_000, "the pipe never was full: the test shows nothing"
    finally:
        kvasir.kill()
        kvasir.wait()
        kvasir.stderr.close()


def test_the_end_of_a_run_is_in_the_log_and_so_is_why_it_ended():
    kvasir = Kvasir("demo", "--http-host", "127.0.0.1", "--http-port", "0")
    url = kvasir.wait_for(r"at (http://127\.0\.0\.1:\d+)").group(1)
    assert httpx.get(f"{url}/live", timeout=20).status_code == 200
    assert kvasir.stop() == 0
    assert "draining" in kvasir.log()
    told = subprocess.run(
        [os.environ["KVASIR_BIN"], "demo", "--http-host", "127.0.0.1", "--http-port", "0", "--tls-cert-path", "/none", "--tls-key-path", "/none"],
        capture_output=True, text=True, timeout=60,
    )
    assert told.returncode != 0 and told.stderr.splitlines()[-1].startswith("error: "), told.stderr


def session(action):
    return {**CHAT, "nvext": {"session_control": {"session_id": "s", "action": action}}}


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_client_forges_no_line_and_fills_no_log(form):
    kvasir = Kvasir("demo", "--http-host", "127.0.0.1", "--http-port", "0", "--log-format", form, "--log-level", "debug")
    try:
        url = kvasir.wait_for(r"at (http://127\.0\.0\.1:\d+)").group(1)
        with httpx.Client(base_url=url, timeout=20) as http:
            forged = session("zz\n2026-01-01T00:00:00.000000Z  INFO forged\r\u001b[2J")
            long = "x" * 300_000
            bodies = [
                forged,
                session(long),
                {**CHAT, "nvext": {"backend_instance_id": long}},
                {**CHAT, "nvext": {"agent_hints": {"priority": long}}},
                {**CHAT, "model": long},
            ]
            for body in bodies:
                answer = http.post("/v1/chat/completions", json=body)
                assert 400 <= answer.status_code < 500, answer.text[:200]
                assert len(answer.content) < 4096
                assert not re.search(r"[\x00-\x1f]", answer.json()["message"])
            for body in ({"model": long}, {"model": long, "active_decode_blocks_threshold": 0.5}, {"model": 1, long: 2}):
                answer = http.post("/busy_threshold", json=body)
                assert answer.status_code >= 400 and len(answer.content) < 4096
    finally:
        assert kvasir.stop() == 0
    assert max(map(len, kvasir.lines)) < 8192
    assert not any(line.startswith("2026-01-01") for line in kvasir.lines), "forged"
    assert not any("\x1b" in line for line in kvasir.lines)
    told = [line for line in kvasir.lines if "INFO forged" in line]
    assert told, "the refusal is not logged at all: the test shows nothing"
    if form == "json":
        assert all(json.loads(line)["level"] for line in told)
