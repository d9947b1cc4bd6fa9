"""`kvasir replay` as a user runs it: the table, the JSON, and the page in a real browser."""

import json
import os
import shutil
import struct
import subprocess
import zlib

import pytest

SMALL = [
    "replay", "--workload", "chat,sessions=60,turns=5,rate=4,system=900,output=60", "--workers", "3", "--num-blocks", "4000",
    "--speed", "1,3", "--policy", "round-robin", "--policy", "kv",
]  # fmt: skip


def replay(*args, code=0):
    done = subprocess.run([os.environ["KVASIR_BIN"], *args], capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def test_the_same_seed_gives_the_same_report(tmp_path):
    reports, tables = [], []
    for name in ["a.json", "b.json"]:
        tables.append(replay(*SMALL, "--seeds", "2", "--json", tmp_path / name).stdout)
        report = json.loads((tmp_path / name).read_text())
        assert all(run.pop("wall_s") >= 0 for run in report["runs"])
        reports.append(report)
    assert tables[0] == tables[1] and reports[0] == reports[1]
    assert len(reports[0]["runs"]) == 2 * 2 * 2
    for run in reports[0]["runs"]:
        assert run["completed"] == run["requests"] == 300


def test_kv_finds_more_than_taking_turns(tmp_path):
    replay(*SMALL, "--json", tmp_path / "r.json")
    runs = json.loads((tmp_path / "r.json").read_text())["runs"]
    hits = {(run["policy"], run["speed"]): run["hit_share"] for run in runs}
    for speed in (1.0, 3.0):
        assert hits["kv", speed] > hits["round-robin", speed]


def test_bad_input_says_what_and_where(tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}\n{"timestamp": oops}\n')
    assert "line 2: not a JSON object" in replay("replay", "--trace", bad, code=2).stderr
    assert "router-temperature" in replay("replay", "--workload", "chat", "--policy", "kv,router-temprature=1", code=2).stderr
    assert "--trace" in replay("replay", code=2).stderr


def pixels(png):
    """The set of colours of an 8-bit PNG."""
    at, data, header = 8, b"", None
    while at < len(png):
        size, kind = struct.unpack(">I4s", png[at : at + 8])
        chunk = png[at + 8 : at + 8 + size]
        header = struct.unpack(">IIBBBBB", chunk) if kind == b"IHDR" else header
        data += chunk if kind == b"IDAT" else b""
        at += size + 12
    width, height, depth, kind = header[:4]
    assert depth == 8 and kind in (2, 6)
    step = 3 if kind == 2 else 4
    raw, row, colours = zlib.decompress(data), bytearray(width * step), set()
    for y in range(height):
        start = y * (width * step + 1)
        method, line = raw[start], bytearray(raw[start + 1 : start + 1 + width * step])
        for x in range(len(line)):
            left = line[x - step] if x >= step else 0
            up, corner = row[x], row[x - step] if x >= step else 0
            if method == 1:
                line[x] = (line[x] + left) & 255
            elif method == 2:
                line[x] = (line[x] + up) & 255
            elif method == 3:
                line[x] = (line[x] + (left + up) // 2) & 255
            elif method == 4:
                nearest = min((abs(up - corner), 0, left), (abs(left - corner), 1, up), (abs(left + up - 2 * corner), 2, corner))
                line[x] = (line[x] + nearest[2]) & 255
        row = line
        colours.update(zip(line[0::step], line[1::step], line[2::step]))
    return colours


@pytest.fixture(scope="module")
def browser():
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    assert found, "./test installs chromium; without it: apt-get install chromium"

    def run(*args):
        common = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        done = subprocess.run([found, *common, *map(str, args)], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_the_page_shows_its_plots_in_a_browser(tmp_path, browser):
    page, shot = tmp_path / "report.html", tmp_path / "report.png"
    replay(*SMALL, "--html", page)
    dom = browser("--dump-dom", page.as_uri())
    for figure in ["ttft-cdf-0", "ttft-cdf-1", "hits-0", "hits-1", "loads-0-0", "loads-1-1", "throughput-latency"]:
        assert f'<figure id="{figure}"><svg' in dom, figure
    browser(f"--screenshot={shot}", "--window-size=900,2400", page.as_uri())
    colours = pixels(shot.read_bytes())
    assert (0x00, 0x72, 0xB2) in colours and (0xD5, 0x5E, 0x00) in colours, "no line of either policy was drawn"


def test_a_policy_that_serves_nothing_is_not_the_best():
    table = replay("replay", "--workload", "tenants,requests=50,rate=20", "--workers", "2", "--policy", "direct", "--policy", "kv").stdout
    direct = next(line for line in table.splitlines() if line.split()[:1] == ["direct"])
    assert "*" not in direct and "-" in direct.split(), table
    assert "direct: 50 requests were not completed" in table
