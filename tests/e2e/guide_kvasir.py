#!/usr/bin/env python3
"""What `kvasir` means in a guide's block: servers go to the background and are waited for, everything else is the binary.

A reader gives a server a terminal of its own and goes on when it is ready. So does this: `frontend`, `demo` and `mocker` are
started, waited for, and left to whoever ends the page (`PIDS` is a folder with a file for each port). A server whose port an
earlier block's server still has takes its place. They listen on loopback.
"""

import json
import os
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

SERVERS = ("frontend", "demo", "indexer", "mocker", "router", "select", "slot-tracker")
ASKERS = ("doctor", "health", "top", "upgrade", "why", "workers")
READY_SECONDS = 90


def main():
    binary, words = os.environ["GUIDE_BINARY"], sys.argv[1:]
    if not words or words[0] not in SERVERS or {"-h", "--help"} & set(words):
        asks = words and words[0] in ASKERS and not {"--worker", "--url", "--discovery-backend"} & set(words)
        if asks and "KVASIR_URL" not in os.environ:
            words += ["--url", f"http://127.0.0.1:{os.environ['GUIDE_PORT']}"]
        os.execv(binary, [binary, *words])
    pids = Path(os.environ["PIDS"])
    in_fleet = words[0] == "mocker" and "--discovery-backend" in words and "--http-port" not in words
    door = "system" if words[0] == "router" else "http"
    if not in_fleet and f"--{door}-port" not in words:
        words += [f"--{door}-port", os.environ["GUIDE_PORT"]]
    if not in_fleet and f"--{door}-host" not in words:
        words += [f"--{door}-host", "127.0.0.1"]
    port = "none" if in_fleet else words[words.index(f"--{door}-port") + 1]
    end_earlier(pids / port)
    log = (pids.parent / f"{words[0]}-{port}.log").open("a")
    server = subprocess.Popen([binary, *words], stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)
    (pids / port).write_text(str(server.pid))
    if not in_fleet:
        wait(server, words, port, log.name)


def end_earlier(file):
    if not file.exists():
        return
    pid = int(file.read_text())
    try:
        os.kill(pid, signal.SIGKILL)
        end = time.monotonic() + 20
        while time.monotonic() < end:
            os.kill(pid, 0)
            time.sleep(0.02)
    except ProcessLookupError:
        pass


def wait(server, words, port, log):
    scheme = "https" if "--tls-cert-path" in words else "http"
    anyone = ssl.create_default_context()
    anyone.check_hostname, anyone.verify_mode = False, ssl.CERT_NONE
    end = time.monotonic() + READY_SECONDS
    said = "nothing"
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{scheme}://127.0.0.1:{port}/health", timeout=5, context=anyone):
                return
        except urllib.error.HTTPError as refused:
            said = refused.read().decode(errors="replace")
        except (OSError, json.JSONDecodeError) as error:
            said = str(error)
        time.sleep(0.05)
    sys.exit(f"kvasir {' '.join(words)}: not ready, /health said {said}; exit code {server.poll()}\n{Path(log).read_text()[-4000:]}")


main()
