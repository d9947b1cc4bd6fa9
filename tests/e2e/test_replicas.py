"""Several frontends on the same workers, in step over the event plane: `--router-replica-sync`."""

import concurrent.futures
import time

import pytest

from conftest import until
from planes_rig import BUILTIN, TEXT, Load, Planes, chat, first_event, stream, until_exact, until_hits, until_serving, where
from replica_rig import SYNC, delays, requests_on


# A replica that is started anew finds as much as before within 10 seconds of being ready.
HIT_SHARE_SECONDS = 10


@pytest.fixture(scope="module", params=["file+tcp+zmq", "etcd+tcp+nats"])
def pair(request, tmp_path_factory):
    planes = Planes(request.param, tmp_path_factory.mktemp("planes"))
    mockers = []
    try:
        with concurrent.futures.ThreadPoolExecutor() as all_at_once:
            started = all_at_once.map(lambda _: planes.mocker(BUILTIN, speed="1"), range(2))
            frontends = [planes.frontend(*SYNC) for _ in range(2)]
            mockers = list(started)
        ids = [worker for mocker in mockers for worker in mocker.ids]
        for frontend in frontends:
            until_serving(frontend, ids)
            frontend.until_logged("in step with other replicas")
        frontends[0].planes, frontends[0].ids = planes, ids
        yield frontends
        for kvasir in [*frontends, *mockers]:
            assert kvasir.stop(60) == 0, kvasir.log()
    finally:
        planes.end()


def test_load_through_one_is_seen_by_the_other(pair):
    for asked, other in (pair, pair[::-1]):
        # Who has just met is told of nothing that happened before.
        with stream(asked.http, TEXT.format("meet"), 4000) as answer:
            lines = first_event(answer)
            until(lambda: sum(requests_on(other.http).values()) == 1, 30, other.log)
            del lines
        until(lambda: sum(requests_on(other.http).values()) == 0, 30, other.log)
        found = delays(asked, lambda: sum(requests_on(other.http).values()) == 1)
        print(f"{pair[0].planes.combo}: seen after {[round(one * 1000, 1) for one in found]} ms")
        assert min(found) < 0.05, found


def test_the_other_goes_where_there_is_less_to_do(pair):
    one, other = pair
    with stream(one.http, TEXT.format("busy") * 4, 4000) as answer:
        lines = first_event(answer)
        busy = until(lambda: [worker for worker, running in requests_on(other.http).items() if running], 20, other.log)
        for number in range(4):
            assert where(chat(other.http, TEXT.format(f"free {number}"), max_tokens=1)) != busy[0]
        del lines


def test_a_session_is_followed_by_both(pair):
    for number in range(4):
        header = {"x-dynamo-session-id": f"conversation {number}"}
        body = {"model": "m", "messages": [{"role": "user", "content": TEXT.format(f"session {number}")}], "max_tokens": 2,
                "nvext": {"extra_fields": ["worker_id"]}}  # fmt: skip
        ask = lambda kvasir: where(kvasir.http.post("/v1/chat/completions", json=body, headers=header))  # noqa: E731, B023
        first = ask(pair[number % 2])
        # A session is told when it is bound; a request that overtakes the news would bind it anew.
        until(lambda: all(ask(kvasir) == first for kvasir in pair), 20, pair[0].log)


def test_one_that_starts_late_begins_with_what_is_under_way(pair):
    one, _ = pair
    with stream(one.http, TEXT.format("before"), 4000) as answer:
        lines = first_event(answer)
        late = one.planes.frontend(*SYNC)
        until_serving(late, one.ids)
        until(lambda: sum(requests_on(late.http).values()) == 1, 20, late.log)
        del lines
    assert late.stop(60) == 0, late.log()


def hit_share(http, texts):
    """The share of the prompts' tokens that their engines found cached."""
    told = [chat(http, text, max_tokens=2).json()["usage"] for text in texts]
    cached = sum((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0 for usage in told)
    return cached / sum(usage["prompt_tokens"] for usage in told)


def test_one_that_is_killed_and_started_anew_costs_the_others_nothing(pair):
    one, other = pair
    if one.planes.etcd is None:
        pytest.skip("in a folder keys outlive their process by ten seconds: with etcd the same is seen sooner")
    killed = one.planes.frontend(*SYNC)
    until_serving(killed, one.ids)
    killed.until_logged("in step with other replicas")
    warm = [TEXT.format(f"warm {number}") for number in range(16)]
    for text in warm:
        chat(one.http, text, max_tokens=2)
    until_exact(killed)
    before = hit_share(killed.http, warm[:8])
    assert before > 0.5, f"{before}\n{killed.log()}"
    with Load(one.url, clients=2) as load:
        with stream(killed.http, TEXT.format("lost"), 4000) as answer:
            lines = first_event(answer)
            until(lambda: sum(requests_on(other.http).values()) >= 1, 20, other.log)
            killed.process.kill()
            killed.process.wait()
            del lines
        again = one.planes.frontend(*SYNC)
        until_serving(again, one.ids)
        ready = time.monotonic()
        until_exact(again)
        took = time.monotonic() - ready
        # Prompts that only its peers have sent.
        share = hit_share(again.http, warm[8:])
        print(f"{share:.3f} {took:.3f} s after it was ready, {before:.3f} before it was killed")
        assert share >= before - 0.05, f"{share} after {took:.1f} s, {before} before\n{again.log()}"
        assert took < HIT_SHARE_SECONDS, f"{took:.1f} s\n{again.log()}"
        until_hits(again.http, again.log)
        load.until_more(told=one.log)
    assert not load.failed, load.failed[:3]
    # What the killed one had booked goes with its lease.
    until(lambda: sum(requests_on(other.http).values()) == 0, 40, other.log)
    assert again.stop(60) == 0, again.log()


def test_what_was_missed_while_nats_was_away_is_made_good(pair):
    one, other = pair
    if one.planes.nats is None:
        pytest.skip("these talk to each other")
    before = stream(one.http, TEXT.format("before"), 4000)
    lines = first_event(before.__enter__())
    until(lambda: sum(requests_on(other.http).values()) == 1, 20, other.log)
    one.planes.nats.kill()
    before.__exit__(None, None, None)
    del lines
    until(lambda: sum(requests_on(one.http).values()) == 0, 20, one.log)
    with stream(one.http, TEXT.format("meanwhile") * 3, 4000) as answer:
        lines = first_event(answer)
        meanwhile = requests_on(one.http)
        one.planes.nats.start()
        until(lambda: requests_on(other.http) == meanwhile, 40, lambda: f"{requests_on(other.http)} {meanwhile}\n{other.log()}")
        del lines
    until(lambda: sum(requests_on(other.http).values()) == 0, 20, other.log)
