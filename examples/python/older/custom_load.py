"""A cost of one's own on what each worker would have to do."""

import asyncio

from kvasir import DistributedRuntime, KvPushRouter, KvRouterConfig


def custom_cost(load: dict[str, int]) -> float:
    return load["potential_prefill_tokens"] / 16 + 2 * load["potential_decode_blocks"]


async def main() -> None:
    runtime = DistributedRuntime.detached()
    endpoint = runtime.namespace("dynamo").component("backend").endpoint("generate")
    router = KvPushRouter(endpoint=endpoint, block_size=16, kv_router_config=KvRouterConfig())
    tokens = list(range(900, 964))
    loads = await router.get_potential_loads(tokens)
    best = min(loads, key=custom_cost)
    stream = await router.generate(tokens, model="echo", worker_id=best["worker_id"], stop_conditions={"max_tokens": 5})
    print(f"{sum([len(item.get('token_ids') or []) async for item in stream])} tokens", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
