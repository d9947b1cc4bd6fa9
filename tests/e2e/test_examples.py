"""The programs and files in `examples/` do what their first lines say."""

import os
import pathlib
import re
import socket
import subprocess
import sys

from conftest import Kvasir

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
# What two-engines.sh takes of the ports from its first on.
PORTS = range(31)


def kvasir(*args):
    return subprocess.run([os.environ["KVASIR_BIN"], *args], capture_output=True, text=True, timeout=30)


def free_ports():
    """The first of so many ports in a row that nobody has."""
    for first in range(18800, 28800, 100):
        try:
            for more in PORTS:
                with socket.socket() as taken:
                    taken.bind(("127.0.0.1", first + more))
        except OSError:
            continue
        return first
    raise AssertionError("no free ports")


def test_two_engines():
    env = {**os.environ, "KVASIR": os.environ["KVASIR_BIN"], "PORT": str(free_ports())}
    told = subprocess.run([EXAMPLES / "two-engines.sh"], env=env, capture_output=True, text=True, timeout=60)
    assert told.returncode == 0, told.stdout + told.stderr
    cached = [int(n) for n in re.findall(r"(\d+) cached", told.stdout)]
    assert cached[0] == 0 and cached[1] > 0, told.stdout
    assert told.stdout.count("serving") == 2, told.stdout


def test_chat():
    demo = Kvasir("demo", "--http-host", "127.0.0.1", "--http-port", "0")
    url = demo.wait_for(r"at (http://127\.0\.0\.1:\d+)").group(1)
    told = subprocess.run([sys.executable, EXAMPLES / "chat.py", url, "kvasir-demo"], capture_output=True, text=True, timeout=60)
    assert told.returncode == 0, told.stderr
    cached = [int(n) for n in re.findall(r"(\d+) cached", told.stdout)]
    assert len(cached) == 3 and cached[0] == 0 and cached[2] > 0, told.stdout
    assert demo.stop() == 0


def test_files_are_accepted():
    told = kvasir("config", "check", "--config", str(EXAMPLES / "kvasir.toml"))
    assert told.returncode == 0, told.stderr
    frontend = Kvasir(
        "frontend", "--http-host", "127.0.0.1", "--http-port", "0", "--router-mode", "kv",
        "--workers-file", str(EXAMPLES / "workers.txt"), "--router-policy-config", str(EXAMPLES / "policy-classes.yaml"),
    )
    frontend.wait_for(r"listening address=127\.0\.0\.1:\d+")
    frontend.stop()
