"""Routers and indexes over the workers of an endpoint."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from kvasir import _native
from kvasir._native import KvRouterConfig, OverlapScores, compute_block_hash_for_seq
from kvasir.llm.config import AisPerfConfig, LoadThresholdConfig, RoutingConstraints, _session_mode
from kvasir.runtime import Component, Endpoint, Stream

logger = logging.getLogger("kvasir")


class KvRouter:
    """Routes prompts to the workers of an endpoint by what their caches hold and how loaded they are.

    It is the router that `kvasir frontend` runs. Several in one process share nothing: dropping one ends nothing of another.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        block_size: int,
        kv_router_config: KvRouterConfig | None = None,
        ais_perf_config: AisPerfConfig | None = None,
        session_affinity_ttl_secs: int | None = None,
        *,
        load_threshold_config: LoadThresholdConfig | None = None,
        session_affinity_mode: str = "hard",
        aic_perf_config: AisPerfConfig | None = None,
    ) -> None:
        if _session_mode(session_affinity_mode) != "hard":
            raise ValueError(f"session_affinity_mode cannot be {session_affinity_mode!r}: a session stays with its worker (hard)")
        if session_affinity_ttl_secs is not None and session_affinity_ttl_secs <= 0:
            raise ValueError("session_affinity_ttl_secs must be more than 0")
        config = kv_router_config if kv_router_config is not None else KvRouterConfig()
        self._endpoint = endpoint
        self._config = config
        self._block_size = block_size
        busy = load_threshold_config if load_threshold_config is not None else LoadThresholdConfig()
        profile = ais_perf_config if ais_perf_config is not None else aic_perf_config
        machine = profile._machine() if profile is not None else None
        for name in config.without_effect():
            logger.warning("%s has no effect in a router of a program", name)
        self._core = _native.EndpointRouter(
            endpoint._runtime._core, endpoint._name, block_size, config, busy._figures(), session_affinity_ttl_secs, machine
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
        mm_routing_info: Mapping[str, Any] | None = None,
        routing_constraints: RoutingConstraints | None = None,
        response_buffer_size: int = 100,
    ) -> Stream:
        """Sends a prompt to the best worker, or to `worker_id`, and iterates over its answer: dictionaries with `token_ids`.

        The request is booked until its answer ends; letting go of the stream ends both. `mm_routing_info` has the `routing_token_ids` and
        `block_mm_infos` by which a prompt with images is looked up.
        """
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
        if mm_routing_info is not None:
            request["mm_routing_info"] = dict(mm_routing_info)
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
        required, preferred = constraints._lists() if constraints is not None else (None, None)
        media = request.get("mm_routing_info") or {}
        infos = block_mm_infos if block_mm_infos is not None else media.get("block_mm_infos")
        looked_up = media.get("routing_token_ids")
        answer = await self._core.generate(request, override, worker_id, dp_rank, required, preferred, buffer, infos, looked_up)
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
        `update_indexer` remembers the prompt as cached there, where the router guesses what is cached (`use_kv_events=False`).
        """
        await self._first_worker()
        required, preferred = routing_constraints._lists() if routing_constraints is not None else (None, None)
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
            update_indexer,
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
        self._core = _native.EndpointRouter(where._runtime._core, where._name, block_size, KvRouterConfig(), busy)

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


class ApproxKvIndexer(_native.ApproxKvIndexer):
    """Which worker likely holds which prefix, by where requests were sent: for engines that publish no events."""

    async def process_routing_decision_for_request(
        self, tokens: Sequence[int], worker_id: int, dp_rank: int = 0, lora_name: str | None = None
    ) -> None:
        """A prompt was sent to a rank: its blocks count as cached there for the time to live."""
        self.record_routing(tokens, worker_id, dp_rank, lora_name)
