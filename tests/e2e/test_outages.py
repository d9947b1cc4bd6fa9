"""etcd and NATS away under load: no request fails, and afterwards everything is in step again."""

import os
import time

import pytest

from conftest import until
from planes_rig import BUILTIN, Load, Planes, until_exact, until_hits, until_serving

# Seconds; longer than a lease lives, so that a store forgets whoever does not come back.
AWAY = float(os.environ.get("KVASIR_TEST_OUTAGE_SECONDS", "30"))


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    planes = Planes("etcd+tcp+nats", tmp_path_factory.mktemp("planes"))
    # One takes its requests over TCP, the other over NATS.
    workers = [planes.mocker(BUILTIN), planes.mocker(BUILTIN, "--request-plane", "nats")]
    frontend = planes.frontend()
    frontend.planes, frontend.ids, frontend.on_nats = planes, [id for mocker in workers for id in mocker.ids], workers[1].ids[0]
    until_serving(frontend, frontend.ids)
    yield frontend
    assert frontend.stop() == 0, frontend.log()
    for mocker in workers:
        assert mocker.stop(60) == 0, mocker.log()
    planes.end()


def state(fleet):
    return fleet.http.get("/health").json()["discovery"][0]["state"]


@pytest.mark.parametrize("data", ["kept", "lost"])
def test_etcd_comes_back(fleet, data):
    etcd = fleet.planes.etcd
    with Load(fleet.url) as load:
        load.until_more(told=fleet.log)
        etcd.kill()
        until(lambda: state(fleet) == "lost", 30, fleet.log)
        end = time.monotonic() + AWAY
        while time.monotonic() < end:
            load.until_more(1, told=fleet.log)
        if data == "lost":
            etcd.wipe()
        etcd.start()
        until(lambda: state(fleet) == "ready", 60, fleet.log)
        # Who comes now finds all of them: they have announced themselves again.
        newcomer = fleet.planes.frontend()
        until_serving(newcomer, fleet.ids)
        assert newcomer.stop() == 0, newcomer.log()
        load.until_more(told=fleet.log)
    assert not load.failed, f"{len(load.failed)} of {len(load.failed) + load.served}: {load.failed[:3]}"
    until_serving(fleet, fleet.ids)
    until_hits(fleet.http, fleet.log)


def test_nats_comes_back(fleet):
    """Requests to the worker on NATS wait for it, and none fails; what is known of caches is in step again when it is back."""
    nats = fleet.planes.nats
    until_hits(fleet.http, fleet.log)
    with Load(fleet.url, clients=8) as load:
        until(lambda: fleet.on_nats in load.seen, 30, fleet.log)
        nats.kill()
        # Who is sent to the worker on NATS now waits: there may be nobody left who asks.
        time.sleep(AWAY)
        load.seen = set()
        nats.start()
        until(lambda: fleet.on_nats in load.seen, 60, fleet.log)
        load.until_more(told=fleet.log)
    assert not load.failed, f"{len(load.failed)} of {len(load.failed) + load.served}: {load.failed[:3]}"
    until_hits(fleet.http, fleet.log)
    until_exact(fleet)
