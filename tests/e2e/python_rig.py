"""The wheel: built once for all tests, as `bindings/python/wheel.py` builds it, and put where Python finds it."""

import contextlib
import fcntl
import functools
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "python"
# A model's folder that is small and always there.
BUILTIN = ROOT / "crates/text/src/builtin"


def target():
    """Where cargo put the binary that is tested."""
    return pathlib.Path(os.environ["KVASIR_BIN"]).resolve().parents[1]


@contextlib.contextmanager
def alone():
    """Files are tested by several processes at once; the first builds, the others find all done."""
    out = target() / "wheel"
    out.mkdir(exist_ok=True)
    with open(out / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield out


@functools.cache
def wheel():
    """The wheel, with the module and the command of this tree."""
    with alone() as out:
        command = [sys.executable, str(ROOT / "bindings/python/wheel.py"), "--out", str(out)]
        env = {**os.environ, "CARGO_TARGET_DIR": str(target())}
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=env)
        assert done.returncode == 0, done.stdout + done.stderr
        return pathlib.Path(done.stdout.strip().splitlines()[-1])


@functools.cache
def packages():
    """A folder with the package in it, for tests that import it."""
    digest = hashlib.sha256(wheel().read_bytes()).hexdigest()[:16]
    with alone() as out:
        folder = out / f"packages-{digest}"
        if not folder.exists():
            for old in out.glob("packages-*"):
                shutil.rmtree(old)
            install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"]
            subprocess.run([*install, "--target", str(folder), str(wheel())], check=True, timeout=120)
    return folder


@pytest.fixture(scope="module")
def kvasir():
    """The package, imported."""
    sys.path.insert(0, str(packages()))
    import kvasir

    yield kvasir
    sys.path.remove(str(packages()))


def environment(folder, **more):
    """The environment of a program that finds others in a folder."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("DYN_", "KVASIR_", "NATS_", "ETCD_"))}
    planes = {
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(folder),
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "zmq",
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "PYTHONPATH": str(packages()),
        "PYTHONUNBUFFERED": "1",
    }
    return {**kept, **planes, **more}
