"""The caller sends, and says when the first token came and when all is done."""

import asyncio

from kvasir import DistributedRuntime, KvPushRouter, KvRouterConfig


async def main() -> None:
    runtime = DistributedRuntime.detached()
    endpoint = runtime.namespace("dynamo").component("backend").endpoint("generate")
    router = KvPushRouter(endpoint=endpoint, block_size=16, kv_router_config=KvRouterConfig())
    client = endpoint.client()
    await client.wait_for_instances()
    tokens = list(range(700, 740))
    worker_id, overlap = await router.best_worker_id(tokens, request_id="req-123")
    request = {"model": "echo", "token_ids": tokens, "stop_conditions": {"max_tokens": 3}}
    response = await client.direct(request, worker_id, annotated=False, request_id="req-123")
    first = await anext(response)
    await router.mark_prefill_complete("req-123")
    rest = [item async for item in response]
    await router.free("req-123")
    print(f"{overlap} blocks were there; {1 + len(rest)} items, the first {first['token_ids']}", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
