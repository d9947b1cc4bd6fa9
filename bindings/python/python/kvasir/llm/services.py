"""The services of the command, run by a program: `kvasir indexer`, `kvasir select`, `kvasir slot-tracker`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from kvasir.__main__ import command


def _run(service: str, argv: Sequence[str] | None) -> None:
    words = sys.argv[1:] if argv is None else argv
    with subprocess.Popen([str(command()), service, *words]) as running:
        try:
            code = running.wait()
        except BaseException:
            running.terminate()
            raise
    if code != 0:
        raise SystemExit(code)


def run_kv_indexer(argv: Sequence[str] | None = None) -> None:
    """Runs `kvasir indexer` with these words, or with the program's own, until it ends; `SystemExit` if it fails."""
    _run("indexer", argv)


def run_select_service(argv: Sequence[str] | None = None) -> None:
    """Runs `kvasir select` with these words, or with the program's own, until it ends; `SystemExit` if it fails."""
    _run("select", argv)


def run_slot_tracker(argv: Sequence[str] | None = None) -> None:
    """Runs `kvasir slot-tracker` with these words, or with the program's own, until it ends; `SystemExit` if it fails."""
    _run("slot-tracker", argv)


__all__ = ["run_kv_indexer", "run_select_service", "run_slot_tracker"]
