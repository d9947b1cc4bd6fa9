//! Completions for bash.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::{Values, Word, flags, values};

/// What comes before the table of words.
const HEAD: &str = r#"# Completions of kvasir for bash: source this, or put it into the folder of bash-completion as `kvasir`.

_kvasir() {
    local cur prev command word options values operands i
    cur=${COMP_WORDS[COMP_CWORD]}
    prev=${COMP_WORDS[COMP_CWORD-1]}
    # bash parts words at `=`: --name=val is three of them.
    if [[ $cur == '=' ]]; then
        cur=
    elif [[ $prev == '=' ]]; then
        prev=${COMP_WORDS[COMP_CWORD-2]}
    fi
    command=
    for ((i = 1; i < COMP_CWORD; i++)); do
        word=${COMP_WORDS[i]}
        if [[ $word != -* ]]; then
            command=$word
            break
        fi
    done
    COMPREPLY=()
"#;

const TAIL: &str = r#"    esac
    if [[ $cur == -* ]]; then
        COMPREPLY=($(compgen -W "$options --help" -- "$cur"))
    else
        COMPREPLY=($(compgen -W "$operands" -- "$cur"))
    fi
}

complete -F _kvasir kvasir
"#;

pub(super) fn script(words: &[Word]) -> String {
    let mut out = String::from(HEAD);
    values_of_options(&mut out, words);
    out.push_str("    case $command in\n");
    let names: Vec<_> = words.iter().map(|word| word.name).collect();
    let _ = writeln!(
        out,
        "        '') options=--version operands='{}' ;;",
        names.join(" ")
    );
    for word in words {
        let options: Vec<String> = word.options.iter().flat_map(|spec| flags(spec)).collect();
        let _ = writeln!(
            out,
            "        {}) options='{}' operands='{}' ;;",
            word.name,
            options.join(" "),
            word.operands.join(" ")
        );
    }
    let _ = writeln!(out, "        *) return ;;");
    out.push_str(TAIL);
    out
}

/// What may follow an option, by its name. One name means one kind of value in all commands.
fn values_of_options(out: &mut String, words: &[Word]) {
    let mut names: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    let (mut paths, mut free) = (Vec::new(), Vec::new());
    for spec in words.iter().flat_map(|word| &word.options) {
        let flag = format!("--{}", spec.name);
        match values(spec) {
            Values::None => {}
            Values::Names(list) => {
                names.insert(flag, list);
            }
            Values::Path => paths.push(flag),
            Values::Free => free.push(flag),
        }
    }
    out.push_str("    case $prev in\n");
    for (flag, list) in names {
        let list = list.join(" ");
        let _ = writeln!(
            out,
            "        {flag}) COMPREPLY=($(compgen -W '{list}' -- \"$cur\")); return ;;"
        );
    }
    for list in [&mut paths, &mut free] {
        list.sort();
        list.dedup();
    }
    if !paths.is_empty() {
        let _ = writeln!(
            out,
            "        {})\n            compopt -o filenames 2>/dev/null\n            \
             COMPREPLY=($(compgen -f -- \"$cur\")); return ;;",
            paths.join("|")
        );
    }
    if !free.is_empty() {
        let _ = writeln!(out, "        {}) return ;;", free.join("|"));
    }
    out.push_str("    esac\n");
}
