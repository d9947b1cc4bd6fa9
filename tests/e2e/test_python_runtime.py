"""The wheel on planes: endpoints served and called, workers that publish, routers; beside real frontends, ours and Dynamo's."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading

import httpx
import pytest

from conftest import Kvasir, until
from dynamo_frontend import Dynamo
from dynamo_rig import model_folder
from planes_rig import MODEL, TEXT, Planes, chat
from python_rig import BUILTIN, EXAMPLES, environment, kvasir, packages  # noqa: F401

DYNAMO = os.environ.get("KVASIR_DYNAMO_PYTHON")


def interruptible():
    """A program that a background job of a shell starts ignores SIGINT, unless it is told otherwise."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Program:
    """A Python program that runs beside the test."""

    def __init__(self, *command, env, python=sys.executable, stdin=False):
        self.lines = []
        self.process = subprocess.Popen(
            [python, *map(str, command)], stdin=subprocess.PIPE if stdin else None, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, env=env, preexec_fn=interruptible,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            self.lines.append(line)

    def said(self, text, seconds=60):
        return until(lambda: next((line for line in list(self.lines) if text in line), None), seconds, self.log)

    def log(self):
        return "".join(self.lines)

    def end(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"it did not end:\n{self.log()}")
        self._reader.join(10)


def run(script, env, seconds=60, python=sys.executable):
    """What a program prints that must end well."""
    done = subprocess.run([python, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=seconds, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A folder in which an engine of `examples/python/engine.py` announces itself."""
    folder = tmp_path_factory.mktemp("kv")
    engine = Program(EXAMPLES / "engine.py", BUILTIN, env=environment(folder))
    engine.said("serves echo")
    yield folder
    engine.end()


def test_endpoints_are_served_and_called(kvasir):  # noqa: F811
    seen = {}

    async def count(request, context):
        seen["id"], seen["metadata"] = context.id(), dict(context.metadata)
        for at in range(request["to"]):
            if context.is_stopped():
                seen["stopped at"] = at
                return
            yield {"at": at}
            await asyncio.sleep(0)

    async def broken(request):
        yield 1
        raise ValueError("boom")

    async def main():
        runtime = kvasir.DistributedRuntime(asyncio.get_running_loop(), "mem", "tcp", event_plane="zmq")
        good, bad = runtime.endpoint("ns.comp.count"), runtime.endpoint("dyn://ns.comp.broken")
        serving = [asyncio.ensure_future(good.serve_endpoint(count)), asyncio.ensure_future(bad.serve_endpoint(broken))]
        client = await good.client()
        assert await client.wait_for_instances() == client.instance_ids() == [good.connection_id()]
        assert str(client.instances()[0]) == f"ns/comp/count/{good.connection_id()}"
        items = [item async for item in await client.generate({"to": 3})]
        assert [item.data() for item in items] == [{"at": 0}, {"at": 1}, {"at": 2}] and not items[0].is_error()
        for name in ("3f2504e0-4f89-41d3-9a0c-0305e82c3301", "a name, \"quoted\""):
            context = kvasir.Context(name, {"tenant": "a"})
            items = [item async for item in await client.round_robin({"to": 2}, annotated=False, context=context)]
            assert items == [{"at": 0}, {"at": 1}] and (seen["id"], seen["metadata"]["tenant"]) == (name, "a")
        assert [item async for item in await client.generate({"to": 0}, request_id="req-123")] == [] and seen["id"] == "req-123"
        with pytest.raises(ValueError, match="512 bytes"):
            await client.generate({"to": 0}, request_id="x" * 513)
        # More items than any queue between the two holds.
        items = [item async for item in await client.random({"to": 5000}, annotated=False)]
        assert [item["at"] for item in items] == list(range(5000))
        # The caller stops: the stream ends, and the handler sees it.
        context = kvasir.Context()
        stream = await client.random({"to": 10**9}, context=context)
        await anext(stream)
        context.stop_generating()
        async for _ in stream:
            pass
        while "stopped at" not in seen:
            await asyncio.sleep(0.01)
        # The caller lets go of its stream: the same.
        del seen["stopped at"]
        stream = await client.random({"to": 10**9})
        await anext(stream)
        del stream
        while "stopped at" not in seen:
            await asyncio.sleep(0.01)
        with pytest.raises(Exception, match="instance_id=5 not found for endpoint ns/comp/count"):
            await client.direct({}, 5)
        # Every way to choose reaches the one that is there; one that only a router has is refused.
        for mode in (kvasir.RouterMode.LeastLoaded, kvasir.RouterMode.PowerOfTwoChoices, kvasir.RouterMode.DeviceAwareWeighted):
            other = good.client(mode)
            await other.wait_for_instances()
            assert [item async for item in await other.generate({"to": 1}, annotated=False)] == [{"at": 0}]
        assert [item async for item in await client.device_aware_weighted({"to": 1}, annotated=False)] == [{"at": 0}]
        with pytest.raises(ValueError, match="KvRouter"):
            good.client(kvasir.RouterMode.KV)
        # Instances by what their engines say.
        with pytest.raises(TimeoutError, match="pool = 'a'"):
            await client.wait_for_instance_by_runtime_data("pool", "a", 0.05)
        waiting = asyncio.ensure_future(client.wait_for_instances_by_runtime_data("pool", "a", 1, 60))
        about = kvasir.ModelRuntimeConfig()
        about.set_engine_specific("pool", "a")
        await kvasir.register_model(
            kvasir.ModelInput.Tokens, kvasir.ModelType.Chat, good, str(BUILTIN), "counter", runtime_config=about, worker_type=kvasir.WorkerType.Aggregated
        )
        assert await waiting == [good.connection_id()]
        assert await client.wait_for_instance_by_runtime_data("pool", "a") == good.connection_id()
        failing = bad.client()
        await failing.wait_for_instances()
        stream = await failing.random("x", annotated=False)
        assert await anext(stream) == 1
        with pytest.raises(ValueError, match="ValueError: boom"):
            await anext(stream)
        with pytest.raises(TypeError, match="cannot be sent"):
            await client.generate(object())
        runtime.shutdown()
        await asyncio.wait_for(asyncio.gather(*serving), 20)
        with pytest.raises(kvasir.WorkerUnavailable):
            while True:
                await client.generate({"to": 1})
                await asyncio.sleep(0.01)

    # The error of `broken` comes after its first item.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DYN_TCP_RPC_HOST", "127.0.0.1")
        asyncio.run(asyncio.wait_for(main(), 60))


def test_a_session_stays_with_its_worker(kvasir):  # noqa: F811
    async def answer(request):
        yield {"token_ids": request["token_ids"][:1], "finish_reason": "length"}

    async def main():
        runtimes = [kvasir.DistributedRuntime(asyncio.get_running_loop(), "mem", "tcp", event_plane="zmq") for _ in range(2)]
        endpoints = [runtime.endpoint("sessions.backend.generate") for runtime in runtimes]
        serving = [asyncio.ensure_future(endpoint.serve_endpoint(answer)) for endpoint in endpoints]
        router = kvasir.KvRouter(endpoints[0], 16, session_affinity_ttl_secs=600)
        await router.wait_for_workers(2)

        async def home(session, prompt):
            request = {"model": "m", "token_ids": [prompt] * 64, "agent_context": {"session_id": session}}
            request |= {"stop_conditions": {}, "sampling_options": {}, "output_options": {}, "eos_token_ids": [], "annotations": []}
            items = [item async for item in await router.generate_from_request(request)]
            assert "timing" in items[-1]["routing_data"], items
            return items[0]["routing_data"]["worker_id"]["decode_worker_id"]

        # By load alone a coin would be thrown each time.
        homes = {session: await home(session, at) for at, session in enumerate("abcdefgh")}
        for again in range(4):
            assert {session: await home(session, 100 * again + at) for at, session in enumerate("abcdefgh")} == homes
        assert router.booked == 0
        with pytest.raises(ValueError, match="session_affinity_mode"):
            kvasir.KvRouter(endpoints[0], 16, session_affinity_mode="soft")
        for runtime in runtimes:
            runtime.shutdown()
        await asyncio.gather(*serving)

    asyncio.run(asyncio.wait_for(main(), 90))


def test_our_frontend_routes_to_a_python_engine(store):
    env = {"DYN_FILE_KV": str(store)}
    frontend = Kvasir(
        "frontend", "--router-mode", "kv", "--discovery-backend", "file", "--http-host", "127.0.0.1", "--http-port", "0",
        "--tcp-rpc-host", "127.0.0.1", env=env,
    )  # fmt: skip
    url = "http://" + frontend.wait_for(r"listening address=(127\.0\.0\.1:\d+)").group(1)
    with httpx.Client(base_url=url, timeout=30) as http:
        until(lambda: [m["id"] for m in http.get("/v1/models").json()["data"]] == ["echo"], 30, frontend.log)
        body = {"model": "echo", "prompt": "a prompt of several blocks " * 30, "max_tokens": 8}
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 8, answer.text

        def known():
            gauges = [line for line in http.get("/metrics").text.splitlines() if line.startswith("kvasir_index_entries")]
            return sum(float(line.rsplit(" ", 1)[1]) for line in gauges) > 3

        until(known, 20, frontend.log)
    assert frontend.stop() == 0


# What each prints, whichever package it imports.
PRINTED = {"route.py": "Generated 20 tokens: [1, 2, 3", "lowest_ttft.py": "Generated tokens: [100]", "gateway.py": "4 tokens"}


@pytest.mark.parametrize("package", ["kvasir", "dynamo"])
def test_examples_run_with_either_package(store, tmp_path, package):
    """The same files, but for their import lines; side by side."""
    env, python = environment(store), sys.executable
    if package == "dynamo":
        if not DYNAMO:
            pytest.skip("NO KVASIR_DYNAMO_PYTHON: Dynamo's own package is NOT compared")
        python = DYNAMO
        env.pop("PYTHONPATH")
    programs = {}
    for example in PRINTED:
        text = (EXAMPLES / example).read_text().replace("from kvasir.", f"from {package}.")
        (tmp_path / example).write_text(text)
        programs[example] = Program(tmp_path / example, env=env, python=python)
    for example, words in PRINTED.items():
        programs[example].said(words)
        programs[example].process.wait(30)
        assert programs[example].process.returncode == 0, programs[example].log()


def test_older_names_are_the_same_objects(store, kvasir):  # noqa: F811
    assert kvasir.KvPushRouter is kvasir.KvRouter and kvasir.register_llm is kvasir.register_model
    program = Program(EXAMPLES / "seed_names.py", env=environment(store))
    program.said("3 items, the first [500]")
    program.said("2 tokens")
    program.process.wait(30)


def test_a_router_knows_caches_and_leaks_nothing(store):
    told = run(
        """
        import asyncio, json, os, threading
        import kvasir
        from kvasir import _native

        async def main():
            runtime = kvasir.DistributedRuntime.detached()
            endpoint = runtime.endpoint("dynamo.backend.generate")
            router = kvasir.KvRouter(endpoint, 16, kvasir.KvRouterConfig())
            second = kvasir.KvRouter(endpoint, 16, kvasir.KvRouterConfig())
            indexer = kvasir.KvIndexer(endpoint, 16)
            prompt = list(range(9000, 9160))
            stream = await router.generate(prompt, "echo", stop_conditions={"max_tokens": 3})
            items = [item async for item in stream]
            assert [t for item in items for t in item["token_ids"]] == prompt[:3], items
            worker = items[0]["routing_data"]["worker_id"]["decode_worker_id"]
            assert router.worker_ids() == [worker]
            while (await second.best_worker(prompt))[2] != 10:
                await asyncio.sleep(0.01)
            assert await second.best_worker(prompt) == (worker, 0, 10)
            while (await indexer.find_matches_for_request(prompt)).scores != {(worker, 0): 10}:
                await asyncio.sleep(0.01)
            scores = await second.get_overlap_scores(prompt)
            assert scores["num_blocks"] == 10 and scores["block_size"] == 16, scores
            [row] = scores["workers"]
            assert (row["worker_id"], row["dp_rank"], row["device_blocks"], row["router_credit_blocks"]) == (worker, 0, 10, 10), scores
            assert len(json.loads(await second.dump_events())) >= 1
            # Dropping one router ends nothing of another.
            del second, indexer
            for request in ("x", "y"):
                assert (await router.best_worker(prompt, request_id=request))[0] == worker
            assert router.booked == 2
            try:
                await router.best_worker(prompt, request_id="x")
                raise SystemExit("a second booking of one id")
            except kvasir.InvalidArgument as error:
                assert "already exists" in str(error)
            await router.mark_prefill_complete("x")
            await router.free("x")
            await router.free("y")
            for gone in (router.free, router.mark_prefill_complete):
                try:
                    await gone("x")
                    raise SystemExit("freed twice")
                except kvasir.RequestNotFound as error:
                    assert str(error) == "Request x not found"
            try:
                await router.generate(prompt, "echo", worker_id=5)
                raise SystemExit("an unknown worker")
            except ValueError as error:
                assert "does not identify a known worker" in str(error)
            # A thousand answers that nobody reads to their end, after some by which all threads have begun.
            async def cancelled(at):
                stream = await router.generate([at, *prompt], "echo", stop_conditions={"max_tokens": 100000})
                if at % 2:
                    await anext(stream)
            async def idle():
                while router.booked:
                    await asyncio.sleep(0.01)
                # Requests of each connection, and nothing else.
                while _native.task_count() > 8:
                    await asyncio.sleep(0.01)
                return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
            await asyncio.gather(*(cancelled(n) for n in range(50)))
            threads, files = await idle()
            for at in range(0, 1000, 50):
                await asyncio.gather(*(cancelled(n) for n in range(at, at + 50)))
            # Tasks that were cancelled in their wait, too.
            waiting = [asyncio.ensure_future(cancelled(n)) for n in range(100)]
            await asyncio.sleep(0)
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            # Sockets of the last answers may take a moment to close.
            while (after := await idle())[1] > files + 8:
                await asyncio.sleep(0.05)
            assert after[0] <= threads, (threads, after)
            print("all is freed")

        asyncio.run(asyncio.wait_for(main(), 90))
        """,
        environment(store),
        120,
    )
    assert "all is freed" in told


def test_the_end_of_the_interpreter_waits_for_nobody(store):
    """In the middle of streams, with routers alive: it ends at once, without a word on standard error."""
    script = """
        import asyncio, kvasir, threading, os
        async def main():
            runtime = kvasir.DistributedRuntime.detached()
            router = kvasir.KvRouter(runtime.endpoint("dynamo.backend.generate"), 16)
            streams = [await router.generate([n] * 40, "echo", stop_conditions={"max_tokens": 10**6}) for n in range(1, 20)]
            for stream in streams:
                await anext(stream)
            globals()["kept"] = streams, router, runtime
        asyncio.run(main())
        print("over")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60, env=environment(store, DYN_LOG="error")
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "over\n", ""), done


def test_a_fork_is_refused_with_a_word(tmp_path):
    told = run(
        """
        import os, kvasir
        kvasir.DistributedRuntime(None, "mem")
        child = os.fork()
        if child == 0:
            try:
                kvasir.DistributedRuntime(None, "mem")
            except RuntimeError as error:
                os._exit(0 if "forked" in str(error) and "spawn" in str(error) else 2)
            os._exit(3)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """,
        environment(tmp_path),
    )
    assert told == "0\n"


def test_planes_that_are_not_there_are_named(tmp_path):
    told = run(
        """
        import asyncio, kvasir
        async def handler(request):
            yield 1
        async def main():
            runtime = kvasir.DistributedRuntime(None, "etcd", "tcp", event_plane="zmq")
            endpoint = runtime.endpoint("a.b.c")
            try:
                await asyncio.wait_for(endpoint.serve_endpoint(handler), 20)
            except kvasir.CannotConnect as error:
                print("no etcd:", error)
        asyncio.run(main())
        """,
        environment(tmp_path, ETCD_ENDPOINTS="http://127.0.0.1:9", DYN_LOG="off"),
    )
    assert "no etcd:" in told and "DYN_DISCOVERY_BACKEND" in told, told
    told = run(
        """
        import asyncio, kvasir
        async def handler(request):
            yield 1
        async def main():
            runtime = kvasir.DistributedRuntime(None, "file", "nats", event_plane="zmq")
            try:
                await asyncio.wait_for(runtime.endpoint("a.b.c").serve_endpoint(handler), 40)
            except kvasir.CannotConnect as error:
                print("no NATS:", error)
        asyncio.run(main())
        """,
        environment(tmp_path, NATS_SERVER="nats://127.0.0.1:9", DYN_LOG="off"),
    )
    assert "no NATS:" in told and "127.0.0.1:9" in told and "NATS_SERVER" in told, told


def test_a_worker_that_dies_in_the_middle_is_an_exception(tmp_path):
    engine = Program(EXAMPLES / "engine.py", BUILTIN, env=environment(tmp_path))
    engine.said("serves echo")
    script = """
        import asyncio, kvasir
        async def main():
            endpoint = kvasir.DistributedRuntime.detached().endpoint("dynamo.backend.generate")
            router, client = kvasir.KvRouter(endpoint, 16), endpoint.client()
            [worker] = await client.wait_for_instances()
            stream = await router.generate(list(range(64)), "echo", stop_conditions={"max_tokens": 10**9})
            await anext(stream)
            print("begun", flush=True)
            try:
                async for _ in stream:
                    pass
            except kvasir.DynamoException as error:
                print(type(error).__name__, router.booked, flush=True)
            try:
                await client.direct({}, worker)
            except kvasir.DynamoException as error:
                print("then", type(error).__name__, flush=True)
        asyncio.run(asyncio.wait_for(main(), 90))
    """
    caller = Program("-c", textwrap.dedent(script), env=environment(tmp_path, DYN_LOG="error"))
    caller.said("begun")
    engine.process.kill()
    caller.said("StreamIncomplete 0")
    said = caller.said("then ").split()[1]
    assert said in ("CannotConnect", "WorkerUnavailable"), caller.log()
    assert caller.process.wait(30) == 0, caller.log()
    engine.process.wait(20)


@pytest.mark.skipif(not DYNAMO, reason="NO KVASIR_DYNAMO_PYTHON: beside Dynamo's own processes nothing is tested")
def test_python_workers_and_dynamo_reach_each_other(store, tmp_path):
    """A worker of `dynamo.runtime` is called by our client, and our engine by Dynamo's: the same programs, the other package."""
    serve = """
        import asyncio
        from PACKAGE.runtime import dynamo_worker
        async def handler(request, context):
            for at in range(request["to"]):
                yield {"at": at, "of": "PACKAGE"}
        @dynamo_worker()
        async def main(runtime):
            await runtime.endpoint("other.comp.count").serve_endpoint(handler)
        asyncio.run(main())
    """
    call = """
        import asyncio
        from PACKAGE.runtime import dynamo_worker
        @dynamo_worker()
        async def main(runtime):
            client = await runtime.endpoint("other.comp.count").client()
            await client.wait_for_instances()
            print([item async for item in await client.random({"to": 2}, annotated=False)], flush=True)
            runtime.shutdown()
        asyncio.run(main())
    """
    pythons = {"kvasir": sys.executable, "dynamo": DYNAMO}
    pairs, workers, clients = [("dynamo", "kvasir"), ("kvasir", "dynamo")], {}, {}

    def program(package, text, folder):
        env = environment(folder, DYN_LOG="error")
        if package == "dynamo":
            env.pop("PYTHONPATH")
        return Program("-c", textwrap.dedent(text).replace("PACKAGE", package), env=env, python=pythons[package])

    for server, caller in pairs:
        folder = tmp_path / server
        folder.mkdir()
        workers[server] = program(server, serve, folder)
        clients[server] = program(caller, call, folder)
    for server, _ in pairs:
        clients[server].said(f"[{{'at': 0, 'of': '{server}'}}, {{'at': 1, 'of': '{server}'}}]")
        clients[server].end()
        workers[server].end()


@pytest.mark.skipif(not DYNAMO or not os.environ.get("KVASIR_TEST_QWEN_DIR"), reason="NO ai-dynamo or tokenizer here: beside Dynamo's own frontend nothing is tested")
@pytest.mark.parametrize("package", ["kvasir", "dynamo"])
def test_an_engine_answers_behind_the_frontend_of_the_other(tmp_path, package):
    """`examples/python/engine.py`: with our package behind Dynamo's frontend, with Dynamo's behind ours."""
    planes, folder = Planes("file+tcp+zmq", tmp_path), model_folder()
    env, python = environment(planes.env["DYN_FILE_KV"], **planes.env), sys.executable
    text = (EXAMPLES / "engine.py").read_text().replace("from kvasir.", f"from {package}.")
    # A card with all that one can say is read by the other's frontend, too.
    text = text.replace("import KvEventPublisher,", "import KvEventPublisher, KvRouterConfig, RouterConfig, RouterMode,")
    chosen = "router_config=RouterConfig(RouterMode.KV, KvRouterConfig(router_temperature=0.1), 0.9)"
    text = text.replace("worker_type=WorkerType.Aggregated", f"worker_type=WorkerType.Aggregated, {chosen}")
    assert text.count("RouterConfig(") == 2, text
    if package == "dynamo":
        python = DYNAMO
        env.pop("PYTHONPATH")
    (tmp_path / "engine.py").write_text(text)
    engine = Program(tmp_path / "engine.py", folder, MODEL, env=env, python=python)
    frontend = Dynamo(planes, tmp_path / "dynamo.log") if package == "kvasir" else planes.frontend()
    try:
        engine.said(f"serves {MODEL}")
        if package == "kvasir":
            frontend.until_serving(MODEL)
        until(lambda: chat(frontend.http, "Are you there?", max_tokens=1).status_code == 200, 60, frontend.log)
        answer = chat(frontend.http, TEXT.format(1), max_tokens=8)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 8, answer.text
    finally:
        engine.process.kill()
        engine.process.wait()
        frontend.stop()
        planes.end()
