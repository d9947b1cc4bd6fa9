"""A PUB socket of ZMTP 3.0, as an engine has one: enough of it to send recorded frames to one subscriber."""

import socket
import struct
import threading

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)


class Publisher:
    """Listens on loopback; `subscribed` is set once somebody listens, and `send` reaches them."""

    def __init__(self):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = "tcp://127.0.0.1:%d" % self.listener.getsockname()[1]
        self.subscribed = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        self.peer, _ = self.listener.accept()
        self.peer.sendall(GREETING)
        self._read(len(GREETING))
        ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 3) + b"PUB"
        self.peer.sendall(bytes([4, len(ready)]) + ready)
        while not self.subscribed.is_set():
            flags, length = self._read(2)
            body = self._read(length)
            # A subscription is a message that begins with 1, or in newer versions a command.
            if (flags == 0 and body[:1] == b"\x01") or (flags & 4 and body.startswith(b"\x09SUBSCRIBE")):
                self.subscribed.set()

    def _read(self, count):
        data = b""
        while len(data) < count:
            more = self.peer.recv(count - len(data))
            if not more:
                raise EOFError("the subscriber is gone")
            data += more
        return data

    def send(self, frames):
        out = b""
        for at, frame in enumerate(frames):
            more = 1 if at + 1 < len(frames) else 0
            out += bytes([more, len(frame)]) if len(frame) < 256 else bytes([more | 2]) + struct.pack(">Q", len(frame))
            out += frame
        self.peer.sendall(out)

    def close(self):
        self.listener.close()
        if self.subscribed.is_set():
            self.peer.close()
