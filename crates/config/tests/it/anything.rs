//! Whatever is typed, set or written: an answer, never a panic; and a file made from settings gives
//! the same settings.

use kvasir_config::{Command, Invocation, Settings, Value, options};
use proptest::prelude::*;
use serde_json::Value as Json;

use crate::support::{invoke_words, run};

/// A word as people and programs put on command lines: names of options, near-misses, values, junk.
fn word() -> impl Strategy<Value = String> {
    let names: Vec<String> = options()
        .flat_map(|spec| [format!("--{}", spec.name), format!("--no-{}", spec.name)])
        .chain(
            [
                "--", "-i", "-x", "show", "check", "--json", "--for", "none", "true",
            ]
            .map(Into::into),
        )
        .collect();
    prop_oneof![
        4 => proptest::sample::select(names),
        2 => (-5i64..100_000).prop_map(|number| number.to_string()),
        1 => ".{0,12}",
        1 => "--[a-z-]{0,20}(=.{0,6})?",
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_command_line_gets_an_answer(
        command in proptest::sample::select(vec!["frontend", "demo", "config", "help", "router"]),
        words in proptest::collection::vec(word(), 0..8),
    ) {
        let words: Vec<&str> = std::iter::once(command).chain(words.iter().map(String::as_str)).collect();
        match invoke_words(&words, &[], Some("")) {
            Ok(Invocation::Print(page)) => prop_assert!(!page.is_empty()),
            Ok(Invocation::Run(run)) => prop_assert!(run.settings.iter().count() > 0),
            Err(error) => {
                prop_assert!(!error.problems().is_empty());
                let message = error.to_string();
                prop_assert!(message.starts_with("error: ") && message.ends_with("--help"));
            }
        }
    }

    #[test]
    fn any_file_and_any_variable_get_an_answer(
        file in "([a-z-]{1,20} = .{0,10}\n|.{0,20}\n){0,5}",
        variable in proptest::sample::select(
            options().flat_map(|spec| spec.env).map(|var| var.name).collect::<Vec<_>>()
        ),
        value in ".{0,12}",
    ) {
        let words = ["frontend", "--config", "f.toml"];
        if let Err(error) = invoke_words(&words, &[(variable, &value)], Some(&file)) {
            prop_assert_eq!(error.exit_code(), 2);
        }
    }
}

/// One line of a file for a value.
fn line(name: &str, value: &Value) -> String {
    let literal = match value {
        Value::Unset => Json::from("none"),
        Value::List(items) => items.clone().into(),
        other => other.text().into(),
    };
    format!("{name} = {literal}\n")
}

#[test]
fn a_file_made_from_settings_gives_the_same_settings() {
    let first = run(
        "frontend --worker http://a:1 --worker http://b:2 --router-temperature 0.25 --no-kv-events \
         --router-queue-threshold none --index-max-bytes 3MiB --router-ttl-secs 7.5",
        &[],
    )
    .settings;
    let file: String = first
        .iter()
        .filter(|(spec, setting)| spec.sources.file && setting.origin.is_user())
        .map(|(spec, setting)| line(spec.name, &setting.value))
        .collect();
    let Ok(Invocation::Run(second)) =
        invoke_words(&["frontend", "--config", "f.toml"], &[], Some(&file))
    else {
        panic!("the file is right:\n{file}")
    };
    let values = |settings: &Settings| {
        let rows = settings.iter().filter(|(spec, _)| spec.sources.file);
        rows.map(|(spec, setting)| (spec.name, setting.value.clone()))
            .collect::<Vec<_>>()
    };
    assert_eq!(values(&first), values(&second.settings));
}

/// What `config show` prints is what one may type.
#[test]
fn every_default_prints_and_parses_back() {
    for command in Command::ALL {
        for (spec, setting) in Settings::defaults(*command).iter() {
            let text = setting.value.text();
            if matches!(setting.value, Value::Unset | Value::List(_)) {
                continue;
            }
            let again = kvasir_config::parse_value(&spec.kind, &text);
            assert_eq!(again.as_ref(), Some(&setting.value), "{}", spec.name);
        }
    }
}
