"""A decode worker and a prefill worker of one model: python register.py MODEL_FOLDER"""

import asyncio
import sys

from kvasir import DistributedRuntime, ModelInput, ModelType, register_llm


async def answer(request):
    yield {"token_ids": request["token_ids"][:1], "finish_reason": "length"}


async def main(folder: str) -> None:
    served = []
    for component, kind in (("decode", ModelType.Chat | ModelType.Completions), ("prefill", ModelType.Prefill)):
        runtime = DistributedRuntime.detached()  # one for each worker: they are two processes elsewhere
        endpoint = runtime.namespace("apart").component(component).endpoint("generate")
        await register_llm(
            model_input=ModelInput.Tokens,
            model_type=kind,
            endpoint=endpoint,
            model_path=folder,
            model_name="echo-apart",  # the same for both
        )
        served.append(asyncio.ensure_future(endpoint.serve_endpoint(answer)))
        print(f"{component} worker {endpoint.connection_id()}", flush=True)
    await asyncio.gather(*served)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
