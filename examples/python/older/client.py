"""A client of an endpoint: any instance, one after the other, a certain one."""

import asyncio

from kvasir import DistributedRuntime


async def main() -> None:
    runtime = DistributedRuntime.detached()
    client = runtime.namespace("dynamo").component("backend").endpoint("generate").client()
    await client.wait_for_instances()
    request = {"model": "echo", "token_ids": [7, 8, 9], "stop_conditions": {"max_tokens": 2}}
    sent = {
        "generate": await client.generate(request, annotated=False),
        "random": await client.random(request, annotated=False),
        "round robin": await client.round_robin(request, annotated=False),
        "direct": await client.direct(request, client.instance_ids()[0], annotated=False),
    }
    for way, stream in sent.items():
        print(f"{way}: {[token async for item in stream for token in item['token_ids']]}", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
