//! The command line.
//!
//! Answers: which options does this command line set, to which texts? It splits words and looks
//! names up in the table; whether a text is a legal value is asked later, in one place for all
//! sources.
//!
//! Rules: `--name value` and `--name=value`; a switch takes no separate value, has a `--no-` form
//! and accepts `--name=false`; the last of several wins, repeatable options collect. `--` ends
//! options. A negative number is a value, a word with two dashes never is.

use crate::command::Scope;
use crate::error::{NameScope, Problem, quoted};
use crate::nearest::nearest;
use crate::settings::{Assignment, Origin};
use crate::spec::Spec;
use crate::table;

/// What a command line asks for.
#[derive(Debug, Default)]
pub(crate) struct ParsedArgs {
    pub(crate) assignments: Vec<Assignment>,
    pub(crate) operands: Vec<String>,
    pub(crate) help: Option<HelpLength>,
    pub(crate) version: bool,
    pub(crate) problems: Vec<Problem>,
}

/// `-h` or `--help`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HelpLength {
    Short,
    Full,
}

/// Splits the words after the command. `scope` are the commands whose options are allowed.
pub(crate) fn scan(words: &[String], scope: Scope, command: &str) -> ParsedArgs {
    let mut scanner = ArgParser {
        words,
        at: 0,
        scope,
        command,
        out: ParsedArgs::default(),
    };
    while let Some(word) = scanner.next_word() {
        scanner.take(&word);
    }
    scanner.out
}

struct ArgParser<'a> {
    words: &'a [String],
    at: usize,
    scope: Scope,
    command: &'a str,
    out: ParsedArgs,
}

impl ArgParser<'_> {
    fn next_word(&mut self) -> Option<String> {
        let word = self.words.get(self.at).cloned();
        self.at += 1;
        word
    }

    /// Consumes the following word if it can be a value.
    fn next_value(&mut self) -> Option<String> {
        let word = self
            .words
            .get(self.at)
            .filter(|word| !looks_like_flag(word))
            .cloned();
        self.at += usize::from(word.is_some());
        word
    }

    fn take(&mut self, word: &str) {
        match word {
            "-h" => self.out.help = self.out.help.or(Some(HelpLength::Short)),
            "--help" => self.out.help = Some(HelpLength::Full),
            "-V" | "--version" => self.out.version = true,
            "--" => {
                let rest = self.words.get(self.at..).unwrap_or_default();
                self.out.operands.extend(rest.iter().cloned());
                self.at = self.words.len();
            }
            _ if word.starts_with("--") => self.long(word),
            _ if looks_like_flag(word) => self.short(word),
            _ => self.operand(word),
        }
    }

    fn operand(&mut self, word: &str) {
        self.out.operands.push(word.into());
    }

    fn long(&mut self, word: &str) {
        let body = word.trim_start_matches('-');
        let (name, inline) = match body.split_once('=') {
            Some((name, text)) => (name, Some(text.to_owned())),
            None => (body, None),
        };
        let named = |name: &str| table::named_for(name, self.scope);
        let positive = named(name).map(|spec| (spec, false));
        let negative = || {
            let spec = named(name.strip_prefix("no-")?)?;
            spec.is_switch().then_some((spec, true))
        };
        match positive.or_else(negative) {
            Some((spec, negated)) => self.found(spec, &format!("--{name}"), inline, negated),
            None => self.unknown(&format!("--{name}"), inline.is_some()),
        }
    }

    fn short(&mut self, word: &str) {
        let mut letters = word.chars().skip(1);
        let found = letters.next().and_then(|letter| {
            table::all().find(|spec| spec.short == Some(letter) && spec.scope.meets(self.scope))
        });
        match (found, letters.next()) {
            (Some(spec), None) => self.found(spec, word, None, false),
            _ => self.unknown(word, false),
        }
    }

    /// Reports a name that is no option, and skips what was probably its value.
    fn unknown(&mut self, written: &str, has_inline: bool) {
        if !has_inline {
            self.next_value();
        }
        let scoped = NameScope(Some(self.scope));
        self.out
            .problems
            .push(Problem::unknown_name(written, "--", "flag", scoped));
    }

    fn found(&mut self, spec: &'static Spec, written: &str, inline: Option<String>, negated: bool) {
        let text = if spec.is_switch() {
            self.warn_of_detached_value(spec, inline.is_some());
            Some(inline.unwrap_or_else(|| "true".into()))
        } else {
            inline.or_else(|| self.next_value())
        };
        if !spec.sources.flag || !spec.scope.meets(self.scope) {
            self.out.problems.push(self.misplaced(spec, written));
            return;
        }
        let Some(text) = text else {
            let expects = spec.kind.expects();
            let problem = Problem::MissingValue {
                option: spec.name,
                metavar: spec.metavar,
                expects,
            };
            self.out.problems.push(problem);
            return;
        };
        self.assign(spec, written, text, negated);
    }

    fn assign(&mut self, spec: &'static Spec, written: &str, text: String, negated: bool) {
        if spec.repeated {
            let earlier = self
                .out
                .assignments
                .iter_mut()
                .find(|a| a.spec.name == spec.name);
            if let Some(earlier) = earlier {
                earlier.texts.push(text);
                return;
            }
        }
        let origin = Origin::Flag(written.into());
        self.out.assignments.push(Assignment {
            spec,
            texts: vec![text],
            negated,
            origin,
        });
    }

    /// `--router-kv-events false` would otherwise switch it on and leave a stray word.
    fn warn_of_detached_value(&mut self, spec: &Spec, has_inline: bool) {
        let next = self.words.get(self.at).map(String::as_str);
        if has_inline || !matches!(next, Some("true" | "false")) {
            return;
        }
        self.at += 1;
        let name = spec.name;
        self.out.problems.push(Problem::Misplaced {
            option: name,
            message: format!(
                "--{name} takes no separate value; write --{name} or --no-{name}, \
                 or --{name}=false with an equals sign"
            ),
        });
    }

    fn misplaced(&self, spec: &Spec, written: &str) -> Problem {
        let message = if spec.sources.flag {
            let others: Vec<_> = spec
                .scope
                .names()
                .iter()
                .map(|name| format!("kvasir {name}"))
                .collect();
            let here =
                table::all().filter(|spec| spec.sources.flag && spec.scope.meets(self.scope));
            let meant = nearest(spec.name, here.map(|spec| spec.name))
                .map(|name| format!(". Did you mean `--{name}`?"))
                .unwrap_or_default();
            format!(
                "{written} is not an option of kvasir {}, but of {}{meant}",
                self.command,
                others.join(", ")
            )
        } else {
            let variables: Vec<_> = spec.env.iter().map(|var| var.name).collect();
            format!(
                "{written} cannot be a flag, since other users can read command lines; set {} \
                 or {} in the --config file",
                variables.join(" or "),
                quoted(spec.name)
            )
        };
        Problem::Misplaced {
            option: spec.name,
            message,
        }
    }
}

/// A dash and something that is not a number.
fn looks_like_flag(word: &str) -> bool {
    let Some(rest) = word.strip_prefix('-') else {
        return false;
    };
    !rest.is_empty() && rest.parse::<f64>().is_err()
}
