"""The names of older guides over `ai-dynamo` 1.6.1, which has dropped them: what programs for it import in place of `kvasir`.

Each is the call of 1.6.1 that its release notes name in its place. What a program does with them is all Dynamo's.
"""

from dynamo import llm
from dynamo.llm import KvRouterConfig, ModelInput, ModelType, WorkerType
from dynamo.runtime import DistributedRuntime as Runtime

__all__ = ["DistributedRuntime", "KvPushRouter", "KvRouterConfig", "ModelInput", "ModelType", "register_llm"]


class Calls:
    """A client that is made when it is first needed: `client()` was no coroutine."""

    def __init__(self, endpoint):
        self.endpoint, self.made = endpoint, None

    async def client(self):
        self.made = self.made or await self.endpoint.client()
        return self.made

    def __getattr__(self, name):
        async def call(*arguments, request_id=None, **named):
            return await getattr(await self.client(), name)(*arguments, **named)

        return call

    def instance_ids(self):
        return self.made.instance_ids()


class Names:
    """`namespace().component().endpoint()`: parts of a path."""

    def __init__(self, runtime, *parts):
        self.runtime, self.parts = runtime, parts

    def component(self, name):
        return Names(self.runtime, *self.parts, name)

    def endpoint(self, name):
        return Endpoint(self.runtime.endpoint(".".join((*self.parts, name))))


class Endpoint:
    def __init__(self, endpoint):
        self.real = endpoint

    def client(self):
        return Calls(self.real)

    def __getattr__(self, name):
        return getattr(self.real, name)


class DistributedRuntime:
    def __init__(self, runtime):
        self.runtime = runtime

    @staticmethod
    def detached():
        return DistributedRuntime(Runtime.detached())

    def namespace(self, name):
        return Names(self.runtime, name)


class KvPushRouter:
    def __init__(self, endpoint, block_size, kv_router_config):
        self.real = llm.KvRouter(endpoint.real, block_size, kv_router_config)

    async def best_worker_id(self, *arguments, **named):
        worker, _, overlap = await self.real.best_worker(*arguments, **named)
        return worker, overlap

    def __getattr__(self, name):
        return getattr(self.real, name)


async def register_llm(model_input, model_type, endpoint, **more):
    role = {"worker_type": WorkerType.Aggregated}
    if model_type == ModelType.Prefill:
        role = {"worker_type": WorkerType.Prefill, "needs": [[WorkerType.Decode]]}
    await llm.register_model(model_input, model_type, endpoint.real, **role, **more)
