"""Start lines of the routers we stand beside. Every one is installed from a
public registry by setup.sh; nothing of theirs is kept here.

A peer is a dict:
  cmd    the router itself: the process (and its children) that is measured
  aux    processes it needs that are NOT counted
  env    extra environment
  files  files to write first
In every string {port} is the router's port, {mport} a free port for its
metrics, {b1} {b2} the two fake backends' URLs, {h1} {h2} the same as
host:port, {work} the work folder, {run} this peer's private folder.
"""

NGINX = """
user root root; worker_processes 2; daemon off; pid {run}/nginx.pid; error_log {run}/error.log warn;
events {{ worker_connections 4096; }}
http {{
  access_log off; client_body_temp_path {run}/b; proxy_temp_path {run}/p;
  fastcgi_temp_path {run}/f; uwsgi_temp_path {run}/u; scgi_temp_path {run}/s;
  client_body_buffer_size 256k; client_max_body_size 64m; keepalive_requests 100000000;
  upstream b {{ server {h1}; server {h2}; keepalive 256; keepalive_requests 100000000; }}
  server {{ listen 127.0.0.1:{port};
    location / {{ proxy_pass http://b; proxy_http_version 1.1; proxy_set_header Connection "";
                 proxy_buffering off; proxy_request_buffering on; }} }}
}}
"""


def rust(venv, *head, log):
    def make(policy, log=log):
        return {"cmd": [f"{{work}}/v-{venv}/bin/{head[0]}", *head[1:], "--host", "127.0.0.1",
                        "--port", "{port}", "--worker-urls", "{b1}", "{b2}", "--policy", policy,
                        "--prometheus-host", "127.0.0.1", "--prometheus-port", "{mport}",
                        "--log-level", log]}
    return make


smg = rust("smg", "smg", "launch", log="warn")
sglang = rust("sglang-router", "sglang-router", "launch", log="warn")
vllm = rust("vllm-router", "vllm-router", log="warning")

nginx = {"cmd": ["nginx", "-p", "{run}", "-c", "{run}/nginx.conf"], "files": {"nginx.conf": NGINX}}

PEERS = {
    "nginx": nginx,
    "nginx-again": nginx,     # A/A control: how far its ratio strays from 1 is the noise of the run
    "smg-cache": smg("cache_aware"),
    "smg-rr": smg("round_robin"),
    "sglang-cache": sglang("cache_aware"),
    "sglang-rr": sglang("round_robin"),
    "vllm-cache": vllm("cache_aware"),
    "vllm-rr": vllm("round_robin"),
    # As it comes, at its default log level: every request is logged.
    "smg-cache-log": smg("cache_aware", log="info"),
}
