"""What is in `deploy`, judged by the programs that it is for: promtool and a real Prometheus, systemd, the Kubernetes schemas."""

import importlib.util
import os
import re
import shutil
import socket
import subprocess
import time
from pathlib import Path

import httpx
import pytest
import yaml

from conftest import until
from engines import Fleet
from test_cli import kvasir

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = ["1.28", "1.34"]


def needs(tool):
    return pytest.mark.skipif(shutil.which(tool) is None, reason=f"NO {tool} here: what it checks of deploy/ is NOT checked")


@needs("promtool")
def test_every_alert_fires_when_it_should_and_not_before():
    rules = yaml.safe_load((DEPLOY / "alerts/kvasir.rules.yml").read_text())["groups"][0]["rules"]
    tested = {test["name"] for test in yaml.safe_load((DEPLOY / "alerts/kvasir.test.yml").read_text())["tests"]}
    assert tested == {rule["alert"] for rule in rules}
    assert all("kvasir " in rule["annotations"]["action"] for rule in rules), "each ends in a command"
    known = (ROOT / "docs/reference/metrics.md").read_text()
    for rule in rules:
        for name in re.findall(r"\b(?:dynamo|kvasir)_\w+", rule["expr"]):
            assert f"`{name.removesuffix('_bucket')}`" in known, name
    for command in (["check", "rules", "kvasir.rules.yml"], ["test", "rules", "kvasir.test.yml"]):
        done = subprocess.run(["promtool", *command], cwd=DEPLOY / "alerts", capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


def boards():
    spec = importlib.util.spec_from_file_location("boards", DEPLOY / "grafana/boards.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_boards_are_as_their_table_is():
    for name, text in boards().files().items():
        assert (DEPLOY / "grafana" / name).read_text() == text, f"{name} is stale: python3 deploy/grafana/boards.py"


def ready(address):
    try:
        return httpx.get(f"{address}/-/ready", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


@needs("prometheus")
def test_every_query_of_a_board_finds_data(tmp_path):
    fleet = Fleet("mock", mocker=["--events", "tcp://127.0.0.1:0", "--replay", "tcp://127.0.0.1:0"], frontend=["--router-mode", "kv"])
    target = fleet.url.removeprefix("http://")
    config = {"global": {"scrape_interval": "1s"}, "scrape_configs": [{"job_name": "kvasir", "static_configs": [{"targets": [target]}]}]}
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(
            ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data", f"--web.listen-address=127.0.0.1:{port}"],
            stdout=log, stderr=log,
        ) as prometheus,
    ):  # fmt: skip
        try:
            until(lambda: ready(address), 60, (tmp_path / "log").read_text)
            ask = {"model": "mock", "prompt": "the same long beginning " * 20, "max_tokens": 8, "stream": True}

            def missing():
                httpx.post(f"{fleet.url}/v1/completions", json=ask, timeout=30).raise_for_status()
                found = {}
                for title, query in boards().queries():
                    answer = httpx.get(f"{address}/api/v1/query", params={"query": query}, timeout=30).json()
                    assert answer["status"] == "success", (query, answer)
                    values = [row["value"][1] for row in answer["data"]["result"]]
                    if not any(value not in ("NaN", "+Inf") for value in values):
                        found[title] = query
                return found

            end = time.monotonic() + 60
            while left := missing():
                assert time.monotonic() < end, left
                time.sleep(0.5)
        finally:
            prometheus.kill()
    fleet.stop()


@needs("systemd-analyze")
def test_systemd_takes_the_unit_and_calls_it_well_confined(tmp_path):
    unit = (DEPLOY / "systemd/kvasir.service").read_text()
    copy = tmp_path / "kvasir.service"
    copy.write_text(unit.replace("/usr/bin/kvasir", os.environ["KVASIR_BIN"]).replace("Documentation=man:kvasir(1)\n", ""))
    done = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr
    judged = subprocess.run(["systemd-analyze", "security", "--offline=true", "--threshold=20", copy], capture_output=True, text=True, timeout=60)
    assert judged.returncode == 0, judged.stdout
    flags = re.findall(r"--[a-z-]+", next(line for line in unit.splitlines() if line.startswith("ExecStart=")))
    told = kvasir("help", "frontend").stdout
    assert flags and all(flag in told for flag in flags)


@needs("systemd-analyze")
def test_systemd_takes_the_socket(tmp_path):
    for name in ("kvasir.service", "kvasir.socket"):
        text = (DEPLOY / "systemd" / name).read_text().replace("/usr/bin/kvasir", os.environ["KVASIR_BIN"])
        (tmp_path / name).write_text(text.replace("Documentation=man:kvasir(1)\n", ""))
    done = subprocess.run(["systemd-analyze", "verify", tmp_path / "kvasir.socket"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@needs("systemd-socket-activate")
@pytest.mark.parametrize("apart", [False, True])
def test_a_frontend_serves_at_the_sockets_that_systemd_opened(tmp_path, apart):
    clients, operators = free_port(), free_port()
    sockets = [f"--listen=127.0.0.1:{port}" for port in ([clients, operators] if apart else [clients])]
    # Ports of its own that it must not open.
    options = ["--http-host", "127.0.0.1", "--http-port", "1", *(["--admin-port", "2"] if apart else [])]
    with (tmp_path / "log").open("w") as log:
        words = ["systemd-socket-activate", *sockets, os.environ["KVASIR_BIN"], "frontend", *options]
        plain = {name: value for name, value in os.environ.items() if not name.startswith(("DYN_", "KVASIR_"))}
        started = subprocess.Popen(words, stdout=log, stderr=log, env=plain)
    try:
        # The first connection starts it.
        until(lambda: answers(f"http://127.0.0.1:{clients}/live"), 60, (tmp_path / "log").read_text)
        at = operators if apart else clients
        assert httpx.get(f"http://127.0.0.1:{at}/workers", timeout=30).status_code == 200
        assert httpx.get(f"http://127.0.0.1:{clients}/workers", timeout=30).status_code == (404 if apart else 200)
    finally:
        started.kill()
        started.wait()


def answers(url):
    try:
        return httpx.get(url, timeout=30).status_code == 200
    except httpx.TransportError:
        return False


@needs("systemd-socket-activate")
def test_a_socket_too_many_is_refused_with_what_to_do(tmp_path):
    port = free_port()
    sockets = [f"--listen=127.0.0.1:{port}", f"--listen=127.0.0.1:{free_port()}"]
    with (tmp_path / "log").open("w") as log:
        words = ["systemd-socket-activate", *sockets, os.environ["KVASIR_BIN"], "frontend"]
        started = subprocess.Popen(words, stdout=log, stderr=log)
    try:
        until(lambda: not answers(f"http://127.0.0.1:{port}/live") and started.poll() is not None, 60, (tmp_path / "log").read_text)
        assert started.returncode == 2 and "--admin-port" in (tmp_path / "log").read_text()
    finally:
        started.kill()
        started.wait()


def test_kubernetes_takes_the_manifests(tmp_path):
    import kubernetes_validate

    files = ("kvasir.yaml", "worker-selector.yaml")
    documents = [document for name in files for document in yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text())]
    for document in documents:
        for version in KUBERNETES:
            kubernetes_validate.validate(document, version, strict=True)
    by_kind = {document["kind"]: document for document in documents}
    pod = by_kind["Deployment"]["spec"]["template"]
    labels = pod["metadata"]["labels"]
    for kind in ("Service", "PodDisruptionBudget"):
        selector = by_kind[kind]["spec"]["selector"]
        assert selector.get("matchLabels", selector) == labels, kind
    assert by_kind["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    # Whoever runs in the pod can read the secret, which others cannot.
    user, (secret,) = pod["spec"]["securityContext"], [volume["secret"] for volume in pod["spec"]["volumes"] if "secret" in volume]
    assert user["runAsUser"] == user["fsGroup"] and secret["defaultMode"] == 0o440
    # What the pod is started with is what the binary takes.
    settings = by_kind["ConfigMap"]["data"]["kvasir.toml"]
    (tmp_path / "workers").write_text(by_kind["ConfigMap"]["data"]["workers"])
    (tmp_path / "token").write_text("t")
    settings = settings.replace("/etc/kvasir/workers", f"{tmp_path}/workers").replace("/etc/kvasir-admin/token", f"{tmp_path}/token")
    (tmp_path / "kvasir.toml").write_text(settings)
    checked = kvasir("config", "check", "--config", str(tmp_path / "kvasir.toml"))
    assert checked.returncode == 0, checked.stderr
    monitor = yaml.safe_load((DEPLOY / "kubernetes/service-monitor.yaml").read_text())
    ports = {port["name"] for document in documents if document["kind"] == "Service" for port in document["spec"]["ports"]}
    assert {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} <= ports


def into(root, program):
    """Copies a program and what it is linked with into another root."""
    path = shutil.which(program)
    linked = subprocess.run(["ldd", path], capture_output=True, text=True).stdout
    for file in [path, *re.findall(r"(/\S+) \(0x", linked)]:
        copy = root / file.lstrip("/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(os.path.realpath(file), copy)


@needs("dpkg-deb")
@pytest.mark.skipif(os.geteuid() != 0, reason="NOT root: the Debian package is NOT installed")
def test_dpkg_installs_the_package_and_it_runs(tmp_path):
    binary, package, root = os.environ["KVASIR_BIN"], tmp_path / "kvasir.deb", tmp_path / "root"
    made = subprocess.run([DEPLOY / "debian/package.sh", binary, package], env={**os.environ, "COMPRESSION": "none"}, capture_output=True, text=True, timeout=120)
    assert made.returncode == 0, made.stderr
    for folder in ("var/lib/dpkg/info", "var/lib/dpkg/updates", "dev", "etc"):
        (root / folder).mkdir(parents=True)
    (root / "var/lib/dpkg/status").touch()
    (root / "bin").symlink_to("usr/bin")
    os.mknod(root / "dev/urandom", 0o20666, os.makedev(1, 9))
    for program in ("sh", "od", "tr", binary):
        into(root, program)
    shutil.move(root / binary.lstrip("/"), tmp_path / "copy")  # Only what it is linked with: the package brings it.
    dpkg = lambda *words: subprocess.run(["dpkg", f"--root={root}", "--force-depends", *words], capture_output=True, text=True, timeout=120)  # noqa: E731
    installed = dpkg("-i", str(package))
    assert installed.returncode == 0, installed.stdout + installed.stderr
    ran = subprocess.run([shutil.which("chroot"), root, "/usr/bin/kvasir", "config", "check", "--config", "/etc/kvasir/kvasir.toml"], env={}, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0 and ran.stdout.startswith("ok: "), ran.stdout + ran.stderr
    pages = {path.name for path in (root / "usr/share/man/man1").iterdir()}
    for command in ("frontend", "router", "indexer", "select", "slot-tracker", "doctor", "upgrade"):
        assert f"kvasir-{command}.1.gz" in pages, pages
    token = root / "etc/kvasir/admin-token"
    assert re.fullmatch(r"[0-9a-f]{64}", token.read_text()) and token.stat().st_mode & 0o777 == 0o600
    again = token.read_text()
    assert dpkg("-i", str(package)).returncode == 0 and token.read_text() == again, "a token stays"
    assert dpkg("-r", "kvasir").returncode == 0
    assert not (root / "usr/bin/kvasir").exists() and (root / "etc/kvasir/kvasir.toml").exists()
