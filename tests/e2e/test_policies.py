"""Placement by seconds, the default before engine servers: what it learns is shown, and a decision is told in seconds."""

import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import httpx

from conftest import until
from engines import Fleet, frontend_before

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


def settled(fleet):
    """What is learned, once it no longer changes."""
    before = learned(fleet)
    time.sleep(0.2)
    return before if learned(fleet) == before else None


def test_what_is_learned_is_shown_and_why_is_told_in_seconds():
    fleet = Fleet(MODEL)
    assert 'router_policy="time"' in fleet.frontend.until_logged("how workers are chosen")
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
    assert "learned    8k prompt" in told.stdout, told.stdout
    fleet.stop()


def test_a_profile_starts_it_and_the_next_process_goes_on(tmp_path):
    kept = ["--index-snapshot", str(tmp_path / "index.bin")]
    fleet = Fleet(MODEL, frontend=["--engine-profile", "h200-llama-8b", *kept])
    for rank in learned(fleet):
        assert (rank["prompt_samples"], rank["step_samples"]) == (0, 0), rank
        assert 0.1 < rank["prompt_8k_s"] < 1, rank
    told = learned(fleet)[0]["prompt_8k_s"]
    with ThreadPoolExecutor(4) as clients:
        list(clients.map(lambda number: ask(fleet, number), range(150)))
    changed = lambda: all(rank["prompt_8k_s"] != told for rank in learned(fleet))  # noqa: E731
    until(changed, told=lambda: learned(fleet))
    before = until(lambda: settled(fleet), told=lambda: learned(fleet))
    assert fleet.frontend.stop() == 0, fleet.frontend.log()
    fleet.frontend = frontend_before(fleet.engines, *kept)
    fleet.url = fleet.frontend.url
    until(lambda: learned(fleet) == before, told=lambda: (before, learned(fleet)))
    fleet.stop()


def test_an_option_of_dynamo_selects_its_cost_which_learns_nothing():
    fleet = Fleet(MODEL, frontend=["--router-mode", "kv"])
    assert 'router_policy="kv"' in fleet.frontend.until_logged("how workers are chosen")
    ask(fleet, 1)
    assert learned(fleet) == [None, None]
    fleet.stop()


def test_a_shadow_policy_is_compared_and_acts_on_nothing():
    fleet = Fleet(MODEL, frontend=["--shadow-policy", "round-robin"])
    with ThreadPoolExecutor(4) as clients:
        list(clients.map(lambda number: ask(fleet, number), range(60)))
    last = ask(fleet, 999, stream=False)
    (shadow,) = httpx.get(f"{fleet.url}/shadow", timeout=30).json()["shadows"]
    assert shadow["policy"] == "round-robin" and shadow["model"] == MODEL
    assert shadow["placements"] == shadow["compared"] == 61, shadow
    assert 0 < shadow["disagreed"] < 61, shadow
    assert shadow["disagreement"] == shadow["disagreed"] / 61
    page = httpx.get(f"{fleet.url}/metrics", timeout=30).text
    for result, count in [("agrees", 61 - shadow["disagreed"]), ("disagrees", shadow["disagreed"])]:
        assert f'kvasir_shadow_placements_total{{model="{MODEL}",result="{result}"}} {count}\n' in page
    assert f'kvasir_shadow_regret_seconds{{better="live",model="{MODEL}"}}' in page
    decision = httpx.get(f"{fleet.url}/decisions/{last}", timeout=30).json()
    assert decision["shadow"]["policy"] == "round-robin" and decision["shadow"]["name"].endswith("/0")
    run = lambda *words: subprocess.run(  # noqa: E731
        [os.environ["KVASIR_BIN"], *words, "--url", fleet.url], capture_output=True, text=True, timeout=60, check=False
    )
    assert "shadow     round-robin" in run("why", last).stdout
    assert "of 61 placements elsewhere" in run("top", "--once").stdout
    fleet.stop()


def test_a_shadow_policy_that_is_none_is_refused_at_the_start():
    command = [os.environ["KVASIR_BIN"], "frontend", "--worker", "http://127.0.0.1:1"]
    for spec in ["kv,no-such-thing=3", "direct"]:
        told = subprocess.run(
            [*command, "--shadow-policy", spec], capture_output=True, text=True, timeout=60, check=False
        )
        assert told.returncode == 2 and spec.split(",")[0] in told.stderr, told.stderr
