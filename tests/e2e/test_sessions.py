"""Sessions reach token workers: `session_control` over the request plane."""

import os
import pathlib

import httpx
import pytest

from conftest import Kvasir, until
from scripted_worker import ScriptedWorker

QWEN = os.environ.get("KVASIR_TEST_QWEN_DIR", "")
if not QWEN:
    pytest.skip("NO tokenizer here (KVASIR_TEST_QWEN_DIR): nothing is known of sessions at token workers", allow_module_level=True)


def test_a_worker_is_told_when_a_session_begins_and_ends(tmp_path):
    store, model = tmp_path / "kv", tmp_path / "model"
    model.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).symlink_to(pathlib.Path(QWEN) / name)
    (model / "config.json").write_text('{"eos_token_id": 151645, "max_position_embeddings": 32768}')
    worker = ScriptedWorker(store, model, {"m": (None, None)}, {"yes": "Yes."}, endpoints=("session_control",))
    kvasir = Kvasir("frontend", "--http-host", "127.0.0.1", "--http-port", "0", "--tcp-rpc-host", "127.0.0.1", "--discovery-backend", "file",
                    "--request-plane", "tcp", "--router-mode", "kv", env={"DYN_FILE_KV": str(store)})  # fmt: skip
    url = "http://" + kvasir.wait_for(r"listening.*address=(127\.0\.0\.1:\d+)").group(1)
    with httpx.Client(base_url=url, timeout=60) as http:
        until(lambda: http.get("/v1/models").json()["data"], 120, kvasir.log)

        def ask(**control):
            body = {"model": "m", "messages": [{"role": "user", "content": "say yes"}], "nvext": {"session_control": {"session_id": "s", **control}}}
            answer = http.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["message"]["content"] == "Yes."

        # The endpoint and the model are announced apart; a session that cannot be opened yet is not bound.
        until(lambda: ask(action="open", timeout=60) or worker.calls, 60, kvasir.log)
        opened = {"action": "open_session", "session_id": "s", "timeout": 90, "capacity_of_str_len": 65536}
        assert worker.calls == [("session_control", opened)]
        ask()
        ask(action="open")
        assert len(worker.calls) == 1, "it is open already"
        ask(action="close")
        until(lambda: len(worker.calls) == 2, 30, kvasir.log)
        assert worker.calls[1] == ("session_control", {"action": "close_session", "session_id": "s"})
    worker.stop()
    assert kvasir.stop() == 0, kvasir.log()
