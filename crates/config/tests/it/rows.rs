//! Every option through flag, variable and file: default, good value, bad value, older names.
//!
//! `rows.txt` says what users know about each option, apart from the table under test. A column
//! for a bad value holds `-` where every text is a value.

use kvasir_config::{Command, Settings, options};
use serde_json::Value as Json;

use crate::support::{invoke_words, printed};

struct Row {
    name: &'static str,
    variables: Vec<&'static str>,
    default: Json,
    good: &'static str,
    bad: Option<&'static str>,
    aliases: Vec<&'static str>,
    command: &'static str,
    with: Vec<&'static str>,
}

fn rows() -> Vec<Row> {
    let lines = include_str!("rows.txt").lines();
    lines
        .filter(|line| !line.starts_with('#'))
        .map(row)
        .collect()
}

fn row(line: &'static str) -> Row {
    let columns: Vec<_> = line.split('|').map(str::trim).collect();
    let [name, variables, default, good, bad, aliases, command, with] = columns[..] else {
        panic!("eight columns: {line}")
    };
    let list = |text: &'static str| {
        text.split(',')
            .map(str::trim)
            .filter(|part| !part.is_empty())
            .collect()
    };
    Row {
        name,
        variables: list(variables),
        default: serde_json::from_str(default).expect(line),
        good,
        bad: Some(bad).filter(|bad| *bad != "-"),
        aliases: list(aliases),
        command,
        with: with.split_whitespace().collect(),
    }
}

impl Row {
    fn is_switch(&self) -> bool {
        self.default.is_boolean()
    }

    /// What `config show --json` must say after the good value was given.
    fn good_value(&self) -> Json {
        if self.default.is_array() {
            return Json::from(vec![self.good]);
        }
        if is_secret(self.name) {
            return "(hidden)".into();
        }
        if self.default.is_string() || self.good.starts_with('{') {
            return self.good.into();
        }
        serde_json::from_str(self.good).unwrap_or_else(|_| self.good.into())
    }

    /// Flags that give `text` under `name`.
    fn flags(&self, name: &str, text: &str) -> Vec<String> {
        match (self.is_switch(), text) {
            (true, "true") => vec![format!("--{name}")],
            (true, "false") => vec![format!("--no-{name}")],
            _ => vec![format!("--{name}={text}")],
        }
    }

    /// What `config show` reports for this option.
    fn shown(&self, flags: &[String], vars: &[(&str, &str)], file: Option<&str>) -> Json {
        let mut words = vec!["config", "show", "--json", "--for", self.command];
        words.extend(&self.with);
        words.extend(flags.iter().map(String::as_str));
        if file.is_some() {
            words.extend(["--config", "test.toml"]);
        }
        let page = match invoke_words(&words, vars, file) {
            Ok(kvasir_config::Invocation::Print(page)) => page,
            other => panic!("{words:?} {vars:?} {file:?}: {other:?}"),
        };
        let page: Json = serde_json::from_str(&page).expect("config show --json prints JSON");
        page["options"][self.name].clone()
    }

    /// The complaint about the option, from wherever.
    fn complaint(&self, flags: &[String], vars: &[(&str, &str)], file: Option<&str>) -> String {
        let mut words = vec!["config", "check", "--for", self.command];
        words.extend(&self.with);
        words.extend(flags.iter().map(String::as_str));
        if file.is_some() {
            words.extend(["--config", "test.toml"]);
        }
        let error = invoke_words(&words, vars, file).expect_err(self.name);
        assert_eq!(error.exit_code(), 2);
        assert_eq!(error.problems().len(), 1, "{}: {error}", self.name);
        error.problems()[0].to_string()
    }

    fn file(&self, text: &str) -> String {
        let plain = self.is_switch() && matches!(text, "true" | "false");
        let number = text.parse::<f64>().is_ok_and(f64::is_finite) && !self.default.is_string();
        let quoted = Json::from(text).to_string();
        let value = if plain || number {
            text.to_owned()
        } else {
            quoted
        };
        if self.default.is_array() {
            return format!("{} = [{value}]\n", self.name);
        }
        format!("# a comment\n{} = {value}\n", self.name)
    }
}

fn is_secret(name: &str) -> bool {
    ["etcd-auth-password", "admin-token", "worker-api-key"].contains(&name)
}

/// Names a file, so it cannot stand in one.
const NOT_IN_FILE: &str = "config";

#[test]
fn every_option_of_the_table_is_in_the_list_and_the_other_way_round() {
    let listed: Vec<_> = rows().iter().map(|row| row.name).collect();
    let flags_only = [
        "for",
        "json",
        "changed",
        "limit",
        "live",
        "once",
        "force",
        "until-stdin-closes",
    ];
    let missing: Vec<_> = options()
        .map(|spec| spec.name)
        .filter(|name| !listed.contains(name) && !flags_only.contains(name))
        .collect();
    assert!(missing.is_empty(), "add to rows.txt: {missing:?}");
    for row in rows() {
        let spec = kvasir_config::option_named(row.name).expect(row.name);
        let variables: Vec<_> = spec
            .env
            .iter()
            .map(|var| {
                if var.negated {
                    format!("!{}", var.name)
                } else {
                    var.name.into()
                }
            })
            .collect();
        assert_eq!(variables, row.variables, "{}", row.name);
        assert_eq!(spec.aliases, row.aliases, "{}", row.name);
    }
}

#[test]
fn defaults_are_what_users_know() {
    for row in rows() {
        let command = Command::named(row.command).expect(row.command);
        let page: Json =
            serde_json::from_str(&Settings::defaults(command).to_json()).expect("JSON");
        let shown = &page["options"][row.name];
        assert_eq!(shown["value"], row.default, "{}", row.name);
        assert_eq!(shown["origin"], "default", "{}", row.name);
    }
}

#[test]
fn a_good_value_arrives_from_flag_variable_and_file() {
    for row in rows() {
        let good = row.good_value();
        let name = row.name;
        if !is_secret(name) && name != NOT_IN_FILE {
            let by_flag = row.shown(&row.flags(name, row.good), &[], None);
            assert_eq!(
                (&by_flag["value"], &by_flag["origin"]),
                (&good, &"flag".into()),
                "{name}"
            );
        }
        if name != NOT_IN_FILE {
            let by_file = row.shown(&[], &[], Some(&row.file(row.good)));
            assert_eq!(
                (&by_file["value"], &by_file["origin"]),
                (&good, &"file".into()),
                "{name}"
            );
        }
        for variable in row.variables.iter().filter(|_| name != NOT_IN_FILE) {
            let (variable, text) = match (variable.strip_prefix('!'), row.good) {
                (Some(variable), "true") => (variable, "false"),
                (Some(variable), text) => (variable, text),
                (None, text) => (*variable, text),
            };
            let by_variable = row.shown(&[], &[(variable, text)], None);
            let seen = (&by_variable["value"], &by_variable["origin"]);
            assert_eq!(seen, (&good, &"variable".into()), "{name} {variable}");
            assert_eq!(by_variable["from"], format!("variable {variable}"));
        }
    }
}

#[test]
fn a_bad_value_gets_one_message_from_flag_variable_and_file() {
    for row in rows() {
        let Some(bad) = row.bad else { continue };
        let name = row.name;
        let variable = row.variables[0];
        let by_flag = row.complaint(&row.flags(name, bad), &[], None);
        let by_variable = row.complaint(&[], &[(variable, bad)], None);
        let by_file = row.complaint(&[], &[], Some(&row.file(bad)));
        let line = if row.default.is_array() { 1 } else { 2 };
        let place = "(flag)".to_owned();
        assert!(
            by_flag.starts_with(&format!("--{name}: `{bad}` {place}")),
            "{by_flag}"
        );
        assert_eq!(
            by_variable,
            by_flag.replace(&place, &format!("(variable {variable})"))
        );
        assert_eq!(
            by_file,
            by_flag.replace(&place, &format!("(test.toml:{line})"))
        );
    }
}

#[test]
fn precedence_is_flag_variable_file_default() {
    for row in rows()
        .iter()
        .filter(|row| !is_secret(row.name) && row.name != NOT_IN_FILE)
    {
        let (flags, file) = (row.flags(row.name, row.good), row.file(row.good));
        let vars = [(row.variables[0], row.good)];
        assert_eq!(
            row.shown(&flags, &vars, Some(&file))["origin"],
            "flag",
            "{}",
            row.name
        );
        assert_eq!(
            row.shown(&[], &vars, Some(&file))["origin"],
            "variable",
            "{}",
            row.name
        );
        assert_eq!(
            row.shown(&[], &[], Some(&file))["origin"],
            "file",
            "{}",
            row.name
        );
    }
}

#[test]
fn the_first_of_several_variables_wins() {
    for row in rows()
        .iter()
        .filter(|row| row.variables.len() > 1 && !row.is_switch())
    {
        let other = if row.good.starts_with('/') {
            "/other"
        } else {
            "3.0"
        };
        let other = if row.name == "log-level" {
            "warn"
        } else {
            other
        };
        let vars = [(row.variables[1], other), (row.variables[0], row.good)];
        assert_eq!(
            row.shown(&[], &vars, None)["value"],
            row.good_value(),
            "{}",
            row.name
        );
    }
}

#[test]
fn older_names_work_as_flag_and_key_without_a_word() {
    for row in rows() {
        // `kvasir config` has a --json of its own.
        for alias in row.aliases.iter().filter(|alias| **alias != "json") {
            let by_flag = row.shown(&row.flags(alias, row.good), &[], None);
            assert_eq!(by_flag["value"], row.good_value(), "{alias}");
            assert_eq!(by_flag["origin"], "flag", "{alias}");
            let file = row.file(row.good).replace(row.name, alias);
            assert_eq!(
                row.shown(&[], &[], Some(&file))["value"],
                row.good_value(),
                "{alias}"
            );
        }
    }
    let page = printed("config show --changed --no-kv-events", &[], None);
    assert!(
        page.contains("router-kv-events") && page.contains("flag --no-kv-events"),
        "{page}"
    );
}

#[test]
fn none_and_empty_unset_what_can_be_unset() {
    let nullable = ["router-queue-threshold", "active-decode-blocks-threshold"];
    for row in rows().iter().filter(|row| nullable.contains(&row.name)) {
        for text in ["None", "none", ""] {
            let shown = row.shown(&[], &[(row.variables[0], text)], None);
            assert_eq!(shown["value"], Json::Null, "{} `{text}`", row.name);
            assert_eq!(shown["origin"], "variable", "{} `{text}`", row.name);
        }
        assert_eq!(
            row.shown(&row.flags(row.name, "None"), &[], None)["value"],
            Json::Null
        );
        let file = format!("{} = \"none\"", row.name);
        assert_eq!(row.shown(&[], &[], Some(&file))["value"], Json::Null);
    }
}

#[test]
fn an_empty_variable_of_any_other_option_counts_as_not_given() {
    for row in rows()
        .iter()
        .filter(|row| !row.is_switch() && !row.default.is_null())
    {
        // Without a word about NATS it is another.
        if ["router-queue-threshold", "event-plane"].contains(&row.name) {
            continue;
        }
        let shown = row.shown(&[], &[(row.variables[0], "")], None);
        assert_eq!(shown["value"], row.default, "{}", row.name);
    }
    let switch = rows()
        .into_iter()
        .find(|row| row.name == "router-kv-events")
        .expect("listed");
    assert_eq!(
        switch.shown(&[], &[("DYN_ROUTER_USE_KV_EVENTS", "")], None)["value"],
        false
    );
}

#[test]
fn names_variables_and_letters_are_unique() {
    let mut names: Vec<_> = options().map(|spec| spec.name).collect();
    for command in Command::ALL
        .iter()
        .map(|command| command.name())
        .chain(["config"])
    {
        let of_command = options().filter(|spec| spec.scope.names().contains(&command));
        let all = of_command.flat_map(|spec| spec.aliases.iter().chain([&spec.name]));
        let mut all: Vec<_> = all.collect();
        all.sort_unstable();
        let count = all.len();
        all.dedup();
        assert_eq!(all.len(), count, "{command}");
    }
    let mut variables: Vec<_> = options()
        .flat_map(|spec| spec.env)
        .map(|var| var.name)
        .collect();
    for list in [&mut names, &mut variables] {
        list.sort_unstable();
        let count = list.len();
        list.dedup();
        assert_eq!(list.len(), count);
    }
    assert!(names.iter().all(|name| !name.starts_with("no-")));
}

#[test]
fn every_row_has_texts_and_a_legal_default() {
    for spec in options() {
        let summary = spec.summary();
        assert!(
            summary.ends_with('.') && summary.len() <= 110,
            "{}: {summary}",
            spec.name
        );
        assert!(
            spec.default.is_some() || spec.nullable || spec.repeated,
            "{}",
            spec.name
        );
        if let Some(text) = spec.default {
            assert!(
                kvasir_config::parse_value(&spec.kind, text).is_some(),
                "{}",
                spec.name
            );
        }
        assert_eq!(spec.sources.env, !spec.env.is_empty(), "{}", spec.name);
    }
}
