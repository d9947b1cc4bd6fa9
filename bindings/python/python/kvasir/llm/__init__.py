"""Routing, publishing, models and indexes under the names of `dynamo.llm`: a program changes its import line and nothing else."""

from __future__ import annotations

from kvasir._native import (
    KvRouterConfig,
    OverlapScores,
    RadixTree,
    compute_block_hash_for_seq,
    compute_seq_hash_for_block,
    lora_name_to_id,
)
from kvasir.exceptions import HttpError, RouterQueueLimitExceeded, SelectionServiceError
from kvasir.llm.config import (
    AicPerfConfig,
    AisPerfConfig,
    LoadThresholdConfig,
    RouterConfig,
    RouterMode,
    RoutingConstraints,
)
from kvasir.llm.models import (
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    WorkerType,
    register_llm,
    register_model,
    unregister_llm,
    unregister_model,
    update_model_taints,
)
from kvasir.llm.publishers import (
    ForwardPassMetrics,
    FpmDirectPublisher,
    FpmEventRelay,
    FpmEventSubscriber,
    KvEventPublisher,
    KvStats,
    SpecDecodeStats,
    WorkerMetricsPublisher,
    WorkerStats,
    ZmqKvEventPublisher,
    ZmqKvEventPublisherConfig,
)
from kvasir.llm.recording import KvRecorder, ZmqKvEventListener
from kvasir.llm.routing import ApproxKvIndexer, KvIndexer, KvPushRouter, KvRouter
from kvasir.llm.selection import SelectionCacheConfig, SelectionService
from kvasir.llm.services import run_kv_indexer, run_select_service, run_slot_tracker

__all__ = [
    "AicPerfConfig",
    "AisPerfConfig",
    "ApproxKvIndexer",
    "ForwardPassMetrics",
    "FpmDirectPublisher",
    "FpmEventRelay",
    "FpmEventSubscriber",
    "HttpError",
    "KvEventPublisher",
    "KvIndexer",
    "KvPushRouter",
    "KvRecorder",
    "KvRouter",
    "KvRouterConfig",
    "KvStats",
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
    "SpecDecodeStats",
    "WorkerMetricsPublisher",
    "WorkerStats",
    "WorkerType",
    "ZmqKvEventListener",
    "ZmqKvEventPublisher",
    "ZmqKvEventPublisherConfig",
    "compute_block_hash_for_seq",
    "compute_seq_hash_for_block",
    "lora_name_to_id",
    "register_llm",
    "register_model",
    "run_kv_indexer",
    "run_select_service",
    "run_slot_tracker",
    "unregister_llm",
    "unregister_model",
    "update_model_taints",
]
