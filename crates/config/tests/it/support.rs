//! Small helpers: one call from words, variables and a file's text to a result.

use std::io;

use kvasir_config::{ConfigError, Environment, Invocation, Run, parse};

/// Parses a command line written as one would type it, without quotes.
pub(crate) fn invoke(
    line: &str,
    variables: &[(&str, &str)],
    file: Option<&str>,
) -> Result<Invocation, ConfigError> {
    let words: Vec<&str> = line.split_whitespace().collect();
    invoke_words(&words, variables, file)
}

/// The same with the words already apart.
pub(crate) fn invoke_words(
    words: &[&str],
    variables: &[(&str, &str)],
    file: Option<&str>,
) -> Result<Invocation, ConfigError> {
    let env = Environment::from_iter(variables.iter().copied());
    parse(words.iter().map(Into::into), &env, |_| {
        file.map(str::to_owned)
            .ok_or_else(|| io::ErrorKind::NotFound.into())
    })
}

/// The settings of a command line that must be right.
pub(crate) fn run(line: &str, variables: &[(&str, &str)]) -> Run {
    match invoke(line, variables, None) {
        Ok(Invocation::Run(run)) => *run,
        other => panic!("`{line}` should run: {other:?}"),
    }
}

/// The printed page of a command line that must be right.
pub(crate) fn printed(line: &str, variables: &[(&str, &str)], file: Option<&str>) -> String {
    match invoke(line, variables, file) {
        Ok(Invocation::Print(page)) => page,
        Ok(other) => panic!("`{line}` should print: {other:?}"),
        Err(error) => panic!("`{line}` should print:\n{error}"),
    }
}

/// The message of a command line that must be wrong.
pub(crate) fn refused(line: &str, variables: &[(&str, &str)], file: Option<&str>) -> String {
    match invoke(line, variables, file) {
        Err(error) => {
            assert_eq!(error.exit_code(), 2);
            error.to_string()
        }
        Ok(other) => panic!("`{line}` should be refused: {other:?}"),
    }
}
