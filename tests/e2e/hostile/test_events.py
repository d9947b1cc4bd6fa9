"""Event sockets that mislead: events that come late, a port that speaks nonsense, sockets of the wrong engine, a tokenizer
that differs in two ids. Each is named for what it is, healthy engines raise no alarm, and no fault fills the log."""

import concurrent.futures
import contextlib
import json
import os
import pathlib
import random
import shutil
import socket
import struct
import subprocess
import threading
import time

import httpx

from conftest import until
from engines import ScriptedEngine
from events_rig import BLOCK, MODEL, Engine, Rig

MODEL_DIR = pathlib.Path(__file__).parents[3] / "crates/text/src/builtin"


def sockets_of(engine):
    """Where an engine says that its events and its replay are."""
    told = engine.http.get("/kv_event_sources").json()["0"]
    return told["endpoint"], told["replay_endpoint"]


class SlowPath:
    """A path to a socket on which what the engine says takes a while: in order, some of it longer than the rest."""

    def __init__(self, address, least, most, seed=1):
        host, port = address.removeprefix("tcp://").rsplit(":", 1)
        self.target, self.least, self.most = (host, int(port)), least, most
        self.rng, self.late = random.Random(seed), True
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = "tcp://127.0.0.1:%d" % self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                engine = socket.create_connection(self.target)
                threading.Thread(target=self.carry, args=(client, engine, False), daemon=True).start()
                threading.Thread(target=self.carry, args=(engine, client, True), daemon=True).start()

    def carry(self, source, sink, slow):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if slow and self.late:
                    time.sleep(self.rng.uniform(self.least, self.most))
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self):
        self.listener.close()


def test_a_starved_engine_raises_no_alarm():
    """Events come 200 to 500 ms late while conversations go on: nothing is wrong with them, and they are waited for."""
    engine = Engine()
    events, replay = (SlowPath(address, 0.2, 0.5) for address in sockets_of(engine))
    engine.url += f",events={events.address},replay={replay.address}"
    rig = Rig([engine])
    rig.prove(engine)
    shared = rig.fresh(20)

    def talk(seed):
        rng = random.Random(seed)
        prompt = shared + [rng.randrange(4000) for _ in range(3 * BLOCK)]
        for _ in range(6):
            rig.ask(prompt, engine)
            prompt = prompt + [rng.randrange(4000) for _ in range(2 * BLOCK)]

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        list(pool.map(talk, range(12)))
    rig.settle(engine)
    # Whatever is still to be judged is judged within twice the longest lag.
    until(lambda: rig.cache(engine)["events"]["delay_ms"] >= 100, told=rig.log)
    time.sleep(1.5)
    page = rig.http.get("/metrics").text
    findings = [line for line in page.splitlines() if line.startswith("kvasir_worker_predictions_total")]
    wrong = [line for line in findings if not ('finding="right"' in line or 'finding="late"' in line)]
    assert findings and not wrong, wrong
    assert rig.cache(engine)["state"] == "exact"
    assert "replaying" not in rig.log() and "not trusted" not in rig.log()
    assert rig.findings(engine, "late") > 0, "events were not late enough to show anything"
    events.close(), replay.close()
    rig.close()


def test_swapped_sockets_are_named_at_start_and_by_what_they_tell():
    """Two engines, each with the other's event socket: said at start, and by the first prompts that appear elsewhere."""
    engines = [Engine(), Engine()]
    for engine, (events, replay) in zip(engines, [sockets_of(engines[1]), sockets_of(engines[0])]):
        engine.url += f",events={events},replay={replay}"
    rig = Rig(engines, settle=False)
    for _ in range(2):
        rig.frontend.until_logged("events= is not what the engine announces")

    def named():
        for engine in engines:
            rig.ask(rig.fresh(), engine)
        return all(rig.cache(engine)["cause"] == "other_engine" for engine in engines)

    rig.until(named, "both are named")
    assert all("events=" in rig.cache(engine)["advice"] for engine in engines)
    assert all(rig.findings(engine, "events_missing") == 0 for engine in engines)
    rig.close()


def test_one_socket_for_two_workers_is_named():
    """The second has the first one's socket: said at start; its own prompts appear nowhere, the first one's at both."""
    first, second = Engine(), Engine()
    events, replay = sockets_of(first)
    second.url += f",events={events},replay={replay}"
    rig = Rig([first, second], settle=False)
    line = rig.frontend.until_logged("two workers have one event address")
    assert first.url in line and second.url.split(",")[0] in line, line

    def named():
        for engine in rig.engines:
            rig.ask(rig.fresh(), engine)
        return rig.cache(second)["cause"] == "other_engine" and rig.cache(first)["state"] == "exact"

    rig.until(lambda: rig.ask(rig.fresh(), first) and named(), "the second is named and the first is believed")
    rig.close()


class Nonsense:
    """A port that speaks; `hello` is what it says to each connection, `more` what it says then, if anything."""

    def __init__(self, hello, more=()):
        self.hello, self.more = hello, more
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = "tcp://127.0.0.1:%d" % self.listener.getsockname()[1]
        self.open = True
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        with contextlib.suppress(OSError):
            while True:
                peer, _ = self.listener.accept()
                threading.Thread(target=self.speak, args=(peer,), daemon=True).start()

    def speak(self, peer):
        with contextlib.suppress(OSError):
            peer.sendall(self.hello)
            for part in self.more:
                peer.sendall(part)
                time.sleep(0.02)
                if not self.open:
                    break
            peer.close()

    def close(self):
        self.open = False
        self.listener.close()


def test_a_port_that_speaks_nonsense_is_named_without_a_flood():
    port = Nonsense(b"SSH-2.0-OpenSSH_9.6\r\n" * 9)
    engine = Engine(events=False)
    engine.url += f",events={port.address}"
    rig = Rig([engine], settle=False)
    rig.until(lambda: rig.cache(engine)["cause"] == "events_unreachable", "the cause is named")
    time.sleep(4)
    lines = [line for line in rig.log().splitlines() if "event socket" in line]
    assert 1 <= len(lines) <= 3, "\n".join(lines)
    assert any(engine.url.split(",")[0] in line and port.address in line for line in lines), lines
    port.close()
    rig.close()


def zmtp_hello():
    """The greeting and the READY command of a publisher without security."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)
    properties = b"\x0bSocket-Type" + struct.pack(">I", 3) + b"PUB"
    ready = b"\x05READY" + properties
    return greeting + b"\x04" + bytes([len(ready)]) + ready


def zmtp_message(*parts):
    """The parts of one message, each short."""
    flags = [1] * (len(parts) - 1) + [0]
    return b"".join(bytes([flag, len(part)]) + part for flag, part in zip(flags, parts))


def test_unreadable_messages_do_not_fill_the_log():
    """Thousands of messages with the right frames and rubbish in them: one line, and a count in `faults`."""
    message = lambda at: zmtp_message(b"", struct.pack(">Q", at), b"\xc1rubbish")  # noqa: E731
    rubbish = (b"".join(map(message, range(at, at + 200))) for at in range(0, 200_000, 200))
    port = Nonsense(zmtp_hello(), rubbish)
    engine = Engine(events=False)
    engine.url += f",events={port.address}"
    rig = Rig([engine], settle=False)
    rig.until(lambda: rig.cache(engine)["events"]["faults"].get("unreadable", 0) > 2000, "they are counted")
    lines = [line for line in rig.log().splitlines() if "unreadable event message" in line]
    assert len(lines) == 1, f"{len(lines)} lines\n{lines[:3]}"
    assert len(rig.log().splitlines()) < 60, rig.log()
    port.close()
    rig.close()


def swapped(tmp_path, first=900, second=1700):
    """A folder like the built-in model's, but for two ids that have changed places."""
    folder = tmp_path / "swapped"
    shutil.copytree(MODEL_DIR, folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    words = {at: word for word, at in vocabulary.items()}
    vocabulary[words[first]], vocabulary[words[second]] = second, first
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder, [words[at].replace("Ġ", " ") for at in (first, second)]


def doctor(*args):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("DYN_", "KVASIR_"))}
    command = [os.environ["KVASIR_BIN"], "doctor", "--timeout-secs", "5", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)


def test_two_swapped_ids_are_found(tmp_path):
    """Doctor reads a text with all common ids; the frontend sees that the engine stores other blocks than ours, with equal
    counts, and calls it that."""
    folder, words = swapped(tmp_path)
    engine = Engine("--model-path", str(MODEL_DIR))
    done = doctor("--json", "--worker", engine.url, "--model-path", str(folder))
    checks = {check["check"]: check for check in json.loads(done.stdout)["workers"][0]["checks"]}
    assert done.returncode == 1 and checks["tokens"]["outcome"] == "fail", checks["tokens"]
    good = doctor("--json", "--worker", engine.url, "--model-path", str(MODEL_DIR))
    assert good.returncode == 0, good.stdout
    rig = Rig([engine], "--model-path", str(folder), settle=False)

    def named():
        for _ in range(3):
            text = f"{random.random()} {words[0]} {words[1]} " + "and so the sea went on. " * 20
            for _ in range(2):
                body = {"model": MODEL, "max_tokens": 4, "prompt": text}
                rig.http.post("/v1/completions", json=body).raise_for_status()
        return rig.cache(engine)["cause"] == "tokenization_differs"

    rig.until(named, "the tokenizer is named")
    assert rig.findings(engine, "events_missing") == 0
    assert "--model-path" in rig.cache(engine)["advice"]
    rig.close()


def test_doctor_shows_no_terminal_escapes():
    """What an engine says of itself may hold anything; a terminal is shown none of it raw."""
    engine = ScriptedEngine("m\x1b[2J\x1b]0;owned\x07", pages={"/version": json.dumps({"version": "\x1b[31m0.32.0\x9b\r"})})
    engine.say({"choices": [], "usage": {"prompt_tokens": 72}})
    done = doctor("--worker", engine.url)
    printed = done.stdout + done.stderr
    assert "0.32.0" in printed
    assert not [c for c in printed if ord(c) < 32 and c != "\n" or 127 <= ord(c) < 160], repr(printed)
    engine.stop()


def test_a_dead_port_is_not_called_a_loss():
    """In its first seconds, before it counts as unreachable, nothing is said to be missing."""
    engine = Engine(events=False)
    engine.url += ",events=tcp://127.0.0.1:1"
    rig = Rig([engine], settle=False)
    prompt = rig.fresh()
    for _ in range(8):
        rig.ask(prompt, engine)
    rig.until(lambda: rig.cache(engine)["cause"] == "events_unreachable", "the cause is named")
    assert rig.findings(engine, "events_missing") == 0
    assert "missing" not in rig.log()
    rig.close()


def test_a_repaired_loss_is_counted():
    """The last message of all is lost and found again by asking: nothing is missing, and the loss is in `faults`."""
    rig = Rig(1)
    engine = rig.engines[0]
    rig.prove(engine)
    engine.fault("drop=1")
    rig.ask(rig.fresh(), engine)
    rig.until(lambda: rig.cache(engine)["events"]["faults"].get("repaired") == 1, "the loss is counted")
    assert rig.same(engine) and rig.faults(engine, "repaired") == 1
    rig.close()


def test_an_old_clear_is_no_news():
    """A frontend that comes later hears of clears that are long past: no line says that the engine clears its cache now."""
    engine = Engine()
    with httpx.Client(base_url=engine.url, timeout=30) as http:
        for at in range(4):
            body = {"model": MODEL, "max_tokens": 2, "prompt": [at] * 64}
            http.post("/v1/completions", json=body).raise_for_status()
            engine.clear()
    rig = Rig([engine])
    assert "cleared its cache" not in rig.log(), rig.log()
    engine.clear()
    rig.ask(rig.fresh(), engine)
    rig.frontend.until_logged("cleared its cache")
    rig.close()
