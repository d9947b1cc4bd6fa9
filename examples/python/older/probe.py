"""Several routers are asked, and one of them is sent through."""

import asyncio

from kvasir import DistributedRuntime, KvPushRouter, KvRouterConfig


async def main() -> None:
    runtime = DistributedRuntime.detached()
    endpoint = runtime.namespace("dynamo").component("backend").endpoint("generate")
    router_1 = KvPushRouter(endpoint=endpoint, block_size=16, kv_router_config=KvRouterConfig())
    router_2 = KvPushRouter(endpoint=endpoint, block_size=16, kv_router_config=KvRouterConfig(0.0))
    tokens = list(range(800, 864))
    worker_id_1, overlap_1 = await router_1.best_worker_id(tokens)  # no request id: a question
    worker_id_2, overlap_2 = await router_2.best_worker_id(tokens)
    chosen_router, worker_id = (router_1, worker_id_1) if overlap_1 > overlap_2 else (router_2, worker_id_2)
    stream = await chosen_router.generate(tokens, model="echo", worker_id=worker_id, stop_conditions={"max_tokens": 2})
    print(f"{sum([len(item.get('token_ids') or []) async for item in stream])} tokens", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
