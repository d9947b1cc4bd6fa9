//! The pages people read: help, `config show`, `config check`, the reference.

use expect_test::{Expect, expect, expect_file};

use crate::support::printed;

/// A page without the words that change when a feature lands.
fn settled(page: &str) -> String {
    let unsettled = |line: &&str| {
        let line = line.to_lowercase();
        !line.contains("no effect yet") && !line.trim().starts_with("partly: ")
    };
    page.lines()
        .filter(unsettled)
        .map(|line| format!("{line}\n"))
        .collect()
}

fn check(line: &str, expected: Expect) {
    expected.assert_eq(&settled(&printed(line, &[], None)));
}

#[test]
fn overview() {
    check(
        "--help",
        expect![[r#"
            kvasir: a KV-cache-aware router for LLM inference

            Usage: kvasir <command> [options]

            Commands:
              frontend     Serve the OpenAI API and route each request to the best worker
              demo         Try it: frontend, mock workers and sample traffic in one process
              router       Route for other services, without an HTTP API of its own
              indexer      Serve over HTTP which worker holds how much of a prompt
              slot-tracker Serve over HTTP what runs where, as others tell it
              select       Serve over HTTP which worker is best for a prompt, and book it
              mocker       Run a mock engine that behaves like an inference server
              replay       Simulate a trace under several policies, in virtual time
              why          Show why a request went where it went, or the latest decisions
              workers      List the workers of a running frontend, add one, remove one
              top          Watch a running frontend: workers, load, cache, requests
              doctor       Check why a worker's cache is not known, and which flag fixes it
              health       Tell by the exit code whether a running frontend can serve
              upgrade      Start a running frontend anew, without a lost request
              config       Show every option with its origin, check them, or print the file's schema
              completions  Print a completion script for a shell
              man          Print the manual page, of all or of a command
              help         Show this, or the help of a command

            A first try:
              kvasir demo --traffic
              kvasir frontend --worker http://10.0.0.7:8000 --worker http://10.0.0.8:8000

            Options of a command: kvasir <command> -h (short) or --help (all)
        "#]],
    );
    assert_eq!(printed("help", &[], None), printed("-h", &[], None));
}

#[test]
fn version() {
    assert_eq!(
        printed("--version", &[], None),
        format!("kvasir {}\n", env!("CARGO_PKG_VERSION"))
    );
    assert_eq!(printed("frontend -V", &[], None), printed("-V", &[], None));
}

#[test]
fn help_of_commands() {
    check(
        "config -h",
        expect![[r#"
            Show or check what a command would run with

            Usage: kvasir config show [--for COMMAND] [--changed] [--json] [options of COMMAND]
                   kvasir config check [--for COMMAND] [options of COMMAND]
                   kvasir config schema

            General:
              --config FILE
                      Read options from this TOML file. [KVASIR_CONFIG, default: unset]
              --for COMMAND
                      Command whose options to show or check. [default: frontend]
              --json
                      Print JSON instead of text. [default: false]
              --changed
                      Show only values that differ from their defaults. [default: false]

              -h, --help  Short or full help

            All 4 options: kvasir config --help
        "#]],
    );
    expect_file!["pages/frontend-short.txt"].assert_eq(&settled(&printed(
        "frontend -h",
        &[],
        None,
    )));
    expect_file!["pages/frontend-full.txt"].assert_eq(&settled(&printed(
        "frontend --help",
        &[],
        None,
    )));
    expect_file!["pages/demo-short.txt"].assert_eq(&settled(&printed("demo -h", &[], None)));
    assert_eq!(
        printed("help frontend", &[], None),
        printed("frontend --help", &[], None)
    );
}

/// Whoever knows only the variable finds it in the full help.
#[test]
fn full_help_lists_every_option_with_variable_and_default() {
    let page = printed("frontend --help", &[], None);
    let frontend =
        kvasir_config::options().filter(|spec| spec.scope.meets(kvasir_config::Scope::FRONTEND));
    for spec in frontend {
        assert!(
            page.contains(&format!("{} ", spec.name)) || page.contains(&format!("{}\n", spec.name)),
            "{}",
            spec.name
        );
        for var in spec.env {
            assert!(page.contains(var.name), "{}", var.name);
        }
    }
    assert!(page.lines().all(|line| line.chars().count() <= 100));
}

#[test]
fn config_show() {
    let vars = [("DYN_HTTP_PORT", "9000"), ("ETCD_AUTH_PASSWORD", "hush")];
    let file =
        "# fleet\nrouter-temperature = 0.3\nworker = [\"http://a:8000\", \"http://b:8000\"]\n";
    let line = "config show --config k.toml --router-kv-overlap-score-weight 2";
    let page = printed(&format!("{line} --changed"), &vars, Some(file));
    assert!(!page.contains("hush"));
    expect![[r#"
        # kvasir frontend

        # General
        config                          k.toml                       flag --config

        # Workers
        worker                          http://a:8000 http://b:8000  k.toml:3

        # HTTP
        http-port                       9000                         variable DYN_HTTP_PORT

        # Worker selection
        router-mode                     kv                           because of --worker

        # Cost
        router-prefill-load-scale       2.0                          because of --router-kv-overlap-score-weight
        router-kv-overlap-score-weight  2.0                          flag --router-kv-overlap-score-weight
        router-temperature              0.3                          k.toml:2

        # Discovery and planes
        discovery-backend               static                       because of --worker
        event-plane                     zmq                          because of --discovery-backend
        etcd-auth-password              (hidden)                     variable ETCD_AUTH_PASSWORD

        # Notices
        --router-kv-overlap-score-weight (flag) is deprecated: use --router-prefill-load-scale and --router-kv-overlap-score-credit
    "#]].assert_eq(&settled(&page));
    let json = printed(&format!("{line} --changed --json"), &vars, Some(file));
    expect![[r#"
        {
          "command": "frontend",
          "notices": [
            "--router-kv-overlap-score-weight (flag) is deprecated: use --router-prefill-load-scale and --router-kv-overlap-score-credit"
          ],
          "options": {
            "config": {
              "default": null,
              "from": "flag --config",
              "origin": "flag",
              "value": "k.toml"
            },
            "discovery-backend": {
              "default": "etcd",
              "from": "because of --worker",
              "origin": "rule",
              "value": "static"
            },
            "etcd-auth-password": {
              "default": null,
              "from": "variable ETCD_AUTH_PASSWORD",
              "origin": "variable",
              "value": "(hidden)"
            },
            "event-plane": {
              "default": "nats",
              "from": "because of --discovery-backend",
              "origin": "rule",
              "value": "zmq"
            },
            "http-port": {
              "default": "8000",
              "from": "variable DYN_HTTP_PORT",
              "origin": "variable",
              "value": 9000
            },
            "router-kv-overlap-score-weight": {
              "default": null,
              "from": "flag --router-kv-overlap-score-weight",
              "origin": "flag",
              "status": "Deprecated: use --router-prefill-load-scale and --router-kv-overlap-score-credit.",
              "value": 2.0
            },
            "router-mode": {
              "default": "round-robin",
              "from": "because of --worker",
              "origin": "rule",
              "value": "kv"
            },
            "router-prefill-load-scale": {
              "default": "1.0",
              "from": "because of --router-kv-overlap-score-weight",
              "origin": "rule",
              "value": 2.0
            },
            "router-temperature": {
              "default": "0.0",
              "from": "k.toml:2",
              "origin": "file",
              "value": 0.3
            },
            "worker": {
              "default": null,
              "from": "k.toml:3",
              "origin": "file",
              "value": [
                "http://a:8000",
                "http://b:8000"
              ]
            }
          }
        }
    "#]].assert_eq(&settled(&json));
    let all = printed(line, &vars, Some(file));
    let rows = all
        .lines()
        .filter(|line| !line.starts_with('#') && !line.is_empty())
        .count();
    let options = kvasir_config::options()
        .filter(|spec| spec.scope.meets(kvasir_config::Scope::FRONTEND))
        .count();
    assert!(rows >= options, "{rows} of {options}");
}

#[test]
fn config_check() {
    check(
        "config check --for demo --workers 2",
        expect![[r#"
            ok: kvasir demo would start; 1 options set
        "#]],
    );
}

#[test]
fn reference_names_every_option_once() {
    let page = kvasir_config::reference_page();
    for spec in kvasir_config::options().filter(|spec| spec.sources.flag) {
        let long = |dashes: &str, end: &str| {
            page.matches(&format!("{dashes}{}{end}\n", spec.name))
                .count()
        };
        let headings = long("### `--", "`")
            + long("### `--[no-]", "`")
            + page.matches(&format!("### `--{} ", spec.name)).count()
            + page.matches(&format!(", --{}`\n", spec.name)).count();
        assert_eq!(headings, 1, "{}", spec.name);
    }
}
