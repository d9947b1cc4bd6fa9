"""Real workers of Dynamo 1.6.1 (its simulated engine), as a user starts them."""

import atexit
import json
import os
import pathlib
import signal
import subprocess
import tempfile

import pytest

from conftest import until

PYTHON = os.environ.get("KVASIR_DYNAMO_PYTHON", "")
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "bos_token_id": 151643, "eos_token_id": 151645,
    "hidden_act": "silu", "hidden_size": 896, "intermediate_size": 4864, "max_position_embeddings": 32768,
    "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "vocab_size": 151936,
}


def need_dynamo():
    """Skips, and says what is not known then."""
    if not PYTHON or not os.path.exists(PYTHON):
        pytest.skip("NO ai-dynamo here (KVASIR_DYNAMO_PYTHON): nothing is known of real Dynamo workers", allow_module_level=True)
    if not os.environ.get("KVASIR_TEST_QWEN_DIR"):
        pytest.skip("NO tokenizer here (KVASIR_TEST_QWEN_DIR): nothing is known of real Dynamo workers", allow_module_level=True)


def model_folder():
    """A folder as Dynamo wants it: the tokenizer, and a config.json."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="kvasir-model-"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).symlink_to(pathlib.Path(os.environ["KVASIR_TEST_QWEN_DIR"]) / name)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


class Mocker:
    """A process of `dynamo.mocker` that announces itself in a store."""

    def __init__(self, model, env, *args, workers=1):
        self.log = tempfile.NamedTemporaryFile("w+", prefix="dynamo-mocker-")
        self.process = subprocess.Popen(
            [PYTHON, "-m", "dynamo.mocker", "--model-path", str(model), "--model-name", "m", "--num-workers", str(workers),
             "--block-size", "16", *args],
            stdout=self.log, stderr=subprocess.STDOUT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "DYN_TCP_RPC_HOST": "127.0.0.1", "DYN_EVENT_PLANE_HOST": "127.0.0.1", **env},
        )
        atexit.register(self.kill)

    def kill(self):
        """As a machine that loses its power."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def terminate(self):
        self.process.send_signal(signal.SIGTERM)

    def told(self):
        return pathlib.Path(self.log.name).read_text()[-3000:]


def file_plane(store):
    """What puts a process of either kind on the same planes."""
    flags = ["--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq"]
    return flags, {"DYN_FILE_KV": str(store)}


def workers_of(http):
    """The ids that the frontend lists as serving."""
    return sorted(w["worker_id"] for w in http.get("/workers").json()["workers"] if w["state"] == "serving")


def until_serving(http, count, seconds=90, told=lambda: ""):
    return until(lambda: (ids := workers_of(http)) and len(ids) == count and ids, seconds, told)
