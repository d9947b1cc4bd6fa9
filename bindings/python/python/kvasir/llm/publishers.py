"""What an engine tells routers: what its cache holds, how loaded it is, what it computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from kvasir import _native
from kvasir.runtime import Component, Endpoint


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
        self._core = _native.CacheEvents(
            where._runtime._core, where._name, worker_id or None, kv_block_size, dp_rank, enable_local_indexer, zmq_endpoint, zmq_topic
        )

    @overload
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
    ) -> None: ...

    @overload
    def publish_stored(
        self,
        token_ids: int,
        num_block_tokens: Sequence[int],
        block_hashes: Sequence[int],
        parent_hash: Sequence[int],
        block_mm_infos: int,
        lora_name: int | None = None,
    ) -> None: ...

    def publish_stored(
        self,
        token_ids: Any = None,
        num_block_tokens: Any = None,
        block_hashes: Any = None,
        parent_hash: Any = None,
        block_mm_infos: Any = None,
        lora_name: Any = None,
        is_eagle: bool | None = None,
        cache_salt: str | None = None,
        *,
        event_id: int | None = None,
        lora_id: int = 0,
    ) -> None:
        """Blocks were stored, the first of them after `parent_hash`. A block that is not full ends what is told.

        Older releases number events themselves: `publish_stored(event_id, token_ids, num_block_tokens, block_hashes, lora_id, parent_hash)`. The number
        is not needed here; an adapter has a name.
        """
        if isinstance(token_ids, int):
            event_id, token_ids, num_block_tokens, block_hashes = token_ids, num_block_tokens, block_hashes, parent_hash
            lora_id, parent_hash = block_mm_infos if block_mm_infos is not None else lora_id, lora_name
            block_mm_infos, lora_name = None, None
        if lora_id:
            raise ValueError(f"lora_id {lora_id} names no adapter here: give lora_name")
        self._core.publish_stored(token_ids, num_block_tokens, block_hashes, parent_hash, block_mm_infos, lora_name, is_eagle, cache_salt)

    @overload
    def publish_removed(self, block_hashes: Sequence[int]) -> None: ...

    @overload
    def publish_removed(self, block_hashes: int, older: Sequence[int], /) -> None: ...

    def publish_removed(self, block_hashes: Any = None, older: Any = None, *, event_id: int | None = None) -> None:
        """Blocks were removed. Older releases give a number before them, which is not needed."""
        self._core.publish_removed(block_hashes if older is None else older)

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


@dataclass
class WorkerStats:
    """Requests of an engine, as older releases tell them."""

    request_active_slots: int
    request_total_slots: int
    num_requests_waiting: int
    data_parallel_rank: int | None = None


@dataclass
class KvStats:
    """Blocks of an engine's cache, as older releases tell them."""

    kv_active_blocks: int
    kv_total_blocks: int
    gpu_cache_usage_perc: float
    gpu_prefix_cache_hit_rate: float


@dataclass
class SpecDecodeStats:
    """Drafted tokens of an engine, as older releases tell them."""

    num_spec_tokens: int | None = None
    num_drafts: int | None = None
    num_draft_tokens: int | None = None
    num_accepted_tokens: int | None = None
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)


@dataclass
class ForwardPassMetrics:
    """How loaded an engine is, as older releases tell it. Routers hear of the rank and its active blocks."""

    worker_stats: WorkerStats
    kv_stats: KvStats
    spec_decode_stats: SpecDecodeStats | None = None


class WorkerMetricsPublisher:
    """Tells routers how loaded a worker is."""

    def __init__(self) -> None:
        self._core: _native.LoadReports | None = None

    async def create_endpoint(self, endpoint: Endpoint | Component, metrics_labels: list[tuple[str, str]] | None = None) -> None:
        """Opens the channel; to be awaited before `publish`. `metrics_labels` of older releases have no effect."""
        del metrics_labels
        where = endpoint.endpoint("generate") if isinstance(endpoint, Component) else endpoint
        self._core = await _native.open_load(where._runtime._core, where._name)

    def publish(
        self, dp_rank: int | ForwardPassMetrics | None = None, active_decode_blocks: int | None = None, kv_used_blocks: int | None = None
    ) -> None:
        """Tells how loaded a rank is: at least one figure, or the `ForwardPassMetrics` of older releases."""
        if isinstance(dp_rank, ForwardPassMetrics):
            blocks = dp_rank.kv_stats.kv_active_blocks
            dp_rank, active_decode_blocks, kv_used_blocks = dp_rank.worker_stats.data_parallel_rank, blocks, blocks
        if active_decode_blocks is None and kv_used_blocks is None:
            raise ValueError("nothing to publish: give active_decode_blocks or kv_used_blocks")
        if self._core is None:
            raise RuntimeError("await create_endpoint(endpoint) first")
        self._core.publish(dp_rank, active_decode_blocks, kv_used_blocks)


class FpmDirectPublisher:
    """Tells what an engine computes in each of its steps. A rank of which nothing is told gives a sign of life each second."""

    def __init__(self, endpoint: Endpoint, worker_id: int, dp_size: int = 1) -> None:
        self._core = _native.PassReports(endpoint._runtime._core, endpoint._name, worker_id, dp_size)

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
        self._core = _native.PassRelay(endpoint._runtime._core, endpoint._name, zmq_endpoint)

    def shutdown(self) -> None:
        """Passes on nothing more."""
        self._core.shutdown()


class FpmEventSubscriber:
    """Hears what the workers of an endpoint compute: one report after the other (`recv`), or the newest of each rank (`start_tracking`)."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._core = _native.PassReader(endpoint._runtime._core, endpoint._name)
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
