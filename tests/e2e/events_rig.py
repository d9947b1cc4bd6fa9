"""A frontend before mock engines with real event sockets, and the means to compare index and truth."""

import collections
import random
import time

import httpx

from conftest import Kvasir

MODEL = "tiny"
BLOCK = 16
TIMEOUT = 60
VOCABULARY = 4000


class Engine:
    """A mock engine; `url` is where it answers."""

    def __init__(self, *extra, events=True):
        free = "tcp://127.0.0.1:0"
        sockets = ["--events", free, "--replay", free] if events else []
        self.process = Kvasir(
            "mocker", "--http-host", "127.0.0.1", "--http-port", "0", "--model-name", MODEL, "--block-size", str(BLOCK),
            "--speedup", "50", *sockets, *extra,
        )
        self.url = self.process.wait_for(r"on (http://127\.0\.0\.1:\d+)").group(1)
        self.http = httpx.Client(base_url=self.url, timeout=30)
        self.id = None

    def fault(self, fault):
        answer = self.http.post("/mock/event_faults", json={"fault": fault})
        assert answer.status_code == 200, answer.text

    def clear(self):
        """As an operator would; the engine tells it, unless a fault keeps it from that."""
        answer = self.http.post("/reset_prefix_cache")
        assert answer.status_code == 200, answer.text

    def truth(self):
        """The blocks that its cache holds, and how many batches it has published."""
        rank = self.http.get("/mock/cache").json()["ranks"][0]
        return set(rank["blocks"]), rank["published"]


class Rig:
    """A frontend and its engines."""

    def __init__(self, engines=1, *extra, engine_options=(), settle=True):
        """`engines`: how many, or which."""
        if isinstance(engines, int):
            engines = [Engine(*engine_options) for _ in range(engines)]
        self.engines = engines
        self.next = 0
        self.start(*extra, settle=settle)

    def start(self, *extra, settle=True):
        workers = [word for engine in self.engines for word in ("--worker", engine.url)]
        # Blocks are counted as the index has them, not as an engine would use them.
        mode = [] if "--router-mode" in extra else ["--router-mode", "kv"]
        self.frontend = Kvasir("frontend", "--http-host", "127.0.0.1", "--http-port", "0", *workers, *mode, *extra)
        url = "http://" + self.frontend.wait_for(r"address=(127\.0\.0\.1:\d+)").group(1)
        self.http = httpx.Client(base_url=url, timeout=30)
        self.until(lambda: len(self.workers()) == len(self.engines), "all workers join")
        by_url = {row["url"]: row["worker_id"] for row in self.workers()}
        for engine in self.engines:
            engine.id = by_url[engine.url.split(",")[0]]
            if settle and self.cache(engine)["events"]:
                self.settle(engine)

    def close(self):
        self.http.close()
        assert self.frontend.stop() == 0, self.log()
        for engine in self.engines:
            engine.http.close()
            engine.process.stop()

    def log(self):
        return self.frontend.log()

    def until(self, done, what, seconds=TIMEOUT):
        """Waits for something that must happen by itself."""
        end = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < end, f"in vain: {what}\n{self.http.get('/workers').text}\n{self.log()}"
            time.sleep(0.02)

    def workers(self):
        return self.http.get("/workers").json()["workers"]

    def cache(self, engine):
        """What `/workers` says about an engine's cache view."""
        row = next(row for row in self.workers() if row["worker_id"] == engine.id)
        return row["ranks"][0]["cache"]

    def metric(self, name, engine, **labels):
        wanted = {"worker_id": str(engine.id), **labels}
        total = 0.0
        for line in self.http.get("/metrics").text.splitlines():
            if line.startswith(f"kvasir_{name}{{") and all(f'{k}="{v}"' in line for k, v in wanted.items()):
                total += float(line.rsplit(" ", 1)[1])
        return total

    def faults(self, engine, kind):
        return self.metric("kv_event_faults_total", engine, kind=kind)

    def findings(self, engine, finding):
        return self.metric("worker_predictions_total", engine, finding=finding)

    def indexed(self, engine):
        """The blocks that the index believes an engine to hold."""
        counts = collections.Counter()
        answer = self.http.get("/dump")
        assert answer.status_code == 200, answer.text
        for event in answer.json().get(f"{MODEL}:default", {}).get("events", []):
            if event["worker_id"] != engine.id:
                continue
            data = event["event"]["data"]
            if "stored" in data:
                counts.update(block["block_hash"] for block in data["stored"]["blocks"])
            else:
                counts.subtract(data["removed"]["block_hashes"])
        return {name for name, count in counts.items() if count > 0}

    def settle(self, engine):
        """Waits until all that an engine published has been heard."""

        def heard():
            events, (_, published) = self.cache(engine)["events"], engine.truth()
            sequence = -1 if events["sequence"] is None else events["sequence"]
            return events["connected"] and not events["recovering"] and sequence + 1 == published

        self.until(heard, "all events are heard")

    def same(self, engine):
        self.settle(engine)
        return self.indexed(engine) == engine.truth()[0]

    def fresh(self, blocks=10):
        """A prompt that nobody has seen."""
        self.next += 1
        rng = random.Random(self.next)
        return [rng.randrange(VOCABULARY) for _ in range(blocks * BLOCK)]

    def ask(self, prompt, engine=None, **fields):
        """One completion, by `engine` if it is given; the usage that it reports."""
        headers = {"x-dynamo-worker-instance-id": str(engine.id)} if engine else {}
        body = {"model": MODEL, "max_tokens": 4, "prompt": prompt, **fields}
        answer = self.http.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()["usage"]

    def cached(self, prompt, engine=None):
        return self.ask(prompt, engine)["prompt_tokens_details"]["cached_tokens"]

    def prove(self, engine, seconds=60):
        """Lets an engine prove its events right: more often after each time that it was not believed. By time and not by
        number: an answer is judged once its events have had theirs, and a quick machine asks hundreds until then."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            prompt = self.fresh()
            for _ in range(2):
                self.ask(prompt, engine)
                self.settle(engine)
            if self.cache(engine)["state"] == "exact":
                return
        raise AssertionError(f"never believed:\n{self.log()}")

    def cache_state(self, engine, state, cause):
        """Waits until metrics say this of an engine's cache view."""
        named = lambda: self.metric("worker_cache_state", engine, state=state, cause=cause) == 1  # noqa: E731
        self.until(named, f"metrics say {state}, {cause}")

    def foretold(self):
        """Blocks that the latest decisions took for cached, oldest first."""

        def blocks(decision):
            winner = decision["winner"][0]
            return next(c["terms"]["cached_blocks"] for c in decision["candidates"] if c["rank"] == winner)

        return [blocks(decision) for decision in reversed(self.http.get("/decisions").json()["decisions"])]
