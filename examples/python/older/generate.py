"""A router, and a request with settings of its own."""

import asyncio

from kvasir._core import DistributedRuntime, KvPushRouter, KvRouterConfig


async def main() -> None:
    runtime = DistributedRuntime.detached()
    namespace = runtime.namespace("dynamo")
    component = namespace.component("backend")
    endpoint = component.endpoint("generate")
    router = KvPushRouter(endpoint=endpoint, block_size=16, kv_router_config=KvRouterConfig())
    stream = await router.generate(
        token_ids=[1, 2, 3, 4, 5, 6, 7, 8, 9, 10],
        model="echo",
        stop_conditions={"max_tokens": 20, "ignore_eos": True},
        sampling_options={"temperature": 0.7, "top_p": 0.9},
        router_config_override={"overlap_score_weight": 2.0, "router_temperature": 0.5},
    )
    generated = []
    async for response in stream:
        if isinstance(response, dict) and "token_ids" in response:
            generated.extend(response["token_ids"])
    print(f"Generated {len(generated)} tokens: {generated}", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
