"""The router chooses, sends, and follows the request to its end."""

import asyncio

from kvasir import DistributedRuntime, KvPushRouter, KvRouterConfig


async def main() -> None:
    runtime = DistributedRuntime.detached()
    endpoint = runtime.namespace("dynamo").component("backend").endpoint("generate")
    router = KvPushRouter(endpoint=endpoint, block_size=16, kv_router_config=KvRouterConfig())
    tokens = list(range(600, 640))
    stream = await router.generate(token_ids=tokens, model="echo")
    print(f"{sum([len(item.get('token_ids') or []) async for item in stream])} tokens", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
