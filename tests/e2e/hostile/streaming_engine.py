"""An engine of which each byte is known, and a stream from it."""

import json
import socket
import threading
import time

import httpx


class StreamingEngine:
    """An engine that streams as its prompt says: tokens, then seconds between two of them. Told to drain it closes its listener
    and its idle connections, and goes on with its streams. One that `closes` ends each connection with its answer."""

    def __init__(self, closes=False):
        self.closes = closes
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.idle, self.lock, self.draining = set(), threading.Lock(), threading.Event()
        self.last_byte = None
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self.serve, args=(connection,), daemon=True).start()

    def serve(self, connection):
        file = connection.makefile("rwb")
        try:
            while not self.draining.is_set():
                with self.lock:
                    self.idle.add(connection)
                request = self.read(file)
                with self.lock:
                    self.idle.discard(connection)
                if request is None:
                    break
                self.answer(file, *request)
                if self.closes:
                    break
        except OSError:
            pass
        finally:
            connection.close()

    @staticmethod
    def read(file):
        first = file.readline().decode().split(" ")
        if len(first) < 2:
            return None
        length = 0
        while (line := file.readline().decode().strip().lower()):
            if line.startswith("content-length:"):
                length = int(line.split(":")[1])
        return first[0], first[1], file.read(length)

    def answer(self, file, method, path, body):
        models = json.dumps({"object": "list", "data": [{"id": "m", "max_model_len": 4096}]}).encode()
        if method == "GET" or path == "/tokenize":
            status = b"200 OK" if path == "/v1/models" else b"404 Not Found"
            page = models if path == "/v1/models" else b"{}"
            ends = b"connection: close\r\n" if self.closes else b""
            head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\n%scontent-length: %d\r\n\r\n"
            file.write(head % (status, ends, len(page)) + page)
            file.flush()
            return
        tokens, pause = json.loads(body)["messages"][0]["content"].split()
        file.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for number in range(int(tokens)):
            self.chunk(file, {"index": 0, "delta": {"content": f"{number} "}, "finish_reason": None})
            time.sleep(float(pause))
        self.chunk(file, {"index": 0, "delta": {}, "finish_reason": "stop"})
        done = b"data: [DONE]\n\n"
        file.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(done), done))
        file.flush()

    def chunk(self, file, choice):
        event = b"data: %s\n\n" % json.dumps({"id": "1", "choices": [choice]}).encode()
        file.write(b"%x\r\n%s\r\n" % (len(event), event))
        file.flush()
        self.last_byte = time.monotonic()

    def drain(self):
        self.draining.set()
        # Closing alone does not wake who waits in accept.
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        with self.lock:
            for connection in self.idle:
                connection.shutdown(socket.SHUT_RDWR)


class Stream(threading.Thread):
    """One stream on a worker that it names."""

    def __init__(self, url, worker, tokens, pause):
        super().__init__(daemon=True)
        self.url, self.worker, self.tokens = url, worker, tokens
        self.body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": f"{tokens} {pause}"}]}
        self.text, self.ended, self.begun = "", None, threading.Event()
        self.start()

    def run(self):
        headers = {"x-worker-instance-id": str(self.worker)} if self.worker else {}
        with httpx.stream("POST", f"{self.url}/v1/chat/completions", json=self.body, headers=headers, timeout=60) as answer:
            for piece in answer.iter_text():
                self.text += piece
                self.begun.set()
        self.ended = time.monotonic()

    def is_whole(self):
        events = [json.loads(line[6:]) for line in self.text.splitlines() if line.startswith("data: {")]
        said = "".join(choice["delta"].get("content", "") for event in events for choice in event.get("choices", []))
        expected = "".join(f"{number} " for number in range(self.tokens))
        return said == expected and self.text.endswith("data: [DONE]\n\n") and '"error"' not in self.text
