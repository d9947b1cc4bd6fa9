"""Manual page, completions and schema, all printed from the option table, as their readers take them."""

import json
import os
import pty
import select
import shutil
import subprocess
import tomllib

import jsonschema
import pytest

from test_cli import kvasir


def needs(tool):
    return pytest.mark.skipif(shutil.which(tool) is None, reason=f"NO {tool} here: what it checks of pages is NOT checked")


COMMANDS = ["frontend", "demo", "mocker", "replay", "why", "workers", "top", "doctor", "health"]


@needs("man")
@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_man_reads_the_page(command, tmp_path):
    page = kvasir("man", *([command] if command else []))
    assert page.returncode == 0 and not page.stderr
    file = tmp_path / "kvasir.1"
    file.write_text(page.stdout)
    env = {**os.environ, "MANWIDTH": "100", "LC_ALL": "C.UTF-8"}
    read = subprocess.run(["man", "--warnings", "-l", file], capture_output=True, text=True, env=env, timeout=60)
    assert read.returncode == 0 and not read.stderr, read.stderr
    name = f"kvasir-{command}" if command else "kvasir"
    assert name in read.stdout and "EXIT STATUS" in read.stdout
    if command in (None, "frontend"):
        assert "--router-mode MODE" in read.stdout and "DYN_ROUTER_MODE" in read.stdout


@needs("mandoc")
def test_mandoc_has_nothing_to_say():
    lint = subprocess.run(["mandoc", "-T", "lint", "-W", "warning"], input=kvasir("man").stdout, capture_output=True,
                          text=True, timeout=60)  # fmt: skip
    # The page has no date: the same version prints the same page.
    assert [line for line in lint.stdout.splitlines() if "missing date" not in line] == []


def completed(script, *words):
    """What bash offers after these words; the last one is what the cursor stands behind."""
    program = """
        source "$1"; shift
        COMP_WORDS=(kvasir "$@"); COMP_CWORD=$#
        _kvasir; printf '%s\\n' "${COMPREPLY[@]}"
    """
    run = subprocess.run(["bash", "-c", program, "bash", script, *words], capture_output=True, text=True, timeout=30)
    assert run.returncode == 0 and not run.stderr, run.stderr
    return run.stdout.split()


def test_bash_completes(tmp_path):
    script = tmp_path / "kvasir.bash"
    script.write_text(kvasir("completions", "bash").stdout)
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    assert completed(script, "w") == ["why", "workers"]
    assert set(COMMANDS) < set(completed(script, ""))
    assert completed(script, "frontend", "--router-mo") == ["--router-mode"]
    assert completed(script, "frontend", "--router-mode", "r") == ["round-robin", "random"]
    assert completed(script, "frontend", "--router-mode", "=", "k") == ["kv"]
    assert "--no-router-kv-events" in completed(script, "frontend", "--no-")
    assert completed(script, "workers", "") == ["add", "remove"]
    assert "--interval" in completed(script, "top", "--") and "--limit" not in completed(script, "top", "--")
    assert completed(script, "top", "--interval", "") == []
    (tmp_path / "some.toml").touch()
    assert completed(script, "frontend", "--config", f"{tmp_path}/so") == [f"{tmp_path}/some.toml"]
    assert completed(script, "nonsense", "--") == []


@needs("fish")
def test_fish_completes(tmp_path):
    script = tmp_path / "kvasir.fish"
    script.write_text(kvasir("completions", "fish").stdout)

    def offered(line):
        run = subprocess.run(["fish", "-c", f"source {script}; complete -C '{line}'"], capture_output=True, text=True,
                             timeout=60)  # fmt: skip
        assert run.returncode == 0 and not run.stderr, run.stderr
        return [row.split("\t")[0] for row in run.stdout.splitlines()]

    assert offered("kvasir w") == ["why", "workers"]
    assert offered("kvasir frontend --router-mode ro") == ["round-robin"]
    assert "--interval" in offered("kvasir top --") and "--limit" not in offered("kvasir top --")


@needs("zsh")
def test_zsh_completes(tmp_path):
    (tmp_path / "_kvasir").write_text(kvasir("completions", "zsh").stdout)
    leader, follower = pty.openpty()
    shell = subprocess.Popen(["zsh", "-f", "-i"], stdin=follower, stdout=follower, stderr=follower,
                             env={**os.environ, "TERM": "dumb"})  # fmt: skip

    def say(text, until):
        os.write(leader, text.encode())
        seen = ""
        while until not in seen:
            assert select.select([leader], [], [], 10)[0], seen
            seen += os.read(leader, 65536).decode(errors="replace")

    try:
        say(f"fpath=({tmp_path} $fpath); bindkey -e; autoload -U compinit; compinit -u -D; print re''ady\n", "ready")
        say("kvasir wh\t", "why ")
        say("\x15kvasir frontend --router-mode=ro\t", "=round-robin")
        say("\x15kvasir workers \t", "remove")
    finally:
        shell.kill()
        shell.wait()
        os.close(leader)
        os.close(follower)


def test_wrong_words():
    for wrong in (["completions"], ["completions", "tcsh"], ["completions", "bash", "zsh"], ["man", "nobody"],
                  ["man", "frontend", "demo"], ["config", "schema", "x"]):  # fmt: skip
        told = kvasir(*wrong)
        assert told.returncode == 2 and told.stderr.startswith("error: "), wrong
    for right in (["completions", "--help"], ["man", "-h"], ["help", "completions"]):
        assert kvasir(*right).stdout.count("Usage: kvasir") == 1, right


GOOD = """
router-mode = "kv"
http-port = 9000
worker = ["http://a:8000", "http://b:8000"]
router-temperature = 0.5
router-kv-events = false
index-max-bytes = "2GiB"
router-queue-threshold = "none"
"""
BAD = [
    'router_mode = "kv"',
    'router-mode = "vk"',
    "http-port = 70000",
    "http-port = true",
    "router-temperature = -0.5",
    "router-kv-overlap-score-credit = 1.5",
    "worker = [1.5, []]",
    'config = "other.toml"',
    "[section]\nx = 1",
    "router-kv-events = 3",
    'index-max-bytes = "2 apples"',
    "json = true",
]


def test_the_schema_judges_files_as_the_loader_does(tmp_path):
    schema = json.loads(kvasir("config", "schema").stdout)
    validator = jsonschema.Draft202012Validator(schema)
    jsonschema.Draft202012Validator.check_schema(schema)
    for text, good in [(GOOD, True), *((bad, False) for bad in BAD)]:
        file = tmp_path / "kvasir.toml"
        file.write_text(text)
        told = kvasir("config", "check", "--config", str(file))
        assert (told.returncode == 0) == good, (text, told.stderr)
        assert validator.is_valid(tomllib.loads(text)) == good, text
    for name, option in schema["properties"].items():
        if "default" in option and "$ref" not in option:
            assert validator.is_valid({name: option["default"]}), name


def test_every_option_that_a_file_may_have_is_in_the_schema():
    schema = json.loads(kvasir("config", "schema").stdout)["properties"]
    for command in ("frontend", "mocker", "replay", "top"):
        shown = json.loads(kvasir("config", "show", "--json", "--for", command).stdout)["options"]
        flags_only = {"config", "once", "json", "limit", "force", "until-stdin-closes"}
        assert set(shown) - flags_only <= set(schema), set(shown) - set(schema)
    assert all(option.get("description") or "$ref" in option for option in schema.values())
