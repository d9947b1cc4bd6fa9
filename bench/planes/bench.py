#!/usr/bin/env python3
"""Two frontends before the same token workers: Kvasir and Dynamo 1.6.1, in one run. See README.md."""
import argparse, json, os, shutil, signal, subprocess, sys, time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "http"))
from bench import Router, cpu, load, locked, post, chat, report, rss_mib, SCENARIOS  # noqa: E402

import direct  # noqa: E402

PLANES = ["--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq"]
FIRST_PORT = 9300
# What 1.6.1 wants to see of a model's config.json.
CONFIG = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "bos_token_id": 151643, "eos_token_id": 151645,
          "max_position_embeddings": 32768, "hidden_size": 896, "num_attention_heads": 14, "num_hidden_layers": 24,
          "num_key_value_heads": 2, "vocab_size": 151936}


def frontends(kvasir, python):
    """Each looks at the same folder of records, so each sees the same workers."""
    dynamo = [python, "-m", "dynamo.frontend", "--router-mode", "kv", "--http-host", "127.0.0.1", "--http-port", "{port}",
              *PLANES, "--tokenizer", "fastokens"]
    ours = [kvasir, "frontend", "--router-mode", "kv", "--http-host", "127.0.0.1", "--http-port", "{port}", *PLANES]
    return {"dynamo": dynamo, "kvasir": ours}


def main():
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--work", required=True, help="folder that bench/http/setup.sh prepared (its model is used)")
    ap.add_argument("--kvasir", required=True)
    ap.add_argument("--python", required=True, help="a Python that has ai-dynamo 1.6.1")
    ap.add_argument("--workers", type=int, default=2)
    ap.add_argument("--scenarios", default="short,prefix,stream,single")
    ap.add_argument("--rounds", type=int, default=5)
    ap.add_argument("--secs", type=int, default=4)
    ap.add_argument("--only", help="one frontend alone: kvasir or dynamo")
    ap.add_argument("--lock")
    ap.add_argument("--json")
    a = ap.parse_args()
    work = Path(a.work).resolve()
    run = work / "run" / "planes"
    shutil.rmtree(run, ignore_errors=True)
    model = run / "model"
    model.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(work / "model" / name, model)
    (model / "config.json").write_text(json.dumps(CONFIG))
    # DYN_LOG cannot silence 1.6.1: even "off" leaves one line per request. It is in these figures.
    os.environ.update(DYN_FILE_KV=str(run / "kv"), HF_HUB_OFFLINE="1", DYN_LOG="warn")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    # A ratio of 0 is documented as "no delays" but behaves as 1 in 1.6.1: use a huge one.
    mocker = subprocess.Popen([a.python, "-m", "dynamo.mocker", "--model-path", str(model), "--model-name", "m",
                               "--num-workers", str(a.workers), "--speedup-ratio", "1000000", *PLANES],
                              stdout=open(run / "mocker.log", "wb"), stderr=subprocess.STDOUT, start_new_session=True)
    routers, info, samples, alone = [], {}, [], []
    try:
        for i, (name, cmd) in enumerate(frontends(a.kvasir, a.python).items()):
            if a.only in (None, name):
                routers.append(Router(name, {"cmd": cmd}, FIRST_PORT + i, work))
        for r in routers:
            _, _, body = post(r.port, chat("count", 128, True))
            info[r.name] = {"startup_s": r.startup, "rss_start": rss_mib(r.pid), "affinity": None,
                            "chunks": body.count("data:") - body.count("[DONE]")}
        with locked(a.lock):
            before = {r.name: cpu(r.pid) for r in routers}
            time.sleep(5)
            for r in routers:
                info[r.name]["idle_pct"] = (cpu(r.pid) - before[r.name]) / 5 * 100
                load(r, "short", 1, 999, [])  # warm up, not counted
        for scenario in a.scenarios.split(","):
            for rnd in range(a.rounds):
                with locked(a.lock):
                    for r in routers if rnd % 2 == 0 else routers[::-1]:
                        s = load(r, scenario, a.secs, rnd + 1, [mocker.pid])
                        samples.append({"scenario": scenario, "round": rnd, "router": r.name, **s})
                        info[r.name]["rss_end"] = rss_mib(r.pid)
                    if scenario == "single":
                        alone.append(direct.p50_ms(run / "kv", a.secs))
                if a.json:
                    Path(a.json).write_text(json.dumps({"info": info, "samples": samples, "direct_p50_ms": alone}, indent=1))
                print(f"{scenario} {rnd + 1}/{a.rounds}", file=sys.stderr)
    finally:
        for r in routers:
            r.stop()
        os.killpg(mocker.pid, signal.SIGTERM)
        try:
            mocker.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(mocker.pid, signal.SIGKILL)
    report(info, samples, "dynamo")
    report_added(samples, alone)


def report_added(samples, alone):
    """What a frontend adds to the worker's own time, with one request after another."""
    for rnd, own in enumerate(alone):
        p50 = {s["router"]: s["p50"] for s in samples if s["scenario"] == "single" and s["round"] == rnd}
        added = {name: f"{value:.2f} - {own:.2f} = {value - own:.2f} ms" for name, value in p50.items()}
        share = (p50["kvasir"] - own) / (p50["dynamo"] - own) if len(p50) == 2 else float("nan")
        print(f"added to the worker's p50, round {rnd + 1}: {added}; ratio {share:.2f}")


if __name__ == "__main__":
    main()
