"""Endpoints, clients and contexts under the names of `dynamo.runtime`.

Options come from the environment, as for `kvasir` and Dynamo: `DYN_DISCOVERY_BACKEND`, `ETCD_ENDPOINTS`, `DYN_FILE_KV`, `DYN_REQUEST_PLANE`,
`DYN_EVENT_PLANE`, `NATS_SERVER`, `DYN_LOG` and the others.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import inspect
import logging
import os
import uuid
import warnings
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, MutableMapping
from dataclasses import dataclass
from typing import Any

from kvasir import _native

logger = logging.getLogger("kvasir")
_RUNTIMES: weakref.WeakSet[DistributedRuntime] = weakref.WeakSet()


@atexit.register
def _end() -> None:
    """Takes back what this process announced, and ends its threads before Python is taken down."""
    for runtime in list(_RUNTIMES):
        if runtime._pid == os.getpid():
            runtime._core.end()
    _native.shut_down()


Handler = Callable[..., AsyncIterator[Any]]

_LATE_ITEMS = 16
"""Items that a handler may still yield after its caller has left."""


class Context:
    """One request: its id, what its caller said beside it, and whether it was stopped.

    A handler gets the context of its caller; passing it on to `Client.generate(..., context=context)` stops that call, too.
    """

    def __init__(
        self,
        id: str | None = None,
        metadata: dict[str, str] | None = None,
        *,
        _cancellation: _native.Cancellation | None = None,
    ) -> None:
        self._id = id if id is not None else str(uuid.uuid4())
        self._metadata: dict[str, str] = dict(metadata or {})
        self._cancellation = _cancellation if _cancellation is not None else _native.Cancellation()

    def id(self) -> str:
        """The request's id."""
        return self._id

    def is_stopped(self) -> bool:
        """Whether nobody wants the answer any more."""
        return self._cancellation.is_stopped()

    def is_killed(self) -> bool:
        """Whether it was killed. Stopping and killing are one here: never."""
        return False

    def stop_generating(self) -> None:
        """Stops the request: its worker sees a stopped context, its stream ends."""
        self._cancellation.stop()

    def async_killed_or_stopped(self) -> asyncio.Future[bool]:
        """Done when it was stopped."""
        return asyncio.ensure_future(self._cancellation.stopped())

    def detached(self, id: str) -> Context:
        """A context of its own with the same metadata."""
        return Context(id, self._metadata)

    def notify_first_token(self) -> None:
        """Does nothing: routers see the first token in the stream."""

    @property
    def metadata(self) -> MutableMapping[str, str]:
        """What the caller said beside the request; travels with calls that get this context."""
        return self._metadata

    @metadata.setter
    def metadata(self, metadata: dict[str, str]) -> None:
        self._metadata = dict(metadata)

    def _trace(self) -> list[str]:
        parts = self._metadata.get("traceparent", "").split("-")
        return parts if len(parts) == 4 else []

    @property
    def trace_id(self) -> str | None:
        """The id of the trace, if the caller has one."""
        parts = self._trace()
        return parts[1] if parts else None

    @property
    def span_id(self) -> str | None:
        """The caller's span."""
        parts = self._trace()
        return parts[2] if parts else None

    @property
    def parent_span_id(self) -> str | None:
        """The caller's span, of which this request's would be a child."""
        return self.span_id

    def trace_headers(self) -> dict[str, str] | None:
        """Headers that hand the trace on to an engine."""
        names = ("traceparent", "tracestate", "x-request-id", "request-id")
        headers = {name: self._metadata[name] for name in names if name in self._metadata}
        return headers if "traceparent" in headers else None


class Stream:
    """An answer, to be iterated over with `async for`. Letting go of it ends the call."""

    def __init__(self, answer: _native.Answer) -> None:
        self._answer = answer

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Any:
        answer = self._answer
        while True:
            item = answer.try_next()
            if item is not NotImplemented:
                return item
            await answer.ready()

    async def aclose(self) -> None:
        """Ends the call."""
        self._answer.close()


@dataclass(frozen=True, repr=False)
class TransportType:
    """How an instance is reached."""

    kind: str
    address: str

    def __repr__(self) -> str:
        return f"TransportType({self.kind}, {self.address})"


@dataclass(frozen=True, repr=False)
class Instance:
    """One process that serves an endpoint."""

    instance_id: int
    namespace: str
    component: str
    endpoint: str
    transport: TransportType
    device_type: str | None

    def __str__(self) -> str:
        return f"{self.namespace}/{self.component}/{self.endpoint}/{self.instance_id}"

    def __repr__(self) -> str:
        return f"Instance({self})"


_MODES = {
    "roundrobin": "round_robin",
    "random": "random",
    "poweroftwochoices": "power_of_two",
    "leastloaded": "least_loaded",
    "deviceawareweighted": "device_aware_weighted",
}


def _mode(router_mode: Any) -> str:
    name = str(getattr(router_mode, "name", router_mode) or "random")
    mode = _MODES.get(name.replace("_", "").replace("-", "").lower())
    if mode is None:
        raise ValueError(f"a client cannot choose by {name}: a KvRouter does, and direct() names the instance")
    return mode


class Client:
    """Calls the instances of an endpoint. Each call has the id of its `context`, or `request_id`, or one of its own."""

    def __init__(self, endpoint: Endpoint, router_mode: Any = None) -> None:
        self._endpoint = endpoint
        self._mode = _mode(router_mode)
        self._caller = _native.Caller(endpoint._runtime._core, *endpoint._name)

    def instance_ids(self) -> list[int]:
        """The ids of those that are there."""
        return self._caller.instance_ids()

    def instances(self) -> list[Instance]:
        """Those that are there, with how they are reached."""
        rows = self._caller.instances()
        return [Instance(id, *self._endpoint._name, TransportType(kind, address), device) for id, kind, address, device in rows]

    async def wait_for_instances(self, count: int = 1) -> list[int]:
        """Waits until there are some; their ids."""
        return await self._caller.wait_for_instances(count)

    async def wait_for_instance_by_runtime_data(self, key: str, value: str, timeout_s: float | None = None) -> int:
        """Waits for the one instance whose engine says `value` under `key` in its card's runtime data; its id."""
        found = await self.wait_for_instances_by_runtime_data(key, value, 1, timeout_s)
        if len(found) > 1:
            raise ValueError(f"{len(found)} instances of {self._endpoint!r} say {key} = {value!r}: {found}")
        return found[0]

    async def wait_for_instances_by_runtime_data(self, key: str, value: str, min_count: int, timeout_s: float | None = None) -> list[int]:
        """Waits until at least `min_count` instances say so; their ids in order. `TimeoutError` after `timeout_s`."""
        try:
            return await asyncio.wait_for(self._caller.wait_by_runtime_data(key, value, min_count), timeout_s)
        except (TimeoutError, asyncio.TimeoutError):
            text = f"fewer than {min_count} instances of {self._endpoint!r} said {key} = {value!r} within {timeout_s} s"
            raise TimeoutError(text) from None

    async def _call(
        self, request: Any, mode: str, instance_id: int | None, annotated: bool | None, context: Context | None, request_id: str | None
    ) -> Stream:
        context = context if context is not None else Context(request_id)
        metadata = [(str(name), str(value)) for name, value in context.metadata.items()]
        annotated = True if annotated is None else annotated
        answer = await self._caller.call(request, mode, instance_id, annotated, context.id(), metadata, context._cancellation)
        return Stream(answer)

    async def generate(
        self, request: Any, annotated: bool | None = True, context: Context | None = None, *, request_id: str | None = None
    ) -> Stream:
        """Calls an instance by the client's own mode, which is random unless another was asked for."""
        return await self._call(request, self._mode, None, annotated, context, request_id)

    async def random(
        self, request: Any, annotated: bool | None = True, context: Context | None = None, *, request_id: str | None = None
    ) -> Stream:
        """Calls a random instance."""
        return await self._call(request, "random", None, annotated, context, request_id)

    async def round_robin(
        self, request: Any, annotated: bool | None = True, context: Context | None = None, *, request_id: str | None = None
    ) -> Stream:
        """Calls each instance in turn."""
        return await self._call(request, "round_robin", None, annotated, context, request_id)

    async def device_aware_weighted(
        self, request: Any, annotated: bool | None = True, context: Context | None = None, *, request_id: str | None = None
    ) -> Stream:
        """Calls GPUs and CPUs in proportion to their worth, of either the one with the fewest calls of this client."""
        return await self._call(request, "device_aware_weighted", None, annotated, context, request_id)

    async def direct(
        self, request: Any, instance_id: int, annotated: bool | None = True, context: Context | None = None, *, request_id: str | None = None
    ) -> Stream:
        """Calls the instance of this id."""
        return await self._call(request, "direct", instance_id, annotated, context, request_id)


class _AwaitableClient(Client):
    """A client that the seeds' programs take as it is, and newer ones await."""

    def __await__(self) -> Generator[Any, Any, Client]:
        return self._self().__await__()

    async def _self(self) -> Client:
        return self


class Endpoint:
    """An endpoint by its name: to be served, or to be called."""

    def __init__(self, runtime: DistributedRuntime, name: tuple[str, str, str]) -> None:
        self._runtime = runtime
        self._name = name
        self._served: _native.Served | None = None

    def __repr__(self) -> str:
        return f"Endpoint({'.'.join(self._name)})"

    def connection_id(self) -> int:
        """The id under which this process announces itself."""
        return self._runtime._core.connection_id()

    def lease_id(self) -> int:
        """The same, by its older name."""
        return self.connection_id()

    def client(self, router_mode: Any = None) -> _AwaitableClient:
        """A client of this endpoint; can be awaited."""
        return _AwaitableClient(self, router_mode)

    async def serve_endpoint(
        self,
        handler: Handler,
        graceful_shutdown: bool = True,
        metrics_labels: list[tuple[str, str]] | None = None,
        health_check_payload: dict[str, Any] | None = None,
    ) -> None:
        """Serves the endpoint until the runtime is shut down or this is cancelled.

        `handler(request)` or `handler(request, context)` is an async generator; each item that it yields goes to the caller. What it raises is an
        error there. `metrics_labels` and `health_check_payload` are taken and have no effect yet.
        """
        del metrics_labels, health_check_payload
        loop = asyncio.get_running_loop()
        answers = _Answers(handler)
        served = await _native.serve(self._runtime._core, self._name, loop, answers.start)
        self._served = served
        try:
            await self._runtime._ending()
        finally:
            self._served = None
            await asyncio.shield(self._leave(served, answers, graceful_shutdown))

    async def _leave(self, served: _native.Served, answers: _Answers, graceful: bool) -> None:
        try:
            await served.withdraw()
        except Exception as error:  # noqa: BLE001
            logger.warning("%r stays announced until its lease ends: %s", self, error)
        if graceful:
            await answers.ended()
        served.close()
        answers.cancel()

    async def unregister_endpoint_instance(self) -> None:
        """Nobody is to find this endpoint until `register_endpoint_instance`."""
        await self._being_served().withdraw()

    async def register_endpoint_instance(self) -> None:
        """This endpoint is to be found again."""
        await self._being_served().announce()

    def _being_served(self) -> _native.Served:
        if self._served is None:
            raise RuntimeError(f"{self!r} is not served by this process")
        return self._served


class _Answers:
    """The requests of an endpoint that are being answered."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._takes_context = _takes_context(handler)
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, request: Any, id: str, metadata: list[tuple[str, str]], reply: _native.Reply) -> None:
        context = Context(id, dict(metadata), _cancellation=reply.cancellation)
        task = asyncio.get_running_loop().create_task(self._answer(request, context, reply))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _called(self, request: Any, context: Context) -> Any:
        match self._takes_context:
            case "by name":
                return self._handler(request, context=context)
            case "by place":
                return self._handler(request, context)
            case _:
                return self._handler(request)

    async def _answer(self, request: Any, context: Context, reply: _native.Reply) -> None:
        try:
            stream = self._called(request, context)
            if inspect.isawaitable(stream):
                stream = await stream
            late = 0
            async for item in stream:
                while not reply.send(item):
                    await reply.room()
                if context.is_stopped():
                    # The handler may see it and end in its own way; one that does not is closed.
                    late += 1
                    if late > _LATE_ITEMS:
                        break
            close = getattr(stream, "aclose", None)
            if close is not None:
                await close()
            while not reply.finish():
                await reply.room()
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001
            if not context.is_stopped():
                logger.exception("a handler failed")
            name = next((base.__name__ for base in type(error).__mro__ if base.__name__ in _TOLD), type(error).__name__)
            while not reply.fail(name, f"{type(error).__name__}: {error}"):
                await reply.room()
            while not reply.finish():
                await reply.room()

    async def ended(self) -> None:
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()


_TOLD = {
    "Cancelled",
    "CannotConnect",
    "ConnectionTimeout",
    "Disconnected",
    "EngineShutdown",
    "InvalidArgument",
    "RouterQueueLimitExceeded",
    "StreamIncomplete",
    "TimeoutError",
    "Unknown",
    "ValueError",
    "WorkerUnavailable",
}


def _takes_context(handler: Handler) -> str | None:
    """How a handler takes the context of its caller, if it does."""
    try:
        parameters = list(inspect.signature(handler).parameters.values())
    except (TypeError, ValueError):
        return None
    named = next((p for p in parameters if p.name == "context"), None)
    if named is not None and named.kind is named.KEYWORD_ONLY:
        return "by name"
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_two = len(positional) >= 2 or any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return "by place" if takes_two else None


class Component:
    """A component of a namespace."""

    def __init__(self, runtime: DistributedRuntime, namespace: str, name: str) -> None:
        self._runtime = runtime
        self._namespace = namespace
        self._component = name

    def endpoint(self, name: str) -> Endpoint:
        """One of its endpoints."""
        return Endpoint(self._runtime, (self._namespace, self._component, _checked(name)))


class Namespace:
    """A namespace."""

    def __init__(self, runtime: DistributedRuntime, name: str) -> None:
        self._runtime = runtime
        self._name = name

    def component(self, name: str) -> Component:
        """One of its components."""
        return Component(self._runtime, self._name, _checked(name))


def _checked(name: str) -> str:
    if not isinstance(name, str) or not name or "/" in name:
        raise ValueError(f"{name!r} cannot be a part of an endpoint's name: a str without slashes, not empty")
    return name


class DistributedRuntime:
    """A process among others that find each other in a store.

    Several in one process are fine: dropping one ends nothing of another.
    """

    def __init__(
        self,
        event_loop: asyncio.AbstractEventLoop | None = None,
        discovery_backend: str | None = None,
        request_plane: str | None = None,
        enable_nats: bool | None = None,
        *,
        event_plane: str | None = None,
        response_plane: str | None = None,
    ) -> None:
        if enable_nats is not None:
            warnings.warn("enable_nats has no effect: the event plane says whether NATS is used", DeprecationWarning, stacklevel=2)
        if response_plane not in (None, "tcp"):
            raise ValueError(f"response_plane cannot be {response_plane!r}: answers come over tcp")
        self._core = _native.Runtime(discovery_backend, request_plane, event_plane)
        self._pid = os.getpid()
        self._loop = event_loop
        _RUNTIMES.add(self)
        self._shut = False
        self._waiting: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}

    @staticmethod
    def detached() -> DistributedRuntime:
        """A runtime by the environment alone."""
        return DistributedRuntime()

    def event_loop(self) -> asyncio.AbstractEventLoop | None:
        """The loop that it was made with."""
        return self._loop

    def namespace(self, name: str) -> Namespace:
        """A namespace."""
        return Namespace(self, _checked(name))

    def endpoint(self, path: str) -> Endpoint:
        """The endpoint `namespace.component.endpoint`, with or without `dyn://` before it."""
        parts = path.removeprefix("dyn://").split(".")
        if len(parts) != 3 or not all(parts):
            raise ValueError(f"{path!r} is no endpoint: namespace.component.endpoint")
        namespace, component, endpoint = (_checked(part) for part in parts)
        return Endpoint(self, (namespace, component, endpoint))

    def shutdown(self) -> None:
        """Ends what is served, after what is being answered. Can be called from any thread."""
        self._shut = True
        for event, loop in list(self._waiting.items()):
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)

    async def _ending(self) -> None:
        event = asyncio.Event()
        self._waiting[event] = asyncio.get_running_loop()
        try:
            if not self._shut:
                await event.wait()
        finally:
            self._waiting.pop(event, None)

    def set_health_status(self, ready: bool) -> None:
        """Has no effect: a worker is as healthy as it answers."""
        del ready

    def register_engine_route(self, route_name: str, callback: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]) -> None:
        """Has no effect: this process has no HTTP door of its own."""
        del route_name, callback


class UnaryClient:
    """Calls an endpoint that answers with one item."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def complete(self, request: Any, *, context: Context | None = None) -> Any:
        """The one item that an instance answers with; `RuntimeError` if there is none, or more than one."""
        stream = await self._client.round_robin(request, annotated=False, context=context)
        items = []
        try:
            async for item in stream:
                items.append(item)
                if len(items) > 1:
                    raise RuntimeError("unary endpoint returned multiple responses")
        finally:
            await stream.aclose()
        if not items:
            raise RuntimeError("unary endpoint returned no response")
        return items[0]


async def serve_unary_endpoint(endpoint: Endpoint, handler: Callable[..., Awaitable[Any]]) -> None:
    """Serves `handler(request, context=...)`, whose result is the whole answer."""

    async def answer(request: Any, *, context: Context) -> AsyncIterator[Any]:
        yield await handler(request, context=context)

    await endpoint.serve_endpoint(answer)


def dynamo_worker(enable_nats: bool | None = None) -> Callable[[Callable[..., Coroutine[Any, Any, None]]], Callable[..., Coroutine[Any, Any, None]]]:
    """Decorates an async function that is to get a `DistributedRuntime` first; the environment says how it is reached."""
    if enable_nats is not None:
        warnings.warn("enable_nats has no effect: the event plane says whether NATS is used", DeprecationWarning, stacklevel=2)

    def decorator(function: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., Coroutine[Any, Any, None]]:
        @functools.wraps(function)
        async def wrapper(*args: Any, **kwargs: Any) -> None:
            backend = os.environ.get("DYN_DISCOVERY_BACKEND")
            runtime = DistributedRuntime(asyncio.get_running_loop(), backend, os.environ.get("DYN_REQUEST_PLANE"))
            await function(runtime, *args, **kwargs)

        return wrapper

    return decorator


kvasir_worker = dynamo_worker


def dynamo_endpoint(request_model: Any, response_model: Any) -> Callable[[Handler], Handler]:
    """Decorates a handler whose requests are read into a Pydantic model first; other models leave them as they are."""
    del response_model
    validate = getattr(request_model, "model_validate", None)

    def decorator(handler: Handler) -> Handler:
        @functools.wraps(handler)
        async def wrapper(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            given = list(args)
            if validate is not None and len(given) in (1, 2) and isinstance(given[-1], (dict, str)):
                value = given[-1]
                try:
                    given[-1] = request_model.model_validate_json(value) if isinstance(value, str) else validate(value)
                except ValueError as error:
                    raise ValueError(f"Invalid request: {error}") from error
            async for item in handler(*given, **kwargs):
                yield item

        return wrapper

    return decorator


__all__ = [
    "Client",
    "Component",
    "Context",
    "DistributedRuntime",
    "Endpoint",
    "Instance",
    "Namespace",
    "Stream",
    "TransportType",
    "UnaryClient",
    "dynamo_endpoint",
    "dynamo_worker",
    "kvasir_worker",
    "serve_unary_endpoint",
]
