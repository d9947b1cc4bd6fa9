//! What users read when something is wrong, or worth a word.

use expect_test::{Expect, expect};

use crate::support::{invoke_words, refused, run};

fn check(line: &str, vars: &[(&str, &str)], file: Option<&str>, expected: Expect) {
    expected.assert_eq(&refused(line, vars, file));
}

#[test]
fn bad_values_name_option_value_place_and_range() {
    let vars = [
        ("DYN_ROUTER_TEMPERATURE", "-1"),
        ("DYN_ROUTER_USE_KV_EVENTS", "maybe"),
    ];
    let file = "router-queue-threshold = 0\nhttp-port = \"banana\"\nworker = [\"a:8000\"]\n";
    check(
        "frontend --router-mode vk --config k.toml",
        &vars,
        Some(file),
        expect![[r#"
            error: --router-mode: `vk` (flag) is not allowed; give one of round-robin, random, kv, direct, power-of-two, least-loaded, device-aware-weighted. Did you mean `kv`?
            error: --router-kv-events: `maybe` (variable DYN_ROUTER_USE_KV_EVENTS) is not allowed; give true or false (also 1/0, yes/no, on/off)
            error: --router-temperature: `-1` (variable DYN_ROUTER_TEMPERATURE) is not allowed; give a finite number, at least 0
            error: --worker: `a:8000` (k.toml:3) is not allowed; give one address such as http://10.0.0.7:8000, without user and password, with additions as name=value after commas (a key as api-key-file=FILE); repeat --worker for each further server
            error: --http-port: `banana` (k.toml:2) is not allowed; give a whole number from 0 to 65535
            error: --router-queue-threshold: `0` (k.toml:1) is not allowed; give a finite number above 0, or none
            More: kvasir frontend --help"#]],
    );
}

#[test]
fn unknown_names_suggest_the_nearest() {
    check(
        "frontend --router-temprature 1 --no-router-kv-event --temperature 2 --xyzzy",
        &[],
        None,
        expect![[r#"
            error: unknown option `--router-temprature` (flag). Did you mean `--router-temperature`?
            error: unknown option `--no-router-kv-event` (flag). Did you mean `--no-router-kv-events`?
            error: unknown option `--temperature` (flag). Did you mean `--router-temperature`?
            error: unknown option `--xyzzy` (flag)
            More: kvasir frontend --help"#]],
    );
    let file = "router_mode = \"kv\"\nbanana = 1\nno-router-kv-events = true\n[router]\nmode = 1\n";
    check(
        "frontend --config k.toml",
        &[],
        Some(file),
        expect![[r#"
            error: unknown option `router_mode` (k.toml:1). Did you mean `router-mode`?
            error: unknown option `banana` (k.toml:2)
            error: k.toml:3: `no-router-kv-events` is a flag only; write router-kv-events = false
            error: k.toml:4: [router] is a section, and the file has none; write all options at the top level, such as router-mode = "kv"
            More: kvasir frontend --help"#]],
    );
}

#[test]
fn misplaced_options_say_where_they_belong() {
    check(
        "frontend --workers 4 --etcd-auth-password x",
        &[],
        None,
        expect![[r#"
            error: --workers is not an option of kvasir frontend, but of kvasir demo, kvasir mocker, kvasir replay. Did you mean `--worker`?
            error: --etcd-auth-password cannot be a flag, since other users can read command lines; set ETCD_AUTH_PASSWORD or `etcd-auth-password` in the --config file
            More: kvasir frontend --help"#]],
    );
    check(
        "frontend --config k.toml",
        &[],
        Some("config = \"x\"\n"),
        expect![[r#"
            error: k.toml:1: `config` is not allowed in a file
            More: kvasir frontend --help"#]],
    );
}

#[test]
fn words_out_of_place() {
    check(
        "",
        &[],
        None,
        expect![[r#"
            error: no command is given; try: kvasir demo
            More: kvasir --help"#]],
    );
    check(
        "forntend",
        &[],
        None,
        expect![[r#"
            error: unknown command `forntend`. Did you mean `frontend`?
            More: kvasir --help"#]],
    );
    check(
        "--http-port 1 frontend",
        &[],
        None,
        expect![[r#"
            error: `--http-port` comes before the command; write kvasir <command> first
            More: kvasir --help"#]],
    );
    check(
        "frontend serve",
        &[],
        None,
        expect![[r#"
            error: kvasir frontend takes no argument `serve`; options begin with --
            More: kvasir frontend --help"#]],
    );
    check(
        "frontend --http-port",
        &[],
        None,
        expect![[r#"
            error: --http-port needs a value: --http-port PORT, a whole number from 0 to 65535
            More: kvasir frontend --help"#]],
    );
    check(
        "frontend --http-port --traffic",
        &[],
        None,
        expect![[r#"
            error: --http-port needs a value: --http-port PORT, a whole number from 0 to 65535
            error: --traffic is not an option of kvasir frontend, but of kvasir demo
            More: kvasir frontend --help"#]],
    );
    check(
        "frontend --router-kv-events false",
        &[],
        None,
        expect![[r#"
            error: --router-kv-events takes no separate value; write --router-kv-events or --no-router-kv-events, or --router-kv-events=false with an equals sign
            More: kvasir frontend --help"#]],
    );
    check(
        "config",
        &[],
        None,
        expect![[r#"
            error: kvasir config needs a subcommand: show, check or schema
            More: kvasir config --help"#]],
    );
    check(
        "config sow",
        &[],
        None,
        expect![[r#"
            error: unknown subcommand `sow` of kvasir config; use show, check or schema
            More: kvasir config --help"#]],
    );
}

#[test]
fn files_that_cannot_be_read() {
    check(
        "frontend --config none.toml",
        &[],
        None,
        expect![[r#"
            error: cannot read the --config file `none.toml`: entity not found
            More: kvasir frontend --help"#]],
    );
    check(
        "frontend --config k.toml",
        &[],
        Some("a = 1\nb = = 2\n"),
        expect![[r#"
            error: k.toml:2: not valid TOML: extra `=`, expected nothing
            More: kvasir frontend --help"#]],
    );
    check(
        "frontend --config k.toml",
        &[],
        Some("http-port = 1\nhttp-port = 2\n"),
        expect![[r#"
            error: k.toml:2: not valid TOML: duplicate key
            More: kvasir frontend --help"#]],
    );
    check(
        "frontend --config k.toml",
        &[],
        Some("http-port = [1]\n"),
        expect![[r#"
            error: --http-port: `[…]` (k.toml:1) is not allowed; give a whole number from 0 to 65535
            More: kvasir frontend --help"#]],
    );
    let huge = "# ".to_owned() + &"x".repeat(2 << 20);
    check(
        "frontend --config k.toml",
        &[],
        Some(&huge),
        expect![[r#"
            error: k.toml: larger than 1048576 bytes
            More: kvasir frontend --help"#]],
    );
}

#[test]
fn long_and_strange_values_are_shown_short_and_plain() {
    let long = "x".repeat(1000);
    let error = invoke_words(&["frontend", "--http-port", &long], &[], None);
    assert!(error.expect_err("refused").to_string().len() < 300);
    let error = invoke_words(&["frontend", "--http-port", "\u{1b}[31m"], &[], None);
    let message = error.expect_err("refused").to_string();
    assert!(message.contains(r"`\u{1b}[31m`"), "{message}");
    let secret = [("ETCD_AUTH_PASSWORD", "hu\u{FFFD}sh")];
    assert!(
        !refused("frontend", &secret, None).contains("hu"),
        "a secret is never printed"
    );
}

/// What is said at start, and only about what a person set.
#[test]
fn notices() {
    let said = |line: &str, vars: &[(&str, &str)]| {
        let notices = run(line, vars).notices;
        notices
            .iter()
            .map(|notice| format!("{notice}\n"))
            .collect::<String>()
    };
    assert_eq!(
        said(
            "frontend",
            &[("DYN_SOMETHING_OF_A_WORKER", "1"), ("KVASIR_TEST_X", "1")]
        ),
        ""
    );
    let vars = [
        ("DYN_ROUTER_MOD", "kv"),
        ("DYN_HTTP_PROT", "1"),
        ("KVASIR_COLOUR", "blue"),
    ];
    expect![[r#"
        --kserve-grpc-server (flag) has no effect yet: this version accepts it and does not act on it
        --admission-control (flag) is ignored: use the busy thresholds and the queue
        --router-durable-kv-events (flag) is deprecated: leave it out, since workers keep their own events for replay
        variable DYN_HTTP_PROT is set, but no option reads it. Did you mean DYN_HTTP_PORT?
        variable DYN_ROUTER_MOD is set, but no option reads it. Did you mean DYN_ROUTER_MODE?
        variable KVASIR_COLOUR is set, but no option reads it
    "#]].assert_eq(&said(
        "frontend --router-durable-kv-events --kserve-grpc-server --admission-control none",
        &vars,
    ));
}
