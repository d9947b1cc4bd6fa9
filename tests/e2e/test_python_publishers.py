"""What engines tell through the wheel: a recorded vLLM through `ZmqKvEventPublisher`, and lists of any shape through `KvEventPublisher`."""

import array
import asyncio
import base64
import json
import pathlib
import struct

import pytest

from python_rig import BUILTIN, kvasir  # noqa: F401
from zmtp import Publisher

RECORDED = pathlib.Path(__file__).parents[2] / "testdata/vllm-kv-events"
BLOCK = 32
# "wall_time": 0.5 in MessagePack.
WALL_TIME = b"\xa9wall_time\xcb" + struct.pack(">d", 0.5)


def lines(folder, name):
    return [json.loads(line) for line in (RECORDED / folder / name).read_text().splitlines()]


class Cache:
    """An engine's cache, as its own events tell it: the oracle of these tests."""

    def __init__(self):
        self.blocks = {}  # an engine's name: the name before it, its tokens

    def apply(self, event):
        if event["type"] == "AllBlocksCleared":
            self.blocks.clear()
        elif event["type"] == "BlockRemoved":
            for name in event["block_hashes"]:
                self.blocks.pop(name, None)
        else:
            before = event["parent_block_hash"]
            for at, name in enumerate(event["block_hashes"]):
                # What is cached under a salt is nobody else's.
                salt = (event.get("extra_keys") or [None] * (at + 1))[at]
                self.blocks[name] = (before, tuple(event["token_ids"][at * BLOCK : (at + 1) * BLOCK]), json.dumps(salt))
                before = name

    def overlap(self, prompt):
        names = {of: name for name, of in self.blocks.items()}
        before, found = None, 0
        for at in range(0, len(prompt) - BLOCK + 1, BLOCK):
            before = names.get((before, tuple(prompt[at : at + BLOCK]), "null"))
            if before is None:
                break
            found += 1
        return found


async def soon(condition):
    """Waits for it; the whole test has its time."""
    while not condition():
        await asyncio.sleep(0.01)


async def handler(request):
    yield request


def run(main):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DYN_TCP_RPC_HOST", "127.0.0.1")
        asyncio.run(asyncio.wait_for(main(), 90))


def test_a_recorded_engine_is_relayed_event_by_event(kvasir):  # noqa: F811
    recorded, batches = lines("int-sha256", "pub_frames.jsonl"), lines("int-sha256", "decoded.jsonl")
    prompts = [request["prompt_token_ids"] for request in lines("int-sha256", "requests.jsonl") if request["prompt_token_ids"]]
    frames = [[base64.b64decode(frame) for frame in message["frames_b64"]] for message in recorded]

    async def main():
        runtime = kvasir.DistributedRuntime(asyncio.get_running_loop(), "mem", "tcp", event_plane="zmq")
        endpoint = runtime.endpoint("recorded.backend.generate")
        serving = asyncio.ensure_future(endpoint.serve_endpoint(handler))
        engine, worker = Publisher(), endpoint.connection_id()
        config = kvasir.ZmqKvEventPublisherConfig(worker_id=worker, kv_block_size=BLOCK, zmq_endpoint=engine.endpoint, zmq_topic="kv-events")
        publisher = kvasir.ZmqKvEventPublisher(endpoint, config)
        indexer = kvasir.KvIndexer(endpoint, BLOCK)
        await indexer.wait_for_workers(1)
        await asyncio.to_thread(engine.subscribed.wait, 30)
        cache, held = Cache(), 0

        def known(prompt):
            return indexer.find_matches_for_request(prompt).scores.get((worker, 0), 0)

        for message, batch in zip(frames, batches, strict=True):
            engine.send(message)
            for event in batch["batch"][1]:
                cache.apply(event)
            expected = [cache.overlap(prompt) for prompt in prompts]
            held = max(held, sum(expected))
            await soon(lambda: [known(prompt) for prompt in prompts] == expected)  # noqa: B023
        assert held > 100, "the recording fills caches"
        publisher.shutdown()
        engine.close()
        runtime.shutdown()
        await asyncio.wait_for(serving, 20)

    run(main)


def test_steps_of_an_engine_are_told_relayed_and_heard(kvasir):  # noqa: F811
    """Forward-pass metrics: made by us, passed on from an engine's own socket, and read one by one or as the newest of each rank."""
    figures = {
        "scheduled_num_prefill_requests": 1, "scheduled_sum_prefill_tokens": 2, "scheduled_sum_prefill_kv_tokens": 3,
        "scheduled_num_decode_requests": 4, "scheduled_sum_decode_kv_tokens": 5, "queued_num_prefill_requests": 6,
        "queued_sum_prefill_tokens": 7, "queued_num_decode_requests": 8, "queued_sum_decode_kv_tokens": 9,
    }  # fmt: skip

    async def main():
        runtime = kvasir.DistributedRuntime(asyncio.get_running_loop(), "mem", "tcp", event_plane="zmq")
        endpoint, relayed = runtime.endpoint("steps.backend.generate"), runtime.endpoint("steps.relayed.generate")
        await kvasir.register_model(
            kvasir.ModelInput.Tokens, kvasir.ModelType.Chat, endpoint, str(BUILTIN), "steps", worker_type=kvasir.WorkerType.Aggregated
        )
        worker = endpoint.connection_id()
        publisher = kvasir.FpmDirectPublisher(endpoint, worker, dp_size=2)
        reader, tracker = kvasir.FpmEventSubscriber(endpoint), kvasir.FpmEventSubscriber(endpoint)
        tracker.start_tracking()
        for wrong in (tracker.recv, reader.get_recent_stats):
            with pytest.raises(RuntimeError):
                wrong()
        with pytest.raises(ValueError, match="dp_rank"):
            publisher.publish(dp_rank=2, **figures, wall_time_secs=0.5)
        with pytest.raises(ValueError, match="wall_time"):
            publisher.publish(dp_rank=0, **figures, wall_time_secs=-1)
        # Signs of life come by themselves; a step is what has taken time.
        step = None
        while step is None:
            publisher.publish(dp_rank=1, **figures, wall_time_secs=0.5)
            heard = await asyncio.to_thread(reader.recv)
            step = heard if WALL_TIME in heard else None
        await soon(lambda: set(tracker.get_recent_stats()) == {(str(worker), 0), (str(worker), 1)})
        assert list(tracker.get_model_cards()) == [str(worker)] and "steps" in tracker.get_model_cards()[str(worker)]
        # The same bytes, as an engine would publish them itself.
        engine, second = Publisher(), kvasir.FpmEventSubscriber(relayed)
        relay = kvasir.FpmEventRelay(relayed, engine.endpoint)
        await asyncio.to_thread(engine.subscribed.wait, 30)
        receiving = asyncio.ensure_future(asyncio.to_thread(second.recv))
        sequence = 0
        while not receiving.done():
            engine.send([b"", sequence.to_bytes(8, "big"), step])
            sequence += 1
            await asyncio.sleep(0.05)
        assert receiving.result() == step
        for part in (relay, publisher, tracker):
            part.shutdown()
        # Whoever waits is let go.
        waiting = asyncio.ensure_future(asyncio.to_thread(lambda: list(iter(second.recv, None))))
        second.shutdown()
        await asyncio.wait_for(waiting, 30)
        reader.shutdown()
        engine.close()
        runtime.shutdown()

    run(main)


def test_lists_arrays_and_mistakes(kvasir):  # noqa: F811
    """Whatever holds whole numbers is read alike, and whatever does not is named."""

    class Index:
        def __init__(self, number):
            self.number = number

        def __index__(self):
            return self.number

    # Python keeps numbers in digits of 30 bits: those around one and two of them, too.
    tokens = [0, 1, 2**30 - 1, 2**30, 2**31, *range(2**16, 2**16 + 26), 2**32 - 1]
    same = [tokens, tuple(tokens), array.array("I", tokens), array.array("q", tokens), [Index(token) for token in tokens], (token for token in tokens)]
    hashes = [kvasir.compute_block_hash_for_seq(given, 16) for given in same]
    assert len(hashes[0]) == 2 and hashes == [hashes[0]] * len(same)
    assert kvasir.compute_block_hash_for_seq([True, *tokens[1:]], 16)[1] == hashes[0][1]
    for wrong, error in [([1, "2"], TypeError), ([1, None], TypeError), ([1, 2.0], TypeError), ([-1], (ValueError, OverflowError)),
                         ([2**32], (ValueError, OverflowError)), ([2**70], OverflowError), ("text", TypeError), (7, TypeError)]:  # fmt: skip
        with pytest.raises(error):
            kvasir.compute_block_hash_for_seq(wrong, 16)
    # An engine's names are any 64 bits, signed or not; the same bits are the same name.
    names = [2**64 - 1, 2**63, 5, 2**30, 2**60 - 1, 2**60, 2**63 - 1, 0]
    signed = [-1, -(2**63), *names[2:]]
    router = kvasir.Router(block_size=16)
    router.add_worker(1)
    prompt = list(range(16 * len(names)))
    for stored, removed in [(names, signed), (array.array("Q", names), tuple(names)), (tuple(names), array.array("q", signed)), (signed, array.array("Q", names))]:
        assert router.stored(1, prompt, stored)
        assert router.overlap_scores(prompt).scores == {(1, 0): len(names)}
        assert router.removed(1, removed)
        assert router.overlap_scores(prompt).scores == {}
    for wrong in ([2**64], [-(2**63) - 1], ["a"]):
        with pytest.raises((OverflowError, TypeError)):
            router.stored(1, prompt[:16], wrong)


def test_a_batch_is_told_as_a_whole_or_not_at_all(kvasir):  # noqa: F811

    async def main():
        runtime = kvasir.DistributedRuntime(asyncio.get_running_loop(), "mem", "tcp", event_plane="zmq")
        endpoint = runtime.endpoint("told.backend.generate")
        serving = asyncio.ensure_future(endpoint.serve_endpoint(handler))
        publisher = kvasir.KvEventPublisher(endpoint, kv_block_size=4, enable_local_indexer=True)
        indexer, prompt = kvasir.KvIndexer(endpoint, 4), list(range(12))
        await indexer.wait_for_workers(1)
        worker = endpoint.connection_id()
        good = {"type": "stored", "token_ids": prompt, "num_block_tokens": [4, 4, 4], "block_hashes": [1, 2, 3]}
        for bad in ({"type": "lost"}, {"type": "stored", "token_ids": [1]}, {**good, "block_hashes": [1]}, {**good, "token_ids": prompt[:5]}):
            with pytest.raises(ValueError):
                publisher.publish_batch([good, bad])
        publisher.publish_batch([good, {"type": "removed", "block_hashes": [3]}])
        await soon(lambda: indexer.find_matches_for_request(prompt).scores == {(worker, 0): 2})
        publisher.publish_removed(array.array("q", [1, 2]))
        await soon(lambda: not indexer.find_matches_for_request(prompt).scores)
        # A block that is not full ends what can be shared.
        publisher.publish_stored(array.array("I", prompt), [4, 4, 3], [7, 8, 9])
        await soon(lambda: indexer.find_matches_for_request(prompt).scores == {(worker, 0): 2})
        # Images count in what is told and in what is looked up.
        router, pictures = kvasir.KvRouter(endpoint, 4), [None, {"mm_objects": [{"mm_hash": 5, "offsets": [[0, 4]]}]}, None]
        publisher.publish_stored(prompt, [4, 4, 4], [17, 18, 19], block_mm_infos=pictures)
        while (await router.best_worker(prompt, block_mm_infos=pictures))[2] != 3:
            await asyncio.sleep(0.01)
        assert (await router.best_worker(prompt))[2] == 2
        [seen], [blind] = await router.get_potential_loads(prompt, pictures), await router.get_potential_loads(prompt)
        assert seen["potential_prefill_tokens"] < blind["potential_prefill_tokens"], (seen, blind)
        publisher.publish_cleared()
        await soon(lambda: not indexer.find_matches_for_request(prompt).scores)
        publisher.shutdown()
        with pytest.raises(RuntimeError, match="shut down"):
            publisher.publish_removed([1])
        runtime.shutdown()
        await asyncio.wait_for(serving, 20)

    run(main)
