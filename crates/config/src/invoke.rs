//! From a whole command line to what to do.
//!
//! Answers: run which command with which settings, print what, or refuse why? The order: command,
//! flags, file, variables, merge, rules between options.
//!
//! Elsewhere: each of those steps; this module only puts them together.

use std::ffi::OsString;
use std::io;
use std::path::Path;

use crate::args;
use crate::command::{Command, Scope};
use crate::complete::{self, Shell};
use crate::environment::{self, Environment};
use crate::error::{ConfigError, Problem, quoted};
use crate::file;
use crate::keys;
use crate::nearest::nearest;
use crate::notice::{self, Notice};
use crate::settings::{Assignment, Settings};
use crate::{help, man, rules, schema, show};

/// What the command line asks for.
#[derive(Debug)]
pub enum Invocation {
    /// Run a command.
    Run(Box<Run>),
    /// Print this to standard output and leave with code 0.
    Print(String),
}

/// A command and all it needs to know.
#[derive(Debug)]
pub struct Run {
    /// The command.
    pub command: Command,
    /// Its settings.
    pub settings: Settings,
    /// Words that are no options, as in `kvasir why ID`.
    pub operands: Vec<String>,
    /// What to log as warnings, once logging is up.
    pub notices: Vec<Notice>,
}

type ReadFile<'a> = &'a dyn Fn(&Path) -> io::Result<String>;

/// Reads a whole command line, without the program's own name.
///
/// `read_file` reads the `--config` file, so that tests need none.
///
/// ```
/// use kvasir_config::{Environment, Invocation, keys, parse};
/// let env = Environment::from_iter([("DYN_HTTP_PORT", "9000")]);
/// let args = ["frontend", "--worker", "http://a:8000"].map(Into::into);
/// let Invocation::Run(run) = parse(args, &env, |_| Err(std::io::ErrorKind::NotFound.into()))?
///     else { panic!("a command to run") };
/// assert_eq!(run.settings.get(keys::HTTP_PORT), 9000);
/// # Ok::<(), kvasir_config::ConfigError>(())
/// ```
pub fn parse(
    args: impl IntoIterator<Item = OsString>,
    env: &Environment,
    read_file: impl Fn(&Path) -> io::Result<String>,
) -> Result<Invocation, ConfigError> {
    let words: Vec<String> = args
        .into_iter()
        .map(|word| word.to_string_lossy().into_owned())
        .collect();
    let Some((first, rest)) = words.split_first() else {
        return Err(usage("no command is given; try: kvasir demo"));
    };
    match (first.as_str(), rest.first()) {
        ("-h" | "--help", _) | ("help", None) => Ok(Invocation::Print(help::overview())),
        ("help", Some(command)) => dispatch(command, &["--help".into()], env, &read_file),
        ("-V" | "--version", _) => Ok(Invocation::Print(version())),
        _ => dispatch(first, rest, env, &read_file),
    }
}

fn dispatch(
    word: &str,
    rest: &[String],
    env: &Environment,
    read_file: ReadFile<'_>,
) -> Result<Invocation, ConfigError> {
    match word {
        "config" => return config(rest, env, read_file),
        "completions" => return completions(rest),
        "man" => return manual(rest),
        _ => {}
    }
    match Command::named(word) {
        Some(command) => run(command, rest, env, read_file),
        None => Err(usage(no_such_command(word))),
    }
}

fn usage(message: impl Into<String>) -> ConfigError {
    ConfigError::new("kvasir", vec![Problem::usage(message)])
}

fn version() -> String {
    format!("kvasir {}\n", env!("CARGO_PKG_VERSION"))
}

fn no_such_command(word: &str) -> String {
    if word.starts_with('-') {
        let word = quoted(word);
        return format!("{word} comes before the command; write kvasir <command> first");
    }
    let pages = help::PAGES
        .iter()
        .filter_map(|(usage, _)| usage.split(' ').next());
    let commands = Command::ALL.iter().map(|command| command.name());
    let names = commands.chain(pages);
    // One that is known has no page of its own where this is asked.
    if names.clone().any(|name| name == word) {
        return format!("`{word}` has no page of its own; kvasir help shows how it is used");
    }
    let suggestion = nearest(word, names).map(|name| format!(". Did you mean `{name}`?"));
    format!(
        "unknown command {}{}",
        quoted(word),
        suggestion.unwrap_or_default()
    )
}

fn run(
    command: Command,
    words: &[String],
    env: &Environment,
    read_file: ReadFile<'_>,
) -> Result<Invocation, ConfigError> {
    let parsed = args::scan(words, command.scope(), command.name());
    if let Some(length) = parsed.help {
        return Ok(Invocation::Print(help::command(command, length)));
    }
    if parsed.version {
        return Ok(Invocation::Print(version()));
    }
    let mut problems = parsed.problems;
    let beyond = parsed.operands.get(command.operands_max());
    problems.extend(beyond.map(|word| stray(word, command.name())));
    match load(command, &parsed.assignments, env, read_file, problems) {
        Ok(loaded) => Ok(Invocation::Run(Box::new(Run {
            operands: parsed.operands,
            ..loaded
        }))),
        Err(problems) => Err(ConfigError::new(
            &format!("kvasir {}", command.name()),
            problems,
        )),
    }
}

fn stray(word: &str, command: &str) -> Problem {
    Problem::usage(format!(
        "kvasir {command} takes no argument {}; options begin with --",
        quoted(word)
    ))
}

/// `kvasir completions SHELL`.
fn completions(words: &[String]) -> Result<Invocation, ConfigError> {
    if wants_help(words) {
        return Ok(Invocation::Print(help::COMPLETIONS.to_owned()));
    }
    let shell = match words {
        [name] => Shell::named(name),
        _ => None,
    };
    match shell {
        Some(shell) => Ok(Invocation::Print(complete::script(shell))),
        None => Err(usage(format!(
            "kvasir completions needs one shell: bash, zsh or fish, not {}",
            quoted(&words.join(" "))
        ))),
    }
}

/// `kvasir man [COMMAND]`.
fn manual(words: &[String]) -> Result<Invocation, ConfigError> {
    if wants_help(words) {
        return Ok(Invocation::Print(help::MANUAL.to_owned()));
    }
    match words {
        [] => Ok(Invocation::Print(man::page(None))),
        [name] => match Command::named(name) {
            Some(command) => Ok(Invocation::Print(man::page(Some(command)))),
            None => Err(usage(no_such_command(name))),
        },
        [_, second, ..] => Err(ConfigError::new("kvasir man", vec![stray(second, "man")])),
    }
}

fn wants_help(words: &[String]) -> bool {
    words.iter().any(|word| word == "-h" || word == "--help")
}

/// `kvasir config show|check|schema`: the options of another command, looked at and not run.
fn config(
    words: &[String],
    env: &Environment,
    read_file: ReadFile<'_>,
) -> Result<Invocation, ConfigError> {
    let target = target_of(words);
    let scope = target.scope().and(Scope::CONFIG);
    let parsed = args::scan(words, scope, "config");
    if let Some(length) = parsed.help {
        return Ok(Invocation::Print(help::config(length)));
    }
    let mut problems = parsed.problems;
    let verb = parsed.operands.first().map(String::as_str);
    let verbs = ["show", "check", "schema"];
    if parsed.operands.len() != 1 || !verb.is_some_and(|verb| verbs.contains(&verb)) {
        let given = parsed.operands.join(" ");
        problems.push(Problem::usage(match verb {
            None => "kvasir config needs a subcommand: show, check or schema".into(),
            Some(_) => format!(
                "unknown subcommand {} of kvasir config; use show, check or schema",
                quoted(&given)
            ),
        }));
    }
    if verb == Some("schema") && problems.is_empty() {
        return Ok(Invocation::Print(schema::page()));
    }
    let loaded = load(target, &parsed.assignments, env, read_file, problems)
        .map_err(|problems| ConfigError::new("kvasir config", problems))?;
    let Run {
        settings, notices, ..
    } = &loaded;
    let changed = settings.get(keys::CHANGED);
    Ok(Invocation::Print(match verb {
        Some("check") => show::checked(settings, notices),
        _ if settings.get(keys::JSON) => show::json(settings, notices, changed),
        _ => show::text(settings, notices, changed),
    }))
}

/// The command that `--for` names. A bad name is reported when the options are checked.
fn target_of(words: &[String]) -> Command {
    let parsed = args::scan(words, Scope::CONFIG, "config");
    let named = parsed
        .assignments
        .iter()
        .rev()
        .find(|found| found.spec.name == keys::FOR.name());
    let text = named.and_then(|found| found.texts.last());
    text.and_then(|name| Command::named(name))
        .unwrap_or(Command::Frontend)
}

/// Merges the sources, applies and checks the rules.
fn load(
    command: Command,
    flags: &[Assignment],
    env: &Environment,
    read_file: ReadFile<'_>,
    mut problems: Vec<Problem>,
) -> Result<Run, Vec<Problem>> {
    let mut settings = Settings::defaults(command);
    let mut notices = Vec::new();
    let (variables, bad_variables) = environment::assignments(env, command.scope());
    let file = config_file(flags, &variables, command, read_file);
    // Lowest precedence first, so that later ones replace earlier ones; problems are reported the
    // other way round, nearest to the user first.
    let mut told = Vec::new();
    for assignment in file.assignments.iter().chain(&variables).chain(flags) {
        told.extend(settings.assign(assignment).err());
    }
    problems.extend(told.into_iter().rev());
    problems.extend(bad_variables);
    problems.extend(file.problems);
    notices.extend(file.notices);
    if problems.is_empty() {
        notices.extend(rules::apply(&mut settings));
        problems = rules::check(&settings);
    }
    if !problems.is_empty() {
        return Err(problems);
    }
    notices.splice(0..0, notice::of_status(&settings));
    notices.extend(environment::slips(env));
    Ok(Run {
        command,
        settings,
        operands: Vec::new(),
        notices,
    })
}

/// Reads the file that flag or variable name, if any.
fn config_file(
    flags: &[Assignment],
    variables: &[Assignment],
    command: Command,
    read_file: ReadFile<'_>,
) -> file::FileContent {
    let name = keys::CONFIG.name();
    let named = |from: &[Assignment]| {
        let found = from
            .iter()
            .rev()
            .find(|assignment| assignment.spec.name == name)?;
        found.texts.last().filter(|path| !path.is_empty()).cloned()
    };
    let Some(path) = named(flags).or_else(|| named(variables)) else {
        return file::FileContent::default();
    };
    match read_file(Path::new(&path)) {
        Ok(text) => file::read(&path, &text, command),
        Err(error) => {
            let message = format!("cannot read the --config file {}: {error}", quoted(&path));
            file::FileContent {
                problems: vec![Problem::File { message }],
                ..Default::default()
            }
        }
    }
}
