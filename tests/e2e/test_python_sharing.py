"""Routers of programs that share what they know: bookings, the index, a stream of events, classes of requests. And what reads events beside them."""

import array
import asyncio
import base64
import json

import pytest

from planes_rig import MODEL, Planes
from python_rig import BUILTIN, environment, kvasir  # noqa: F401
from test_python_publishers import BLOCK, lines, run, soon
from test_python_runtime import run as run_program
from zmtp import Publisher

PROMPT = list(range(5000, 5064))


async def answer(request):
    yield {"token_ids": request["token_ids"][:1], "finish_reason": "length"}


class Worker:
    """A runtime in memory with one worker that serves a model."""

    def __init__(self, kvasir, name):  # noqa: F811
        self.kvasir = kvasir
        self.runtime = kvasir.DistributedRuntime(asyncio.get_running_loop(), "mem", "tcp", event_plane="zmq")
        self.endpoint = self.runtime.endpoint(f"{name}.backend.generate")

    async def __aenter__(self):
        kinds = (self.kvasir.ModelInput.Tokens, self.kvasir.ModelType.Chat)
        about = self.kvasir.ModelRuntimeConfig()
        about.total_kv_blocks, about.max_num_batched_tokens = 1000, 64
        await self.kvasir.register_model(*kinds, self.endpoint, str(BUILTIN), "m", kv_cache_block_size=16, runtime_config=about)
        self.serving = asyncio.ensure_future(self.endpoint.serve_endpoint(answer))
        return self

    async def __aexit__(self, *error):
        self.runtime.shutdown()
        await asyncio.wait_for(self.serving, 20)


def test_replicas_count_what_the_others_book(kvasir):  # noqa: F811
    async def main():
        async with Worker(kvasir, "replicas") as worker:
            first, second = (kvasir.KvRouter(worker.endpoint, 16, kvasir.KvRouterConfig(router_replica_sync=True)) for _ in range(2))
            alone = kvasir.KvRouter(worker.endpoint, 16, kvasir.KvRouterConfig())

            async def active(router):
                [row] = await router.get_potential_loads(PROMPT)
                return row["active_requests"]

            await first.best_worker(PROMPT, request_id="a")
            while await active(second) != 1:
                await asyncio.sleep(0.01)
            assert await active(first) == 1 and await active(alone) == 0
            await first.free("a")
            while await active(second) != 0:
                await asyncio.sleep(0.01)
            # A replica that goes takes its bookings along.
            await first.best_worker(PROMPT, request_id="b")
            while await active(second) != 1:
                await asyncio.sleep(0.01)
            del first
            while await active(second) != 0:
                await asyncio.sleep(0.01)

    run(main)


def test_one_router_answers_with_its_index_for_another(kvasir):  # noqa: F811
    async def main():
        async with Worker(kvasir, "indexed") as worker:
            holds = kvasir.KvRouter(worker.endpoint, 16, kvasir.KvRouterConfig(serve_indexer=True))
            asks = kvasir.KvRouter(worker.endpoint, 16, kvasir.KvRouterConfig(use_remote_indexer=True))
            await holds.wait_for_workers(1)
            publisher = kvasir.KvEventPublisher(worker.endpoint, kv_block_size=16, enable_local_indexer=True)
            publisher.publish_stored(PROMPT, [16] * 4, [1, 2, 3, 4])
            await soon(lambda: holds.blocks_known == 4)
            while (await asks.best_worker(PROMPT))[2] != 4:
                await asyncio.sleep(0.01)
            assert asks.blocks_known == 0
            publisher.shutdown()

    run(main)


def test_a_file_names_classes_and_their_limits(kvasir, tmp_path):  # noqa: F811
    policies = tmp_path / "classes.yaml"
    policies.write_text(
        "default_policy_family: interactive\n"
        "uncached_isl_buckets:\n  - {min_tokens: 0, bucket: all}\n"
        "classes:\n"
        "  - {name: interactive, policy_family: interactive, cache_bucket: all, quantum: 8192}\n"
        "  - {name: batch, policy_family: batch, cache_bucket: all, quantum: 64, prefill_busy_threshold: 64, request_queue_limit_per_worker: 1}\n"
    )
    with pytest.raises(ValueError, match="router_policy_config"):
        kvasir.Router(config=kvasir.KvRouterConfig(router_policy_config=str(tmp_path / "none.yaml")))

    async def main():
        async with Worker(kvasir, "classes") as worker:
            config = kvasir.KvRouterConfig(router_policy_config=str(policies), router_queue_threshold=1.0)
            router = kvasir.KvRouter(worker.endpoint, 16, config)
            await router.best_worker(list(range(200)), request_id="runs")
            # The worker has more to compute than one batch: who comes now waits, and one of the class may.
            waits = asyncio.ensure_future(router.best_worker(list(range(300)), request_id="waits", policy_class="batch"))
            while not waits.done():
                try:
                    asked = router.best_worker(list(range(400)), request_id="refused", policy_class="batch")
                    await asyncio.wait_for(asked, 0.05)
                except TimeoutError:
                    continue
                except kvasir.RouterQueueLimitExceeded as error:
                    refused = error
                    break
            assert (refused.policy_class, refused.limit_kind, refused.limit) == ("batch", "requests", 1), vars(refused)
            await router.mark_prefill_complete("runs")
            await router.free("runs")
            await waits
            await router.free("waits")
            await soon(lambda: router.booked == 0)

    run(main)


def test_events_that_a_stream_keeps_are_read_by_who_comes_later(tmp_path):
    """A router that is made after all was said knows what the workers hold: from JetStream, not from them."""
    planes = Planes("etcd+tcp+nats", tmp_path)
    mocker = planes.mocker(BUILTIN, "--durable-kv-events", workers=2)
    script = f"""
        import asyncio, kvasir
        PROMPT = list(range(100, 164))
        async def main():
            endpoint = kvasir.DistributedRuntime.detached().endpoint("dynamo.backend.generate")
            config = kvasir.KvRouterConfig(durable_kv_events=True)
            assert config.without_effect() == []
            first = kvasir.KvRouter(endpoint, 16, config)
            await first.wait_for_workers(2)
            stream = await first.generate(PROMPT, {MODEL!r}, stop_conditions={{"max_tokens": 2}})
            items = [item async for item in stream]
            worker = items[0]["routing_data"]["worker_id"]["decode_worker_id"]
            while (await first.best_worker(PROMPT))[::2] != (worker, 4):
                await asyncio.sleep(0.02)
            second = kvasir.KvRouter(endpoint, 16, config)
            while (await second.best_worker(PROMPT))[::2] != (worker, 4):
                await asyncio.sleep(0.02)
            print("read from the stream")
        asyncio.run(asyncio.wait_for(main(), 90))
    """
    try:
        assert "read from the stream" in run_program(script, environment(tmp_path, **planes.env, DYN_DISCOVERY_BACKEND="etcd", DYN_EVENT_PLANE="nats"), 120)
    finally:
        assert mocker.stop(60) == 0, mocker.log()
        planes.end()


def test_a_recorder_writes_what_another_index_can_be_made_of(kvasir, tmp_path):  # noqa: F811
    async def main():
        async with Worker(kvasir, "recorded") as worker:
            component = worker.runtime.namespace("recorded").component("backend")
            with pytest.raises(ValueError, match="max_count"):
                kvasir.KvRecorder(component, max_count=0)
            with pytest.raises(OSError):
                kvasir.KvRecorder(component, tmp_path / "none" / "events.jsonl")
            recorder = kvasir.KvRecorder(component, tmp_path / "events.jsonl", max_lines_per_file=2)
            publisher = kvasir.KvEventPublisher(component, kv_block_size=16)
            told = 0
            # A channel is heard once it was found.
            while await recorder.event_count() < 5:
                publisher.publish_stored(PROMPT[:16], [16], [told + 1], None)
                told += 1
                await asyncio.sleep(0.05)
            names = [2**60 + at for at in range(4)]
            publisher.publish_stored(PROMPT, [16] * 4, names)
            while not any(str(names[-1]) in path.read_text() for path in tmp_path.glob("events*.jsonl")):
                await asyncio.sleep(0.01)
            recorder.shutdown()
            count, elapsed = await recorder.event_count(), await recorder.elapsed_time()
            assert elapsed == await recorder.elapsed_time() > 0
            files = sorted(tmp_path.glob("events*.jsonl"))
            assert len(files) == (count + 1) // 2 and files[0].name == "events.jsonl"
            first = json.loads(files[0].read_text().splitlines()[0])
            assert set(first) == {"timestamp", "event"} and first["event"]["worker_id"] == worker.endpoint.connection_id()
            indexer = kvasir.KvIndexer(worker.runtime.endpoint("empty.backend.generate"), 16)
            assert await recorder.replay_events(indexer, max_count=1) == 1
            assert await recorder.replay_events(indexer, timed=True, max_time=60) == count
            assert indexer.find_matches_for_request(PROMPT).scores[worker.endpoint.connection_id(), 0] == 4
            publisher.shutdown()

    run(main)


def test_an_engines_own_socket_is_heard_without_a_router(kvasir):  # noqa: F811
    recorded, batches = lines("int-sha256", "pub_frames.jsonl"), lines("int-sha256", "decoded.jsonl")
    expected = sum(len(batch["batch"][1]) for batch in batches)

    async def main():
        engine = Publisher()
        listener = kvasir.ZmqKvEventListener(engine.endpoint, "kv-events", BLOCK)
        await asyncio.to_thread(engine.subscribed.wait, 30)
        for message in recorded:
            engine.send([base64.b64decode(frame) for frame in message["frames_b64"]])
        heard = []
        while len(heard) < expected:
            heard += await listener.get_events()
            await asyncio.sleep(0.01)
        tree, stored = kvasir.RadixTree(), 0
        for event in heard:
            stored += "stored" in json.loads(event)["data"]
            tree.apply_event(7, event.encode())
        assert stored > 3 and tree.dump_tree_as_events()
        listener.shutdown()
        engine.close()
        for wrong in (("nowhere", "", 16), ("tcp://127.0.0.1:1", "", 0)):
            with pytest.raises(ValueError):
                kvasir.ZmqKvEventListener(*wrong)

    run(main)


def test_older_publishers_are_called_as_they_were(kvasir):  # noqa: F811
    async def main():
        async with Worker(kvasir, "older") as worker:
            indexer = kvasir.KvIndexer(worker.endpoint, 16)
            await indexer.wait_for_workers(1)
            rank = (worker.endpoint.connection_id(), 0)
            component = worker.runtime.namespace("older").component("backend")
            publisher = kvasir.KvEventPublisher(component, rank[0], 16, enable_local_indexer=True)
            known = lambda: indexer.find_matches_for_request(PROMPT).scores.get(rank, 0)  # noqa: E731
            publisher.publish_stored(1, PROMPT[:32], [16, 16], [11, 12], 0)
            await soon(lambda: known() == 2)
            publisher.publish_stored(2, PROMPT[32:], [16, 16], [13, 14], 0, 12)
            await soon(lambda: known() == 4)
            publisher.publish_removed(3, [14])
            await soon(lambda: known() == 3)
            publisher.publish_removed(event_id=4, block_hashes=array.array("q", [13]))
            await soon(lambda: known() == 2)
            publisher.publish_stored(event_id=5, token_ids=PROMPT[32:48], num_block_tokens=[16], block_hashes=[13], lora_id=0, parent_hash=12)
            await soon(lambda: known() == 3)
            with pytest.raises(ValueError, match="lora_name"):
                publisher.publish_stored(6, PROMPT[:16], [16], [15], 7)
            publisher.shutdown()
            # How loaded it is, in the words of older releases: too busy, and then not.
            busy = kvasir.LoadThresholdConfig(active_decode_blocks_threshold=0.5)
            router = kvasir.KvRouter(worker.endpoint, 16, kvasir.KvRouterConfig(), load_threshold_config=busy)
            metrics = kvasir.WorkerMetricsPublisher()
            await metrics.create_endpoint(component)

            async def until(is_free, blocks):
                told = kvasir.ForwardPassMetrics(kvasir.WorkerStats(1, 8, 0, 0), kvasir.KvStats(blocks, 1000, blocks / 1000, 0.0))
                while True:
                    metrics.publish(told)
                    try:
                        await router.best_worker(PROMPT)
                        if is_free:
                            return
                    except kvasir.WorkerUnavailable:
                        if not is_free:
                            return
                    await asyncio.sleep(0.05)

            await until(False, 900)
            await until(True, 10)

    run(main)


def test_a_guess_is_remembered_where_engines_do_not_tell(kvasir):  # noqa: F811
    async def main():
        async with Worker(kvasir, "guessed") as worker:
            router = kvasir.KvRouter(worker.endpoint, 16, kvasir.KvRouterConfig(use_kv_events=False))
            assert (await router.best_worker(PROMPT))[2] == 0
            assert (await router.best_worker(PROMPT))[2] == 0, "a question changes nothing"
            await router.best_worker(PROMPT, update_indexer=True)
            assert (await router.best_worker(PROMPT))[2] == 4 and router.booked == 0

    run(main)
