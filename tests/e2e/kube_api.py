"""An API server for tests: what frontends and workers ask of the one of a cluster, after the public list and watch contract.

It can be away for a while with all its connections, and come back at the same port."""

import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

SLICES = "/apis/discovery.k8s.io/v1/namespaces/{ns}/endpointslices"
WORKERS = "/apis/nvidia.com/v1alpha1/namespaces/{ns}/dynamoworkermetadatas"


class KubeApi:
    """`url` is where it listens; `requests` is what was asked: method, path, query."""

    def __init__(self, namespace="default", token=None):
        self.namespace, self.token = namespace, token
        self.changed = threading.Condition()
        self.version, self.objects, self.log, self.requests = 100, {}, [], []
        self.server, self.port = None, 0
        self.start()
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self):
        api = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def setup(self):
                super().setup()
                api.open.add(self.connection)

            def finish(self):
                api.open.discard(self.connection)
                try:
                    super().finish()
                except OSError:
                    pass

            def handle_any(self):
                parts = urlsplit(self.path)
                query = {name: values[0] for name, values in parse_qs(parts.query).items()}
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                api.requests.append((self.command, parts.path, query))
                if api.token and self.headers.get("authorization") != f"Bearer {api.token}":
                    return self.answer(401, {"kind": "Status", "code": 401, "message": "Unauthorized"})
                if self.command == "GET" and query.get("watch") in ("true", "1"):
                    return self.watch(parts.path, query)
                self.answer(*api.follow(self.command, parts.path, query, body))

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_any

            def answer(self, status, value):
                body = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def watch(self, path, query):
                seen = int(query.get("resourceVersion") or 0)
                end = time.monotonic() + float(query.get("timeoutSeconds") or 300)
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                server = api.server
                while server is api.server and (left := end - time.monotonic()) > 0:
                    with api.changed:
                        news = [e for e in api.log if e[0] > seen and e[1] == path and api.fits(e[2]["object"], query)]
                        if not news:
                            api.changed.wait(min(left, 0.5))
                            continue
                        seen = api.version
                    for _, _, event in news:
                        line = json.dumps(event).encode() + b"\n"
                        # Lines end where they end, not where a piece does.
                        for part in (line[:7], line[7:]):
                            self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
                    self.wfile.flush()
                self.wfile.write(b"0\r\n\r\n")

        class Server(ThreadingHTTPServer):
            def handle_error(self, *_):
                """Clients leave their watches when they like."""

        self.open = set()
        server = Server(("127.0.0.1", self.port), Handler)
        server.daemon_threads = True
        self.port = server.server_address[1]
        self.server = server
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def stop(self):
        """It is away, with all its connections."""
        server, self.server = self.server, None
        server.shutdown()
        server.server_close()
        for connection in list(self.open):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def fits(self, value, query):
        labels = value["metadata"].get("labels") or {}
        wanted = [pair.partition("=") for pair in (query.get("labelSelector") or "").split(",") if pair]
        return all(labels.get(name) == text for name, _, text in wanted)

    def follow(self, method, path, query, body):
        with self.changed:
            if method == "GET" and path in self.collections():
                items = [o for (of, _), o in sorted(self.objects.items()) if of == path and self.fits(o, query)]
                return 200, {"kind": "List", "apiVersion": "v1", "metadata": {"resourceVersion": str(self.version)}, "items": items}
            collection, _, name = path.rpartition("/")
            known = self.objects.get((collection, name))
            if method == "PATCH":
                value = json.loads(body)
                value["metadata"].setdefault("uid", (known or {"metadata": {}})["metadata"].get("uid", f"uid-{self.version}"))
                value["metadata"]["generation"] = 1 + (known or {"metadata": {}})["metadata"].get("generation", 0)
                return 200, self._put(collection, value)
            if known is None:
                return 404, {"kind": "Status", "code": 404, "message": f"{name} not found", "reason": "NotFound"}
            if method == "DELETE":
                self._delete(collection, name)
                return 200, {"kind": "Status", "code": 200}
            return (200, known) if method == "GET" else (405, {"kind": "Status", "code": 405})

    def collections(self):
        return {text.format(ns=self.namespace) for text in (SLICES, WORKERS, "/api/v1/namespaces/{ns}/pods")}

    def put(self, collection, value):
        with self.changed:
            self._put(collection.format(ns=self.namespace), value)

    def _put(self, collection, value):
        key = (collection, value["metadata"]["name"])
        kind = "MODIFIED" if key in self.objects else "ADDED"
        self.version += 1
        value["metadata"]["resourceVersion"] = str(self.version)
        value["metadata"]["namespace"] = self.namespace
        self.objects[key] = value
        self.log.append((self.version, collection, {"type": kind, "object": value}))
        self.changed.notify_all()
        return value

    def _delete(self, collection, name):
        value = self.objects.pop((collection, name))
        self.version += 1
        self.log.append((self.version, collection, {"type": "DELETED", "object": value}))
        self.changed.notify_all()

    def slice(self, name, labels, endpoints, ports=()):
        """A slice of endpoints: pod, address, whether it is ready, whether it ends. Ports: name and number."""
        rows = [
            {
                "addresses": [address],
                "conditions": {"ready": ready and not ending, "serving": ready, "terminating": ending},
                "targetRef": {"kind": "Pod", "name": pod, "namespace": self.namespace, "uid": f"{pod}-uid"},
            }
            for pod, address, ready, ending in endpoints
        ]
        self.put(
            SLICES,
            {
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSlice",
                "metadata": {"name": name, "labels": labels},
                "addressType": "IPv4",
                "endpoints": rows,
                "ports": [{"name": port, "port": number, "protocol": "TCP"} for port, number in ports],
            },
        )

    def kubeconfig(self, path):
        """Writes a kubeconfig that leads here; its path."""
        user = {"token": self.token} if self.token else {}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": self.namespace}}],
            "clusters": [{"name": "test", "cluster": {"server": self.url}}],
            "users": [{"name": "test", "user": user}],
        }
        path.write_text(json.dumps(config))
        return str(path)
