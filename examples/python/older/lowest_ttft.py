"""The worker with the least prompt to compute answers soonest."""

import asyncio

from kvasir._core import DistributedRuntime, KvPushRouter, KvRouterConfig


async def main() -> None:
    runtime = DistributedRuntime.detached()
    namespace = runtime.namespace("dynamo")
    component = namespace.component("backend")
    endpoint = component.endpoint("generate")
    router = KvPushRouter(endpoint=endpoint, block_size=16, kv_router_config=KvRouterConfig())
    token_ids = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    potential_loads = await router.get_potential_loads(token_ids)
    best = min(potential_loads, key=lambda load: load["potential_prefill_tokens"])
    print(f"Selected worker {best['worker_id']} with {best['potential_prefill_tokens']} prefill tokens", flush=True)
    stream = await router.generate(token_ids=token_ids, model="echo", worker_id=best["worker_id"], stop_conditions={"max_tokens": 20})
    generated = []
    async for response in stream:
        if isinstance(response, dict) and "token_ids" in response:
            generated.extend(response["token_ids"])
    print(f"Generated {len(generated)} tokens", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
