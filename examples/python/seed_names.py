"""The names that older programs use: KvPushRouter, namespace().component().endpoint(), best_worker_id, register_llm.

    python seed_names.py

They are the same objects as the current ones; 1.6.1 of Dynamo itself has them no more.
"""

import asyncio

from kvasir import DistributedRuntime, KvPushRouter, KvRouterConfig


async def main() -> None:
    runtime = DistributedRuntime.detached()
    namespace = runtime.namespace("dynamo")
    component = namespace.component("backend")
    endpoint = component.endpoint("generate")
    router = KvPushRouter(endpoint=endpoint, block_size=16, kv_router_config=KvRouterConfig())
    tokens = list(range(500, 564))
    worker_id, overlap = await router.best_worker_id(tokens, request_id="req-123")
    client = namespace.component("backend").endpoint("generate").client()
    await client.wait_for_instances()
    request = {"model": "echo", "token_ids": tokens, "stop_conditions": {"max_tokens": 3}}
    response = await client.direct(request, worker_id, annotated=False)
    first = await anext(response)
    await router.mark_prefill_complete("req-123")
    rest = [item async for item in response]
    await router.free("req-123")
    print(f"{overlap} blocks were there; {1 + len(rest)} items, the first {first['token_ids']}", flush=True)

    # Several routers: probe without a request id, then send where most is cached.
    other = KvPushRouter(endpoint=endpoint, block_size=16, kv_router_config=KvRouterConfig(0.0))
    one, two = await router.best_worker_id(tokens), await other.best_worker_id(tokens)
    chosen, worker_id = (router, one[0]) if one[1] > two[1] else (other, two[0])
    stream = await chosen.generate(tokens, model="echo", worker_id=worker_id, stop_conditions={"max_tokens": 2})
    print(f"{sum(len(item.get('token_ids') or []) for item in [item async for item in stream])} tokens", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
