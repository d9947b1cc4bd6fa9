"""Workers that die in the middle of an answer: the client's text is that of an unbroken one."""

import httpx
import openai
import pytest

from conftest import Kvasir, until


@pytest.fixture(scope="module")
def fleet():
    """Three mock engines behind a frontend that continues answers."""
    mocker = Kvasir("mocker", "--workers", "3", "--http-host", "127.0.0.1", "--http-port", "0", "--speedup-ratio", "50")
    engines = [mocker.wait_for(r"on (http://127\.0\.0\.1:\d+)").group(1) for _ in range(3)]
    workers = [arg for url in engines for arg in ("--worker", url)]
    frontend = Kvasir("frontend", *workers, "--http-host", "127.0.0.1", "--http-port", "0", "--migration-limit", "3",
                      "--router-mode", "round-robin", "--runtime-inhibited-duration-secs", "0")
    frontend.url = "http://" + frontend.wait_for(r"listening.*address=(127\.0\.0\.1:\d+)").group(1)
    frontend.engines = engines
    until(lambda: len(httpx.get(f"{frontend.url}/workers", timeout=30).json()["workers"]) == 3, told=frontend.log)
    yield frontend
    assert frontend.stop() == 0, frontend.log()
    mocker.stop()


@pytest.fixture()
def ask(fleet):
    client = openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0)

    def chat(prompt, **more):
        stream = client.chat.completions.create(
            model="kvasir-mock", messages=[{"role": "user", "content": prompt}], stream=True,
            stream_options={"include_usage": True}, **more)
        return list(stream)

    def completion(prompt, **more):
        stream = client.completions.create(
            model="kvasir-mock", prompt=prompt, stream=True, stream_options={"include_usage": True}, **more)
        return list(stream)

    return {"chat": chat, "completion": completion}


def text_of(chunks):
    pieces = [choice.delta.content if hasattr(choice, "delta") else choice.text
              for chunk in chunks for choice in chunk.choices]
    return "".join(piece or "" for piece in pieces)


def strike(fleet, *faults):
    """The first engine breaks off; without faults none does. Of a request under which two break off nobody is asked a third time."""
    for engine in fleet.engines:
        httpx.delete(f"{engine}/mock/faults").raise_for_status()
    for fault in faults:
        httpx.post(f"{fleet.engines[0]}/mock/faults", json={"fault": fault}).raise_for_status()


def metric(fleet, name):
    page = httpx.get(f"{fleet.url}/metrics").text
    return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(name + "{"))


def finish_of(chunks):
    return [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]


@pytest.mark.parametrize("death", ["die=30", "cut=30"])
@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_a_broken_answer_reads_as_an_unbroken_one(fleet, ask, kind, death):
    prompt = f"Tell me about the harbour ({kind}, {death})."
    strike(fleet)
    whole = ask[kind](prompt, max_tokens=60, extra_body={"ignore_eos": True})
    before = metric(fleet, "dynamo_frontend_model_migration_total")
    strike(fleet, death)
    # Engines are asked in turn, and one of three breaks off.
    answers = [ask[kind](prompt, max_tokens=60, extra_body={"ignore_eos": True}) for _ in range(3)]
    strike(fleet)
    assert metric(fleet, "dynamo_frontend_model_migration_total") - before >= 1
    for broken in answers:
        assert text_of(broken) == text_of(whole)
        assert len({chunk.id for chunk in broken}) == 1
        assert finish_of(broken) == ["length"]
        usage, expected = broken[-1].usage, whole[-1].usage
        assert usage.prompt_tokens == expected.prompt_tokens
        assert usage.completion_tokens == expected.completion_tokens
    loads = lambda: [rank for row in httpx.get(f"{fleet.url}/workers").json()["workers"] for rank in row["ranks"]]  # noqa: E731
    until(lambda: all(rank["active_requests"] == 0 for rank in loads()), told=loads)


def test_an_answer_to_its_own_end(fleet, ask):
    strike(fleet)
    whole = ask["chat"]("What do the swallows announce?")
    strike(fleet, "die=4")
    answers = [ask["chat"]("What do the swallows announce?") for _ in range(3)]
    strike(fleet)
    for broken in answers:
        assert text_of(broken) == text_of(whole)
        assert finish_of(broken) == ["stop"]


def test_what_cannot_move_is_a_clean_error(fleet, ask):
    # Long after the first event: an answer that broke off before that was read is quietly asked elsewhere.
    strike(fleet, "die=300")
    errors = 0
    for _ in range(30):
        try:
            ask["chat"]("Two answers, please.", n=2, max_tokens=400, extra_body={"ignore_eos": True})
        except openai.APIError:
            errors += 1
            break
    strike(fleet)
    assert errors == 1
    assert metric(fleet, "kvasir_migration_refused_total") == errors
