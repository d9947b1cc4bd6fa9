#!/usr/bin/env python3
"""Puts routers side by side in front of the same two fake backends. See README.md."""
import argparse, fcntl, http.client, json, os, random, shlex, shutil, signal, statistics, subprocess, sys, time
from contextlib import contextmanager
from pathlib import Path
from peers import PEERS

HERE = Path(__file__).resolve().parent
TICK = os.sysconf("SC_CLK_TCK")
SCENARIOS = {"short": 32, "prefix": 32, "stream": 32, "single": 1}   # name: connections
B1, B2, FIRST_PORT = 9001, 9002, 9100


def tree(pid):
    """pid and all its descendants."""
    kids = {}
    for p in Path("/proc").iterdir():
        if p.name.isdigit():
            try:
                kids.setdefault(int((p / "stat").read_text().rpartition(")")[2].split()[1]), []).append(int(p.name))
            except OSError:
                pass
    out, todo = [], [pid]
    while todo:
        x = todo.pop()
        out.append(x)
        todo += kids.get(x, [])
    return out


def cpu(pid):
    """CPU seconds (user + system) spent so far by the process tree."""
    return sum(user_and_system(pid))


def user_and_system(pid):
    """The same in its two parts; the second is the kernel's."""
    user = system = 0
    for p in tree(pid):
        try:
            f = Path(f"/proc/{p}/stat").read_text().rpartition(")")[2].split()
            user, system = user + int(f[11]), system + int(f[12])
        except OSError:
            pass
    return user / TICK, system / TICK


def rss_mib(pid):
    total = 0
    for p in tree(pid):
        try:
            for line in Path(f"/proc/{p}/status").read_text().splitlines():
                if line.startswith("VmRSS"):
                    total += int(line.split()[1])
        except OSError:
            pass
    return total / 1024


def post(port, body, timeout=10):
    c = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        c.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        r = c.getresponse()
        return r.status, r.getheader("x-backend"), r.read().decode(errors="replace")
    finally:
        c.close()


def chat(text, max_tokens=1, stream=False):
    return {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, "stream": stream}


class Router:
    def __init__(self, name, spec, port, work):
        self.name, self.port, self.procs = name, port, []
        run = work / "run" / name
        shutil.rmtree(run, ignore_errors=True)
        run.mkdir(parents=True)
        self.log = run / "log"
        names = dict(port=port, mport=port + 400, work=work, run=run, b1=f"http://127.0.0.1:{B1}",
                     b2=f"http://127.0.0.1:{B2}", h1=f"127.0.0.1:{B1}", h2=f"127.0.0.1:{B2}")
        for file, content in spec.get("files", {}).items():
            (run / file).write_text(content.format(**names))
        env = {**os.environ, **{k: v.format(**names) for k, v in spec.get("env", {}).items()}}
        began = time.monotonic()
        for cmd in [spec["cmd"], *spec.get("aux", [])]:
            with open(self.log, "ab") as log:
                self.procs.append(subprocess.Popen([a.format(**names) for a in cmd], env=env, stdout=log,
                                                   stderr=log, start_new_session=True))
        self.pid = self.procs[0].pid
        self.startup = self.wait(began)

    def wait(self, began, limit=60):
        while time.monotonic() - began < limit:
            if self.procs[0].poll() is not None:
                break
            try:
                if post(self.port, chat("ready?"))[0] == 200:
                    return time.monotonic() - began
            except OSError:
                pass
            time.sleep(0.02)
        tail = self.log.read_text(errors="replace")[-1500:]
        self.stop()
        raise RuntimeError(f"{self.name} did not answer; end of its log:\n{tail}")

    def stop(self):
        for sig, timeout in ((signal.SIGTERM, 3), (signal.SIGKILL, 3)):
            for p in self.procs:
                if p.poll() is None:
                    try:
                        os.killpg(p.pid, sig)      # its own session: only what we started
                    except OSError:
                        pass
            for p in self.procs:
                try:
                    p.wait(timeout)
                except subprocess.TimeoutExpired:
                    pass


class Direct:
    """No router: the load goes straight to backend 1."""
    name, port, startup = "direct", B1, 0.0
    def __init__(self, proc): self.pid, self.procs = proc.pid, [proc]
    def stop(self): pass


@contextmanager
def locked(path):
    if not path:
        yield
        return
    with open(path, "w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield


def load(router, scenario, secs, seed, behind):
    """behind: pids that serve this router (the backends)."""
    env = {**os.environ, "SCENARIO": "short" if scenario == "single" else scenario, "SEED": str(seed)}
    (user0, kernel0), behind0 = user_and_system(router.pid), sum(map(cpu, behind))
    out = subprocess.run(["wrk", "-t1", f"-c{SCENARIOS[scenario]}", f"-d{secs}s", "--timeout", "10s", "-s",
                          str(HERE / "load.lua"), f"http://127.0.0.1:{router.port}"],
                         env=env, capture_output=True, text=True)
    (user, kernel), used_behind = user_and_system(router.pid), sum(map(cpu, behind)) - behind0
    used, in_kernel = user + kernel - user0 - kernel0, kernel - kernel0
    lines = [l for l in out.stdout.splitlines() if l.startswith("{")]
    if not lines:
        raise RuntimeError(out.stdout + out.stderr)
    r = json.loads(lines[-1])
    n = max(r["requests"], 1)
    return {"rps": r["requests"] / (r["us"] / 1e6), "p50": r["p50_ms"], "p99": r["p99_ms"],
            "cpu_us": used / n * 1e6, "kernel_us": in_kernel / n * 1e6, "behind_us": used_behind / n * 1e6, "errors": r["errors"], "requests": r["requests"]}


def affinity(router):
    """Of requests that repeat a long prefix, how many reach the backend that saw it first.
    In shuffled order: in a fixed one, round robin over two backends repeats itself."""
    first, hit, all_, order = {}, 0, 0, random.Random(1)
    for rep in range(9):
        for p in order.sample(range(12), 12):
            _, backend, _ = post(router.port, chat(f"probe {p} " * 400 + f"q{rep}"))
            if backend is None:
                return None
            if rep == 0:
                first[p] = backend
            else:
                all_ += 1
                hit += backend == first[p]
    return hit / all_


def main():
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--work", default=os.environ.get("BENCH_WORK", "work"))
    ap.add_argument("--peers", default="nginx,nginx-again,vllm-cache")
    ap.add_argument("--router", action="append", default=[], metavar="NAME=COMMAND",
                    help="another router; {port} {b1} {b2} {h1} {h2} {work} {run} are filled in")
    ap.add_argument("--scenarios", default="short,prefix,stream,single")
    ap.add_argument("--base", default="nginx", help="the row the ratios are against")
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--secs", type=int, default=4)
    ap.add_argument("--lock", help="take this file's lock for each pass (a shared machine)")
    ap.add_argument("--json", help="write every raw sample here, after every pass")
    ap.add_argument("--show", metavar="JSON", help="only print the tables of an earlier run")
    a = ap.parse_args()
    if a.show:
        j = json.loads(Path(a.show).read_text())
        return report(j["info"], j["samples"], a.base)
    work = Path(a.work).resolve()

    specs = {n: PEERS[n] for n in a.peers.split(",") if n}
    for r in a.router:
        name, _, command = r.partition("=")
        specs[name] = {"cmd": shlex.split(command)}
    scenarios = a.scenarios.split(",")

    def interrupted(*_):
        raise KeyboardInterrupt
    signal.signal(signal.SIGTERM, interrupted)                      # so that finally runs

    backends = [subprocess.Popen([str(work / "backend/release/fake-openai"), str(p), n])
                for p, n in ((B1, "b1"), (B2, "b2"))]
    time.sleep(0.3)
    routers, info, samples = [Direct(backends[0])], {}, []
    try:
        for i, (name, spec) in enumerate(specs.items()):
            try:
                routers.append(Router(name, spec, FIRST_PORT + i, work))
            except (RuntimeError, OSError) as e:
                print(f"!! {name}: {e}", file=sys.stderr)
        for r in routers:
            status, _, body = post(r.port, chat("count", 128, True))
            info[r.name] = {"startup_s": r.startup, "rss_start": rss_mib(r.pid),
                            "chunks": body.count("data:") - body.count("[DONE]"), "affinity": affinity(r)}
        behind = {r.name: [p.pid for p in r.procs[1:] or backends] for r in routers}
        behind["direct"] = []
        with locked(a.lock):
            before = {r.name: cpu(r.pid) for r in routers}
            time.sleep(5)
            for r in routers:
                info[r.name]["idle_pct"] = (cpu(r.pid) - before[r.name]) / 5 * 100
            for r in routers:
                load(r, "short", 1, 999, [])                        # warm up, not counted
        for scenario in scenarios:
            for rnd in range(a.rounds):
                with locked(a.lock):
                    for r in routers if rnd % 2 == 0 else routers[::-1]:
                        s = load(r, scenario, a.secs, rnd + 1, behind[r.name])
                        samples.append({"scenario": scenario, "round": rnd, "router": r.name, **s})
                        info[r.name]["rss_end"] = rss_mib(r.pid)
                if a.json:                                          # after every pass: nothing is lost
                    Path(a.json).write_text(json.dumps({"info": info, "samples": samples}, indent=1))
                print(f"{scenario} {rnd + 1}/{a.rounds}", file=sys.stderr)
    except KeyboardInterrupt:
        print("interrupted: reporting what there is", file=sys.stderr)
    finally:
        for r in routers:
            r.stop()
        for b in backends:
            b.terminate()
            b.wait()
    report(info, samples, a.base)


def report(info, samples, base_name):
    med = statistics.median
    print("\n| router | start s | RSS MiB start | RSS MiB end | idle CPU % | chunks per 128 | prefix affinity |")
    print("|---|---|---|---|---|---|---|")
    for name, i in info.items():
        aff = "-" if i["affinity"] is None else f"{i['affinity']:.0%}"
        print(f"| {name} | {i['startup_s']:.2f} | {i['rss_start']:.0f} | {i.get('rss_end', 0):.0f} | "
              f"{i.get('idle_pct', 0):.1f} | {i['chunks']} | {aff} |")
    for sc in dict.fromkeys(s["scenario"] for s in samples):
        rows = {}
        for s in samples:
            if s["scenario"] == sc:
                rows.setdefault(s["router"], {})[s["round"]] = s
        base = rows.get(base_name, {})
        print(f"\n**{sc}** ({SCENARIOS[sc]} connections, medians; ratios are to {base_name} in the same round)\n")
        print("| router | rounds | req/s | p50 ms | p99 ms | CPU us/req | of it kernel | CPU behind us/req | req/s ratio (min..max) | "
              "CPU ratio (min..max) | errors |")
        print("|---|---|---|---|---|---|---|---|---|---|---|")
        for name, by_round in rows.items():
            m = lambda k: med(s[k] for s in by_round.values())

            def ratio(k):
                v = [s[k] / base[n][k] for n, s in by_round.items() if n in base and base[n][k]]
                return f"{med(v):.3g} ({min(v):.3g}..{max(v):.3g})" if v else "-"
            print(f"| {name} | {len(by_round)} | {m('rps'):.0f} | {m('p50'):.2f} | {m('p99'):.2f} | {m('cpu_us'):.0f} | {m('kernel_us'):.0f} | "
                  f"{m('behind_us'):.0f} | {ratio('rps')} | {ratio('cpu_us')} | "
                  f"{sum(s['errors'] for s in by_round.values())} |")


if __name__ == "__main__":
    main()
