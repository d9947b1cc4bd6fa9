"""How long a worker itself takes: one request after another over the request plane, without a frontend.

The answer's connection is accepted and read to its end by plain blocking sockets; what Python takes for that is in the figure, as what wrk takes is
in the figures of frontends."""
import json, socket, statistics, struct, time, uuid
from pathlib import Path

# As many as the chat template and the words of the scenario `short` make.
PROMPT_TOKENS = 40


def exact(sock, count):
    got = b""
    while len(got) < count:
        piece = sock.recv(count - len(got))
        if not piece:
            raise EOFError
        got += piece
    return got


def two_part(header=b"", body=b""):
    return struct.pack(">QQQ", len(header), len(body), 0) + header + body


def endpoint(store):
    """Address and path of a worker."""
    for file in (Path(store) / "v1" / "instances").iterdir():
        record = json.loads(file.read_text())
        if record["endpoint"] == "generate":
            return record["transport"]["tcp"].split("/", 1)
    raise RuntimeError(f"no worker in {store}")


def request(path, home, number):
    ids = [str(uuid.uuid4()) for _ in range(2)]
    info = {"address": "127.0.0.1:%d" % home.getsockname()[1], "subject": ids[1], "context": ids[0], "stream_type": "response"}
    control = {"id": ids[0], "request_type": "single_in", "response_type": "many_out", "payload_codec": "json",
               "connection_info": {"transport": "tcp_server", "info": json.dumps(info)}}
    body = {"model": "m", "token_ids": [1000 + (number * 7 + at) % 50_000 for at in range(PROMPT_TOKENS)], "stop_conditions": {"max_tokens": 1},
            "sampling_options": {}, "output_options": {}, "eos_token_ids": [], "annotations": []}
    frame = two_part(json.dumps(control).encode(), json.dumps(body).encode())
    headers = json.dumps({"request-id": ids[0], "x-endpoint-path": path}).encode()
    return (struct.pack(">H", len(path)) + path.encode() + struct.pack(">H", len(headers)) + headers
            + struct.pack(">I", len(frame)) + frame)


def answered(home):
    """Reads an answer to its end."""
    with home.accept()[0] as sock:
        sock.settimeout(10)
        while True:
            head, body, _ = struct.unpack(">QQQ", exact(sock, 24))
            header = exact(sock, head)
            exact(sock, body)
            if header == b'"sentinel"':
                return


def p50_ms(store, secs):
    """Median of requests that follow each other for so long."""
    (address, path), took = endpoint(store), []
    host, port = address.rsplit(":", 1)
    with socket.create_server(("127.0.0.1", 0)) as home, socket.create_connection((host, int(port)), timeout=10) as worker:
        home.settimeout(10)
        worker.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end = time.monotonic() + secs
        while time.monotonic() < end:
            frame = request(path, home, len(took))
            begun = time.monotonic()
            worker.sendall(frame)
            refused = exact(worker, struct.unpack(">I", exact(worker, 4))[0])
            if refused:
                raise RuntimeError(refused)
            answered(home)
            took.append(time.monotonic() - begun)
    return statistics.median(took) * 1e3
