"""A cost of one's own on potential loads: the worker with the least prompt to compute answers soonest.

    python lowest_ttft.py [ENDPOINT]
"""

import asyncio
import sys

from kvasir.llm import KvRouter, KvRouterConfig
from kvasir.runtime import DistributedRuntime


async def main(path: str) -> None:
    runtime = DistributedRuntime.detached()
    router = KvRouter(runtime.endpoint(path), 16, KvRouterConfig())
    tokens = list(range(100, 164))
    loads = await router.get_potential_loads(tokens)
    best = min(loads, key=lambda row: row["potential_prefill_tokens"])
    print(f"Selected worker {best['worker_id']} with {best['potential_prefill_tokens']} prefill tokens", flush=True)
    stream = await router.generate(
        tokens, model="echo", worker_id=best["worker_id"], dp_rank=best["dp_rank"], stop_conditions={"max_tokens": 5}
    )
    async for response in stream:
        if isinstance(response, dict) and response.get("token_ids"):
            print(f"Generated tokens: {response['token_ids']}", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "dynamo.backend.generate"))
