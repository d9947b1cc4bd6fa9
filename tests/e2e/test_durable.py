"""Cache events that are kept in JetStream: routers that die and come back, and a stream that is purged or deleted under them."""

import base64
import json
import os
import socket
import subprocess
import time

import pytest

from conftest import until
from planes_rig import BUILTIN, TEXT, Load, Planes, chat, until_hits, until_serving, where

STREAM = "namespace-dynamo-component-backend-kv-events"
BUCKET = STREAM.removesuffix("-kv-events") + "-radix-bucket"
DURABLE = ["--router-durable-kv-events", "--router-snapshot-threshold", "20"]


def jetstream(nats, api, body=""):
    """Asks JetStream, as any client of NATS can."""
    with socket.create_connection(("127.0.0.1", nats.port), timeout=20) as connection:
        lines = connection.makefile("rwb")
        lines.readline()
        lines.write(f'CONNECT {{"verbose":false,"headers":true}}\r\nSUB answer 1\r\nPUB $JS.API.{api} answer {len(body)}\r\n{body}\r\n'.encode())
        lines.flush()
        while True:
            line = lines.readline()
            assert line, "NATS closed the connection"
            if line.startswith(b"MSG"):
                return json.loads(lines.read(int(line.split()[-1])))


def messages(nats):
    return jetstream(nats, f"STREAM.INFO.{STREAM}")["state"]["messages"]


def consumers(nats):
    return [consumer["name"] for consumer in jetstream(nats, f"CONSUMER.LIST.{STREAM}", "{}")["consumers"]]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    planes = Planes("etcd+tcp+nats", tmp_path_factory.mktemp("planes"))
    mocker = planes.mocker(BUILTIN, "--durable-kv-events", workers=2)
    frontends = [planes.frontend(*DURABLE) for _ in range(2)]
    for frontend in frontends:
        until_serving(frontend, mocker.ids)
    planes.frontends, planes.mocker_process, planes.ids = frontends, mocker, mocker.ids
    yield planes
    for kvasir in [*planes.frontends, mocker]:
        assert kvasir.stop(60) == 0, kvasir.log()
    planes.end()


def prompts(name, count=8):
    return [TEXT.format(f"{name} {number}") for number in range(count)]


def homes(frontend, texts):
    """Where each prompt is sent."""
    return [where(chat(frontend.http, text, max_tokens=2)) for text in texts]


def index(frontend):
    """What a frontend knows: which worker holds which blocks."""
    known = set()
    for part in frontend.http.get("/dump").json().values():
        for event in part["events"]:
            for block in event["event"]["data"]["stored"]["blocks"]:
                known.add((event["worker_id"], event["event"].get("dp_rank", 0), block["block_hash"]))
    return known


def until_same(frontends):
    """Waits until all know the same; what that is."""
    known = []

    def same():
        known[:] = [index(frontend) for frontend in frontends]
        return all(one == known[0] for one in known)

    until(same, 60, lambda: f"{[len(one) for one in known]}\n{frontends[0].log()}\n{frontends[-1].log()}")
    return known[0]


def warm(fleet, name, count=8):
    """Prompts that were sent through the first frontend, where they went, and what both frontends know when they have heard of all."""
    one, texts = fleet.frontends[0], prompts(name, count)
    before = len(until_same(fleet.frontends))
    went = homes(one, texts)
    blocks = lambda: len(index(one)) - before  # noqa: E731
    until(lambda: blocks() >= 4 * count, 60, lambda: f"{blocks()}\n{one.log()}")
    return texts, went, until_same(fleet.frontends)


def restarted(fleet, at):
    """One frontend is killed as by a crash, and started anew."""
    killed = fleet.frontends[at]
    killed.process.kill()
    killed.process.wait()
    again = fleet.frontends[at] = fleet.frontend(*DURABLE)
    until_serving(again, fleet.ids)
    return again


def assert_knows(frontend, known, texts, went):
    """It knows the same as before, and goes by it from its first request on."""
    until(lambda: index(frontend) == known, 60, lambda: f"{len(index(frontend))} of {len(known)}\n{frontend.log()}")
    assert homes(frontend, texts) == went, frontend.log()


def test_every_router_hears_of_every_cache(fleet):
    one, other = fleet.frontends
    until_hits(one.http, one.log)
    texts, went, known = warm(fleet, "heard")
    assert_knows(other, known, texts, went)


def test_the_doctor_knows_of_events_in_a_stream(fleet):
    command = [os.environ["KVASIR_BIN"], "doctor", "--discovery-backend", "etcd"]
    looked = subprocess.run(command, env={**os.environ, **fleet.env}, capture_output=True, text=True, timeout=120)
    assert looked.returncode == 0, looked.stdout + looked.stderr
    assert looked.stdout.count(f"jetstream {STREAM}") == 2, looked.stdout
    assert looked.stdout.count("the blocks of a request were written to the stream") == 2, looked.stdout


def test_a_router_that_is_killed_knows_the_caches_when_it_is_back(fleet):
    texts, went, known = warm(fleet, "back")
    before = set(consumers(fleet.nats))
    again = restarted(fleet, 0)
    assert_knows(again, known, texts, went)
    # Its old consumer is nobody's: the others take it away when its key in etcd is gone.
    other = fleet.frontends[1]
    until(lambda: len(before & set(consumers(fleet.nats))) == 1, 60, lambda: f"{before} {consumers(fleet.nats)}\n{other.log()}")


def test_the_stream_stays_short_and_nothing_is_lost(fleet):
    texts, went, known = warm(fleet, "short", 24)
    until(lambda: messages(fleet.nats) <= 20, 60, lambda: f"{messages(fleet.nats)}\n{fleet.frontends[0].log()}")
    for frontend in fleet.frontends:
        # None is left who could tell: snapshot and stream are all there is.
        frontend.process.kill()
        frontend.process.wait()
    assert_knows(restarted(fleet, 0), known, texts, went)
    restarted(fleet, 1)
    until_same(fleet.frontends)


def test_nats_comes_back(fleet):
    one = fleet.frontends[0]
    with Load(one.url) as load:
        load.until_more(told=one.log)
        fleet.nats.kill()
        end = time.monotonic() + 3
        while time.monotonic() < end:
            load.until_more(1, told=one.log)
        fleet.nats.start()
        load.until_more(told=one.log)
    assert not load.failed, load.failed[:3]
    for frontend in fleet.frontends:
        until_hits(frontend.http, frontend.log)


def test_a_stream_that_is_purged_under_routers_costs_nothing(fleet):
    texts, went, known = warm(fleet, "purged")
    assert jetstream(fleet.nats, f"STREAM.PURGE.{STREAM}")["success"]
    last = jetstream(fleet.nats, f"STREAM.INFO.{STREAM}")["state"]["last_seq"]
    stored = lambda: int(head(fleet.nats).get("stream-sequence", 0))  # noqa: E731
    until(lambda: stored() >= last, 60, lambda: f"{stored()} {last}\n{fleet.frontends[0].log()}")
    for at in range(2):
        assert_knows(restarted(fleet, at), known, texts, went)


def test_a_stream_and_a_bucket_that_are_deleted_under_routers_are_made_anew(fleet):
    """Routers go on with what they know, write it down, and read what is written from then on."""
    texts, went, known = warm(fleet, "deleted", 24)
    until(lambda: messages(fleet.nats) <= 20, 60, lambda: f"{messages(fleet.nats)}\n{fleet.frontends[0].log()}")
    for gone in (f"OBJ_{BUCKET}", STREAM):
        assert jetstream(fleet.nats, f"STREAM.DELETE.{gone}")["success"]
        created = lambda: jetstream(fleet.nats, f"STREAM.INFO.{STREAM}").get("created")  # noqa: E731
        until(lambda: created() and head(fleet.nats).get("stream-created") == created(), 60, fleet.frontends[0].log)
    for frontend in fleet.frontends:
        frontend.until_logged("the stream was deleted and is made anew")
    until(lambda: len(consumers(fleet.nats)) == 2, 60, lambda: f"{consumers(fleet.nats)}\n{fleet.frontends[0].log()}")
    assert_knows(restarted(fleet, 0), known, texts, went)
    texts, went, known = warm(fleet, "after")
    assert_knows(restarted(fleet, 1), known, texts, went)


def head(nats):
    """What the object store says of the snapshot."""
    name = base64.urlsafe_b64encode(b"kvasir-index").decode()
    found = jetstream(nats, f"STREAM.MSG.GET.OBJ_{BUCKET}", json.dumps({"last_by_subj": f"$O.{BUCKET}.M.{name}"}))
    return json.loads(base64.b64decode(found["message"]["data"]))["metadata"] if "message" in found else {}
