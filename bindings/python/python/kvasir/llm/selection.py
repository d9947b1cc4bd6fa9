"""`kvasir select` in a program: workers are chosen and booked for whoever forwards requests itself."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from kvasir import _native
from kvasir.exceptions import SelectionServiceError


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
        self._core = _native.Selection((ttl, entries, most), session, replica_sync_port, list(replica_sync_peers or []))

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
