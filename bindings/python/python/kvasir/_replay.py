"""Simulating a trace under several policies, from a program or a notebook: the command `kvasir replay`, with its tables as values."""

from __future__ import annotations

import html
import json
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvasir.__main__ import command


class Replay:
    """What a replay found: a run for each policy, speed and seed. A notebook shows its page, with plots."""

    def __init__(self, report: Mapping[str, Any], page: str, printed: str) -> None:
        self.report = dict(report)
        """All numbers, as `kvasir replay --json` writes them."""
        self.page = page
        """The page with tables and plots; needs no network."""
        self.printed = printed
        """The table as the command prints it."""

    @property
    def runs(self) -> list[dict[str, Any]]:
        """One dictionary for each run."""
        runs: list[dict[str, Any]] = self.report["runs"]
        return runs

    def rows(self) -> list[dict[str, float | int | str | bool | None]]:
        """The plain figures of each run, those in tables joined by dots: `ttft_ms.p99`."""
        return [dict(_flat("", run)) for run in self.runs]

    def table(self) -> Any:
        """The rows as a pandas `DataFrame`; without pandas, the rows."""
        try:
            import pandas  # type: ignore[import-not-found,import-untyped,unused-ignore]
        except ImportError:
            return self.rows()
        return pandas.DataFrame(self.rows())

    def _repr_html_(self) -> str:
        return f'<iframe srcdoc="{html.escape(self.page)}" style="width: 100%; height: 70em; border: 0"></iframe>'

    def __repr__(self) -> str:
        return self.printed


def _flat(prefix: str, value: Mapping[str, Any]) -> Iterable[tuple[str, float | int | str | bool | None]]:
    for name, item in value.items():
        if isinstance(item, Mapping):
            yield from _flat(f"{prefix}{name}.", item)
        elif not isinstance(item, list):
            yield f"{prefix}{name}", item


def replay(
    trace: str | Path | None = None,
    *,
    workload: str | None = None,
    policies: Iterable[str] = (),
    timeout: float | None = None,
    **options: Any,
) -> Replay:
    """Plays a trace, or a workload such as `chat,sessions=200,turns=6,rate=3`, once for each policy.

    `options` are those of `kvasir replay`, with `_` for `-`: `workers=8`, `speed="1,2"`, `seeds=3`. A wrong one is a `ValueError` with the command's own words.
    """
    if (trace is None) == (workload is None):
        raise ValueError("name a trace or a workload: one of them")
    words = ["replay", f"--trace={trace}" if trace is not None else f"--workload={workload}"]
    words += [f"--policy={policy}" for policy in policies]
    for name, value in options.items():
        option = "--" + name.replace("_", "-")
        if value is True:
            words.append(option)
        elif value is not False and value is not None:
            given = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else value
            words.append(f"{option}={given}")
    with tempfile.TemporaryDirectory(prefix="kvasir-replay-") as folder:
        report, page = Path(folder) / "report.json", Path(folder) / "page.html"
        line = [str(command()), *words, f"--json={report}", f"--html={page}"]
        done = subprocess.run(line, capture_output=True, text=True, timeout=timeout, check=False)
        if done.returncode == 2:
            raise ValueError(done.stderr.strip())
        if done.returncode != 0:
            raise RuntimeError(f"kvasir replay ended with code {done.returncode}: {done.stderr.strip()}")
        return Replay(json.loads(report.read_text()), page.read_text(), done.stdout)


__all__ = ["Replay", "replay"]
