"""Cache events for programs that read them: an engine's own socket, and a file of what an endpoint's workers published."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from kvasir import _native
from kvasir.llm.routing import KvIndexer
from kvasir.runtime import Component, Endpoint

_LOOK_SECONDS = 0.2
"""How often a recorder looks whether its time is over."""


class ZmqKvEventListener:
    """Hears one engine's own event socket, without a router."""

    def __init__(self, zmq_endpoint: str, zmq_topic: str, kv_block_size: int) -> None:
        self._core = _native.EngineEvents(zmq_endpoint, zmq_topic, kv_block_size)

    async def get_events(self) -> list[str]:
        """What came since the last time, each a cache event in JSON, as `RadixTree.apply_event` takes it. Waits for nothing."""
        return self._core.take()

    def shutdown(self) -> None:
        """Hears nothing more."""
        self._core.shutdown()


class KvRecorder:
    """Writes what the workers of an endpoint publish of their caches into a file, a JSON object a line: `{"timestamp": ms, "event": ...}`.

    It ends by itself after `max_count` events or `max_time` seconds. With `max_lines_per_file` the file is followed by others: `events.jsonl`,
    `events1.jsonl`, ... Without `output_path` it is a new temporary file, whose path is `output_path`.
    """

    def __init__(
        self,
        component: Endpoint | Component,
        output_path: str | os.PathLike[str] | None = None,
        max_lines_per_file: int | None = None,
        max_count: int | None = None,
        max_time: float | None = None,
    ) -> None:
        for name, limit in (("max_lines_per_file", max_lines_per_file), ("max_count", max_count), ("max_time", max_time)):
            if limit is not None and limit <= 0:
                raise ValueError(f"{name} must be more than 0")
        where = component.endpoint("generate") if isinstance(component, Component) else component
        if output_path is None:
            file, output_path = tempfile.mkstemp(prefix="kvasir-events-", suffix=".jsonl")
            os.close(file)
        self.output_path = Path(output_path)
        self._lines, self._most, self._longest = max_lines_per_file, max_count, max_time
        self._count = 0
        self._began = time.monotonic()
        self._ended: float | None = None
        self._core = _native.CacheReader(where._runtime._core, where._name)
        # Opened here: a path that cannot be written is the caller's to know.
        self._file: IO[str] = self.output_path.open("w", encoding="utf-8")
        self._thread = threading.Thread(target=self._record, name="kvasir-recorder", daemon=True)
        self._thread.start()

    def _record(self) -> None:
        try:
            while not self._is_over():
                events = self._core.recv(_LOOK_SECONDS)
                if events is None:
                    break
                for event in events:
                    if self._is_over():
                        break
                    self._write(event)
                self._file.flush()
        finally:
            self._ended = time.monotonic()
            self._file.close()

    def _is_over(self) -> bool:
        is_long = self._longest is not None and time.monotonic() - self._began >= self._longest
        return is_long or (self._most is not None and self._count >= self._most)

    def _write(self, event: str) -> None:
        if self._lines is not None and self._count and self._count % self._lines == 0:
            self._file.close()
            self._file = self._part(self._count // self._lines).open("w", encoding="utf-8")
        self._file.write(f'{{"timestamp": {time.time_ns() // 1_000_000}, "event": {event}}}\n')
        self._count += 1

    def _part(self, number: int) -> Path:
        return self.output_path.with_name(f"{self.output_path.stem}{number or ''}{self.output_path.suffix}")

    async def event_count(self) -> int:
        """Events written so far."""
        return self._count

    async def elapsed_time(self) -> float:
        """Seconds since it began, until it ended."""
        return (self._ended if self._ended is not None else time.monotonic()) - self._began

    def _recorded(self) -> Iterator[tuple[int, str]]:
        for number in itertools.count():
            part = self._part(number)
            if not part.exists():
                return
            with part.open(encoding="utf-8") as lines:
                for line in lines:
                    said = json.loads(line)
                    yield int(said["timestamp"]), json.dumps(said["event"])

    async def replay_events(
        self, indexer: KvIndexer, timed: bool = False, max_count: int | None = None, max_time: float | None = None
    ) -> int:
        """Applies what was written to an index, with the pauses between events if `timed`; how many events there were."""
        began, first, applied = time.monotonic(), None, 0
        for at, event in self._recorded():
            first = at if first is None else first
            if timed:
                await asyncio.sleep(max((at - first) / 1000 - (time.monotonic() - began), 0))
            if applied == max_count or (max_time is not None and time.monotonic() - began >= max_time):
                break
            indexer._core.apply_event(event.encode())
            applied += 1
        return applied

    def shutdown(self) -> None:
        """Writes nothing more; what was written is in the file when this returns."""
        self._core.shutdown()
        if threading.current_thread() is not self._thread:
            self._thread.join(5)


__all__ = ["KvRecorder", "ZmqKvEventListener"]
