"""Every shell block of a guide is run as its reader would run it, or says in the line before it why it is not.

The blocks of a page are one session: one shell, one folder, one after the other. `kvasir` starts servers in the background and
waits for them (guide_kvasir.py). Addresses of other machines become those of two mock engines, ports move to free ones.
`cargo xtask tidy` checks that every block is either run or has a reason.
"""

import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from conftest import Kvasir
from dynamo_rig import PYTHON, model_folder

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "deploy/README.md", *sorted((ROOT / "docs/start").glob("*.md")), *sorted((ROOT / "docs/guide").glob("*.md"))]
NOT_RUN = re.compile(r"<!-- not run: (.+) -->")
SHELLS = ("sh", "console")
PAGE_SECONDS = 200
# What a page may start besides Kvasir, with `&`.
SERVERS = ("etcd", "nats-server")

# Machines that guides name, and which of two mock engines stands in for each.
ENGINES = {"10.0.0.7": 0, "10.0.0.8": 1, "a": 0, "b": 1, "gpu-1": 0, "gpu-2": 1}
ENGINE = re.compile(r"http://(" + "|".join(map(re.escape, ENGINES)) + r"):8000\b")
OWN_PORT = re.compile(r"((?:127\.0\.0\.1|localhost):|-port[ =]| -p |tcp://\*:)(\d{4,5})\b")
SERVER_AT_ONCE = re.compile(r"^((?:\w+=\S+ )*(?:kvasir|cargo run) (?:[^\n\\]|\\.|\\\n)*?) &(?=\s*(?:#.*)?$)", re.MULTILINE)
# Stands for each model whose folder a page names: a tokenizer that is read in no time.
SMALL_MODEL = ROOT / "crates/text/src/builtin"
MODELS = ("Qwen2.5-7B-Instruct", "Llama-3.1-8B-Instruct", "qwen2.5")


def blocks(text):
    """(line, language, reason why it is not run, lines) of each fenced block of a shell."""
    found, opened, before = [], None, ""
    for number, line in enumerate(text.splitlines(), 1):
        if opened is None and line.lstrip().startswith("```"):
            opened = (number, line.strip("` "), NOT_RUN.fullmatch(before.strip()), [])
        elif opened is not None and line.lstrip().startswith("```"):
            if opened[1] in SHELLS:
                found.append(opened)
            opened, line = None, ""
        elif opened is not None:
            opened[3].append(line)
        before = line
    return found


def commands(language, lines):
    """What the reader types: of a console the lines after a prompt, the rest is what is printed."""
    if language == "console":
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return textwrap.dedent("\n".join(lines)) + "\n"


def needed(text):
    """Servers that a block starts and that are not here."""
    return [name for name in SERVERS if re.search(rf"^{name} ", text, re.MULTILINE) and not shutil.which(name)]


def script_of(page):
    told = [(line, commands(language, lines)) for line, language, reason, lines in blocks(page.read_text()) if not reason]
    # From the first block on that starts a server which is not here, none is run: they build on each other.
    told = itertools.takewhile(lambda block: not needed(block[1]), told)
    return "".join(f"echo '--- line {line}' >&2\n{text}" for line, text in told)


def free_shift(ports):
    """How far all ports of a page are moved, so that nobody has them; neighbours stay neighbours."""
    ports = {near + step for near in ports for step in range(4)}
    # All stay below what the kernel gives to outgoing connections.
    for number in range(130):
        shift = 10000 + (os.getpid() + number) % 130 * 100
        try:
            for port in ports:
                with socket.socket() as taken:
                    taken.bind(("127.0.0.1", port + shift))
            return shift
        except OSError:
            continue
    raise AssertionError("no free ports")


def runnable():
    return [pytest.param(page, id=page.relative_to(ROOT).as_posix()) for page in PAGES if script_of(page)]


@pytest.fixture
def engines():
    """Two mock servers that publish events, started when a page names engines."""
    started = []

    def start():
        mocker = Kvasir("mocker", "--http-host", "127.0.0.1", "--http-port", "0", "--workers", "2", "--model-name", "qwen",
                        "--kv-events-port", "0", "--speedup", "50", "--model-path", SMALL_MODEL)  # fmt: skip
        started.append(mocker)
        return [mocker.wait_for(r"on (http://127\.0\.0\.1:\d+)").group(1) for _ in range(2)]

    yield start
    for mocker in started:
        mocker.stop()


def tool(folder, name, text):
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)


@pytest.mark.skipif(shutil.which("jq") is None or shutil.which("curl") is None, reason="NO jq or curl here: shell blocks of guides are NOT run")
@pytest.mark.parametrize("page", runnable())
def test_the_blocks_of_a_page_run_in_their_order(page, tmp_path, engines):
    script = script_of(page)
    needs_dynamo = "-m dynamo." in script
    if needs_dynamo and not (os.path.exists(PYTHON) and os.environ.get("KVASIR_TEST_QWEN_DIR")):
        pytest.skip("NO ai-dynamo or no tokenizer here (KVASIR_DYNAMO_PYTHON, KVASIR_TEST_QWEN_DIR): this page is NOT run")
    if ENGINE.search(script):
        urls = engines()
        script = ENGINE.sub(lambda found: urls[ENGINES[found.group(1)]], script)
    script = script.replace("http://10.0.0.1:", "http://127.0.0.1:").replace("/models/", "./models/")
    shift = free_shift({8000, *(int(port) for _, port in OWN_PORT.findall(script) if int(port) < 20000)})
    script = OWN_PORT.sub(lambda found: found.group(1) + str(int(found.group(2)) + (shift if int(found.group(2)) < 20000 else 0)), script)
    script = SERVER_AT_ONCE.sub(r"\1", script)

    bin_folder, pids = tmp_path / "bin", tmp_path / "pids"
    for folder in (bin_folder, pids, tmp_path / "work/models"):
        folder.mkdir(parents=True)
    model = model_folder() if needs_dynamo else SMALL_MODEL
    for name in MODELS:
        (tmp_path / "work/models" / name).symlink_to(model)
        (tmp_path / "work" / name).symlink_to(model)
    tool(bin_folder, "kvasir", f'#!/bin/sh\nexec {sys.executable} {ROOT}/tests/e2e/guide_kvasir.py "$@"\n')
    tool(bin_folder, "cargo", '#!/bin/sh\n[ "$1 $2 $3" = "run --release --" ] || exit 64\nshift 3\nexec kvasir "$@"\n')
    tool(bin_folder, "python", f'#!/bin/sh\nexec {PYTHON or sys.executable} "$@"\n')
    tool(bin_folder, "curl", f'#!/bin/sh\nexec {shutil.which("curl")} --fail-with-body --max-time 60 "$@"\n')
    if shutil.which("etcd"):
        # Its second port is not the reader's concern, but other tests use it, too.
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            peer = f"http://127.0.0.1:{taken.getsockname()[1]}"
        flags = f"--listen-peer-urls {peer} --initial-advertise-peer-urls {peer} --initial-cluster default={peer}"
        tool(bin_folder, "etcd", f'#!/bin/sh\nexec {shutil.which("etcd")} {flags} "$@"\n')
    tool(bin_folder, "sudo", '#!/bin/sh\nexec "$@"\n')
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("DYN_", "KVASIR_", "OTEL_"))}
    env = {
        **plain, "GUIDE_BINARY": os.environ["KVASIR_BIN"], "GUIDE_PORT": str(8000 + shift), "PIDS": str(pids), "PATH": f"{bin_folder}:{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1", "DYN_TCP_RPC_HOST": "127.0.0.1",
        "DYN_EVENT_PLANE_HOST": "127.0.0.1", "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0", "TMPDIR": str(tmp_path),
    }  # fmt: skip
    (tmp_path / "page.sh").write_text("set -euo pipefail\n" + script)
    shell = subprocess.Popen(["bash", tmp_path / "page.sh"], cwd=tmp_path / "work", env=env, stdin=subprocess.DEVNULL,
                             stdout=(tmp_path / "out").open("w"), stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip
    try:
        code = shell.wait(PAGE_SECONDS)
    except subprocess.TimeoutExpired:
        code = "no end"
    finally:
        # What a block started with & is in the shell's group; servers have sessions of their own.
        for group in [shell.pid, *(int(file.read_text()) for file in pids.iterdir())]:
            try:
                os.killpg(group, signal.SIGKILL)
            except ProcessLookupError:
                pass
    logs = "".join(f"\n=== {log.name}\n{log.read_text()[-2000:]}" for log in tmp_path.glob("*.log"))
    assert code == 0, f"{page}: {code}\n{(tmp_path / 'out').read_text()[-6000:]}{logs}"


def test_reasons_are_read_and_consoles_have_prompts():
    text = "<!-- not run: needs a GPU -->\n```sh\nvllm serve\n```\n\n```console\n$ kvasir top\nkvasir top\n```\n```text\nx\n```\n"
    found = blocks(text)
    assert [(line, language, bool(reason)) for line, language, reason, _ in found] == [(2, "sh", True), (6, "console", False)]
    assert commands(*[(language, lines) for _, language, _, lines in found][1]) == "kvasir top\n"
    assert SERVER_AT_ONCE.sub(r"\1", "kvasir mocker \\\n  --x 'y' &\nsleep 9 &") == "kvasir mocker \\\n  --x 'y'\nsleep 9 &"
