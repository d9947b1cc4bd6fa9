"""How a router chooses, and when a worker is too busy: values without behaviour."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvasir._native import KvRouterConfig


class RouterMode(enum.Enum):
    """How workers are chosen."""

    RoundRobin = "round-robin"
    Random = "random"
    PowerOfTwoChoices = "power-of-two"
    KV = "kv"
    Direct = "direct"
    LeastLoaded = "least-loaded"
    DeviceAwareWeighted = "device-aware-weighted"


class RoutingConstraints:
    """Which workers may serve a request, and which it would rather have."""

    required_taints: set[str]
    preferred_taints: dict[str, float]

    def __init__(
        self, required_taints: Iterable[str] | None = None, preferred_taints: Mapping[str, float] | Iterable[str] | None = None
    ) -> None:
        self.required_taints = set(required_taints or ())
        if preferred_taints is None or isinstance(preferred_taints, Mapping):
            self.preferred_taints = dict(preferred_taints or {})
        else:
            self.preferred_taints = {taint: 1.0 for taint in preferred_taints}

    def _lists(self) -> tuple[list[str], dict[str, float]]:
        return sorted(self.required_taints), self.preferred_taints


@dataclass(kw_only=True)
class LoadThresholdConfig:
    """When a worker is too busy to be chosen."""

    active_decode_blocks_threshold: float | None = None
    active_prefill_tokens_threshold: int | None = None
    active_prefill_tokens_threshold_frac: float | None = None

    def _figures(self) -> tuple[float | None, int | None, float | None]:
        return (self.active_decode_blocks_threshold, self.active_prefill_tokens_threshold, self.active_prefill_tokens_threshold_frac)


class RouterConfig:
    """How the frontend is to route to a model's workers."""

    router_mode: RouterMode
    kv_router_config: KvRouterConfig

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
        _session_mode(session_affinity_mode)
        self.router_mode = mode
        self.kv_router_config = config if config is not None else KvRouterConfig()
        self.active_decode_blocks_threshold = active_decode_blocks_threshold
        self.active_prefill_tokens_threshold = active_prefill_tokens_threshold
        self.active_prefill_tokens_threshold_frac = active_prefill_tokens_threshold_frac
        self.enforce_disagg = enforce_disagg
        self.session_affinity_ttl_secs = session_affinity_ttl_secs
        self.session_affinity_mode = session_affinity_mode

    def _card(self) -> dict[str, Any]:
        """As cards carry it; readers refuse names that they do not know."""
        settings, defaults = (json.loads(config.to_json()) for config in (self.kv_router_config, KvRouterConfig()))
        said = {name: settings[name] for name in _IN_CARDS}
        said |= {name: settings[name] for name in _IN_CARDS_IF_SET if settings[name] != defaults[name]}
        thresholds = {
            "active_decode_blocks_threshold": self.active_decode_blocks_threshold,
            "active_prefill_tokens_threshold": self.active_prefill_tokens_threshold,
            "active_prefill_tokens_threshold_frac": self.active_prefill_tokens_threshold_frac,
        }
        return {
            "router_mode": _MODE_IN_CARDS[self.router_mode],
            "kv_router_config": said,
            "load_threshold_config": {name: value for name, value in thresholds.items() if value is not None},
            "enforce_disagg": self.enforce_disagg,
            "session_affinity_ttl_secs": self.session_affinity_ttl_secs,
            "session_affinity_mode": self.session_affinity_mode,
        }


_MODE_IN_CARDS = {
    RouterMode.RoundRobin: "round_robin",
    RouterMode.Random: "random",
    RouterMode.PowerOfTwoChoices: "power_of_two_choices",
    RouterMode.KV: "k_v",
    RouterMode.Direct: "direct",
    RouterMode.LeastLoaded: "least_loaded",
    RouterMode.DeviceAwareWeighted: "device_aware_weighted",
}

_IN_CARDS = (
    "overlap_score_credit",
    "overlap_score_credit_decay",
    "prefill_load_scale",
    "host_cache_hit_weight",
    "disk_cache_hit_weight",
    "router_temperature",
    "use_kv_events",
    "router_replica_sync",
    "router_track_active_blocks",
    "router_track_output_blocks",
    "router_assume_kv_reuse",
    "router_track_prefill_tokens",
    "router_prefill_load_model",
    "router_ttl_secs",
    "router_queue_threshold",
    "router_policy_config",
    "router_event_threads",
    "skip_initial_worker_wait",
    "router_queue_policy",
    "use_remote_indexer",
    "serve_indexer",
    "shared_cache_type",
    "router_predicted_ttl_secs",
)
"""Settings that every card of Dynamo 1.6.1 has."""

_IN_CARDS_IF_SET = (
    "decode_active_request_weight",
    "router_approximate_cache_policy",
    "enable_session_prefix_index",
    "shared_cache_multiplier",
    "conditional_disagg_enabled",
    "conditional_disagg_policy",
    "conditional_disagg_eff_isl_threshold",
    "conditional_disagg_eff_isl_ratio_threshold",
    "conditional_disagg_prefill_busy_threshold",
    "conditional_disagg_decode_busy_threshold",
    "router_prefill_policy",
    "router_decode_policy",
)
"""Settings that it has only where they are not the default."""


def _session_mode(mode: str) -> str:
    if mode not in ("hard", "soft"):
        raise ValueError(f"session_affinity_mode cannot be {mode!r}: hard or soft")
    return mode


class AisPerfConfig:
    """Which machine and model prompts are computed on: a mapping with `aic_system` and `aic_model_path`, or `system` and `model_path`.

    `KvRouterConfig(router_prefill_load_model="aic")` counts booked prompt work down as that machine was measured.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = dict(config)

    def to_dict(self) -> dict[str, Any]:
        """The mapping."""
        return dict(self._config)

    def _machine(self) -> tuple[str, str]:
        def said(name: str) -> str:
            value = self._config.get(f"aic_{name}", self._config.get(name))
            if not isinstance(value, str) or not value:
                raise ValueError(f"ais_perf_config has no aic_{name}: name the machine and the model")
            return value

        return said("system"), said("model_path")


class AicPerfConfig(AisPerfConfig):
    """The same with arguments, as older releases have it. What else they say of the machine is kept and has no effect."""

    def __init__(self, aic_backend: str, aic_system: str, aic_model_path: str, aic_tp_size: int = 1, **more: Any) -> None:
        super().__init__(
            {"aic_backend": aic_backend, "aic_system": aic_system, "aic_model_path": aic_model_path, "aic_tp_size": aic_tp_size, **more}
        )
