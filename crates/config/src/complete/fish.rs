//! Completions for fish.

use std::fmt::Write as _;

use super::{Values, Word, flags, quoted, summary, values};

pub(super) fn script(words: &[Word]) -> String {
    let mut out = String::from(
        "# Completions of kvasir for fish: put this into ~/.config/fish/completions/kvasir.fish.\n\n\
         complete -c kvasir -f\n\
         complete -c kvasir -s h -l help -d 'Short or full help'\n\
         complete -c kvasir -n __fish_use_subcommand -s V -l version -d Version\n",
    );
    for word in words {
        let _ = writeln!(
            out,
            "complete -c kvasir -n __fish_use_subcommand -a {} -d {}",
            word.name,
            quoted(&word.summary)
        );
    }
    for word in words {
        let when = quoted(&format!("__fish_seen_subcommand_from {}", word.name));
        if !word.operands.is_empty() {
            let _ = writeln!(
                out,
                "complete -c kvasir -n {when} -a {}",
                quoted(&word.operands.join(" "))
            );
        }
        for spec in &word.options {
            let value = match values(spec) {
                Values::None => String::new(),
                Values::Names(names) => format!(" -x -a {}", quoted(&names.join(" "))),
                Values::Path => " -r -F".to_owned(),
                Values::Free => " -x".to_owned(),
            };
            for flag in flags(spec) {
                let _ = writeln!(
                    out,
                    "complete -c kvasir -n {when} -l {}{value} -d {}",
                    flag.trim_start_matches('-'),
                    quoted(&summary(spec))
                );
            }
        }
    }
    out
}
