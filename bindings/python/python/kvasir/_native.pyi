"""What the package is made from; programs import `kvasir`, `kvasir.llm` and `kvasir.runtime`."""

from asyncio import AbstractEventLoop, Future
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, final

from typing_extensions import Buffer

__all__ = [
    "Annotated",
    "Answer",
    "ApproxKvIndexer",
    "CacheEvents",
    "CacheReader",
    "Caller",
    "Cancellation",
    "Candidate",
    "Decision",
    "EndpointRouter",
    "EngineEvents",
    "KvRouterConfig",
    "LoadReports",
    "OverlapScores",
    "PassReader",
    "PassRelay",
    "PassReports",
    "RadixTree",
    "Reply",
    "Router",
    "Runtime",
    "Selection",
    "Served",
    "__version__",
    "announce_model",
    "chain_hashes",
    "compute_block_hash_for_seq",
    "compute_seq_hash_for_block",
    "get_reasoning_parser_names",
    "get_tool_parser_names",
    "lora_name_to_id",
    "open_load",
    "serve",
    "settle",
    "shut_down",
    "task_count",
    "withdraw_model",
]
__version__: str

_Tokens: TypeAlias = Iterable[int] | Buffer
"""Token ids: a list, another sequence, or a buffer of whole numbers (array, NumPy), which is read fastest."""

_MediaInfos: TypeAlias = Sequence[Mapping[str, Any] | None]
"""For each block None, or {"mm_objects": [{"mm_hash": int}, ...]}."""

def compute_block_hash_for_seq(
    tokens: _Tokens,
    kv_block_size: int,
    block_mm_infos: _MediaInfos | None = None,
    lora_name: str | None = None,
    is_eagle: bool | None = None,
    cache_namespace: str | None = None,
) -> list[int]: ...
def compute_seq_hash_for_block(block_hashes: Iterable[int]) -> list[int]: ...
def lora_name_to_id(lora_name: str) -> int: ...
def get_reasoning_parser_names() -> list[str]: ...
def get_tool_parser_names() -> list[str]: ...

@final
class KvRouterConfig:
    """How a router chooses. Names and defaults are those of Dynamo 1.6.1, and those of its older releases too."""

    def __new__(
        cls,
        overlap_score_weight: float | None = None,
        host_cache_hit_weight: float = 0.75,
        disk_cache_hit_weight: float = 0.25,
        router_temperature: float = 0.0,
        use_kv_events: bool = True,
        *,
        router_replica_sync: bool = False,
        router_track_active_blocks: bool = True,
        router_track_output_blocks: bool = False,
        router_assume_kv_reuse: bool = True,
        router_track_prefill_tokens: bool = True,
        router_prefill_load_model: str = "none",
        router_ttl_secs: float = 120.0,
        router_approximate_cache_policy: str = "ttl",
        router_queue_threshold: float | None = None,
        router_event_threads: int = 4,
        router_queue_policy: str = "fcfs",
        use_remote_indexer: bool = False,
        serve_indexer: bool = False,
        enable_session_prefix_index: bool = False,
        shared_cache_multiplier: float | None = None,
        shared_cache_type: str = "none",
        router_predicted_ttl_secs: float | None = None,
        conditional_disagg_enabled: bool = False,
        conditional_disagg_policy: str = "isl_bounding",
        conditional_disagg_eff_isl_threshold: int = 2048,
        conditional_disagg_eff_isl_ratio_threshold: float = 0.7,
        conditional_disagg_prefill_busy_threshold: float | None = None,
        conditional_disagg_decode_busy_threshold: float | None = None,
        overlap_score_credit: float = 1.0,
        overlap_score_credit_decay: float = 0.0,
        prefill_load_scale: float = 1.0,
        decode_active_request_weight: float = 0.0,
        router_policy_config: str | None = None,
        router_prefill_policy: str | None = None,
        router_decode_policy: str | None = None,
        router_tracking_hash: str = "public-xxh3-v1",
        router_tracking_key_file: str | None = None,
        router_tracking_key_id: str | None = None,
        durable_kv_events: bool = False,
        router_snapshot_threshold: int | None = 1000000,
        router_reset_states: bool = False,
        router_max_tree_size: int = 1048576,
        router_prune_target_ratio: float = 0.8,
        skip_initial_worker_wait: bool = False,
    ) -> KvRouterConfig: ...
    @staticmethod
    def from_json(config_json: str) -> KvRouterConfig: ...
    def to_json(self) -> str: ...
    def copy(self) -> KvRouterConfig: ...
    def with_overrides(
        self,
        overlap_score_weight: float | None = None,
        *,
        overlap_score_credit: float | None = None,
        overlap_score_credit_decay: float | None = None,
        prefill_load_scale: float | None = None,
        decode_active_request_weight: float | None = None,
    ) -> KvRouterConfig: ...
    def without_effect(self) -> list[str]: ...
    def __eq__(self, other: object, /) -> bool: ...
    @property
    def overlap_score_weight(self) -> float | None:
        """Older name of `prefill_load_scale`; 0 switches the index off."""
    @property
    def host_cache_hit_weight(self) -> float:
        """Worth of a block in host memory."""
    @property
    def disk_cache_hit_weight(self) -> float:
        """Worth of a block on disk or further away."""
    @property
    def router_temperature(self) -> float:
        """0 takes the cheapest worker, more draws among the cheap."""
    @property
    def use_kv_events(self) -> bool:
        """Whether workers publish what their caches hold."""
    @property
    def router_replica_sync(self) -> bool:
        """Whether replicas tell each other what they book."""
    @property
    def router_track_active_blocks(self) -> bool:
        """Count the blocks of running requests."""
    @property
    def router_track_output_blocks(self) -> bool:
        """Count the blocks that they generate, too."""
    @property
    def router_assume_kv_reuse(self) -> bool:
        """Running requests of a worker share equal blocks."""
    @property
    def router_track_prefill_tokens(self) -> bool:
        """Count prompt tokens that are not computed yet."""
    @property
    def router_prefill_load_model(self) -> str:
        """How booked prompt work shrinks before the first token: none, aic or learned."""
    @property
    def router_ttl_secs(self) -> float:
        """Without events: how long a routed block counts as cached."""
    @property
    def router_approximate_cache_policy(self) -> str:
        """Without events: ttl or lru."""
    @property
    def router_queue_threshold(self) -> float | None:
        """Hold requests back while every worker has more batches of prompt waiting than this."""
    @property
    def router_event_threads(self) -> int:
        """Threads that apply events."""
    @property
    def router_queue_policy(self) -> str:
        """Order of those held back: fcfs, lcfs, wspt or wspt-uncached."""
    @property
    def use_remote_indexer(self) -> bool:
        """Ask an index that runs elsewhere."""
    @property
    def serve_indexer(self) -> bool:
        """Let others ask this index."""
    @property
    def enable_session_prefix_index(self) -> bool:
        """Remember what sessions sent."""
    @property
    def shared_cache_multiplier(self) -> float | None:
        """Worth of a block in a cache that workers share; none takes the default."""
    @property
    def shared_cache_type(self) -> str:
        """Which cache workers share."""
    @property
    def router_predicted_ttl_secs(self) -> float | None:
        """Beside events: how long a routed prompt counts as cached."""
    @property
    def conditional_disagg_enabled(self) -> bool:
        """Decide per request whether to prefill elsewhere."""
    @property
    def conditional_disagg_policy(self) -> str:
        """How that is decided."""
    @property
    def conditional_disagg_eff_isl_threshold(self) -> int:
        """Uncached tokens from which on it is done."""
    @property
    def conditional_disagg_eff_isl_ratio_threshold(self) -> float:
        """Uncached share from which on it is done."""
    @property
    def conditional_disagg_prefill_busy_threshold(self) -> float | None:
        """Load of prefill workers from which on it is not done."""
    @property
    def conditional_disagg_decode_busy_threshold(self) -> float | None:
        """Load of decode workers from which on it is done."""
    @property
    def overlap_score_credit(self) -> float:
        """Blocks of cost saved per block held in device memory."""
    @property
    def overlap_score_credit_decay(self) -> float:
        """How fast that credit fades with the prompt work that waits."""
    @property
    def prefill_load_scale(self) -> float:
        """Weight of the prefill term against the decode term."""
    @property
    def decode_active_request_weight(self) -> float:
        """Cost of each running request, in blocks."""
    @property
    def router_policy_config(self) -> str | None:
        """A file with policy classes."""
    @property
    def router_prefill_policy(self) -> str | None:
        """Cost policy of prefill workers."""
    @property
    def router_decode_policy(self) -> str | None:
        """Cost policy of decode workers."""
    @property
    def router_tracking_hash(self) -> str:
        """How blocks are named between routers."""
    @property
    def router_tracking_key_file(self) -> str | None:
        """A key for that."""
    @property
    def router_tracking_key_id(self) -> str | None:
        """Its name."""
    @property
    def durable_kv_events(self) -> bool:
        """Older: events are read from JetStream, which keeps them."""
    @property
    def router_snapshot_threshold(self) -> int | None:
        """Older: events between two snapshots."""
    @property
    def router_reset_states(self) -> bool:
        """Older: forget what is stored at the start."""
    @property
    def router_max_tree_size(self) -> int:
        """Older: without events, blocks remembered."""
    @property
    def router_prune_target_ratio(self) -> float:
        """Older: what share of them a pruning leaves."""
    @property
    def skip_initial_worker_wait(self) -> bool:
        """Older: do not wait for the first worker."""

@final
class Candidate:
    """One rank that could have been chosen, with the terms of its cost, all in blocks."""

    @property
    def worker_id(self) -> int:
        """The worker."""
    @property
    def dp_rank(self) -> int:
        """Its data-parallel rank."""
    @property
    def cost(self) -> float:
        """The sum; lower is better. In seconds where the policy is `time`."""
    @property
    def raw_prefill_blocks(self) -> float:
        """Prompt that waits there plus this one, cached blocks included."""
    @property
    def credit_blocks(self) -> float:
        """Taken off that because it is cached."""
    @property
    def prefill_blocks(self) -> float:
        """What is left to compute."""
    @property
    def decode_blocks(self) -> float:
        """What the rank would hold for its running requests."""
    @property
    def request_cost(self) -> float:
        """The price of the requests that run there."""
    @property
    def taint_factor(self) -> float:
        """What preferred taints multiply the sum by."""
    @property
    def cached_blocks(self) -> float:
        """Blocks of this prompt that it has."""
    @property
    def seconds(self) -> tuple[float, float, float, float, float] | None:
        """Seconds until its turn, for its own prompt, that others lose, of its tokens, of what leaves the cache; None unless the policy is `time`."""
    def to_dict(self) -> dict[str, Any]: ...
    def __eq__(self, other: object, /) -> bool: ...

@final
class Decision:
    """Where a request goes, and why."""

    @property
    def request_id(self) -> str | None:
        """The caller's name for the request; none for a question."""
    @property
    def worker_id(self) -> int | None:
        """The worker; none while it waits, or if there is none."""
    @property
    def dp_rank(self) -> int | None:
        """Its data-parallel rank."""
    @property
    def overlap_blocks(self) -> int:
        """Blocks of the prompt that the worker has, rounded."""
    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that it need not compute."""
    @property
    def booked(self) -> bool:
        """Whether it is booked, so that `free` must follow."""
    @property
    def queued(self) -> bool:
        """Whether it waits."""
    @property
    def queued_seconds(self) -> float:
        """How long it waited."""
    @property
    def error(self) -> str | None:
        """Why it got no worker after it had waited."""
    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
    @property
    def eligible(self) -> int:
        """Ranks that could have been chosen."""
    @property
    def reason(self) -> str | None:
        """Why this one: lowest_cost, tie, sampled, pinned, session, last_resort or rule."""
    @property
    def formula(self) -> str | None:
        """The winner's cost as Dynamo logs it."""
    @property
    def candidates(self) -> list[Candidate]:
        """The cheapest ranks, cheapest first."""
    @property
    def excluded(self) -> list[tuple[int, int, str]]:
        """Ranks that were left out, with the reason; at most eight."""
    def to_dict(self) -> dict[str, Any]: ...
    def __eq__(self, other: object, /) -> bool: ...

@final
class OverlapScores:
    """How many leading blocks of a prompt each rank holds. Can be awaited, which gives it itself."""

    @property
    def scores(self) -> dict[tuple[int, int], int]: ...
    @property
    def frequencies(self) -> list[int]: ...
    def __await__(self) -> Generator[Any, None, OverlapScores]: ...

@final
class RadixTree:
    """Which worker holds which prefix, by the events that are applied to it."""

    def __new__(cls, expiration_duration_secs: float | None = None) -> RadixTree: ...
    def find_matches(self, sequence: Iterable[int], early_exit: bool = False) -> OverlapScores: ...
    def apply_event(self, worker_id: int, kv_cache_event_bytes: bytes) -> None: ...
    def remove_worker(self, worker_id: int) -> None: ...
    def clear_all_blocks(self, worker_id: int) -> None: ...
    def dump_tree_as_events(self) -> list[str]: ...

class ApproxKvIndexer:
    """Which worker likely holds which prefix, by where requests were sent."""

    def __new__(
        cls,
        endpoint: object,
        kv_block_size: int,
        router_ttl_secs: float | None = None,
        max_tree_size: int | None = None,
        prune_target_ratio: float | None = None,
    ) -> ApproxKvIndexer: ...
    def find_matches_for_request(
        self, token_ids: _Tokens, lora_name: str | None = None, is_eagle: bool | None = None
    ) -> OverlapScores: ...
    def block_size(self) -> int: ...
    def record_routing(self, tokens: _Tokens, worker_id: int, dp_rank: int = 0, lora_name: str | None = None) -> None: ...
    def remove_worker(self, worker_id: int) -> None: ...

@final
class Router:
    """The brain as a plain object: no runtime, no planes, no threads. With `now` (seconds) given to every call the same calls give the
    same decisions."""

    def __new__(
        cls,
        block_size: int = 16,
        config: KvRouterConfig | None = None,
        *,
        mode: str = "kv",
        policy: str = "kv",
        seed: int = 0,
    ) -> Router: ...
    @property
    def block_size(self) -> int: ...
    @property
    def booked(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    def add_worker(
        self,
        worker_id: int,
        *,
        dp_size: int = 1,
        dp_start_rank: int = 0,
        total_kv_blocks: int | None = None,
        max_num_batched_tokens: int | None = None,
        max_num_seqs: int | None = None,
        taints: Sequence[str] | None = None,
        loras: Sequence[str] | None = None,
        device: str | None = None,
        now: float | None = None,
    ) -> None: ...
    def remove_worker(self, worker_id: int, *, now: float | None = None) -> None: ...
    def drain_worker(self, worker_id: int, *, now: float | None = None) -> None: ...
    def worker_ids(self) -> list[int]: ...
    def update_load(
        self,
        worker_id: int,
        *,
        dp_rank: int = 0,
        active_decode_blocks: int | None = None,
        active_prefill_tokens: int | None = None,
        kv_used_blocks: int | None = None,
        waiting_requests: int | None = None,
        now: float | None = None,
    ) -> None: ...
    def stored(
        self,
        worker_id: int,
        token_ids: _Tokens,
        block_hashes: Iterable[int],
        parent_hash: int | None = None,
        *,
        dp_rank: int = 0,
        tier: str = "device",
        lora_name: str | None = None,
        cache_namespace: str | None = None,
        is_eagle: bool = False,
    ) -> bool: ...
    def removed(self, worker_id: int, block_hashes: Iterable[int], *, dp_rank: int = 0, tier: str = "device") -> bool: ...
    def cleared(self, worker_id: int, *, dp_rank: int = 0) -> None: ...
    def apply_event(self, worker_id: int, event: bytes | str) -> bool: ...
    def dump_events(self) -> list[str]: ...
    def place(
        self,
        token_ids: _Tokens,
        request_id: str | None = None,
        *,
        worker_id: int | None = None,
        dp_rank: int | None = None,
        overrides: dict[str, Any] | None = None,
        lora_name: str | None = None,
        cache_namespace: str | None = None,
        block_mm_infos: _MediaInfos | None = None,
        required_taints: Sequence[str] | None = None,
        preferred_taints: dict[str, float] | None = None,
        allowed_worker_ids: Sequence[int] | None = None,
        priority: int | None = None,
        strict_priority: int = 0,
        expected_output_tokens: int | None = None,
        policy_class: str | None = None,
        now: float | None = None,
    ) -> Decision: ...
    def potential_loads(
        self,
        token_ids: _Tokens,
        *,
        lora_name: str | None = None,
        cache_namespace: str | None = None,
        now: float | None = None,
    ) -> list[dict[str, int]]: ...
    def overlap_scores(
        self, token_ids: _Tokens, *, lora_name: str | None = None, cache_namespace: str | None = None
    ) -> OverlapScores: ...
    def mark_prefill_complete(self, request_id: str, *, now: float | None = None) -> None: ...
    def mark_generated(self, request_id: str, generated: int, *, now: float | None = None) -> None: ...
    def free(
        self, request_id: str, *, outcome: str = "completed", output_tokens: int = 0, now: float | None = None
    ) -> None: ...
    def poll(self, *, now: float | None = None) -> list[Decision]: ...
    def next_poll_seconds(self) -> float | None: ...

@final
class Cancellation:
    """Whether a request was stopped."""

    def __new__(cls) -> Cancellation: ...
    def stop(self) -> None: ...
    def is_stopped(self) -> bool: ...
    def stopped(self) -> Awaitable[bool]: ...

@final
class Annotated:
    """One item of an answer with its remarks."""

    def data(self) -> Any: ...
    def id(self) -> str | None: ...
    def event(self) -> str | None: ...
    def comments(self) -> list[str] | None: ...
    def is_error(self) -> bool: ...

@final
class Answer:
    """An answer as it comes; `kvasir.runtime.Stream` iterates over it."""

    def try_next(self) -> Any: ...
    def ready(self) -> Awaitable[None]: ...
    def close(self) -> None: ...

@final
class Runtime:
    """Store, planes and lease of `kvasir.runtime.DistributedRuntime`."""

    def __new__(
        cls, discovery_backend: str | None = None, request_plane: str | None = None, event_plane: str | None = None
    ) -> Runtime: ...
    def connection_id(self) -> int: ...
    @property
    def discovery_backend(self) -> str: ...
    @property
    def answering(self) -> int: ...
    def end(self) -> None: ...

@final
class Caller:
    """The calls of `kvasir.runtime.Client`."""

    def __new__(cls, runtime: Runtime, namespace: str, component: str, endpoint: str) -> Caller: ...
    def instance_ids(self) -> list[int]: ...
    def instances(self) -> list[tuple[int, str, str, str | None]]: ...
    def wait_for_instances(self, count: int) -> Awaitable[list[int]]: ...
    def wait_by_runtime_data(self, key: str, value: str, count: int) -> Awaitable[list[int]]: ...
    def call(
        self,
        request: Any,
        mode: str,
        instance_id: int | None,
        annotated: bool,
        context_id: str | None,
        metadata: Sequence[tuple[str, str]],
        cancellation: Cancellation,
    ) -> Awaitable[Answer]: ...

@final
class Reply:
    """Where a handler's items go."""

    def send(self, item: Any) -> bool: ...
    def room(self) -> Awaitable[None]: ...
    def fail(self, kind: str, message: str) -> bool: ...
    def finish(self) -> bool: ...
    @property
    def cancellation(self) -> Cancellation: ...

@final
class Served:
    """An endpoint that is served."""

    def withdraw(self) -> Awaitable[None]: ...
    def announce(self) -> Awaitable[None]: ...
    def close(self) -> None: ...

_Name: TypeAlias = tuple[str, str, str]

def serve(
    runtime: Runtime, name: _Name, event_loop: AbstractEventLoop, start: Callable[[Any, str, list[tuple[str, str]], Reply], None]
) -> Awaitable[Served]: ...
def announce_model(runtime: Runtime, name: _Name, told: str, suffix: str | None) -> Awaitable[None]: ...
def withdraw_model(runtime: Runtime, name: _Name, suffix: str | None) -> Awaitable[None]: ...
def open_load(runtime: Runtime, name: _Name) -> Awaitable[LoadReports]: ...
def chain_hashes(block_hashes: Iterable[int], parent_hash: int | None) -> list[int]: ...
def settle(future: Future[Any], value: Any, error: BaseException | None) -> None: ...
def shut_down() -> None: ...
def task_count() -> int: ...

@final
class CacheEvents:
    """The channel of `kvasir.llm.KvEventPublisher`."""

    def __new__(
        cls,
        runtime: Runtime,
        name: _Name,
        worker_id: int | None,
        block_size: int,
        dp_rank: int,
        answers: bool,
        engine_socket: str | None = None,
        engine_topic: str | None = None,
    ) -> CacheEvents: ...
    def publish_stored(
        self,
        token_ids: _Tokens,
        num_block_tokens: Sequence[int],
        block_hashes: Iterable[int],
        parent_hash: int | None = None,
        block_mm_infos: _MediaInfos | None = None,
        lora_name: str | None = None,
        is_eagle: bool | None = None,
        cache_salt: str | None = None,
    ) -> None: ...
    def publish_removed(self, block_hashes: Iterable[int]) -> None: ...
    def publish_cleared(self) -> None: ...
    def publish_batch(self, events: Iterable[Mapping[str, Any]]) -> None: ...
    def shutdown(self) -> None: ...

@final
class LoadReports:
    """The channel of `kvasir.llm.WorkerMetricsPublisher`."""

    def publish(
        self, dp_rank: int | None = None, active_decode_blocks: int | None = None, kv_used_blocks: int | None = None
    ) -> None: ...

@final
class Selection:
    """`kvasir select` without its door."""

    def __new__(
        cls,
        cache: tuple[str | None, str | None, str | None],
        session_ttl_secs: int | None = None,
        sync_port: int | None = None,
        sync_peers: Sequence[str] = ...,
    ) -> Selection: ...
    def ask(self, verb: str, path: str, body: bytes) -> Awaitable[tuple[int, bytes]]: ...
    def ask_now(self, verb: str, path: str, body: bytes) -> tuple[int, bytes]: ...
    def shutdown(self) -> None: ...

@final
class PassReports:
    """What the ranks of a worker compute."""

    def __new__(cls, runtime: Runtime, name: _Name, worker_id: int, ranks: int) -> PassReports: ...
    def publish(
        self,
        dp_rank: int,
        scheduled: tuple[int, int, int, int, int],
        queued: tuple[int, int, int, int],
        wall_time_secs: float,
    ) -> None: ...
    def shutdown(self) -> None: ...

@final
class PassRelay:
    """Passes on an engine's own reports."""

    def __new__(cls, runtime: Runtime, name: _Name, engine_socket: str) -> PassRelay: ...
    def shutdown(self) -> None: ...

@final
class CacheReader:
    """Hears what the caches of an endpoint's workers hold."""

    def __new__(cls, runtime: Runtime, name: _Name) -> CacheReader: ...
    def recv(self, seconds: float) -> list[str] | None: ...
    def shutdown(self) -> None: ...

@final
class EngineEvents:
    """Hears one engine's own event socket."""

    def __new__(cls, engine_socket: str, engine_topic: str, block_size: int) -> EngineEvents: ...
    def take(self) -> list[str]: ...
    def shutdown(self) -> None: ...

@final
class PassReader:
    """Hears what the workers of an endpoint compute."""

    def __new__(cls, runtime: Runtime, name: _Name) -> PassReader: ...
    def recv(self) -> bytes | None: ...
    def track(self) -> None: ...
    def recent(self) -> dict[tuple[str, int], bytes]: ...
    def cards(self) -> dict[str, str]: ...
    def shutdown(self) -> None: ...

@final
class EndpointRouter:
    """The router of `kvasir.llm.KvRouter`."""

    def __new__(
        cls,
        runtime: Runtime,
        name: _Name,
        block_size: int,
        config: KvRouterConfig,
        busy: tuple[float | None, int | None, float | None],
        session_ttl_secs: int | None = None,
        measured: tuple[str, str] | None = None,
    ) -> EndpointRouter: ...
    def worker_ids(self) -> list[int]: ...
    def wait_for_workers(self, count: int) -> Awaitable[list[int]]: ...
    @property
    def booked(self) -> int: ...
    @property
    def blocks_known(self) -> int: ...
    def generate(
        self,
        request: dict[str, Any],
        router_config_override: dict[str, Any] | None = None,
        worker_id: int | None = None,
        dp_rank: int | None = None,
        required_taints: Sequence[str] | None = None,
        preferred_taints: dict[str, float] | None = None,
        response_buffer_size: int = 100,
        block_mm_infos: Any = None,
        routing_token_ids: _Tokens | None = None,
    ) -> Awaitable[Answer]: ...
    def best_worker(
        self,
        token_ids: _Tokens,
        router_config_override: dict[str, Any] | None = None,
        request_id: str | None = None,
        lora_name: str | None = None,
        required_taints: Sequence[str] | None = None,
        preferred_taints: dict[str, float] | None = None,
        strict_priority: int = 0,
        policy_class: str | None = None,
        cache_namespace: str | None = None,
        block_mm_infos: Any = None,
        update_indexer: bool = False,
    ) -> Awaitable[tuple[int, int, int]]: ...
    def measure_best_worker(self, token_ids: _Tokens, rounds: int) -> float: ...
    def potential_loads(
        self, token_ids: _Tokens, lora_name: str | None = None, cache_namespace: str | None = None, block_mm_infos: Any = None
    ) -> list[dict[str, int]]: ...
    def overlaps(
        self, token_ids: _Tokens, lora_name: str | None = None, cache_namespace: str | None = None, block_mm_infos: Any = None
    ) -> list[tuple[int, int, int, int, int]]: ...
    def find_matches(self, sequence: Iterable[int]) -> OverlapScores: ...
    def apply_event(self, event: bytes) -> None: ...
    def mark_prefill_complete(self, request_id: str) -> None: ...
    def free(self, request_id: str) -> None: ...
    def dump_events(self) -> Awaitable[str]: ...
