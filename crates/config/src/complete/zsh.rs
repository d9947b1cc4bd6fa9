//! Completions for zsh.

use std::fmt::Write as _;

use super::{Values, Word, flags, quoted, summary, values};
use crate::spec::Spec;

pub(super) fn script(words: &[Word]) -> String {
    let mut out = String::from(
        "#compdef kvasir\n# Completions of kvasir for zsh: put this into a folder of $fpath as `_kvasir`.\n\n\
         _kvasir() {\n    local context state state_descr line\n    typeset -A opt_args\n    \
         _arguments -C '(- *)'{-h,--help}'[help]' '(- *)'{-V,--version}'[version]' '1: :->command' '*:: :->rest'\n    \
         case $state in\n    command)\n        local -a commands=(\n",
    );
    for word in words {
        let row = format!("{}:{}", word.name, word.summary.replace(':', "\\:"));
        let _ = writeln!(out, "            {}", quoted(&row));
    }
    out.push_str(
        "        )\n        _describe command commands ;;\n    rest)\n        case $line[1] in\n",
    );
    for word in words {
        let _ = writeln!(out, "        {})\n            _arguments -S \\", word.name);
        for spec in &word.options {
            for argument in arguments(spec) {
                let _ = writeln!(out, "                {} \\", quoted(&argument));
            }
        }
        let operands = match word.operands.is_empty() {
            true => String::from(" "),
            false => format!("({})", word.operands.join(" ")),
        };
        let _ = writeln!(
            out,
            "                '(- *)'{{-h,--help}}'[help]' \\\n                {} ;;",
            quoted(&format!("*: :{operands}"))
        );
    }
    out.push_str("        esac ;;\n    esac\n}\n\nif [[ $funcstack[1] == _kvasir ]]; then\n    _kvasir \"$@\"\nelse\n    compdef _kvasir kvasir\nfi\n");
    out
}

/// The specifications that `_arguments` takes for an option.
fn arguments(spec: &Spec) -> Vec<String> {
    let text = summary(spec)
        .replace('\\', "\\\\")
        .replace('[', "\\[")
        .replace(']', "\\]")
        .replace(':', "\\:");
    let often = if spec.repeated { "*" } else { "" };
    let metavar = spec.metavar.replace(':', " ");
    let value = match values(spec) {
        Values::None => {
            let row = |flag: String| format!("{flag}[{text}]");
            return flags(spec).into_iter().map(row).collect();
        }
        Values::Names(names) => format!(":{metavar}:({})", names.join(" ")),
        Values::Path => format!(":{metavar}:_files"),
        Values::Free => format!(":{metavar}: "),
    };
    vec![format!("{often}--{}=[{text}]{value}", spec.name)]
}
