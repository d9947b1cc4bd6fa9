"""Routing, publishing, models and indexes under the names of `dynamo.llm`: a program changes its import line and nothing else."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from kvasir import _core
from kvasir._core import (
    KvRouterConfig,
    OverlapScores,
    RadixTree,
    compute_block_hash_for_seq,
    compute_seq_hash_for_block,
    lora_name_to_id,
)
from kvasir.exceptions import HttpError, RouterQueueLimitExceeded, SelectionServiceError
from kvasir.runtime import Component, Endpoint, Stream


class RouterMode(enum.Enum):
    """How workers are chosen."""

    RoundRobin = "round-robin"
    Random = "random"
    PowerOfTwoChoices = "power-of-two"
    KV = "kv"
    Direct = "direct"
    LeastLoaded = "least-loaded"
    DeviceAwareWeighted = "device-aware-weighted"


class ModelInput(enum.Enum):
    """What a worker takes."""

    Text = "Text"
    Tokens = "Tokens"
    Tensor = "Tensor"


class WorkerType(enum.Enum):
    """Which part of a request a worker computes."""

    Prefill = "prefill"
    Decode = "decode"
    Encode = "encode"
    Aggregated = "aggregated"


class ModelType(enum.Flag):
    """What a model can be asked for; joined with `|`."""

    Empty = 0
    Chat = enum.auto()
    Completions = enum.auto()
    Embedding = enum.auto()
    TensorBased = enum.auto()
    Prefill = enum.auto()
    Images = enum.auto()
    Audios = enum.auto()
    Videos = enum.auto()
    Realtime = enum.auto()
    Classify = enum.auto()
    Pooling = enum.auto()
    Rerank = enum.auto()

    def supports_chat(self) -> bool:
        """Whether it holds conversations."""
        return ModelType.Chat in self

    def supports_embedding(self) -> bool:
        """Whether it makes embeddings."""
        return ModelType.Embedding in self

    def supports_classify(self) -> bool:
        """Whether it classifies."""
        return ModelType.Classify in self

    def supports_pooling(self) -> bool:
        """Whether it pools."""
        return ModelType.Pooling in self

    def supports_rerank(self) -> bool:
        """Whether it ranks again."""
        return ModelType.Rerank in self

    def _text(self) -> str:
        return " | ".join(kind.name or "" for kind in self)


class RoutingConstraints:
    """Which workers may serve a request, and which it would rather have."""

    def __init__(
        self, required_taints: Iterable[str] | None = None, preferred_taints: Mapping[str, float] | Iterable[str] | None = None
    ) -> None:
        self.required_taints = list(required_taints or [])
        if preferred_taints is None or isinstance(preferred_taints, Mapping):
            self.preferred_taints = dict(preferred_taints or {})
        else:
            self.preferred_taints = {taint: 1.0 for taint in preferred_taints}


class LoadThresholdConfig:
    """When a worker is too busy to be chosen."""

    def __init__(
        self,
        *,
        active_decode_blocks_threshold: float | None = None,
        active_prefill_tokens_threshold: int | None = None,
        active_prefill_tokens_threshold_frac: float | None = None,
    ) -> None:
        self.active_decode_blocks_threshold = active_decode_blocks_threshold
        self.active_prefill_tokens_threshold = active_prefill_tokens_threshold
        self.active_prefill_tokens_threshold_frac = active_prefill_tokens_threshold_frac

    def _figures(self) -> tuple[float | None, int | None, float | None]:
        return (self.active_decode_blocks_threshold, self.active_prefill_tokens_threshold, self.active_prefill_tokens_threshold_frac)


class RouterConfig:
    """How the frontend is to route to a model's workers."""

    def __init__(
        self,
        mode: RouterMode,
        config: KvRouterConfig | None = None,
        active_decode_blocks_threshold: float | None = None,
        active_prefill_tokens_threshold: int | None = None,
        active_prefill_tokens_threshold_frac: float | None = None,
        enforce_disagg: bool = False,
        session_affinity_ttl_secs: int | None = None,
        session_affinity_mode: str = "hard",
    ) -> None:
        self.router_mode = mode
        self.kv_router_config = config if config is not None else KvRouterConfig()
        self.active_decode_blocks_threshold = active_decode_blocks_threshold
        self.active_prefill_tokens_threshold = active_prefill_tokens_threshold
        self.active_prefill_tokens_threshold_frac = active_prefill_tokens_threshold_frac
        self.enforce_disagg = enforce_disagg
        self.session_affinity_ttl_secs = session_affinity_ttl_secs
        self.session_affinity_mode = session_affinity_mode


@dataclass
class ModelRuntimeConfig:
    """What a worker says of its engine."""

    context_length: int | None = None
    total_kv_blocks: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    exclude_tools_when_tool_choice_none: bool = True
    data_parallel_start_rank: int = 0
    data_parallel_size: int = 1
    enable_local_indexer: bool = True
    kv_event_publishing_enabled: bool | None = None
    enable_eagle: bool = False
    taints: set[str] = field(default_factory=set)
    topology_domains: dict[str, str] = field(default_factory=dict)
    kv_transfer_domain: str | None = None
    kv_transfer_enforcement: str | None = None
    kv_transfer_preferred_weight: float | None = None
    runtime_data: dict[str, Any] = field(default_factory=dict)
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None

    def set_engine_specific(self, key: str, value: Any) -> None:
        """Keeps a value for readers of the card."""
        self.runtime_data[key] = value

    def get_engine_specific(self, key: str) -> Any | None:
        """A value that was kept."""
        return self.runtime_data.get(key)

    def set_disaggregated_endpoint(self, bootstrap_host: str | None = None, bootstrap_port: int | None = None) -> None:
        """Where decode workers meet this prefill worker."""
        self.bootstrap_host = bootstrap_host
        self.bootstrap_port = bootstrap_port

    def _json(self) -> dict[str, Any]:
        told: dict[str, Any] = {
            "context_length": self.context_length,
            "total_kv_blocks": self.total_kv_blocks,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "tool_call_parser": self.tool_call_parser,
            "reasoning_parser": self.reasoning_parser,
            "tool_call_arguments_format": "json_string",
            "structural_tag_mode": "off",
            "structural_tag_scope": "auto",
            "structural_tag_schema": "auto",
            "exclude_tools_when_tool_choice_none": self.exclude_tools_when_tool_choice_none,
            "data_parallel_start_rank": self.data_parallel_start_rank,
            "data_parallel_size": self.data_parallel_size,
            "enable_local_indexer": self.enable_local_indexer,
            "runtime_data": self.runtime_data,
            "enable_eagle": self.enable_eagle,
        }
        if self.kv_event_publishing_enabled is not None:
            told["kv_event_publishing_enabled"] = self.kv_event_publishing_enabled
        if self.topology_domains:
            told["topology_domains"] = dict(self.topology_domains)
        for name in ("kv_transfer_domain", "kv_transfer_enforcement", "kv_transfer_preferred_weight"):
            if getattr(self, name) is not None:
                told[name] = getattr(self, name)
        if self.taints:
            told["taints"] = sorted(self.taints)
        if self.bootstrap_host is not None or self.bootstrap_port is not None:
            told["disaggregated_endpoint"] = {"bootstrap_host": self.bootstrap_host, "bootstrap_port": self.bootstrap_port}
        return told


_CARDS: dict[tuple[int, tuple[str, str, str], str | None], dict[str, Any]] = {}
"""What this process has announced, so that labels can change."""


def _role(model_type: ModelType, worker_type: WorkerType | None) -> WorkerType:
    if worker_type is not None:
        return worker_type
    return WorkerType.Prefill if ModelType.Prefill in model_type else WorkerType.Aggregated


def _slug(name: str) -> str:
    return "".join(c.lower() if c.isascii() and (c.isalnum() or c in "-_") else "_" for c in name)


async def register_model(
    model_input: ModelInput,
    model_type: ModelType,
    endpoint: Endpoint,
    model_path: str = "",
    model_name: str | None = None,
    kv_cache_block_size: int | None = None,
    router_config: RouterConfig | None = None,
    runtime_config: ModelRuntimeConfig | None = None,
    user_data: dict[str, Any] | None = None,
    custom_template_path: str | None = None,
    media_decoder: Any = None,
    media_fetcher: Any = None,
    lora_name: str | None = None,
    base_model_path: str | None = None,
    worker_type: WorkerType | None = None,
    needs: list[list[WorkerType]] | None = None,
    self_host_metadata: bool | None = None,
    *,
    tensor_model_config: dict[str, Any] | None = None,
    ignore_weights: bool = False,
    max_gpu_lora_count: int | None = None,
    model_aliases: list[str] | None = None,
    skip_model_assets: bool = False,
    migration_limit: int = 0,
    context_length: int | None = None,
) -> None:
    """Says that an endpoint of this process serves the model in the folder `model_path`, under `model_name`.

    Frontends read the tokenizer and the template in that folder; nothing is downloaded. Without `worker_type` the worker computes all of a
    request, or its prompt alone if `model_type` is `ModelType.Prefill`.
    """
    del media_decoder, media_fetcher, tensor_model_config, ignore_weights, max_gpu_lora_count, self_host_metadata
    if (lora_name is None) != (base_model_path is None):
        raise ValueError("lora_name and base_model_path belong together: give both or none")
    config = runtime_config if runtime_config is not None else ModelRuntimeConfig()
    folder = base_model_path if base_model_path is not None else model_path
    name = lora_name or model_name or folder.rstrip("/").rsplit("/", 1)[-1]
    if not name:
        raise ValueError("a model needs a name: model_name, or the folder that model_path names")
    more: dict[str, Any] = {}
    if user_data is not None:
        more["user_data"] = user_data
    if lora_name is not None:
        more["lora"] = {"name": lora_name}
    if custom_template_path is not None:
        with open(custom_template_path, encoding="utf-8") as file:
            more["chat_template"] = file.read()
    if router_config is not None:
        more["router_config"] = {
            "router_mode": router_config.router_mode.value,
            "kv_router_config": json.loads(router_config.kv_router_config.to_json()),
        }
    length = context_length or config.context_length or _context_length(folder)
    told = {
        "model_path": folder,
        "name": name,
        "aliases": model_aliases or [],
        "model_type": model_type._text(),
        "model_input": model_input.value,
        "worker_type": _role(model_type, worker_type).value,
        "needs": [[kind.value for kind in group] for group in needs or []],
        "kv_cache_block_size": kv_cache_block_size or 16,
        "context_length": length,
        "migration_limit": migration_limit,
        "skip_model_assets": skip_model_assets,
        "runtime_config": {**config._json(), "context_length": length},
        "more": more,
    }
    suffix = _slug(lora_name) if lora_name is not None else None
    await _announce(endpoint, suffix, told)


async def _announce(endpoint: Endpoint, suffix: str | None, told: dict[str, Any]) -> None:
    await _core.announce_model(endpoint._runtime._core, endpoint._name, json.dumps(told), suffix)
    _CARDS[(id(endpoint._runtime), endpoint._name, suffix)] = told


def _context_length(folder: str) -> int:
    try:
        with open(f"{folder}/config.json", encoding="utf-8") as file:
            config = json.load(file)
        return int(config.get("max_position_embeddings") or config.get("text_config", {}).get("max_position_embeddings") or 8192)
    except (OSError, ValueError):
        return 8192


async def unregister_model(endpoint: Endpoint, lora_name: str | None = None) -> None:
    """The endpoint serves the model, or the adapter of this name, no more."""
    suffix = _slug(lora_name) if lora_name is not None else None
    _CARDS.pop((id(endpoint._runtime), endpoint._name, suffix), None)
    await _core.withdraw_model(endpoint._runtime._core, endpoint._name, suffix)


async def update_model_taints(endpoint: Endpoint, taints: Iterable[str]) -> None:
    """Replaces the labels that requests may require or prefer."""
    labels = sorted(set(taints))
    reserved = [label for label in labels if label.startswith("dynamo.topology/")]
    if reserved:
        raise ValueError(f"labels that begin with dynamo.topology/ are reserved: {reserved}")
    mine = [(key, told) for key, told in _CARDS.items() if key[:2] == (id(endpoint._runtime), endpoint._name)]
    if not mine:
        raise ValueError(f"no model is registered for {endpoint!r}")
    for (_, _, suffix), told in mine:
        await _announce(endpoint, suffix, {**told, "runtime_config": {**told["runtime_config"], "taints": labels}})


register_llm = register_model
unregister_llm = unregister_model


class KvEventPublisher:
    """Tells routers what the cache of one rank holds.

    With `zmq_endpoint` it relays an engine's own event socket; without, the engine calls `publish_stored` and `publish_removed`. Calls wait for
    nobody.
    """

    def __init__(
        self,
        endpoint: Endpoint | Component,
        worker_id: int | None = None,
        kv_block_size: int = 0,
        dp_rank: int = 0,
        enable_local_indexer: bool = False,
        zmq_endpoint: str | None = None,
        zmq_topic: str | None = None,
        batching_timeout_ms: int | None = None,
        image_token_id: int | None = None,
        kv_state_endpoint: str | None = None,
        video_token_id: int | None = None,
    ) -> None:
        del batching_timeout_ms, image_token_id, kv_state_endpoint, video_token_id
        if kv_block_size <= 0:
            raise ValueError("kv_block_size must be more than 0")
        # Older releases gave the component; its workers take tokens at `generate`.
        where = endpoint.endpoint("generate") if isinstance(endpoint, Component) else endpoint
        self._endpoint = where
        self._core = _core.CacheEvents(
            where._runtime._core, where._name, worker_id or None, kv_block_size, dp_rank, enable_local_indexer, zmq_endpoint, zmq_topic
        )

    def publish_stored(
        self,
        token_ids: Sequence[int],
        num_block_tokens: Sequence[int],
        block_hashes: Sequence[int],
        parent_hash: int | None = None,
        block_mm_infos: Sequence[Mapping[str, Any] | None] | None = None,
        lora_name: str | None = None,
        is_eagle: bool | None = None,
        cache_salt: str | None = None,
    ) -> None:
        """Blocks were stored, the first of them after `parent_hash`. A block that is not full ends what is told."""
        self._core.publish_stored(token_ids, num_block_tokens, block_hashes, parent_hash, block_mm_infos, lora_name, is_eagle, cache_salt)

    def publish_removed(self, block_hashes: Sequence[int]) -> None:
        """Blocks were removed."""
        self._core.publish_removed(block_hashes)

    def publish_cleared(self) -> None:
        """The cache is empty."""
        self._core.publish_cleared()

    def publish_batch(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Several events in order: `{"type": "stored", ...}`, `{"type": "removed", ...}`. All are checked before any is told."""
        self._core.publish_batch(events)

    def shutdown(self) -> None:
        """Tells nothing more."""
        self._core.shutdown()


@dataclass
class ZmqKvEventPublisherConfig:
    """Where an engine publishes its cache events."""

    worker_id: int
    kv_block_size: int
    zmq_endpoint: str = "tcp://127.0.0.1:5557"
    zmq_topic: str = ""


class ZmqKvEventPublisher:
    """Relays an engine's event socket to routers: the older name of `KvEventPublisher(zmq_endpoint=...)`."""

    def __init__(self, component: Endpoint | Component, config: ZmqKvEventPublisherConfig) -> None:
        self._publisher = KvEventPublisher(
            component,
            config.worker_id,
            config.kv_block_size,
            enable_local_indexer=True,
            zmq_endpoint=config.zmq_endpoint,
            zmq_topic=config.zmq_topic,
        )

    def shutdown(self) -> None:
        """Tells nothing more."""
        self._publisher.shutdown()


class WorkerMetricsPublisher:
    """Tells routers how loaded a worker is."""

    def __init__(self) -> None:
        self._core: _core.LoadReports | None = None

    async def create_endpoint(self, endpoint: Endpoint | Component) -> None:
        """Opens the channel; to be awaited before `publish`."""
        where = endpoint.endpoint("generate") if isinstance(endpoint, Component) else endpoint
        self._core = await _core.open_load(where._runtime._core, where._name)

    def publish(self, dp_rank: int | None = None, active_decode_blocks: int | None = None, kv_used_blocks: int | None = None) -> None:
        """Tells how loaded a rank is; at least one figure."""
        if active_decode_blocks is None and kv_used_blocks is None:
            raise ValueError("nothing to publish: give active_decode_blocks or kv_used_blocks")
        if self._core is None:
            raise RuntimeError("await create_endpoint(endpoint) first")
        self._core.publish(dp_rank, active_decode_blocks, kv_used_blocks)


class FpmDirectPublisher:
    """Tells what an engine computes in each of its steps. A rank of which nothing is told gives a sign of life each second."""

    def __init__(self, endpoint: Endpoint, worker_id: int, dp_size: int = 1) -> None:
        self._core = _core.PassReports(endpoint._runtime._core, endpoint._name, worker_id, dp_size)

    def publish(
        self,
        *,
        dp_rank: int,
        scheduled_num_prefill_requests: int,
        scheduled_sum_prefill_tokens: int,
        scheduled_sum_prefill_kv_tokens: int,
        scheduled_num_decode_requests: int,
        scheduled_sum_decode_kv_tokens: int,
        queued_num_prefill_requests: int,
        queued_sum_prefill_tokens: int,
        queued_num_decode_requests: int,
        queued_sum_decode_kv_tokens: int,
        wall_time_secs: float,
    ) -> None:
        """A rank made a step: what it computed, what waits, and how long it took."""
        scheduled = (
            scheduled_num_prefill_requests,
            scheduled_sum_prefill_tokens,
            scheduled_sum_prefill_kv_tokens,
            scheduled_num_decode_requests,
            scheduled_sum_decode_kv_tokens,
        )
        queued = (queued_num_prefill_requests, queued_sum_prefill_tokens, queued_num_decode_requests, queued_sum_decode_kv_tokens)
        self._core.publish(dp_rank, scheduled, queued, wall_time_secs)

    def shutdown(self) -> None:
        """Tells nothing more."""
        self._core.shutdown()


class FpmEventRelay:
    """Passes on the reports that an engine's own socket publishes."""

    def __init__(self, endpoint: Endpoint, zmq_endpoint: str) -> None:
        self._core = _core.PassRelay(endpoint._runtime._core, endpoint._name, zmq_endpoint)

    def shutdown(self) -> None:
        """Passes on nothing more."""
        self._core.shutdown()


class FpmEventSubscriber:
    """Hears what the workers of an endpoint compute: one report after the other (`recv`), or the newest of each rank (`start_tracking`)."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._core = _core.PassReader(endpoint._runtime._core, endpoint._name)
        self._tracks = False

    def recv(self) -> bytes | None:
        """The next report, as MessagePack; blocks. None after `shutdown`."""
        if self._tracks:
            raise RuntimeError("recv() cannot be used after start_tracking()")
        return self._core.recv()

    def start_tracking(self) -> None:
        """Keeps the newest report of each rank from now on."""
        if not self._tracks:
            self._tracks = True
            self._core.track()

    def get_recent_stats(self) -> dict[tuple[str, int], bytes]:
        """The newest report of each rank of a worker that is there, by `(worker_id, dp_rank)`."""
        if not self._tracks:
            raise RuntimeError("call start_tracking() first")
        return self._core.recent()

    def get_model_cards(self) -> dict[str, str]:
        """The cards of the workers that are there, as JSON, by worker id."""
        if not self._tracks:
            raise RuntimeError("call start_tracking() first")
        return self._core.cards()

    def shutdown(self) -> None:
        """Hears nothing more."""
        self._core.shutdown()


@dataclass(kw_only=True)
class SelectionCacheConfig:
    """How long and how many selections can be turned into reservations."""

    ttl_secs: float | None = None
    max_entries: int | None = None
    max_bytes: int | None = None


_KINDS = {404: "not_found", 405: "not_found", 409: "conflict", 429: "overloaded", 501: "unsupported", 503: "not_ready"}


class SelectionService:
    """Chooses and books workers for a program that forwards requests itself: `kvasir select` in this process, without planes.

    Requests and answers are those of its HTTP routes. Options come from the environment, as for `kvasir select`.
    """

    def __init__(
        self,
        *,
        indexer_threads: int = 4,
        indexer_peers: Sequence[str] | None = None,
        replica_sync_port: int | None = None,
        replica_sync_peers: Sequence[str] | None = None,
        selection_cache: SelectionCacheConfig | None = None,
        session_affinity_ttl_secs: float | None = None,
    ) -> None:
        if indexer_threads <= 0:
            raise ValueError("indexer_threads must be more than 0")
        if indexer_peers:
            raise ValueError("indexer_peers is not taken: engines are listened to, and an engine's replay socket fills the index")
        cache = selection_cache if selection_cache is not None else SelectionCacheConfig()
        figures = (cache.ttl_secs, cache.max_entries, cache.max_bytes)
        ttl, entries, most = (None if figure is None else str(figure) for figure in figures)
        session = None if session_affinity_ttl_secs is None else round(session_affinity_ttl_secs)
        self._core = _core.Selection((ttl, entries, most), session, replica_sync_port, list(replica_sync_peers or []))

    def shutdown(self) -> None:
        """Listens to no engine any more; what is asked from now on is refused."""
        self._core.shutdown()

    async def shutdown_async(self) -> None:
        """The same."""
        self._core.shutdown()

    @staticmethod
    def _body(request: Any) -> bytes:
        if not isinstance(request, Mapping):
            raise ValueError(f"a request is a mapping, not {type(request).__name__}")
        return json.dumps(request).encode()

    def _named(self, request: Any) -> Any:
        return {"model_name": "default", **request} if isinstance(request, Mapping) else request

    @staticmethod
    def _told(answer: tuple[int, bytes]) -> Any:
        status, body = answer
        if status < 300:
            return json.loads(body) if body else None
        try:
            error = str(json.loads(body)["error"])
        except (ValueError, KeyError, TypeError):
            error = body.decode(errors="replace") or f"status {status}"
        if status in (400, 413, 422):
            raise ValueError(error)
        raise SelectionServiceError(error, _KINDS.get(status, "internal"), status)

    async def _ask(self, verb: str, path: str, request: Any = None) -> Any:
        return self._told(await self._core.ask(verb, path, b"" if request is None else self._body(request)))

    def _ask_now(self, verb: str, path: str, request: Any = None) -> Any:
        return self._told(self._core.ask_now(verb, path, b"" if request is None else self._body(request)))

    async def upsert_worker(self, worker: Mapping[str, Any]) -> dict[str, Any]:
        """Adds or replaces a worker and listens to its events; what is known of it."""
        return await self._ask("POST", "/workers", self._named(worker))  # type: ignore[no-any-return]

    async def patch_worker(self, worker_id: int, patch: Mapping[str, Any]) -> dict[str, Any]:
        """Changes what is known of a worker."""
        return await self._ask("PATCH", f"/workers/{worker_id}", patch)  # type: ignore[no-any-return]

    async def delete_worker(self, worker_id: int) -> dict[str, Any]:
        """Forgets a worker; what was known of it."""
        return await self._ask("DELETE", f"/workers/{worker_id}")  # type: ignore[no-any-return]

    def list_workers(self, *, model_name: str | None = None, routing_group: str | None = None) -> list[dict[str, Any]]:
        """What is known of the workers, of one model or group if one is named."""
        return _of_group(self._ask_now("GET", "/workers"), model_name, routing_group)

    def ready(self) -> dict[str, Any]:
        """Whether a worker can be chosen."""
        status, body = self._core.ask_now("GET", "/ready", b"")
        told = json.loads(body)
        return told if "ready" in told else self._told((status, body))  # type: ignore[no-any-return]

    async def overlap_scores(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """How much of a prompt each worker holds."""
        return await self._ask("POST", "/overlap_scores", self._named(request))  # type: ignore[no-any-return]

    async def select(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The best worker; books nothing."""
        return await self._ask("POST", "/select", self._named(request))  # type: ignore[no-any-return]

    async def select_and_reserve(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The best worker, booked."""
        return await self._ask("POST", "/select_and_reserve", self._named(request))  # type: ignore[no-any-return]

    async def create_reservation(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Books what was selected under `selection_id`, or the `worker_id` that is named."""
        return await self._ask("POST", "/reservations", self._named(request))  # type: ignore[no-any-return]

    async def prefill_complete(self, selection_id: str) -> None:
        """The first token of a reservation came."""
        await self._ask("POST", f"/reservations/{quote(selection_id, safe='')}/prefill_complete")

    def add_output_block(self, selection_id: str, *, decay_fraction: float | None = None) -> None:
        """A reservation has generated a block."""
        told = {} if decay_fraction is None else {"decay_fraction": decay_fraction}
        self._ask_now("POST", f"/reservations/{quote(selection_id, safe='')}/output_block", told)

    async def free_reservation(self, selection_id: str) -> None:
        """A reservation ended."""
        await self._ask("DELETE", f"/reservations/{quote(selection_id, safe='')}")

    def loads(self, *, model_name: str | None = None, routing_group: str | None = None) -> list[dict[str, Any]]:
        """What is booked on each worker, group by group."""
        return _of_group(self._ask_now("GET", "/loads"), model_name, routing_group)

    async def potential_loads(self, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What each worker would have to do if a prompt went there."""
        return await self._ask("POST", "/potential_loads", self._named(request))  # type: ignore[no-any-return]

    def list_replica_peers(self) -> list[Any]:
        """Where other services of its kind are."""
        return self._ask_now("GET", "/replica_sync/peers")  # type: ignore[no-any-return]

    def register_replica_peer(self, endpoint: str) -> None:
        """Listens to another service of its kind."""
        self._ask_now("POST", "/replica_sync/register_peer", {"endpoint": endpoint})

    def deregister_replica_peer(self, endpoint: str) -> None:
        """Listens to it no more."""
        self._ask_now("POST", "/replica_sync/deregister_peer", {"endpoint": endpoint})


def _of_group(rows: Any, model_name: str | None, routing_group: str | None) -> list[dict[str, Any]]:
    wanted = {"model_name": model_name, "routing_group": routing_group}
    return [row for row in rows if all(value is None or row.get(name) == value for name, value in wanted.items())]


class KvRouter:
    """Routes prompts to the workers of an endpoint by what their caches hold and how loaded they are.

    It is the router that `kvasir frontend` runs. Several in one process share nothing: dropping one ends nothing of another.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        block_size: int,
        kv_router_config: KvRouterConfig | None = None,
        ais_perf_config: Any = None,
        session_affinity_ttl_secs: int | None = None,
        *,
        load_threshold_config: LoadThresholdConfig | None = None,
        session_affinity_mode: str = "hard",
        aic_perf_config: Any = None,
    ) -> None:
        del ais_perf_config, aic_perf_config
        if session_affinity_mode != "hard":
            raise ValueError(f"session_affinity_mode cannot be {session_affinity_mode!r}: a session stays with its worker (hard)")
        if session_affinity_ttl_secs is not None and session_affinity_ttl_secs <= 0:
            raise ValueError("session_affinity_ttl_secs must be more than 0")
        config = kv_router_config if kv_router_config is not None else KvRouterConfig()
        self._endpoint = endpoint
        self._config = config
        self._block_size = block_size
        busy = load_threshold_config if load_threshold_config is not None else LoadThresholdConfig()
        self._core = _core.EndpointRouter(
            endpoint._runtime._core, endpoint._name, block_size, config, busy._figures(), session_affinity_ttl_secs
        )
        self._waits = not config.skip_initial_worker_wait

    async def _first_worker(self) -> None:
        # Dynamo's constructor waits for the first worker; here the first question does, and only that.
        if self._waits:
            await self._core.wait_for_workers(1)
            self._waits = False

    async def wait_for_workers(self, count: int = 1) -> list[int]:
        """Waits until so many workers are there; their ids."""
        return await self._core.wait_for_workers(count)

    def worker_ids(self) -> list[int]:
        """The ids of the workers that are there."""
        return self._core.worker_ids()

    @property
    def booked(self) -> int:
        """Requests that are booked."""
        return self._core.booked

    @property
    def blocks_known(self) -> int:
        """Blocks that the index holds, over all workers."""
        return self._core.blocks_known

    async def generate(
        self,
        token_ids: Sequence[int],
        model: str,
        stop_conditions: dict[str, Any] | None = None,
        sampling_options: dict[str, Any] | None = None,
        output_options: dict[str, Any] | None = None,
        router_config_override: dict[str, Any] | None = None,
        worker_id: int | None = None,
        dp_rank: int | None = None,
        extra_args: dict[str, Any] | None = None,
        block_mm_infos: Any = None,
        multi_modal_data: Any = None,
        mm_routing_info: Any = None,
        routing_constraints: RoutingConstraints | None = None,
        response_buffer_size: int = 100,
    ) -> Stream:
        """Sends a prompt to the best worker, or to `worker_id`, and iterates over its answer: dictionaries with `token_ids`.

        The request is booked until its answer ends; letting go of the stream ends both.
        """
        del mm_routing_info
        request: dict[str, Any] = {
            "model": model,
            "token_ids": list(token_ids),
            "stop_conditions": stop_conditions or {},
            "sampling_options": sampling_options or {},
            "output_options": output_options or {},
            "eos_token_ids": [],
            "annotations": [],
        }
        if extra_args is not None:
            request["extra_args"] = extra_args
        if multi_modal_data is not None:
            request["multi_modal_data"] = multi_modal_data
        return await self._send(
            request, router_config_override, worker_id, dp_rank, routing_constraints, response_buffer_size, block_mm_infos
        )

    async def generate_from_request(self, request: dict[str, Any], response_buffer_size: int = 100) -> Stream:
        """Sends a whole `PreprocessedRequest`. Its `routing` may name a worker, its `agent_context.session_id` the session that it belongs to."""
        override = request.get("router_config_override")
        return await self._send(request, override, None, None, None, response_buffer_size)

    async def _send(
        self,
        request: dict[str, Any],
        override: dict[str, Any] | None,
        worker_id: int | None,
        dp_rank: int | None,
        constraints: RoutingConstraints | None,
        buffer: int,
        block_mm_infos: Any = None,
    ) -> Stream:
        await self._first_worker()
        required = constraints.required_taints if constraints is not None else None
        preferred = constraints.preferred_taints if constraints is not None else None
        answer = await self._core.generate(request, override, worker_id, dp_rank, required, preferred, buffer, block_mm_infos)
        return Stream(answer)

    async def best_worker(
        self,
        token_ids: Sequence[int],
        router_config_override: dict[str, Any] | None = None,
        request_id: str | None = None,
        update_indexer: bool = False,
        block_mm_infos: Any = None,
        lora_name: str | None = None,
        routing_constraints: RoutingConstraints | None = None,
        strict_priority: int = 0,
        policy_class: str | None = None,
        cache_namespace: str | None = None,
    ) -> tuple[int, int, int]:
        """`(worker_id, dp_rank, overlap_blocks)`.

        Without `request_id` it is a question. With one the request is booked: `mark_prefill_complete` at its first token, `free` at its end.
        """
        del update_indexer
        await self._first_worker()
        required = routing_constraints.required_taints if routing_constraints is not None else None
        preferred = routing_constraints.preferred_taints if routing_constraints is not None else None
        return await self._core.best_worker(
            token_ids,
            router_config_override,
            request_id,
            lora_name,
            required,
            preferred,
            strict_priority,
            policy_class,
            cache_namespace,
            block_mm_infos,
        )

    async def best_worker_id(
        self, token_ids: Sequence[int], router_config_override: dict[str, Any] | None = None, request_id: str | None = None
    ) -> tuple[int, int]:
        """`(worker_id, overlap_blocks)`: the older `best_worker`."""
        worker_id, _, overlap = await self.best_worker(token_ids, router_config_override, request_id)
        return worker_id, overlap

    async def get_potential_loads(
        self, token_ids: Sequence[int], block_mm_infos: Any = None, lora_name: str | None = None, cache_namespace: str | None = None
    ) -> list[dict[str, int]]:
        """What each rank would have to do if a prompt went there, one row per rank."""
        await self._first_worker()
        return self._core.potential_loads(token_ids, lora_name, cache_namespace, block_mm_infos)

    async def get_overlap_scores(
        self,
        token_ids: Sequence[int],
        router_config_override: dict[str, Any] | None = None,
        block_mm_infos: Any = None,
        lora_name: str | None = None,
        include_shared: bool = True,
        cache_namespace: str | None = None,
    ) -> dict[str, Any]:
        """How many leading blocks each rank holds, tier by tier, as Dynamo's `/overlap_scores` answers it."""
        del router_config_override, include_shared
        await self._first_worker()
        near, far = self._config.host_cache_hit_weight, self._config.disk_cache_hit_weight
        workers = [
            {
                "worker_id": worker,
                "dp_rank": rank,
                "device_blocks": device,
                "host_pinned_blocks": device + host,
                "disk_blocks": device + host + disk,
                "host_pinned_extension_blocks": host,
                "disk_extension_blocks": disk,
                "shared_beyond_device_blocks": 0,
                "router_credit_blocks": device + near * host + far * disk,
            }
            for worker, rank, device, host, disk in self._core.overlaps(token_ids, lora_name, cache_namespace, block_mm_infos)
        ]
        return {
            "block_size": self._block_size,
            "num_blocks": len(token_ids) // self._block_size,
            "workers": workers,
            "shared_cache": {"enabled": False, "total_hit_blocks": 0, "ranges": [], "error": None},
        }

    async def mark_prefill_complete(self, request_id: str) -> None:
        """The first token of a booked request came."""
        self._core.mark_prefill_complete(request_id)

    async def free(self, request_id: str) -> None:
        """A booked request ended."""
        self._core.free(request_id)

    async def dump_events(self) -> str:
        """All that the index holds, as a JSON array of router events."""
        return await self._core.dump_events()


KvPushRouter = KvRouter


class KvIndexer:
    """Which worker of an endpoint holds which prefix, by the events that they publish."""

    def __init__(self, endpoint: Endpoint | Component, block_size: int, consumer_uuid: str | None = None) -> None:
        del consumer_uuid
        where = endpoint.endpoint("generate") if isinstance(endpoint, Component) else endpoint
        self._block_size = block_size
        busy = LoadThresholdConfig()._figures()
        self._core = _core.EndpointRouter(where._runtime._core, where._name, block_size, KvRouterConfig(), busy)

    def find_matches(self, sequence: Sequence[int]) -> OverlapScores:
        """How many leading blocks each rank holds, by the names of the blocks. Can be awaited."""
        return self._core.find_matches(sequence)

    def find_matches_for_request(
        self, token_ids: Sequence[int], lora_name: str | None = None, is_eagle: bool | None = None
    ) -> OverlapScores:
        """The same for a prompt. Can be awaited."""
        names = compute_block_hash_for_seq(token_ids, self._block_size, None, lora_name, is_eagle)
        return self._core.find_matches(names)

    def block_size(self) -> int:
        """Tokens in a block."""
        return self._block_size

    async def wait_for_workers(self, count: int = 1) -> list[int]:
        """Waits until so many workers are there; their ids."""
        return await self._core.wait_for_workers(count)


class ApproxKvIndexer(_core.ApproxKvIndexer):
    """Which worker likely holds which prefix, by where requests were sent: for engines that publish no events."""

    async def process_routing_decision_for_request(
        self, tokens: Sequence[int], worker_id: int, dp_rank: int = 0, lora_name: str | None = None
    ) -> None:
        """A prompt was sent to a rank: its blocks count as cached there for the time to live."""
        self.record_routing(tokens, worker_id, dp_rank, lora_name)


__all__ = [
    "ApproxKvIndexer",
    "FpmDirectPublisher",
    "FpmEventRelay",
    "FpmEventSubscriber",
    "HttpError",
    "KvEventPublisher",
    "KvIndexer",
    "KvPushRouter",
    "KvRouter",
    "KvRouterConfig",
    "LoadThresholdConfig",
    "ModelInput",
    "ModelRuntimeConfig",
    "ModelType",
    "OverlapScores",
    "RadixTree",
    "RouterConfig",
    "RouterMode",
    "RouterQueueLimitExceeded",
    "RoutingConstraints",
    "SelectionCacheConfig",
    "SelectionService",
    "SelectionServiceError",
    "WorkerMetricsPublisher",
    "WorkerType",
    "ZmqKvEventPublisher",
    "ZmqKvEventPublisherConfig",
    "compute_block_hash_for_seq",
    "compute_seq_hash_for_block",
    "lora_name_to_id",
    "register_llm",
    "register_model",
    "unregister_llm",
    "unregister_model",
    "update_model_taints",
]
