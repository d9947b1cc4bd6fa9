"""Frontends on the same workers: how they are started, and what one knows of another's load."""

import re
import time

from conftest import until
from planes_rig import TEXT, first_event, stream

SYNC = ["--router-replica-sync", "--router-session-affinity-ttl-secs", "60"]


def requests_on(http):
    """Requests that a frontend of ours knows of, by worker."""
    rows = http.get("/workers").json()["workers"]
    return {row["worker_id"]: sum(rank["active_requests"] for rank in row["ranks"]) for row in rows}


def blocks_at_dynamo(http):
    """Blocks that a frontend of Dynamo's knows of, by worker."""
    line = re.compile(r'^dynamo_frontend_worker_active_decode_blocks\{.*worker_id="(\d+)".*\} (\S+)$', re.M)
    return {int(worker): float(blocks) for worker, blocks in line.findall(http.get("/metrics").text)}


def until_told(holds, seconds=20):
    """Seconds until something holds, looked at without a pause."""
    begin = time.monotonic()
    while not holds():
        assert time.monotonic() < begin + seconds, f"not seen within {seconds} s"
    return time.monotonic() - begin


def delays(asked, seen, count=5):
    """How long after the first token of a request through one frontend another knows of it, each time; and that it forgets it.

    The booking is older than the first token: this is the time from which on nobody could be wrong any more."""
    found = []
    for number in range(count):
        with stream(asked.http, TEXT.format(f"delay {time.monotonic_ns()} {number}"), 4000) as answer:
            lines = first_event(answer)
            found.append(until_told(seen))
            del lines
        until(lambda: not seen(), 20)
    return found
