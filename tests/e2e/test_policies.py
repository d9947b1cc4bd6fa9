"""`--router-policy time` before real mock engines: what it learns is shown, and a decision is told in seconds."""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor

import httpx

from conftest import until
from engines import Fleet

MODEL = "timed"
WORDS = "The ferry leaves the pier at a quarter past every hour until the last light is gone. "


def ask(fleet, number, stream=True):
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"{number} " + WORDS * (5 + number % 20)}],
        "max_tokens": 40,
        "stream": stream,
    }
    answer = httpx.post(f"{fleet.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return None if stream else answer.json()["id"]


def learned(fleet):
    workers = httpx.get(f"{fleet.url}/workers", timeout=30).json()["workers"]
    return [rank["learned"] for worker in workers for rank in worker["ranks"]]


def test_what_is_learned_is_shown_and_why_is_told_in_seconds():
    fleet = Fleet(MODEL, frontend=["--router-policy", "time"])
    with ThreadPoolExecutor(4) as clients:
        list(clients.map(lambda number: ask(fleet, number), range(80)))
    last = ask(fleet, 999, stream=False)
    seen = lambda ranks: sum(rank["prompt_samples"] for rank in ranks) > 0  # noqa: E731
    shown = until(lambda: next((ranks for ranks in [learned(fleet)] if seen(ranks)), None), told=lambda: learned(fleet))
    assert len(shown) == 2
    for rank in shown:
        assert 0 < rank["prompt_8k_s"] < 3, rank
        assert 0 < rank["step_64x2k_s"] < 0.5, rank
    command = [os.environ["KVASIR_BIN"], "why", last, "--url", fleet.url]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "In seconds; the lowest cost wins" in told.stdout, told.stdout + told.stderr
    fleet.stop()


def test_the_linear_policy_shows_nothing_learned():
    fleet = Fleet(MODEL)
    ask(fleet, 1)
    assert learned(fleet) == [None, None]
    fleet.stop()
