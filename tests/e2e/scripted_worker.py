"""A token worker that says what it is told: file discovery and TCP, as Dynamo's workers speak them. It needs nothing but Python.

The last word of a prompt's last message is the key of what it says. It writes one token for each byte, so that every mark comes in pieces.
At a NUL it waits until `go_on` is set.
"""

import json
import os
import pathlib
import random
import socket
import struct
import threading

NAMESPACE = "dynamo"


def letters():
    """The character that stands for each byte in byte-level vocabularies."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {**{byte: chr(byte) for byte in plain}, **{byte: chr(256 + at) for at, byte in enumerate(others)}}


def safe(key):
    return "".join(c if c.isascii() and c.isalnum() else "".join("%%%02X" % b for b in c.encode()) for c in key)


def exact(sock, count):
    got = b""
    while len(got) < count:
        piece = sock.recv(count - len(got))
        if not piece:
            raise EOFError
        got += piece
    return got


class ScriptedWorker:
    """`models`: name to (tool_call_parser, reasoning_parser). `texts`: key to what is said. `requests` is what came."""

    def __init__(self, store, model, models, texts, endpoints=()):
        self.store, self.texts, self.requests, self.calls = pathlib.Path(store), texts, [], []
        tokenizer = json.loads((pathlib.Path(model) / "tokenizer.json").read_text())
        vocabulary = tokenizer["model"]["vocab"]
        self.byte_tokens = {byte: vocabulary[letter] for byte, letter in letters().items()}
        of_letter = {letter: byte for byte, letter in letters().items()}
        self.token_bytes = {id: bytes(of_letter[c] for c in token) for token, id in vocabulary.items() if all(c in of_letter for c in token)}
        self.eos = next(token["id"] for token in tokenizer["added_tokens"] if token["content"] == "<|im_end|>")
        self.files, self.ended, self.go_on = [], threading.Event(), threading.Event()
        self.server = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._serve, daemon=True).start()
        for name, (tools, reasoning) in models.items():
            self._announce(name, model, tools, reasoning, endpoints)
        threading.Thread(target=self._keep_alive, daemon=True).start()

    def stop(self):
        self.ended.set()
        for path in self.files:
            path.unlink(missing_ok=True)
        self.server.close()

    def _put(self, bucket, key, value):
        folder = self.store / bucket
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".tmp_{random.getrandbits(64):016x}"
        temporary.write_text(json.dumps(value))
        path = folder / safe(key)
        os.link(temporary, path)
        temporary.unlink()
        self.files.append(path)

    def _announce(self, name, model, tools, reasoning, endpoints):
        worker, component = random.getrandbits(62), "c" + "".join(c for c in name if c.isalnum())
        address = "127.0.0.1:%d" % self.server.getsockname()[1]
        file = lambda name: {"path": f"{model}/{name}"}  # noqa: E731
        card = {
            "display_name": name, "slug": name, "source_path": str(model), "model_info": {"hf_config_json": file("config.json")},
            "tokenizer": {"hf_tokenizer_json": file("tokenizer.json")}, "prompt_formatter": {"hf_tokenizer_config_json": file("tokenizer_config.json")},
            "context_length": 32768, "kv_cache_block_size": 16, "migration_limit": 0, "model_type": "Chat | Completions", "model_input": "Tokens",
            "worker_type": "aggregated", "needs": [],
            "runtime_config": {"total_kv_blocks": 1000, "data_parallel_size": 1, "enable_local_indexer": False, "kv_event_publishing_enabled": False,
                               "tool_call_parser": tools, "reasoning_parser": reasoning},
        }  # fmt: skip
        for endpoint in ("generate", *endpoints):
            path = f"{NAMESPACE}/{component}/{endpoint}"
            self._put("v1/instances", f"{path}/{worker:x}", {
                "type": "Endpoint", "component": component, "endpoint": endpoint, "namespace": NAMESPACE, "instance_id": worker,
                "transport": {"tcp": f"{address}/{worker:x}/{path}"}, "request_plane_codec": "json"})  # fmt: skip
        self._put("v1/mdc", f"{NAMESPACE}/{component}/generate/{worker:x}", {
            "type": "Model", "namespace": NAMESPACE, "component": component, "endpoint": "generate", "instance_id": worker, "card_json": card})

    def _keep_alive(self):
        while not self.ended.wait(2):
            for path in self.files:
                try:
                    os.utime(path)
                except FileNotFoundError:
                    pass

    def _serve(self):
        while not self.ended.is_set():
            try:
                sock, _ = self.server.accept()
            except OSError:
                return
            threading.Thread(target=self._connection, args=(sock,), daemon=True).start()

    def _connection(self, sock):
        try:
            while True:
                path = exact(sock, struct.unpack(">H", exact(sock, 2))[0]).decode()
                exact(sock, struct.unpack(">H", exact(sock, 2))[0])
                payload = exact(sock, struct.unpack(">I", exact(sock, 4))[0])
                sock.sendall(struct.pack(">I", 0))
                threading.Thread(target=self._answer, args=(path, payload), daemon=True).start()
        except (EOFError, OSError):
            sock.close()

    def _answer(self, path, payload):
        head, body, _ = struct.unpack(">QQQ", payload[:24])
        control, request = json.loads(payload[24:24 + head]), json.loads(payload[24 + head:24 + head + body])
        info = json.loads(control["connection_info"]["info"])
        host, port = info["address"].rsplit(":", 1)
        with socket.create_connection((host, int(port))) as home:
            send = lambda head=b"", body=b"": home.sendall(struct.pack(">QQQ", len(head), len(body), 0) + head + body)  # noqa: E731
            item = lambda data: send(body=json.dumps({"data": data, "complete_final": False}).encode())  # noqa: E731
            send(json.dumps({"subject": info["subject"], "stream_type": "response"}).encode())
            send(b'{"error":null}')
            try:
                if path.endswith("/generate"):
                    self._generate(request, item)
                else:
                    self.calls.append((path.rsplit("/", 1)[1], request))
                    item({"data": {"status": "ok"}})
                send(body=b'{"complete_final":true}')
                send(b'"sentinel"')
                home.settimeout(2)
                home.recv(1)
            except OSError:
                pass

    def _generate(self, request, item):
        self.requests.append(request)
        prompt = b"".join(self.token_bytes.get(id, b"\n") for id in request["token_ids"]).decode(errors="replace")
        text = self.texts[prompt.rsplit("say ", 1)[1].split()[0]]
        tokens = [self.byte_tokens[byte] if byte else None for byte in text.encode()]
        most = (request.get("stop_conditions") or {}).get("max_tokens") or len(tokens)
        for token in tokens[:most]:
            if token is None:
                assert self.go_on.wait(60)
                continue
            item({"data": {"token_ids": [token]}})
        is_cut = most < len(tokens)
        item({"data": {"token_ids": [] if is_cut else [self.eos], "finish_reason": "length" if is_cut else "eos"}})
