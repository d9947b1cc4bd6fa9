"""Models that a worker serves: what it says of them, and how they are announced and taken back."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kvasir import _native
from kvasir.llm.config import RouterConfig
from kvasir.runtime import Endpoint


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
    kv_event_source_mode: str | None = None
    kv_state_endpoint: str | None = None
    enable_eagle: bool = False
    stable_routing_id: str | None = None
    tokenizer_backend: str | None = None
    structural_tag: dict[str, Any] | None = None
    taints: set[str] = field(default_factory=set)
    topology_domains: dict[str, str] = field(default_factory=dict)
    kv_transfer_domain: str | None = None
    kv_transfer_enforcement: str | None = None
    kv_transfer_preferred_weight: float | None = None
    runtime_data: dict[str, Any] = field(default_factory=dict)
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None

    def set_engine_specific(self, key: str, value: Any) -> None:
        """Keeps a value for readers of the card. Text is read as JSON where it is JSON, as Dynamo requires it."""
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError:
                pass
        self.runtime_data[key] = value

    def get_engine_specific(self, key: str) -> Any | None:
        """A value that was kept."""
        return self.runtime_data.get(key)

    def set_structural_tag(self, structural_tag: dict[str, Any] | None = None) -> None:
        """How the engine holds an answer to the form of a call; readers of the card get it as it is. None if it does not."""
        if structural_tag is None:
            self.structural_tag = None
            return
        unknown = sorted(set(structural_tag) - _TAG_MEMBERS)
        if unknown:
            raise ValueError(f"structural_tag has no {unknown[0]!r}: {', '.join(sorted(_TAG_MEMBERS))}")
        defaults = {"scope": "auto", "schema": "auto", "reasoning_boundary": "auto"}
        switches = {"allow_tool_calls_with_structured_output": False, "tool_arguments_any_order": False}
        self.structural_tag = {**defaults, **switches, **structural_tag}

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
            "enable_eagle": self.enable_eagle,
        }
        if self.runtime_data:
            told["runtime_data"] = self.runtime_data
        if self.kv_event_publishing_enabled is not None:
            told["kv_event_publishing_enabled"] = self.kv_event_publishing_enabled
        for name in ("kv_event_source_mode", "stable_routing_id", "tokenizer_backend"):
            if getattr(self, name) is not None:
                told[name] = getattr(self, name)
        if self.kv_state_endpoint is not None:
            parts = self.kv_state_endpoint.removeprefix("dyn://").replace("/", ".").split(".")
            if len(parts) != 3 or not all(parts):
                raise ValueError(f"kv_state_endpoint cannot be {self.kv_state_endpoint!r}: namespace.component.endpoint")
            told["kv_state_endpoint"] = dict(zip(("namespace", "component", "name"), parts, strict=True))
        if self.structural_tag is not None:
            told |= {"structural_tag": self.structural_tag, "structural_tag_mode": "on"}
            told |= {f"structural_tag_{name}": self.structural_tag.get(name, "auto") for name in ("scope", "schema")}
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


_TAG_MEMBERS = {
    "allow_tool_calls_with_structured_output",
    "exclude_special_tokens",
    "reasoning_boundary",
    "schema",
    "scope",
    "tool_arguments_any_order",
}

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
    del ignore_weights, self_host_metadata
    for what, value in (("media_decoder", media_decoder), ("media_fetcher", media_fetcher), ("tensor_model_config", tensor_model_config)):
        if value is not None:
            raise ValueError(f"{what} is not taken: frontends here read text and tokens")
    if (lora_name is None) != (base_model_path is None):
        raise ValueError("lora_name and base_model_path belong together: give both or none")
    config = runtime_config if runtime_config is not None else ModelRuntimeConfig()
    folder = base_model_path if base_model_path is not None else model_path
    name = lora_name or model_name or folder.rstrip("/").rsplit("/", 1)[-1]
    if not name:
        raise ValueError("a model needs a name: model_name, or the folder that model_path names")
    more: dict[str, Any] = {}
    adapters = {} if max_gpu_lora_count is None else {"max_gpu_lora_count": max_gpu_lora_count}
    if user_data is not None:
        more["user_data"] = user_data
    if lora_name is not None:
        more["lora"] = {"name": lora_name}
    if custom_template_path is not None:
        with open(custom_template_path, encoding="utf-8") as file:
            more["chat_template"] = file.read()
    if router_config is not None:
        more["router_config"] = router_config._card()
    role = _role(model_type, worker_type)
    if needs is None:
        # Prompts are computed for somebody.
        needs = [[WorkerType.Decode]] if role is WorkerType.Prefill else []
    length = context_length or config.context_length or _context_length(folder)
    told = {
        "model_path": folder,
        "name": name,
        "aliases": model_aliases or [],
        "model_type": model_type._text(),
        "model_input": model_input.value,
        "worker_type": role.value,
        "needs": [[kind.value for kind in group] for group in needs],
        "kv_cache_block_size": kv_cache_block_size or 16,
        "context_length": length,
        "migration_limit": migration_limit,
        "skip_model_assets": skip_model_assets,
        "runtime_config": {**config._json(), "context_length": length, **adapters},
        "more": more,
    }
    suffix = _slug(lora_name) if lora_name is not None else None
    await _announce(endpoint, suffix, told)


async def _announce(endpoint: Endpoint, suffix: str | None, told: dict[str, Any]) -> None:
    await _native.announce_model(endpoint._runtime._core, endpoint._name, json.dumps(told), suffix)
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
    await _native.withdraw_model(endpoint._runtime._core, endpoint._name, suffix)


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
