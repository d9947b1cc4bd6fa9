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
import time

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


# A folder of packages that nothing has made anew for so long is no longer used by a run of these tests.
STALE_SECONDS = 2 * 3600


def parts():
    """What the wheel is made of: built by whoever started the tests, since a build now would exchange files under tests that run."""
    built = [target() / "debug" / name for name in ("kvasir", "lib_native.so")]
    for path in built:
        assert path.exists(), f"no {path}: cargo build --package kvasir-cli --package kvasir-python --package kvasir-c"
    package = ROOT / "bindings/python"
    return [*built, package / "wheel.py", package / "README.md", package / "pyproject.toml", *sorted((package / "python/kvasir").rglob("*.py*"))]


@functools.cache
def made():
    """The wheel with the module and the command of this tree, and a folder with the package in it: made once for all processes."""
    with alone() as out:
        seen = [(str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in parts()]
        folder = out / f"packages-{hashlib.sha256(repr(seen).encode()).hexdigest()[:16]}"
        if not folder.exists():
            for old in out.glob("packages-*"):
                if time.time() - old.stat().st_mtime > STALE_SECONDS:
                    shutil.rmtree(old)
            shutil.rmtree(out / "new", ignore_errors=True)
            command = [sys.executable, str(ROOT / "bindings/python/wheel.py"), "--built", "--out", str(out / "new")]
            env = {**os.environ, "CARGO_TARGET_DIR": str(target())}
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
            assert done.returncode == 0, done.stdout + done.stderr
            new = pathlib.Path(done.stdout.strip().splitlines()[-1])
            install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"]
            subprocess.run([*install, "--target", str(out / "new/packages"), str(new)], check=True, timeout=300)
            (out / "new/packages/wheel-file").mkdir()
            new.rename(out / "new/packages/wheel-file" / new.name)
            (out / "new/packages").rename(folder)
    return next((folder / "wheel-file").glob("*.whl")), folder


def wheel():
    """The wheel."""
    return made()[0]


def packages():
    """A folder with the package in it, for tests that import it."""
    return made()[1]


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
