#!/usr/bin/env python3
"""How good are N routers? The same trace through 1, 2, 4 and 8 of them in the simulator, with and without sync.

Requests are dealt to the routers in turn. The delay is that of everything a router hears: cache events of engines, and, with
sync, what the other routers book and free. Each row stands beside one router with the same delay.

    bench/replicas/run.py --kvasir target/release/kvasir --trace mooncake-conversation.jsonl [--speed 2.5] [--policy time --policy kv]
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time

REPLICAS = [1, 2, 4, 8]
DELAYS_MS = [0, 1, 5, 20, 100]
# Four routers that tell each other within 5 ms must be so close to one.
JUDGED = (4, 5, True)
WITHIN = 0.03


def simulated(args, policy, replicas, delay, sync):
    """Means over the seeds: TTFT and gaps in ms, share of prompt tokens found, 99th percentile of TTFT in ms."""
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        command = [args.kvasir, "replay", "--trace", args.trace, "--speed", str(args.speed), "--workers", str(args.workers),
                   "--seeds", str(args.seeds), "--jobs", "1", "--policy", policy, "--replicas", str(replicas),
                   "--event-latency-ms", str(delay), "--json", out.name]  # fmt: skip
        if sync:
            command.append("--replica-sync")
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        runs = json.load(out)["runs"]
    mean = lambda of: sum(of(run) for run in runs) / len(runs)  # noqa: E731
    return {
        "ttft": mean(lambda run: run["ttft_ms"]["mean"]),
        "itl": mean(lambda run: run["itl_ms"]["mean"]),
        "hits": mean(lambda run: run["hit_share"]),
        "p99": mean(lambda run: run["ttft_ms"]["p99"]),
    }


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--kvasir", required=True, help="the binary")
    options.add_argument("--trace", required=True)
    options.add_argument("--speed", type=float, default=1.0)
    options.add_argument("--workers", type=int, default=8)
    options.add_argument("--seeds", type=int, default=1)
    options.add_argument("--policy", action="append", help="as of kvasir replay; time and kv if none is given")
    args = options.parse_args()
    told = f"speed {args.speed}, {args.workers} workers, {args.seeds} seeds"
    print(f"{args.trace.rsplit('/', 1)[-1]}, {told}, {time.strftime('%Y-%m-%d', time.gmtime())}. TTFT ms / gap ms / hits / p99 of TTFT ms, and TTFT over one router's.")
    bad = 0
    for policy in args.policy or ["time", "kv"]:
        print(f"\n{policy}\n{'routers':>7} {'sync':>4}  " + "  ".join(f"{f'{delay} ms':^39}" for delay in DELAYS_MS))
        alone = {}
        for replicas in REPLICAS:
            for sync in [False] if replicas == 1 else [True, False]:
                cells = []
                for delay in DELAYS_MS:
                    found = simulated(args, policy, replicas, delay, sync)
                    alone.setdefault(delay, found["ttft"])
                    ratio = found["ttft"] / alone[delay]
                    cells.append(f"{found['ttft']:8.1f} /{found['itl']:6.2f} / {found['hits']:.3f} /{found['p99']:6.0f}  {ratio:.3f}")
                    if (replicas, delay, sync) == JUDGED:
                        judged = (f"4 synced routers at 5 ms over one: {ratio:.3f} (<= {1 + WITHIN})", ratio <= 1 + WITHIN)
                print(f"{replicas:7} {'yes' if sync else 'no':>4}  " + "  ".join(cells), flush=True)
        print(f"{'holds' if judged[1] else 'FAILS'}  {policy}: {judged[0]}", flush=True)
        bad += not judged[1]
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
