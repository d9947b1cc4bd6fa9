//! Every option's value, and who set it.
//!
//! Answers: what is this option now, and why? [`Settings`] holds one checked value for each row
//! of the table, so reading one cannot fail.
//!
//! Invariants: an option that the command does not have is at its default; a value is never
//! without origin; only `rules` writes [`Origin::Rule`].
//!
//! Elsewhere: collecting assignments (`args`, `environment`, `file`), rules between options
//! (`rules`).

use std::collections::BTreeMap;
use std::fmt;

use crate::command::Command;
use crate::error::Problem;
use crate::spec::{Key, Spec};
use crate::table;
use crate::value::{self, SettingType, Value};

/// Who set a value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// Nobody.
    Default,
    /// The `--config` file.
    File {
        /// The file as it was named.
        path: String,
        /// Line of the key, from 1.
        line: usize,
    },
    /// An environment variable.
    Variable(&'static str),
    /// The command line; the flag as it was typed.
    Flag(String),
    /// A policy string such as `kv,router-temperature=0.5`.
    Policy(String),
    /// Another option, or the command, that decides this one.
    Rule(&'static str),
}

impl Origin {
    /// Whether a person set it, and no default or rule.
    pub fn is_user(&self) -> bool {
        !matches!(self, Self::Default | Self::Rule(_))
    }

    /// Where the value of `option` stands, for a message that has named the option already.
    pub(crate) fn place(&self, option: &str) -> String {
        match self {
            Self::Flag(written) if written.strip_prefix("--") == Some(option) => "flag".into(),
            other => other.to_string(),
        }
    }

    /// One word for JSON.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::File { .. } => "file",
            Self::Variable(_) => "variable",
            Self::Flag(_) => "flag",
            Self::Policy(_) => "policy",
            Self::Rule(_) => "rule",
        }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File { path, line } => write!(f, "{path}:{line}"),
            Self::Variable(name) => write!(f, "variable {name}"),
            Self::Flag(flag) => write!(f, "flag {flag}"),
            Self::Policy(policy) => write!(f, "policy {policy}"),
            Self::Rule(cause) => write!(f, "because of {cause}"),
        }
    }
}

/// An option's text as it stood somewhere, before it is checked.
#[derive(Debug, Clone)]
pub(crate) struct Assignment {
    pub(crate) spec: &'static Spec,
    /// One text, or several for a repeatable option.
    pub(crate) texts: Vec<String>,
    /// Whether the text has the opposite sense (`--no-…`, a negated variable).
    pub(crate) negated: bool,
    pub(crate) origin: Origin,
}

/// One value and who set it.
#[derive(Debug, Clone, PartialEq)]
pub struct Setting {
    /// The checked value.
    pub value: Value,
    /// Who set it.
    pub origin: Origin,
}

/// The checked values of one command.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    command: Command,
    /// As given, before rules: what a policy string is laid over.
    given: BTreeMap<&'static str, Setting>,
    /// In effect, after rules.
    by_name: BTreeMap<&'static str, Setting>,
}

impl Settings {
    /// Everything at its default, before any rule.
    pub fn defaults(command: Command) -> Self {
        let setting = |spec: &'static Spec| Setting {
            value: default_value(spec),
            origin: Origin::Default,
        };
        let given: BTreeMap<_, _> = table::all()
            .map(|spec| (spec.name, setting(spec)))
            .collect();
        Self {
            command,
            by_name: given.clone(),
            given,
        }
    }

    /// The command these settings are for.
    pub fn command(&self) -> Command {
        self.command
    }

    /// The value of an option.
    ///
    /// ```
    /// use kvasir_config::{Command, Settings, keys};
    /// let settings = Settings::defaults(Command::Frontend);
    /// assert_eq!(settings.get(keys::HTTP_PORT), 8000);
    /// assert_eq!(settings.get(keys::ROUTER_QUEUE_THRESHOLD), Some(16.0));
    /// ```
    #[expect(
        clippy::expect_used,
        reason = "key, row and parser agree by construction; a test reads every row"
    )]
    pub fn get<T: SettingType>(&self, key: Key<T>) -> T {
        let setting = self.by_name.get(key.name());
        setting
            .and_then(|setting| T::read(&setting.value))
            .expect("a key names a row of its type")
    }

    /// Who set an option.
    pub fn origin<T>(&self, key: Key<T>) -> &Origin {
        self.by_name
            .get(key.name())
            .map_or(&Origin::Default, |setting| &setting.origin)
    }

    /// Whether a person set the option.
    pub fn is_set<T>(&self, key: Key<T>) -> bool {
        self.origin(key).is_user()
    }

    /// Value and origin by name.
    pub fn setting(&self, name: &str) -> Option<&Setting> {
        self.by_name.get(name)
    }

    /// The options of this command with their settings, in the order of the table.
    pub fn iter(&self) -> impl Iterator<Item = (&'static Spec, &Setting)> {
        let scope = self.command.scope();
        table::all()
            .filter(move |spec| spec.scope.meets(scope))
            .filter_map(|spec| self.by_name.get(spec.name).map(|setting| (spec, setting)))
    }

    /// Checks one assignment and takes it over.
    pub(crate) fn assign(&mut self, assignment: &Assignment) -> Result<(), Problem> {
        let value = check(assignment)?;
        let setting = Setting {
            value,
            origin: assignment.origin.clone(),
        };
        self.given.insert(assignment.spec.name, setting.clone());
        self.by_name.insert(assignment.spec.name, setting);
        Ok(())
    }

    /// Undoes what rules did.
    pub(crate) fn forget_rules(&mut self) {
        self.by_name.clone_from(&self.given);
    }

    /// Sets a value by rule.
    pub(crate) fn force<T>(&mut self, key: Key<T>, value: Value, cause: &'static str) {
        self.by_name.insert(
            key.name(),
            Setting {
                value,
                origin: Origin::Rule(cause),
            },
        );
    }

    /// Sets a value by rule if the user set none.
    pub(crate) fn prefer<T>(&mut self, key: Key<T>, value: Value, cause: &'static str) {
        if !self.is_set(key) {
            self.force(key, value, cause);
        }
    }
}

/// The default of a row. The tests of the table prove that each is a legal value.
fn default_value(spec: &Spec) -> Value {
    match spec.default {
        Some(text) => value::parse(&spec.kind, text).unwrap_or(Value::Unset),
        None if spec.repeated => Value::List(Vec::new()),
        None => Value::Unset,
    }
}

/// The checked value of an assignment.
pub(crate) fn check(assignment: &Assignment) -> Result<Value, Problem> {
    let spec = assignment.spec;
    if spec.repeated {
        for text in &assignment.texts {
            check_one(assignment, text)?;
        }
        return Ok(Value::List(assignment.texts.clone()));
    }
    let text = assignment.texts.last().map_or("", String::as_str);
    check_one(assignment, text)
}

fn check_one(assignment: &Assignment, text: &str) -> Result<Value, Problem> {
    let spec = assignment.spec;
    let word = text.trim();
    if spec.nullable && (word.is_empty() || word.eq_ignore_ascii_case("none")) {
        return Ok(Value::Unset);
    }
    match value::parse(&spec.kind, text) {
        Some(Value::Bool(yes)) => Ok(Value::Bool(yes != assignment.negated)),
        Some(value) => Ok(value),
        None => Err(Problem::bad_value(spec, text, &assignment.origin)),
    }
}
