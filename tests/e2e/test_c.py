"""libkvasir: its header compiles, and programs in C and Go route and publish with it beside workers of Python."""

import json
import re
import shutil
import subprocess
import threading

import pytest

from conftest import until
from python_rig import BUILTIN, EXAMPLES, ROOT, environment, target
from test_python_runtime import Program

INCLUDE = ROOT / "bindings/c/include"
STRICT = ["-std=c11", "-D_GNU_SOURCE", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{INCLUDE}"]
BODY = json.dumps({"model": "echo", "messages": [{"role": "user", "content": "The quick brown fox jumps over the lazy dog. " * 8}]})


# Takes requests and tells nothing of its cache: another process does.
WORKER = """
import asyncio, sys
from kvasir.llm import ModelInput, ModelType, WorkerType, register_model
from kvasir.runtime import dynamo_worker

async def answer(request):
    yield {"token_ids": request["token_ids"][:1], "finish_reason": "length"}

@dynamo_worker()
async def main(runtime, folder):
    endpoint = runtime.endpoint("dynamo.backend.generate")
    kinds = (ModelInput.Tokens, ModelType.Chat | ModelType.Completions)
    await register_model(*kinds, endpoint, folder, "echo", kv_cache_block_size=16, worker_type=WorkerType.Aggregated)
    print(f"worker {endpoint.connection_id()} serves echo", flush=True)
    await endpoint.serve_endpoint(answer)

asyncio.run(main(sys.argv[1]))
"""


def library():
    """Where cargo put libkvasir."""
    folder = target() / "debug"
    assert (folder / "libkvasir.so").exists(), "no libkvasir: cargo build --package kvasir-c"
    return folder


def compiled(source, out, static=False):
    """A program, linked with the library."""
    folder = library()
    shared = [f"-L{folder}", f"-Wl,-rpath,{folder}", "-lkvasir"]
    libraries = [str(folder / "libkvasir.a"), "-lm"] if static else shared
    command = ["cc", *STRICT, str(source), "-o", str(out), *libraries, "-lpthread", "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return out


class Piped(Program):
    """A program that reads lines."""

    def __init__(self, *command, env):
        self.lines = []
        self.process = subprocess.Popen(
            [str(word) for word in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def tell(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def close(self):
        """Ends its input; it must end well."""
        self.process.stdin.close()
        assert self.process.wait(30) == 0, self.log()
        self._reader.join(10)


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    """A folder in which two workers announce themselves, and their ids."""
    folder = tmp_path_factory.mktemp("kv")
    engines = [Program("-c", WORKER, BUILTIN, env=environment(folder)) for _ in range(2)]
    ids = [int(re.search(r"worker (\d+)", engine.said("serves echo")).group(1)) for engine in engines]
    yield folder, ids
    for engine in engines:
        engine.end()


def test_a_gateway_in_c_follows_the_cache_that_an_engine_in_c_tells(workers, tmp_path):
    folder, ids = workers
    env = environment(folder)
    gateway = Piped(compiled(ROOT / "examples/c/gateway.c", tmp_path / "gateway", static=True), "dynamo", env=env)

    def answers():
        """What it printed, without its log lines."""
        return [line for line in list(gateway.lines) if line.startswith("worker ")]

    def asked():
        before = len(answers())
        gateway.tell(BODY)
        until(lambda: len(answers()) > before, 60, gateway.log)
        found = re.match(r"worker (\d+) rank 0 tokens ([\d ]+)\n", answers()[before])
        assert found, gateway.log()
        return int(found.group(1)), found.group(2)

    first, tokens = asked()
    assert first in ids and len(tokens.split()) >= 32, tokens
    program = compiled(ROOT / "examples/c/engine.c", tmp_path / "engine")
    # Whichever worker it would be by chance: with its blocks told it is that one, each time.
    for worker in ids:
        engine = Piped(program, "dynamo", "backend", worker, env=env)
        engine.said(f"publishes for worker {worker}")
        engine.tell(tokens)
        engine.said(f"stored {len(tokens.split()) // 16} blocks")
        until(lambda: [asked()[0] for _ in range(8)] == [worker] * 8, 60, gateway.log)
        engine.close()
    gateway.close()


def test_misuse_is_a_code_and_a_word(tmp_path):
    engine = Program(EXAMPLES / "engine.py", BUILTIN, env=environment(tmp_path))
    worker = re.search(r"worker (\d+)", engine.said("serves echo")).group(1)
    program = compiled(ROOT / "bindings/c/tests/misuse.c", tmp_path / "misuse")
    command = [program, "dynamo", BODY, worker]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment(tmp_path, DYN_LOG="error"))
    assert done.returncode == 0 and done.stdout == "all is well\n", done.stdout + done.stderr
    engine.end()


def test_the_header_is_c_plus_plus_too(tmp_path):
    if not shutil.which("c++"):
        pytest.skip("NO c++ here: the header is NOT tried with it")
    (tmp_path / "a.cc").write_text('#include "kvasir.h"\nint main() { return kvasir_version() == nullptr; }\n')
    command = ["c++", "-Wall", "-Werror", f"-I{INCLUDE}", "-fsyntax-only", str(tmp_path / "a.cc")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_gateway_in_go(workers, tmp_path):
    go = shutil.which("go")
    if go is None:
        pytest.skip("NO go here (Debian: golang-go): the library is NOT tried from Go")
    folder, ids = workers
    libraries = library()
    env = environment(
        folder,
        CGO_ENABLED="1",
        CGO_CFLAGS=f"-I{INCLUDE}",
        CGO_LDFLAGS=f"-L{libraries} -Wl,-rpath,{libraries}",
        GOCACHE=str(tmp_path / "cache"),
        GOPATH=str(tmp_path / "path"),
        GO111MODULE="off",
        GOFLAGS="",
        GOTOOLCHAIN="local",
    )
    program = tmp_path / "gateway"
    built = subprocess.run([go, "build", "-o", program, ROOT / "examples/go/main.go"], capture_output=True, text=True, timeout=280, env=env)
    assert built.returncode == 0, built.stderr
    done = subprocess.run([program, "dynamo", BODY], capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    worker, tokens = re.match(r"worker (\d+) tokens (\d+)\n", done.stdout).groups()
    assert int(worker) in ids and int(tokens) >= 32, done.stdout
