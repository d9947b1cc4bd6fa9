"""Routes one prompt to the workers of dynamo.backend.generate, and prints its tokens.

    python route.py [ENDPOINT]
"""

import asyncio
import sys

from kvasir.llm import KvRouter, KvRouterConfig
from kvasir.runtime import DistributedRuntime


async def main(path: str) -> None:
    runtime = DistributedRuntime.detached()
    router = KvRouter(runtime.endpoint(path), 16, KvRouterConfig())
    stream = await router.generate(
        token_ids=list(range(1, 41)),
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
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "dynamo.backend.generate"))
