"""What does a request of a growing conversation cost `kvasir frontend` in kv mode, in CPU time?

    python3 conversations.py --work WORK --router 'a=kvasir frontend ... --http-port {port} --worker {b1} --worker {b2}' \
        [--router 'b=...'] [--env b:NAME=VALUE] [--rounds 5] [--requests 4000] [--kind chat|agent] [--json raw.json]

WORK is the folder that `bench/http/setup.sh` fills (fake backends, a model folder). Conversations are made of the
paragraphs of this repository's Markdown: a system prompt in half of them, then twelve turns; a user's message has 40 to
250 words, an answer 100 to 500. Two hundred conversations are open at a time; each request is the next turn of a random one with all
that was said before, and a conversation that has had its turns is followed by a new one. `agent`: every conversation
brings three tools, and every second answer is a tool call with an id and arguments of its own, and its result.

Each router gets the same requests in the same order over eight connections, by turns, in rounds. CPU is user and system time
of the router's process (`/proc`), over the requests of the round; the first round warms up and is not counted.
"""
import argparse, http.client, itertools, json, os, random, re, shlex, signal, statistics, subprocess, sys, threading, time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
B1, B2, FIRST_PORT = 9311, 9312, 9321
OPEN, TURNS, CONNECTIONS = 200, 12, 8

TOOLS = [{"type": "function", "function": {"name": name, "description": about, "parameters": {
    "type": "object", "properties": {"query": {"type": "string", "description": "what to look for"},
                                     "limit": {"type": "integer"}}, "required": ["query"]}}}
         for name, about in (("search_docs", "Searches the manual and returns passages."),
                             ("read_file", "Returns the text of a file of the repository."),
                             ("run_tests", "Runs the tests that match and returns their output."))]


def paragraphs():
    found = []
    for path in sorted(ROOT.glob("**/*.md")):
        if "target" in path.parts or "node_modules" in path.parts:
            continue
        for part in re.split(r"\n\s*\n", path.read_text(errors="replace")):
            words = part.split()
            if 12 <= len(words) <= 250 and not part.lstrip().startswith(("|", "```", "    ")):
                found.append(part.strip())
    return found


class Talk:
    """One conversation; `next` gives the body of its next request."""

    def __init__(self, rng, prose, kind, number):
        self.rng, self.prose, self.kind, self.number, self.turn = rng, prose, kind, number, 0
        self.messages = []
        if rng.random() < 0.5:
            self.messages.append({"role": "system", "content": self.text(60, 400)})

    def text(self, least, most):
        out, words, wanted = [], 0, self.rng.randint(least, most)
        while words < wanted:
            part = self.rng.choice(self.prose)
            out.append(part)
            words += len(part.split())
        return "\n\n".join(out)

    def next(self):
        if self.turn:
            self.answer()
        self.turn += 1
        self.messages.append({"role": "user", "content": self.text(40, 250)})
        body = {"model": "m", "messages": self.messages, "max_tokens": 1, "stream": False}
        if self.kind == "agent":
            body["tools"] = TOOLS
        return json.dumps(body, ensure_ascii=False).encode()

    def answer(self):
        if self.kind == "agent" and self.turn % 2:
            call = f"call_{self.number}_{self.turn}"
            arguments = json.dumps({"query": self.text(4, 12)[:60], "limit": self.rng.randint(1, 50)})
            self.messages.append({"role": "assistant", "content": "", "tool_calls": [
                {"id": call, "type": "function", "function": {"name": "search_docs", "arguments": arguments}}]})
            self.messages.append({"role": "tool", "tool_call_id": call, "content": self.text(60, 300)})
        self.messages.append({"role": "assistant", "content": self.text(100, 500)})


def bodies(prose, kind):
    rng, number = random.Random(7), OPEN
    talks = [Talk(rng, prose, kind, n) for n in range(OPEN)]
    for talk in talks:                                   # from the start on conversations of every length
        for _ in range(rng.randrange(TURNS)):
            talk.next()
    while True:
        at = rng.randrange(OPEN)
        if talks[at].turn == TURNS:
            number += 1
            talks[at] = Talk(rng, prose, kind, number)
        yield talks[at].next()


def cpu_seconds(pid):
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            total += int((task / "schedstat").read_text().split()[0])
        except OSError:
            pass
    return total / 1e9


def send(port, list_of_bodies):
    """All bodies over CONNECTIONS connections, in order; returns errors."""
    lock, left, errors = threading.Lock(), iter(list_of_bodies), []

    def run():
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        while True:
            with lock:
                body = next(left, None)
            if body is None:
                return connection.close()
            try:
                connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
                answer = connection.getresponse()
                answer.read()
                if answer.status != 200:
                    errors.append(answer.status)
            except OSError as error:
                connection.close()
                errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(CONNECTIONS)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    return len(errors)


def wait_ready(port, proc):
    for _ in range(600):
        if proc.poll() is not None:
            sys.exit("a router ended; see its log")
        if send(port, [b'{"model":"m","messages":[{"role":"user","content":"x"}],"max_tokens":1}']) == 0:
            return
        time.sleep(0.05)
    sys.exit("a router did not answer")


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--work", required=True)
    ap.add_argument("--router", action="append", required=True, metavar="NAME=COMMAND")
    ap.add_argument("--env", action="append", default=[], metavar="NAME:KEY=VALUE")
    ap.add_argument("--rounds", type=int, default=5)
    ap.add_argument("--requests", type=int, default=3000)
    ap.add_argument("--kind", choices=["chat", "agent"], default="chat")
    ap.add_argument("--json")
    a = ap.parse_args()
    work, prose = Path(a.work).resolve(), paragraphs()
    procs, routers, samples = [], {}, []
    try:
        for port, name in ((B1, "b1"), (B2, "b2")):
            procs.append(subprocess.Popen([str(work / "backend/release/fake-openai"), str(port), name]))
        for i, spec in enumerate(a.router):
            name, _, command = spec.partition("=")
            port = FIRST_PORT + i
            command = command.format(port=port, b1=f"http://127.0.0.1:{B1}", b2=f"http://127.0.0.1:{B2}", work=work)
            extra = dict(e.split(":", 1)[1].split("=", 1) for e in a.env if e.startswith(name + ":"))
            with open(f"/tmp/conversations-{name}.log", "wb") as log:
                proc = subprocess.Popen(shlex.split(command), stdout=log, stderr=log, env={**os.environ, **extra})
            procs.append(proc)
            routers[name] = (port, proc)
            wait_ready(port, proc)
        requests = bodies(prose, a.kind)
        for rnd in range(a.rounds + 1):
            batch = list(itertools.islice(requests, a.requests))
            for name in list(routers) if rnd % 2 else list(routers)[::-1]:
                port, proc = routers[name]
                before, began = cpu_seconds(proc.pid), time.monotonic()
                errors = send(port, batch)
                used, wall = cpu_seconds(proc.pid) - before, time.monotonic() - began
                sample = {"kind": a.kind, "round": rnd, "router": name, "cpu_us": used / len(batch) * 1e6, "rps": len(batch) / wall,
                          "body_bytes": sum(map(len, batch)) / len(batch), "errors": errors}
                print(json.dumps(sample), flush=True)
                if rnd:
                    samples.append(sample)
    finally:
        for proc in reversed(procs):
            proc.send_signal(signal.SIGTERM)
        for proc in procs:
            try:
                proc.wait(5)
            except subprocess.TimeoutExpired:
                proc.kill()
    for name in routers:
        of = [s["cpu_us"] for s in samples if s["router"] == name]
        print(f"{a.kind} {name}: {statistics.median(of):.1f} us of CPU a request (median of {len(of)} rounds, {min(of):.1f} to {max(of):.1f})")
    if a.json:
        Path(a.json).write_text(json.dumps(samples, indent=1))


if __name__ == "__main__":
    main()
