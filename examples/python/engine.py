"""A custom engine: it registers a model, serves tokens, and publishes what its cache holds.

    python engine.py MODEL_FOLDER [NAME]

A frontend finds it as it finds any worker: kvasir frontend --router-mode kv, with the same DYN_DISCOVERY_BACKEND.
"""

import asyncio
import collections
import sys

from kvasir.llm import KvEventPublisher, ModelInput, ModelRuntimeConfig, ModelType, WorkerType, register_model
from kvasir.runtime import dynamo_worker

BLOCK, ROOM = 16, 1024  # tokens in a block, blocks in the cache


class EchoEngine:
    """Answers with the prompt's own tokens; keeps the blocks of prompts until it has no room."""

    def __init__(self, publisher):
        self.publisher, self.cache = publisher, collections.OrderedDict()  # names of prefixes, oldest first

    def remember(self, tokens):
        names = [hash(tuple(tokens[: end + BLOCK])) for end in range(0, len(tokens) - BLOCK + 1, BLOCK)]
        known = next((at for at, name in enumerate(names) if name not in self.cache), len(names))
        self.cache.update(dict.fromkeys(names))
        if fresh := names[known:]:
            new, parent = tokens[known * BLOCK : len(names) * BLOCK], names[known - 1] if known else None
            self.publisher.publish_stored(new, [BLOCK] * len(fresh), fresh, parent_hash=parent)
        if gone := [self.cache.popitem(last=False)[0] for _ in range(len(self.cache) - ROOM)]:
            self.publisher.publish_removed(gone)

    async def generate(self, request, context):
        tokens = request["token_ids"]
        self.remember(tokens)
        wanted = (request.get("stop_conditions") or {}).get("max_tokens") or 16
        for at in range(wanted):
            if context.is_stopped():
                return
            yield {"token_ids": [tokens[at % len(tokens)]], "finish_reason": "length" if at + 1 == wanted else None}
            await asyncio.sleep(0)


@dynamo_worker()
async def main(runtime, folder, name="echo"):
    endpoint = runtime.endpoint("dynamo.backend.generate")
    about = ModelRuntimeConfig()
    about.total_kv_blocks, about.max_num_batched_tokens = ROOM, 8192
    kinds = (ModelInput.Tokens, ModelType.Chat | ModelType.Completions)
    await register_model(
        *kinds, endpoint, folder, name, kv_cache_block_size=BLOCK, runtime_config=about, worker_type=WorkerType.Aggregated
    )
    publisher = KvEventPublisher(endpoint, kv_block_size=BLOCK, enable_local_indexer=True)
    print(f"worker {endpoint.connection_id()} serves {name}", flush=True)
    await endpoint.serve_endpoint(EchoEngine(publisher).generate)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
