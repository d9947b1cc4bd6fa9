"""Real workers of Dynamo 1.6.1 (its simulated engine), as a user starts them."""

import atexit
import json
import os
import pathlib
import signal
import subprocess
import tempfile

import pytest

from planes_rig import BUILTIN

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


def small_model_folder():
    """The same with our own small tokenizer, which every process reads in no time."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="kvasir-model-"))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).symlink_to(BUILTIN / name)
    own = json.loads((BUILTIN / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(CONFIG | own))
    return folder


def environment(planes):
    """What a process of Dynamo is told of its planes, and nothing else."""
    own = {k: v for k, v in os.environ.items() if not k.startswith("DYN_")}
    return {**own, "DYN_LOG": "info", **planes.env}


class Mocker:
    """A process of `dynamo.mocker` that announces itself on these planes."""

    def __init__(self, model, planes, *args, workers=1):
        self.log = tempfile.NamedTemporaryFile("w+", prefix="dynamo-mocker-")
        self.process = subprocess.Popen(
            [PYTHON, "-m", "dynamo.mocker", "--model-path", str(model), "--model-name", "m", "--num-workers", str(workers),
             "--block-size", "16", *planes.flags, *args],
            stdout=self.log, stderr=subprocess.STDOUT, env=environment(planes),
        )  # fmt: skip
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
