"""A frontend of ours and a real one of Dynamo 1.6.1 on the same workers, in step: `--router-replica-sync` on both."""

import pytest

from conftest import until
from dynamo_frontend import Dynamo
from dynamo_rig import model_folder, need_dynamo
from planes_rig import TEXT, Planes, first_event, stream, until_serving, where
from replica_rig import SYNC, blocks_at_dynamo, delays, requests_on

need_dynamo()


@pytest.fixture(scope="module", params=["file+tcp+zmq", "etcd+tcp+nats"])
def mixed(request, tmp_path_factory):
    planes, folder = Planes(request.param, tmp_path_factory.mktemp("planes")), model_folder()
    try:
        dynamo = Dynamo(planes, tmp_path_factory.mktemp("log") / "dynamo.log", *SYNC)
        mockers = [planes.mocker(folder, speed="1") for _ in range(2)]
        kvasir = planes.frontend(*SYNC)
        until_serving(kvasir, [worker for mocker in mockers for worker in mocker.ids])
        dynamo.until_serving("m")
        kvasir.combo = request.param
        yield kvasir, dynamo
        for process in (kvasir, *mockers):
            assert process.stop(60) == 0, process.log()
    finally:
        dynamo.stop()
        planes.end()


def test_a_frontend_of_dynamo_and_ours_see_each_other(mixed):
    kvasir, dynamo = mixed
    seen_by_us = lambda: sum(requests_on(kvasir.http).values()) == 1  # noqa: E731
    seen_by_it = lambda: sum(blocks_at_dynamo(dynamo.http).values()) > 0  # noqa: E731
    told = lambda: f"{kvasir.log()}\n{dynamo.log()}"  # noqa: E731
    for asked, seen in ((dynamo, seen_by_us), (kvasir, seen_by_it)):
        with stream(asked.http, TEXT.format("meet"), 4000) as answer:
            lines = first_event(answer)
            until(seen, 30, told)
            del lines
        until(lambda: not seen(), 30, told)
        found = delays(asked, seen)
        print(f"{kvasir.combo}: {'Dynamo' if asked is dynamo else 'Kvasir'} -> seen after {[round(one * 1000, 1) for one in found]} ms")
        assert min(found) < 0.05, found


def test_sessions_are_shared_with_dynamo(mixed):
    """Who asks at the second before it has heard of the first binds anew, and the later word counts at both: they agree, whichever it is.
    If they did not tell each other, half of these sessions would stay apart."""
    kvasir, dynamo = mixed
    for number, (first, second) in enumerate([(kvasir, dynamo), (dynamo, kvasir)] * 4):
        header = {"x-dynamo-session-id": f"shared {number}"}
        body = {"model": "m", "messages": [{"role": "user", "content": TEXT.format(f"shared {number}")}], "max_tokens": 2,
                "nvext": {"extra_fields": ["worker_id"]}}  # fmt: skip
        ask = lambda one: where(one.http.post("/v1/chat/completions", json=body, headers=header))  # noqa: E731, B023
        ask(first)
        until(lambda: ask(second) == ask(first) == ask(second), 20, lambda: f"{kvasir.log()}\n{dynamo.log()}")  # noqa: B023
