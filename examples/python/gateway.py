"""A gateway's own way of sending: ask for the best worker, send there oneself, tell the router how it goes.

    python gateway.py [ENDPOINT]
"""

import asyncio
import sys

from kvasir.llm import KvRouter, KvRouterConfig
from kvasir.runtime import DistributedRuntime


async def main(path: str) -> None:
    runtime = DistributedRuntime.detached()
    endpoint = runtime.endpoint(path)
    router = KvRouter(endpoint, 16, KvRouterConfig())
    client = await endpoint.client()
    await client.wait_for_instances()
    tokens = list(range(300, 364))
    asked, _, _ = await router.best_worker(tokens)  # a question: nothing is booked
    worker, rank, overlap = await router.best_worker(tokens, request_id="req-123")
    print(f"asked {asked}, booked {worker}/{rank}, {overlap} blocks are there", flush=True)
    request = {
        "model": "echo",
        "token_ids": tokens,
        "stop_conditions": {"max_tokens": 4},
        "sampling_options": {},
        "output_options": {},
        "eos_token_ids": [],
        "annotations": [],
    }
    got = 0
    try:
        async for item in await client.direct(request, worker, annotated=False):
            if got == 0 and item["token_ids"]:
                await router.mark_prefill_complete("req-123")
            got += len(item["token_ids"])
    finally:
        await router.free("req-123")
    print(f"{got} tokens", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "dynamo.backend.generate"))
