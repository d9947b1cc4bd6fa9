//! What one option is.
//!
//! Answers: how is an option called, what may it be, where may it be set, what does it mean? A
//! [`Spec`] is the only place where an option is described; parser, environment, file, help and
//! reference read it and hold no knowledge of their own.
//!
//! Invariants: a [`Key`] and its `Spec` are made by one macro row from one type, so reading a
//! setting through its key always finds the kind it expects.
//!
//! Elsewhere: the rows (`table`), turning text into a value (`value`), rules between options
//! (`rules`).

use std::marker::PhantomData;

use kvasir_options::{Range, Row};

use crate::command::Scope;
use crate::value::{Kind, SettingType};

/// The typed name of an option: what consumers hold to read a setting.
#[derive(Debug)]
pub struct Key<T> {
    name: &'static str,
    typed: PhantomData<fn() -> T>,
}

impl<T> Clone for Key<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Key<T> {}

impl<T> Key<T> {
    pub(crate) const fn new(name: &'static str) -> Self {
        Self {
            name,
            typed: PhantomData,
        }
    }

    /// The option's name: its flag without the dashes, and its key in a file.
    pub const fn name(self) -> &'static str {
        self.name
    }
}

/// Heading under which help and reference list an option.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Group {
    /// What is read first and shown by `kvasir config`.
    General,
    /// Address of a running frontend, and queries to it.
    Operate,
    /// The demo's own switches.
    Demo,
    /// What is replayed, and how.
    Replay,
    /// The mock server's own switches.
    Mocker,
    /// The engine model.
    Engine,
    /// Which workers there are.
    Workers,
    /// Listening, paths, limits of HTTP.
    Http,
    /// How a worker is chosen, and when one counts as busy.
    Selection,
    /// Terms of the cost formula.
    Cost,
    /// Tracked load of active requests.
    Tracking,
    /// The admission queue.
    Queue,
    /// The KV cache index: events, prediction, snapshots, remote indexers.
    Cache,
    /// Prefill-time model of the AI configurator.
    Aic,
    /// Prefill and decode on different workers.
    Disagg,
    /// Models, tokenizers, response details.
    Model,
    /// Retries, migration, draining.
    Resilience,
    /// Discovery, request plane, event plane.
    Planes,
    /// The standalone router.
    Standalone,
    /// Logs and metrics.
    Observability,
}

impl Group {
    /// All groups in the order of help and reference.
    pub const ALL: &[Self] = &[
        Self::General,
        Self::Operate,
        Self::Demo,
        Self::Replay,
        Self::Mocker,
        Self::Engine,
        Self::Workers,
        Self::Http,
        Self::Selection,
        Self::Cost,
        Self::Tracking,
        Self::Queue,
        Self::Cache,
        Self::Aic,
        Self::Disagg,
        Self::Model,
        Self::Resilience,
        Self::Planes,
        Self::Standalone,
        Self::Observability,
    ];

    /// The group under which the help of the commands in `scope` lists it: what the demo and the standalone router
    /// share with mock engines is about engines there.
    pub(crate) fn within(self, scope: Scope) -> Self {
        let engines = scope.is_only(Scope::MOCKER) || scope.is_only(Scope::REPLAY);
        match self {
            Self::Demo | Self::Standalone if engines => Self::Engine,
            other => other,
        }
    }

    /// The heading as printed.
    pub const fn title(self) -> &'static str {
        match self {
            Self::General => "General",
            Self::Operate => "Running frontend",
            Self::Demo => "Demo",
            Self::Replay => "Replay",
            Self::Mocker => "Mock server",
            Self::Engine => "Engine model",
            Self::Workers => "Workers",
            Self::Http => "HTTP",
            Self::Selection => "Worker selection",
            Self::Cost => "Cost",
            Self::Tracking => "Load tracking",
            Self::Queue => "Queue",
            Self::Cache => "KV cache index",
            Self::Aic => "Prefill-time model (AIC)",
            Self::Disagg => "Disaggregated prefill",
            Self::Model => "Models and text",
            Self::Resilience => "Retries, migration, shutdown",
            Self::Planes => "Discovery and planes",
            Self::Standalone => "Standalone router",
            Self::Observability => "Logs and metrics",
        }
    }
}

/// Whether setting the option changes anything in this version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// It does what its text says. Tidy checks that some crate reads it.
    Now,
    /// Part of what its text says; what is missing is said in help and at start.
    Partly(&'static str),
    /// Accepted and checked; its feature is not built yet. Said at start when a user sets it.
    NotYet,
    /// Accepted so that old command lines work; it will never do anything.
    Never,
}

/// Places from which an option may be set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sources {
    /// On the command line.
    pub flag: bool,
    /// In the environment.
    pub env: bool,
    /// In the `--config` file.
    pub file: bool,
}

/// One environment variable of an option.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EnvVar {
    /// The variable's name.
    pub name: &'static str,
    /// Whether a true variable means a false option (`DYN_ENABLE_…` for a `disable-…` option).
    pub negated: bool,
}

/// Everything known about one option.
#[derive(Debug, Clone, Copy)]
pub struct Spec {
    /// Flag without dashes, and key in a file.
    pub name: &'static str,
    /// One letter, as in `-i`.
    pub short: Option<char>,
    /// Older flag and file names; accepted silently.
    pub aliases: &'static [&'static str],
    /// Variables, the first that is present wins.
    pub env: &'static [EnvVar],
    /// Heading in help and reference.
    pub group: Group,
    /// Commands that have the option.
    pub scope: Scope,
    /// What a single value may be.
    pub kind: Kind,
    /// Whether `none` or an empty text means "unset".
    pub nullable: bool,
    /// Whether the flag may be given several times, each adding one value.
    pub repeated: bool,
    /// Whether commas also part the values of a repeatable option's variable; spaces always do.
    pub comma_separated: bool,
    /// Default as one would type it; `None` is unset, or an empty list.
    pub default: Option<&'static str>,
    /// What to print for the default where it depends on other options.
    pub default_note: Option<&'static str>,
    /// Name of the value in help, such as `URL`.
    pub metavar: &'static str,
    /// Whether it does anything yet.
    pub effect: Effect,
    /// What to use instead; present exactly for deprecated options.
    pub deprecated: Option<&'static str>,
    /// Where it may be set.
    pub sources: Sources,
    /// Whether its value must never be printed.
    pub secret: bool,
    /// Whether `-h` lists it.
    pub common: bool,
    /// Lines of the documentation: the first paragraph is the one-line help.
    pub doc: &'static [&'static str],
}

impl Spec {
    pub(crate) const fn new<T: SettingType>(
        name: &'static str,
        group: Group,
        scope: Scope,
        doc: &'static [&'static str],
    ) -> Self {
        Self {
            name,
            short: None,
            aliases: &[],
            env: &[],
            group,
            scope,
            kind: T::KIND,
            nullable: T::NULLABLE,
            repeated: T::REPEATED,
            comma_separated: true,
            default: None,
            default_note: None,
            metavar: T::KIND.metavar(),
            effect: Effect::NotYet,
            deprecated: None,
            sources: Sources {
                flag: true,
                env: true,
                file: true,
            },
            secret: false,
            common: false,
            doc,
        }
    }

    /// The one-line help.
    pub fn summary(&self) -> String {
        paragraphs(self.doc).into_iter().next().unwrap_or_default()
    }

    /// The paragraphs after the one-line help.
    pub fn details(&self) -> Vec<String> {
        paragraphs(self.doc).into_iter().skip(1).collect()
    }

    /// The flag as typed, `--name`.
    pub fn flag(&self) -> String {
        format!("--{}", self.name)
    }

    /// The default as printed for people.
    pub fn default_text(&self) -> &'static str {
        match (self.default_note, self.default) {
            (Some(note), _) => note,
            (None, Some(default)) => default,
            (None, None) => "unset",
        }
    }

    /// Whether the option is a switch that takes no value of its own.
    pub fn is_switch(&self) -> bool {
        matches!(self.kind, Kind::Bool)
    }
}

/// Joins documentation lines into paragraphs, split at empty lines.
fn paragraphs(doc: &[&str]) -> Vec<String> {
    let mut out = Vec::new();
    let mut open = String::new();
    for line in doc.iter().map(|line| line.trim()).chain([""]) {
        if line.is_empty() {
            if !open.is_empty() {
                out.push(std::mem::take(&mut open));
            }
            continue;
        }
        if !open.is_empty() {
            open.push(' ');
        }
        open.push_str(line);
    }
    out
}

/// Builder steps of a table row. All are `const`, so a nonsensical row does not compile.
impl Spec {
    /// Takes default and range from the declaration that the option's owner reads, too.
    pub(crate) const fn of<T>(mut self, row: &Row<T>) -> Self {
        self.default = row.text;
        match row.range {
            Range::Type => self,
            Range::Whole { min, max } => self.ints(min, max),
            Range::Number {
                min,
                max,
                above_min,
            } => {
                let mut narrowed = self.floats(min, max);
                if above_min {
                    narrowed.kind = Kind::Float {
                        min,
                        max,
                        above_min,
                    };
                }
                narrowed
            }
        }
    }

    pub(crate) const fn default(mut self, text: &'static str) -> Self {
        self.default = Some(text);
        self
    }

    pub(crate) const fn default_note(mut self, text: &'static str) -> Self {
        self.default_note = Some(text);
        self
    }

    pub(crate) const fn env(mut self, env: &'static [EnvVar]) -> Self {
        self.env = env;
        self
    }

    pub(crate) const fn aliases(mut self, aliases: &'static [&'static str]) -> Self {
        self.aliases = aliases;
        self
    }

    pub(crate) const fn short(mut self, letter: char) -> Self {
        self.short = Some(letter);
        self
    }

    pub(crate) const fn scope(mut self, scope: Scope) -> Self {
        self.scope = scope;
        self
    }

    pub(crate) const fn metavar(mut self, metavar: &'static str) -> Self {
        self.metavar = metavar;
        self
    }

    /// Narrows a whole number to `min..=max`.
    pub(crate) const fn ints(mut self, min: u64, max: u64) -> Self {
        let Kind::Int { max: type_max, .. } = self.kind else {
            panic!("ints() is for whole numbers")
        };
        assert!(
            min <= max && max <= type_max,
            "the range must fit the option's type"
        );
        self.kind = Kind::Int { min, max };
        self
    }

    /// Narrows a number to `min..=max`.
    pub(crate) const fn floats(mut self, min: f64, max: f64) -> Self {
        let Kind::Float { max: type_max, .. } = self.kind else {
            panic!("floats() is for numbers")
        };
        assert!(
            min <= max && max <= type_max,
            "the range must fit the option's type"
        );
        self.kind = Kind::Float {
            min,
            max,
            above_min: false,
        };
        self
    }

    /// Narrows a number to above zero.
    pub(crate) const fn positive(mut self) -> Self {
        let Kind::Float { max, .. } = self.kind else {
            panic!("positive() is for numbers")
        };
        self.kind = Kind::Float {
            min: 0.0,
            max,
            above_min: true,
        };
        self
    }

    /// Requires of a text more than not being empty.
    pub(crate) const fn rule(mut self, rule: &'static crate::value::TextRule) -> Self {
        assert!(matches!(self.kind, Kind::Text(_)), "rule() is for texts");
        self.kind = Kind::Text(rule);
        self.metavar = rule.metavar;
        self
    }

    /// The feature is there. Tidy then wants a reader outside of this crate's table.
    pub(crate) const fn effective(mut self) -> Self {
        self.effect = Effect::Now;
        self
    }

    /// Part of the feature is there; `note` says which, as a sentence without its full stop.
    #[must_use]
    pub const fn partly(mut self, note: &'static str) -> Self {
        self.effect = Effect::Partly(note);
        self
    }

    /// It will never do anything; `note` says what to do instead.
    pub(crate) const fn ignored(mut self, note: &'static str) -> Self {
        self.effect = Effect::Never;
        self.deprecated = Some(note);
        self
    }

    /// Still works, warns; `note` says what to use instead.
    pub(crate) const fn deprecated(mut self, note: &'static str) -> Self {
        self.deprecated = Some(note);
        self
    }

    /// Only on the command line: it would mean nothing elsewhere.
    pub(crate) const fn flag_only(mut self) -> Self {
        self.sources = Sources {
            flag: true,
            env: false,
            file: false,
        };
        self
    }

    /// Not in a file: it says which file to read.
    pub(crate) const fn not_in_file(mut self) -> Self {
        self.sources.file = false;
        self
    }

    /// Never printed, and not a flag: other users of a machine can read command lines.
    pub(crate) const fn secret(mut self) -> Self {
        self.secret = true;
        self.sources.flag = false;
        self
    }

    /// Its values hold commas, so only spaces part them in a variable.
    pub(crate) const fn space_separated(mut self) -> Self {
        assert!(self.repeated, "space_separated() is for repeatable options");
        self.comma_separated = false;
        self
    }

    pub(crate) const fn common(mut self) -> Self {
        self.common = true;
        self
    }
}

/// A variable of the same sense as its option.
pub(crate) const fn var(name: &'static str) -> EnvVar {
    EnvVar {
        name,
        negated: false,
    }
}

/// A variable of the opposite sense.
pub(crate) const fn negated_var(name: &'static str) -> EnvVar {
    EnvVar {
        name,
        negated: true,
    }
}

/// Declares rows: a typed key and its specification from one text. The documentation comment is
/// both the help and the rustdoc. `of router` takes default and range from the row of the same name in
/// `kvasir_options::router`.
macro_rules! options {
    ($table:ident, $group:expr, $scope:expr; $(
        $(#[doc = $doc:literal])+
        $key:ident: $ty:ty = $name:literal $(of $owner:ident)? $(=> $($step:ident($($arg:expr),*)).+)?;
    )+) => {
        $(
            $(#[doc = $doc])+
            pub const $key: $crate::spec::Key<$ty> = $crate::spec::Key::new($name);
        )+
        pub(crate) const $table: &[$crate::spec::Spec] = &[ $(
            $crate::spec::Spec::new::<$ty>($name, $group, $scope, &[$($doc),+])
                $(.of(&kvasir_options::$owner::$key))?
                $($(.$step($($arg),*))+)?
        ),+ ];
    };
}
pub(crate) use options;
