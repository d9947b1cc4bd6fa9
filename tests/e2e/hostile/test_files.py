"""Files that are not what they should be: the frontend says so, and holds little for it."""

import json
import os
import stat
import subprocess

import httpx
import pytest

from conftest import Kvasir, until
from engines import ScriptedEngine, frontend_before
from hostile.proc_memory import MB, peak, rss

GB = 1 << 30


def sparse(path, size, head=b""):
    """A file of `size` bytes that takes no room on the disk."""
    with open(path, "wb") as file:
        file.write(head)
        file.truncate(size)


@pytest.mark.parametrize("head", [b"", b"KVST\x01\x00", b"KVST\x01\x00\xff\xff\xff\xff"], ids=["zeros", "head", "lengths"])
def test_a_sparse_snapshot_of_three_gigabytes_is_refused(tmp_path, head):
    kept = tmp_path / "index.kv"
    sparse(kept, 3 * GB, head)
    engine = ScriptedEngine("m")
    kvasir = frontend_before([engine.url], "--index-snapshot", str(kept))
    kvasir.until_logged("index snapshot refused: starting cold")
    assert peak(kvasir) < 300 * MB, f"{peak(kvasir) / MB:.0f} MB"
    assert kvasir.stop() == 0
    engine.stop()
    assert kept.stat().st_size < MB, "the next one is ours"


def test_a_snapshot_that_is_no_file_delays_nobody(tmp_path):
    kept = tmp_path / "index.kv"
    os.mkfifo(kept)
    engine = ScriptedEngine("m")
    kvasir = frontend_before([engine.url], "--index-snapshot", str(kept))
    kvasir.until_logged("starting cold")
    kvasir.stop()
    assert stat.S_ISFIFO(os.stat(kept).st_mode), "it is not replaced by a file"
    engine.stop()


def refused(*options):
    """What a start that fails says."""
    command = [os.environ["KVASIR_BIN"], "frontend", "--http-host", "127.0.0.1", "--http-port", "0", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, (done.returncode, done.stderr)
    assert len(done.stderr) < 4000
    return done.stderr


@pytest.mark.parametrize(
    "content, told",
    [
        (b"http://a:8000\n" * 400_000, "longer than 4194304 bytes"),
        (b"\xff\xfe\x00", "is not UTF-8 text"),
        (b"http://a:70000\n", "line 1: `http://a:70000` has a port that there is not"),
        (b"http://a:8000\nhttp://b:0\n", "line 2: `http://b:0` has a port"),
        (b"http://a:8000,events=ipc:///tmp/x\n", "not a value of events; it takes an address as tcp://host:5557"),
        (b"http://a:8000,events=tcp://a:99999\n", "not a value of events"),
        (b'{"workers": []}\n', "looks like JSON"),
    ],
    ids=["long", "binary", "port", "port-0", "ipc", "event-port", "json"],
)
def test_a_bad_workers_file_stops_the_start_and_is_named(tmp_path, content, told):
    path = tmp_path / "workers.txt"
    path.write_bytes(content)
    said = refused("--workers-file", str(path))
    assert str(path) in said and told in said, said


@pytest.mark.parametrize("option", ["--http-api-key-file", "--router-policy-config", "--config", "--worker-tls-ca-path", "--workers-file"])
def test_a_file_without_an_end_is_left_in_time(option):
    assert "/dev/zero" in refused("--worker", "http://127.0.0.1:9", option, "/dev/zero")


def test_a_workers_file_that_is_a_pipe_is_refused_and_keeps_nobody_waiting(tmp_path):
    path = tmp_path / "workers.txt"
    os.mkfifo(path)
    assert "it is not a file" in refused("--workers-file", str(path))
    path.unlink()
    path.write_text("http://127.0.0.1:9\n")
    kvasir = Kvasir("frontend", "--http-host", "127.0.0.1", "--http-port", "0", "--workers-file", str(path))
    kvasir.wait_for(r"address\W+(127\.0\.0\.1:\d+)")
    path.unlink()
    os.mkfifo(path)
    kvasir.until_logged("it is not a file; the workers stay as they were")
    assert kvasir.stop() == 0


def test_a_workers_file_that_turns_bad_changes_nothing(tmp_path):
    engine = ScriptedEngine("m")
    path = tmp_path / "workers.txt"
    path.write_text(engine.url + "\n")
    kvasir = Kvasir("frontend", "--http-host", "127.0.0.1", "--http-port", "0", "--workers-file", str(path))
    url = "http://" + kvasir.wait_for(r"address\W+(127\.0\.0\.1:\d+)").group(1)
    serving = lambda: httpx.get(f"{url}/workers", timeout=30).json()["workers"]  # noqa: E731
    until(lambda: len(serving()) == 1)
    before = rss(kvasir)
    sparse(path, 3 * GB)
    kvasir.until_logged("longer than 4194304 bytes; the workers stay as they were")
    path.write_text("http://a:70000\n")
    kvasir.until_logged("has a port that there is not")
    assert len(serving()) == 1 and rss(kvasir) < before + 64 * MB
    # The same over the route of operators.
    for worker in [{"url": "http://a:70000"}, {"url": "http://a:1", "events": "ipc:///tmp/x"}]:
        answer = httpx.post(f"{url}/workers", json=worker, timeout=30)
        assert answer.status_code == 400, answer.text
    assert kvasir.stop() == 0
    engine.stop()


@pytest.mark.parametrize(
    "content, told",
    [
        (b"SECRET words\n", "line 1: one key stands on a line"),
        (b"ok\nSECRET\xc3\xa9\n", "line 2: a key has at most 1024 characters, all visible ASCII"),
        (b"SECRET" * 300_000, "longer than 1048576 bytes"),
        (b"SECRET\n" * 5000, "more than 4096 keys"),
        (b"# nothing\n", "holds no key"),
        (b"\xff\xfe", "is not UTF-8 text"),
    ],
    ids=["words", "letters", "long", "many", "empty", "binary"],
)
@pytest.mark.parametrize("option", ["--http-api-key-file", "--admin-token-file"])
def test_a_bad_key_file_stops_the_start_and_shows_no_key(tmp_path, content, told, option):
    path = tmp_path / "keys.txt"
    path.write_bytes(content)
    said = refused("--worker", "http://127.0.0.1:9", option, str(path))
    assert option in said and str(path) in said and told in said, said
    assert "SECRET" not in said


def test_a_key_may_have_a_name_beside_it(tmp_path):
    path = tmp_path / "keys.txt"
    path.write_text("# teams\nk1 # team a\nk2\t# team b\n")
    engine = ScriptedEngine("m")
    engine.say({"id": "1", "choices": []})
    kvasir = frontend_before([engine.url], "--http-api-key-file", str(path), token="k1")
    status = lambda key: httpx.get(f"{kvasir.url}/v1/models", headers={"authorization": f"Bearer {key}"}).status_code  # noqa: E731
    assert [status(key) for key in ("k1", "k2", "k1 # team a", "team")] == [200, 200, 401, 401]
    assert kvasir.stop() == 0
    engine.stop()


def test_names_and_numbers_of_models_have_bounds():
    """One engine lists a name of 200 KB and one with an escape, another four thousand models."""
    names = ["fine", "x" * 200_000, "esc\x1b[2J", "", "y" * 256, "z" * 257]
    listed = lambda names: json.dumps({"object": "list", "data": [{"id": name, "object": "model"} for name in names]})  # noqa: E731
    odd = ScriptedEngine("m", pages={"/v1/models": listed(names)})
    kvasir = Kvasir("frontend", "--http-host", "127.0.0.1", "--http-port", "0", "--worker", odd.url)
    kvasir.url = "http://" + kvasir.wait_for(r"address\W+(127\.0\.0\.1:\d+)").group(1)
    served = lambda: [model["id"] for model in httpx.get(f"{kvasir.url}/v1/models", timeout=30).json()["data"]]  # noqa: E731
    assert until(lambda: sorted(served())) == ["fine", "y" * 256]
    line = kvasir.until_logged("models of this worker are not served")
    assert "refused=4" in line and len(line) < 1000, line
    assert len(httpx.get(f"{kvasir.url}/metrics", timeout=30).content) < MB
    many = ScriptedEngine("m", pages={"/v1/models": listed([f"adapter-{n}" for n in range(4000)])})
    httpx.post(f"{kvasir.url}/workers", json={"url": many.url}, timeout=30).raise_for_status()
    until(lambda: len(served()) == 1024, 60, kvasir.log)
    assert peak(kvasir) < 400 * MB, f"{peak(kvasir) / MB:.0f} MB"
    assert kvasir.stop() == 0
    odd.stop()
    many.stop()
