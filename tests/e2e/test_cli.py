"""The command line from outside: exit codes, where texts go, what the environment does."""

import json
import os
import subprocess


def kvasir(*args: str, **variables: str) -> subprocess.CompletedProcess:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("DYN_", "KVASIR_"))}
    return subprocess.run(
        [os.environ["KVASIR_BIN"], *args],
        env=env | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
    )


def test_help_goes_to_standard_output():
    for args in (["--help"], ["-h"], ["help"], ["frontend", "-h"], ["demo", "--help"]):
        told = kvasir(*args)
        assert told.returncode == 0 and "Usage: kvasir" in told.stdout and not told.stderr, args


def test_mistakes_end_with_code_two_and_one_line_each():
    told = kvasir("frontend", "--router-mode", "vk", DYN_HTTP_PORT="many")
    assert told.returncode == 2 and not told.stdout
    lines = told.stderr.splitlines()
    assert lines[0].startswith("error: --router-mode: `vk` (flag) is not allowed")
    assert "Did you mean `kv`?" in lines[0]
    assert lines[1].startswith("error: --http-port: `many` (variable DYN_HTTP_PORT) is not allowed")


def test_config_show_tells_who_set_a_value(tmp_path):
    file = tmp_path / "kvasir.toml"
    file.write_text('router-temperature = 0.5\nhttp-port = 1\n')
    told = kvasir("config", "show", "--json", "--config", str(file), "--load-aware", DYN_HTTP_PORT="9001")
    options = json.loads(told.stdout)["options"]
    assert told.returncode == 0
    assert options["http-port"]["value"] == 9001 and options["http-port"]["from"] == "variable DYN_HTTP_PORT"
    assert options["router-temperature"]["from"] == f"{file}:1"
    assert (options["router-mode"]["value"], options["router-mode"]["origin"]) == ("kv", "rule")


def test_config_check(tmp_path):
    assert kvasir("config", "check").returncode == 0
    file = tmp_path / "kvasir.toml"
    file.write_text("router_mode = 'kv'\n")
    told = kvasir("config", "check", "--config", str(file))
    assert told.returncode == 2 and "Did you mean `router-mode`?" in told.stderr


def test_the_settings_in_use_can_be_kept(tmp_path):
    """A start that fails for another reason has written them by then."""
    kept = tmp_path / "settings.json"
    told = kvasir(
        "frontend", "--dump-config-to", str(kept), "--worker", "http://127.0.0.1:9",
        "--http-host", "192.0.2.1", ETCD_AUTH_PASSWORD="hush",
    )
    assert told.returncode == 1, told.stderr
    options = json.loads(kept.read_text())["options"]
    assert options["worker"]["value"] == ["http://127.0.0.1:9"]
    assert options["etcd-auth-password"]["value"] == "(hidden)"
    told = kvasir("frontend", "--dump-config-to", str(tmp_path / "no" / "folder.json"))
    assert told.returncode == 1 and "--dump-config-to" in told.stderr
