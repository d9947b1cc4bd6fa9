"""`kvasir doctor` before real processes: each thing that can be wrong is found, and what is advised mends it."""

import json
import os
import pathlib
import shutil
import socket
import subprocess
import threading

import httpx
import pytest

from conftest import Kvasir
from engines import ScriptedEngine

MODEL = "tiny"
MODEL_DIR = pathlib.Path(__file__).parents[2] / "crates/text/src/builtin"
TLS = pathlib.Path(__file__).parents[2] / "testdata/tls"
# An engine takes a port that is free, and says which.
ANY = "tcp://127.0.0.1:0"
CHECKS = [
    "reachable", "model", "version", "block-size", "prefix-caching", "event-socket", "events-arrive", "replay", "tokens",
    "cached-tokens",
]  # fmt: skip


class Setup:
    """One engine and one doctor, as command lines that advice changes."""

    def __init__(self, engine, doctor, running=True):
        self.engine = {
            "--http-host": "127.0.0.1", "--http-port": "0", "--speedup": "50", "--block-size": "16",
            "--served-model-name": MODEL, "--model-path": str(MODEL_DIR), "--events": ANY, "--replay": ANY,
        }  # fmt: skip
        self.doctor = {"--model-path": str(MODEL_DIR), "--model-name": MODEL}
        change(self.engine, engine)
        self.process = self.place = None
        if running:
            self.start()
        else:
            # Taken, and nobody listens.
            self.place = socket.socket()
            self.place.bind(("127.0.0.1", 0))
            self.at("http://127.0.0.1:%d" % self.place.getsockname()[1])
        change(self.doctor, doctor)

    def start(self):
        self.stop()
        self.process = Kvasir("mocker", *words(self.engine))
        self.at(self.process.wait_for(r"on (http://127\.0\.0\.1:\d+)").group(1))
        if self.engine.get("--events") == ANY and "--data-parallel-size" not in self.engine:
            told = httpx.get(f"{self.url}/kv_event_sources").json()["0"]
            self.engine["--events"] = told["endpoint"]
            if "--replay" in self.engine:
                self.engine["--replay"] = told["replay_endpoint"]

    def at(self, url):
        """It has found its place; when it comes back it is there again."""
        self.url, self.engine["--http-port"] = url, url.rsplit(":")[-1]
        self.doctor.setdefault("--worker", url)

    def stop(self):
        if self.place:
            self.place.close()
        if self.process:
            assert self.process.stop() == 0, self.process.log()

    def ask(self):
        return ask(*words(self.doctor))

    def follow(self, advice):
        """Does what is advised: changes a command line, and starts what it belongs to again."""
        flags = dict(zip(*[iter(advice["args"])] * 2)) if len(advice["args"]) % 2 == 0 else {advice["args"][0]: None}
        if advice["where"] == "kvasir":
            return change(self.doctor, flags)
        if "--kv-events-config" in flags:
            for flag in ["--events", "--replay", "--kv-events-config"]:
                self.engine.pop(flag, None)
            flags["--kv-events-config"] = anywhere(flags["--kv-events-config"])
        if "--host" in flags:
            # vLLM's name for it; and tests stay on this machine.
            flags = {"--http-host": "127.0.0.1", "--http-port": flags["--port"]}
        self.engine.pop(f"--no-{next(iter(flags), '--')[2:]}", None)
        change(self.engine, flags)
        # What was done to the process on command ends with it.
        self.engine.pop("--event-fault-at-start", None)
        self.start()


def change(line, flags):
    """Adds flags, or takes those away that are False."""
    for flag, value in flags.items():
        if value is False:
            line.pop(flag)
        else:
            line[flag] = value


def words(line):
    return [word for flag, value in line.items() for word in ([flag] if value is None else [flag, value])]


def anywhere(config):
    """The same sockets where nothing else of this machine listens."""
    config = json.loads(config)
    assert config["enable_kv_cache_events"] is True and config["publisher"] == "zmq"
    for field in ["endpoint", "replay_endpoint"]:
        assert config[field].startswith("tcp://127.0.0.1:"), config
        config[field] = ANY
    return json.dumps(config)


def run(*args, **env):
    env |= {k: v for k, v in os.environ.items() if not k.startswith(("DYN_", "KVASIR_"))}
    command = [os.environ["KVASIR_BIN"], "doctor", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)


def ask(*args):
    """Exit code, and each worker's findings by check."""
    done = run("--json", "--timeout-secs", "5", *args)
    assert done.returncode in (0, 1), done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] == (done.returncode == 0)
    for worker in report["workers"]:
        assert [check["check"] for check in worker["checks"]] == CHECKS
    return done.returncode, [{check["check"]: check for check in worker["checks"]} for worker in report["workers"]]


def of(findings, outcome):
    return [name for name, finding in findings.items() if finding["outcome"] == outcome]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders like the engine's own, but for the template and for the tokenizer."""
    root = tmp_path_factory.mktemp("models")
    for name in ["template", "tokenizer"]:
        shutil.copytree(MODEL_DIR, root / name)
    template = root / "template/chat_template.jinja"
    template.write_text(template.read_text() + "\n[and so on]")
    tokenizer = root / "tokenizer/tokenizer.json"
    content = json.loads(tokenizer.read_text())
    content["model"]["merges"] = content["model"]["merges"][:50]
    tokenizer.write_text(json.dumps(content))
    return root


# What is wrong: the engine's flags, the doctor's, and the checks that fail.
WRONG = {
    "events off": ({"--events": False, "--replay": False}, {}, ["event-socket"]),
    "events off in vLLM's words": (
        {"--events": False, "--replay": False, "--kv-events-config": '{"enable_kv_cache_events": false}'}, {}, ["event-socket"]),
    "prefix caching off": ({"--no-enable-prefix-caching": None}, {}, ["prefix-caching"]),
    "usage details off": ({"--no-enable-prompt-tokens-details": None}, {}, ["cached-tokens"]),
    "another block size than told": ({}, {"--kv-cache-block-size": "32"}, ["block-size"]),
    "another block size than told of this worker": ({}, {"--worker": "{url},block-size=64"}, ["block-size"]),
    "no replay socket": ({"--replay": False}, {}, ["replay"]),
    "replay not told": ({}, {"--worker": "{url},events=EVENTS"}, ["replay"]),
    "another tokenizer": ({}, {"--model-path": "FOLDER/tokenizer"}, ["tokens"]),
    "another template": ({}, {"--model-path": "FOLDER/template"}, ["tokens"]),
    "another model": ({"--served-model-name": "other"}, {}, ["model"]),
    "events are silent": ({"--event-fault-at-start": "mute"}, {}, ["events-arrive"]),
    "sockets swapped": ({}, {"--worker": "{url},events=REPLAY,replay=EVENTS"}, ["event-socket"]),
    "nobody at the event socket": ({}, {"--worker": "{url},events=tcp://127.0.0.1:1"}, ["event-socket"]),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_advised_mends_it(case, folders):
    engine, doctor, failing = WRONG[case]
    setup = Setup(engine, {})
    places = {"FOLDER": str(folders), "EVENTS": setup.engine.get("--events", ""), "REPLAY": setup.engine.get("--replay", "")}
    for flag, value in doctor.items():
        for name, place in places.items():
            value = value.replace(name, place)
        setup.doctor[flag] = value.format(url=setup.doctor["--worker"])
    code, [findings] = setup.ask()
    assert (code, of(findings, "fail")) == (1, failing), findings
    advice = findings[failing[0]]["advice"]
    assert advice and all(piece["text"] for piece in advice)
    setup.follow(advice[0])
    code, [findings] = setup.ask()
    assert (code, of(findings, "pass")) == (0, CHECKS), findings
    setup.stop()


def test_another_engines_events(tmp_path):
    """Told another engine's sockets: idle, they are silent; busy, they tell of other prompts."""
    stranger, setup = Setup({}, {}), Setup({}, {})
    own = setup.doctor["--worker"]
    setup.doctor["--worker"] = f"{own},events={stranger.engine['--events']},replay={stranger.engine['--replay']}"
    code, [findings] = setup.ask()
    assert (code, of(findings, "fail")) == (1, ["events-arrive"]), findings
    setup.follow(findings["events-arrive"]["advice"][0])
    assert setup.doctor["--worker"] == f"{own},events={setup.engine['--events']},replay={setup.engine['--replay']}"
    code, [findings] = setup.ask()
    assert (code, of(findings, "pass")) == (0, CHECKS), findings
    setup.stop()
    stranger.stop()


def test_an_engine_that_is_not_there():
    setup = Setup({}, {}, running=False)
    code, [findings] = setup.ask()
    assert (code, of(findings, "fail")) == (1, ["reachable"]) and len(of(findings, "skip")) == len(CHECKS) - 1
    advice = findings["reachable"]["advice"][0]
    assert advice["args"] == ["--host", "0.0.0.0", "--port", setup.engine["--http-port"]]
    setup.follow(advice)
    code, [findings] = setup.ask()
    assert (code, of(findings, "pass")) == (0, CHECKS), findings
    setup.stop()


def test_an_engine_behind_tls_whose_authority_is_not_known():
    """A frontend stands in for the engine, which has no TLS of its own; only whether it is believed is asked."""
    files = ["--tls-cert-path", str(TLS / "server.pem"), "--tls-key-path", str(TLS / "server-key.pem")]
    engine = Setup({}, {})
    secure = Kvasir("frontend", "--http-host", "127.0.0.1", "--http-port", "0", "--worker", engine.url, *files)
    port = secure.wait_for(r"address=127\.0\.0\.1:(\d+)").group(1)
    worker = ["--worker", f"https://localhost:{port}"]
    _, [findings] = ask(*worker)
    assert of(findings, "fail") == ["reachable"], findings
    flag, value = findings["reachable"]["advice"][0]["args"]
    assert (flag, value) == ("--worker-tls-ca-path", "FILE")
    _, [findings] = ask(*worker, flag, str(TLS / "ca.pem"))
    assert findings["reachable"]["outcome"] == "pass", findings
    assert secure.stop() == 0, secure.log()
    engine.stop()


@pytest.mark.parametrize("page", ["/server_info", "/get_server_info"])
def test_an_sglang_is_told_its_own_flags(page):
    """What it was started with is on a page of its own; its flags are not vLLM's."""
    settings = {"page_size": 64, "dp_size": 1, "disable_radix_cache": True, "max_total_num_tokens": 6400, "version": "0.5.9"}
    engine = ScriptedEngine(MODEL, pages={page: json.dumps(settings)})
    engine.say({"choices": [], "usage": {"prompt_tokens": 72}})
    _, [findings] = ask("--worker", engine.url)
    shown = {name: (finding["outcome"], finding["why"]) for name, finding in findings.items()}
    assert shown["version"] == ("pass", "SGLang 0.5.9") and shown["block-size"] == ("pass", "64")
    assert shown["event-socket"] == ("fail", "the engine publishes no events")
    flag, config = findings["event-socket"]["advice"][0]["args"]
    assert flag == "--kv-events-config" and "enable_kv_cache_events" not in json.loads(config)
    assert "--disable-radix-cache" in findings["prefix-caching"]["advice"][0]["text"]
    settings["disable_radix_cache"] = False
    engine.pages[page] = json.dumps(settings)
    _, [findings] = ask("--worker", engine.url)
    assert findings["cached-tokens"]["advice"][0]["args"] == ["--enable-cache-report"]
    engine.stop()


def test_two_things_wrong_are_mended_one_by_one():
    setup = Setup({"--no-enable-prefix-caching": None, "--no-enable-prompt-tokens-details": None, "--replay": False}, {})
    for _ in range(4):
        code, [findings] = setup.ask()
        if code == 0:
            break
        setup.follow(findings[of(findings, "fail")[0]]["advice"][0])
    assert (code, of(findings, "pass")) == (0, CHECKS), findings
    setup.stop()


def test_two_ranks_in_an_older_wire():
    setup = Setup({"--data-parallel-size": "2", "--event-wire": "vllm-0.9"}, {})
    code, [findings] = setup.ask()
    assert (code, of(findings, "pass")) == (0, CHECKS), findings
    assert findings["events-arrive"]["why"].startswith("2 ranks"), findings
    setup.stop()


def test_the_workers_of_a_frontend():
    """A frontend's own list is enough: one engine has other blocks than the index, another is told wrong sockets."""
    good, small, deaf = Setup({}, {}), Setup({"--block-size": "32"}, {}), Setup({}, {})
    url_of = lambda setup: setup.doctor["--worker"]
    frontend = Kvasir("frontend", "--http-host", "127.0.0.1", "--http-port", "0", "--worker", url_of(good))
    url = "http://" + frontend.wait_for(r"address=(127\.0\.0\.1:\d+)").group(1)
    with httpx.Client(base_url=url, timeout=30) as http:
        wait(lambda: [row["state"] for row in http.get("/workers").json()["workers"]] == ["serving"])
        http.post("/workers", json={"url": url_of(small)}).raise_for_status()
        http.post("/workers", json={"url": url_of(deaf), "events": good.engine["--events"]}).raise_for_status()
        wait(lambda: [row["state"] for row in http.get("/workers").json()["workers"]] == ["serving"] * 3)
    done = run("--json", "--url", url, "--model-path", str(MODEL_DIR))
    report = {worker["worker"]: {c["check"]: c for c in worker["checks"]} for worker in json.loads(done.stdout)["workers"]}
    assert done.returncode == 1
    assert of(report[url_of(good)], "pass") == CHECKS, report[url_of(good)]
    assert of(report[url_of(small)], "fail") == ["block-size"], report[url_of(small)]
    small.follow(report[url_of(small)]["block-size"]["advice"][0])
    advice = report[url_of(deaf)]["events-arrive"]["advice"][0]
    assert advice["args"] == ["--worker", f"{url_of(deaf)},events={deaf.engine['--events']},replay={deaf.engine['--replay']}"]
    done = run("--json", "--url", url, "--model-path", str(MODEL_DIR), *advice["args"])
    assert done.returncode == 0, done.stdout
    assert frontend.stop() == 0, frontend.log()
    for setup in [good, small, deaf]:
        setup.stop()


def wait(done):
    for _ in range(400):
        if done():
            return
        threading.Event().wait(0.05)
    raise AssertionError("it never came")


def test_a_table_for_people():
    setup = Setup({"--no-enable-prefix-caching": None}, {})
    done = run(*words(setup.doctor))
    lines = [line.split() for line in done.stdout.splitlines()]
    assert done.returncode == 1 and lines[0] == [setup.doctor["--worker"]]
    assert ["FAIL", "prefix-caching"] in [line[:2] for line in lines]
    assert ["engine:", "--enable-prefix-caching"] in [line[:2] for line in lines]
    assert lines[-1] == ["7", "passed,", "1", "failed,", "2", "skipped"]
    setup.stop()


@pytest.mark.parametrize("args, words", [
    (["--worker", "engine:8000"], "http://"), (["--worker", "http://a:1,colour=red"], "colour"),
    (["--url", "nowhere"], "--url"), (["--frontend", "http://u:secret@h"], "without user and password"),
])  # fmt: skip
def test_wrong_command_lines(args, words):
    done = run(*args)
    assert done.returncode == 2 and words in done.stderr, done.stderr


def test_a_frontend_that_cannot_say():
    """Nobody, one that wants a token, one without admin routes, one without engines: each says what to do."""
    done = run("--frontend", "http://127.0.0.1:1")
    assert done.returncode == 1 and "no frontend answers at http://127.0.0.1:1" in done.stderr, done.stderr
    assert run(KVASIR_URL="http://127.0.0.1:1").stderr == done.stderr
    cases = [
        ({"KVASIR_ADMIN_TOKEN": "t"}, [], "asks for a token: give it in a file with --admin-token-file"),
        ({}, ["--disable-frontend-admin-api"], "--disable-frontend-admin-api"),
        ({}, [], "has no engine server to look at"),
    ]
    for env, args, words in cases:
        frontend = Kvasir("demo", "--workers", "1", "--http-host", "127.0.0.1", "--http-port", "0", *args, env=env)
        url = frontend.wait_for(r"at (http://127\.0\.0\.1:\d+)").group(1)
        done = run("--url", url)
        assert done.returncode == 1 and words in done.stderr, done.stderr
        if env:
            assert "does not accept the token" in run("--url", url, KVASIR_ADMIN_TOKEN="other").stderr
            assert "has no engine server" in run("--url", url, KVASIR_ADMIN_TOKEN="t").stderr
        frontend.stop()
