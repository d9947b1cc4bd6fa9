"""A password in a worker's address is refused, and is not repeated: not in an error, a log, a list or a metric."""

import json
import os
import subprocess
import time

import httpx
import pytest

from conftest import Kvasir

SECRET = "hunter2"
WORKER = f"http://me:{SECRET}@127.0.0.1:9"


def run(*args, **env):
    env |= {k: v for k, v in os.environ.items() if not k.startswith(("DYN_", "KVASIR_"))}
    return subprocess.run([os.environ["KVASIR_BIN"], *args], capture_output=True, text=True, timeout=60, env=env)


@pytest.fixture
def files(tmp_path):
    (tmp_path / "workers").write_text(f"http://127.0.0.1:1\n{WORKER}\n")
    (tmp_path / "k.toml").write_text(f'worker = ["{WORKER}"]\n')
    return tmp_path


WAYS = {
    "flag": ["frontend", "--worker", WORKER],
    "no scheme": ["frontend", "--worker", f"me:{SECRET}@127.0.0.1:9"],
    "a slash in it": ["frontend", "--worker", f"http://me:{SECRET}/{SECRET}@127.0.0.1:9"],
    "events": ["frontend", "--worker", f"http://127.0.0.1:9,events=tcp://me:{SECRET}@127.0.0.1:1"],
    "unknown addition": ["frontend", "--worker", f"http://127.0.0.1:9,{WORKER}"],
    "file": ["frontend", "--config", "FILES/k.toml"],
    "workers file": ["frontend", "--workers-file", "FILES/workers"],
    "shown": ["config", "show", "--for", "frontend", "--config", "FILES/k.toml"],
    "doctor": ["doctor", "--worker", WORKER],
    "doctor of a frontend": ["doctor", "--url", WORKER],
    "workers": ["workers", "--url", WORKER],
}


@pytest.mark.parametrize("way", WAYS)
def test_it_is_refused_and_not_repeated(way, files):
    done = run(*[word.replace("FILES", str(files)) for word in WAYS[way]])
    assert done.returncode == 2, done.stderr
    assert SECRET not in done.stdout + done.stderr
    told = done.stderr
    assert "without user and password" in told or "api-key-file=FILE" in told, told


def test_a_variable_is_not_repeated_either():
    done = run("frontend", KVASIR_WORKERS=WORKER)
    assert done.returncode == 2 and SECRET not in done.stderr and "KVASIR_WORKERS" in done.stderr


def test_an_address_that_may_have_one_is_shown_without_it():
    done = run("config", "show", "--for", "frontend", "--json", NATS_SERVER=f"nats://me:{SECRET}@nats:4222")
    assert done.returncode == 0 and SECRET not in done.stdout
    assert "nats://(hidden)@nats:4222" in json.dumps(json.loads(done.stdout))


def test_a_running_frontend_keeps_it_to_itself(tmp_path):
    """Over the admin API and in the workers file, and then in everything that it shows."""
    file = tmp_path / "workers"
    file.write_text("http://127.0.0.1:1\n")
    frontend = Kvasir("frontend", "--http-host", "127.0.0.1", "--http-port", "0", "--workers-file", str(file),
                      "--log-level", "debug")  # fmt: skip
    url = "http://" + frontend.wait_for(r"address=(127\.0\.0\.1:\d+)").group(1)
    file.write_text(f"{WORKER}\n")
    with httpx.Client(base_url=url, timeout=30) as http:
        for body in [{"url": WORKER}, {"url": "http://127.0.0.1:9", "events": f"tcp://me:{SECRET}@h:1"}]:
            answer = http.post("/workers", json=body)
            assert answer.status_code == 400 and SECRET not in answer.text, answer.text
            assert "api-key-file=FILE" in answer.text
        answer = http.delete(f"/workers/{httpx.QueryParams({'w': WORKER})['w']}".replace("//me", "%2F%2Fme"))
        assert answer.status_code in (400, 404) and SECRET not in answer.text, answer.text
        end = time.monotonic() + 20
        while "workers file line 1" not in frontend.log():
            assert time.monotonic() < end, frontend.log()
            time.sleep(0.05)
        for page in ["/workers", "/metrics", "/decisions", "/health"]:
            assert SECRET not in http.get(page).text, page
        assert [row["url"] for row in http.get("/workers").json()["absent"]] == ["http://127.0.0.1:1"]
    refused = run("workers", "add", WORKER, "--url", url)
    assert refused.returncode == 1 and SECRET not in refused.stdout + refused.stderr
    assert frontend.stop() == 0, frontend.log()
    assert SECRET not in frontend.log()
