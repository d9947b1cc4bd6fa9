//! Rust sources as words.
//!
//! Answers: which words does a source consist of, once comments, texts and tests are left out? Rules that look for
//! declarations and paths read these and never the text.
//!
//! Elsewhere: what the words mean (`cycles`, `names`).

use std::collections::BTreeSet;

use crate::tree::Tree;

/// A name, `::`, or one other character, with its line from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Word<'a> {
    pub(crate) text: &'a str,
    pub(crate) line: usize,
}

/// The sources of a crate, test modules left out: path below `folder`, and words.
pub(crate) fn sources<'a>(tree: &'a Tree, folder: &str) -> Vec<(&'a str, Vec<Word<'a>>)> {
    let prefix = format!("{folder}/src/");
    let mut tests = BTreeSet::new();
    let mut found = Vec::new();
    for (path, text) in tree.sources() {
        let Some(name) = path.strip_prefix(&prefix) else {
            continue;
        };
        let (words, modules) = without_tests(&words(text));
        let children = children_of(name);
        tests.extend(
            modules
                .iter()
                .map(|module| format!("{children}{}", module.text)),
        );
        found.push((name, words));
    }
    let is_test = |name: &str| {
        let stem = name.trim_end_matches(".rs");
        tests
            .iter()
            .any(|test| stem == test || stem.starts_with(&format!("{test}/")))
    };
    found.retain(|(name, _)| !is_test(name));
    found
}

/// Where the modules are that a file declares: nothing for `lib.rs`, `a/` for `a.rs` and `a/mod.rs`.
fn children_of(name: &str) -> String {
    let stem = name.trim_end_matches(".rs");
    match stem.rsplit_once('/') {
        Some((folder, "mod")) => format!("{folder}/"),
        None if matches!(stem, "lib" | "main") => String::new(),
        _ => format!("{stem}/"),
    }
}

/// Words of a source.
pub(crate) fn words(source: &str) -> Vec<Word<'_>> {
    let mut found = Vec::new();
    let (mut rest, mut line) = (source, 1);
    while let Some(first) = rest.chars().next() {
        let (text, is_word) = match left_out(rest, first) {
            Some(length) => (rest.get(..length), false),
            None => (rest.get(..word_length(rest, first)), true),
        };
        let text = text.unwrap_or(rest);
        if is_word {
            found.push(Word { text, line });
        }
        line += text.matches('\n').count();
        rest = rest.get(text.len()..).unwrap_or_default();
    }
    found
}

fn word_length(rest: &str, first: char) -> usize {
    match first {
        ':' if rest.starts_with("::") => 2,
        _ if is_name(first) => rest.find(|c| !is_name(c)).unwrap_or(rest.len()),
        _ => first.len_utf8(),
    }
}

/// The length of the space, comment, text, character or lifetime that begins here.
fn left_out(rest: &str, first: char) -> Option<usize> {
    match first {
        _ if first.is_whitespace() => Some(first.len_utf8()),
        '/' if rest.starts_with("//") => Some(rest.find('\n').unwrap_or(rest.len())),
        '/' if rest.starts_with("/*") => Some(comment_length(rest)),
        '\'' => Some(quote_length(rest)),
        '"' => Some(text_length(rest)),
        'r' | 'b' | 'c' => {
            let prefix = word_length(rest, first);
            let (word, after) = rest.split_at(prefix);
            let hashes = after.len() - after.trim_start_matches('#').len();
            let text = after.get(hashes..)?.starts_with('"');
            match word {
                "r" | "br" | "cr" if text => Some(raw_length(rest, prefix + hashes + 1, hashes)),
                "b" | "c" if text && hashes == 0 => Some(prefix + text_length(after)),
                "b" if after.starts_with('\'') => Some(prefix + quote_length(after)),
                _ => None,
            }
        }
        _ => None,
    }
}

/// A raw text that has begun before `inner`.
fn raw_length(rest: &str, inner: usize, hashes: usize) -> usize {
    let closing = format!("\"{}", "#".repeat(hashes));
    let end = rest.get(inner..).and_then(|text| text.find(&closing));
    end.map_or(rest.len(), |at| inner + at + closing.len())
}

fn is_name(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Comments of this kind stand inside one another.
fn comment_length(rest: &str) -> usize {
    let (mut depth, mut at) = (0_usize, 0);
    while let Some(tail) = rest.get(at..).filter(|tail| !tail.is_empty()) {
        if tail.starts_with("/*") {
            (depth, at) = (depth + 1, at + 2);
        } else if tail.starts_with("*/") {
            (depth, at) = (depth - 1, at + 2);
            if depth == 0 {
                return at;
            }
        } else {
            at += tail.chars().next().map_or(1, char::len_utf8);
        }
    }
    rest.len()
}

/// A text in quotes, with what is escaped in it.
fn text_length(rest: &str) -> usize {
    let mut escaped = false;
    for (at, c) in rest.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '"' => return at + 1,
            _ => {}
        }
    }
    rest.len()
}

/// A character in quotes, or the name of a lifetime.
fn quote_length(rest: &str) -> usize {
    let mut inner = rest.char_indices().skip(1);
    let (Some((_, first)), second) = (inner.next(), inner.next()) else {
        return rest.len();
    };
    match second {
        _ if first == '\\' => {
            let close = inner.find(|(_, c)| *c == '\'');
            close.map_or(rest.len(), |(at, _)| at + 1)
        }
        Some((at, '\'')) => at + 1,
        _ => {
            let end = rest
                .char_indices()
                .skip(1)
                .find(|(_, c)| !is_name(*c))
                .map_or(rest.len(), |(at, _)| at);
            end.max(1)
        }
    }
}

/// The words outside of `#[cfg(test)]`, and the names of modules that are only there for tests.
fn without_tests<'a>(words: &[Word<'a>]) -> (Vec<Word<'a>>, Vec<Word<'a>>) {
    let (mut kept, mut modules) = (Vec::new(), Vec::new());
    let mut at = 0;
    while at < words.len() {
        if !is_test_attribute(words, at) {
            kept.push(words[at]);
            at += 1;
            continue;
        }
        let item = after_attributes(words, at);
        let end = end_of_item(words, item);
        let inner: Vec<_> = words[item..end].iter().map(|word| word.text).collect();
        if let [.., "mod", _, ";"] = inner[..] {
            modules.push(words[end - 2]);
        }
        at = end;
    }
    (kept, modules)
}

fn is_test_attribute(words: &[Word<'_>], at: usize) -> bool {
    let next: Vec<_> = words
        .iter()
        .skip(at)
        .take(7)
        .map(|word| word.text)
        .collect();
    matches!(
        next[..],
        ["#", "[", "cfg", "(", "test", ")", "]"] | ["#", "[", "cfg", "(", "all", "(", "test"]
    )
}

fn after_attributes(words: &[Word<'_>], mut at: usize) -> usize {
    let text = |at: usize| words.get(at).map_or("", |word| word.text);
    while text(at) == "#" && text(at + 1) == "[" {
        at = closing(words, at + 1) + 1;
    }
    at
}

/// One past the item that begins here: behind its braces, or behind its semicolon.
fn end_of_item(words: &[Word<'_>], mut at: usize) -> usize {
    while let Some(word) = words.get(at) {
        match word.text {
            ";" => return at + 1,
            "{" => return closing(words, at) + 1,
            "(" | "[" => at = closing(words, at) + 1,
            _ => at += 1,
        }
    }
    words.len()
}

/// Where the bracket that opens here is closed; the last word if it never is.
fn closing(words: &[Word<'_>], open: usize) -> usize {
    let mut depth = 0_usize;
    for (at, word) in words.iter().enumerate().skip(open) {
        match word.text {
            "{" | "(" | "[" => depth += 1,
            "}" | ")" | "]" => {
                depth = depth.saturating_sub(1);
                if depth == 0 {
                    return at;
                }
            }
            _ => {}
        }
    }
    words.len().saturating_sub(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(source: &str) -> Vec<&str> {
        words(source).iter().map(|word| word.text).collect()
    }

    #[test]
    fn comments_texts_and_characters_are_no_words() {
        assert_eq!(
            texts("a // b\n/* c /* d */ e */ f \"g \\\" h\" i"),
            ["a", "f", "i"]
        );
        assert_eq!(texts("r#\"a \" b\"# c br\"d\" b\"e\" f"), ["c", "f"]);
        assert_eq!(
            texts("'a' '\\'' '\\u{1F}' b'x' &'a str 'static"),
            ["&", "str"]
        );
        assert_eq!(texts("r::b(c)"), ["r", "::", "b", "(", "c", ")"]);
        assert_eq!(texts("fn é() { 'é' }"), ["fn", "é", "(", ")", "{", "}"]);
    }

    #[test]
    fn words_have_their_line_behind_texts_of_several() {
        let found = words("a\n\"b\nc\" d");
        assert_eq!(found.last(), Some(&Word { text: "d", line: 3 }));
    }

    #[test]
    fn unfinished_sources_end() {
        for source in ["\"a", "/* a", "r#\"a", "'", "'\\", "b'", "#[cfg(test)]"] {
            let all = words(source);
            without_tests(&all);
        }
    }

    #[test]
    fn what_is_only_for_tests_is_left_out_wherever_it_stands() {
        let tree = Tree::of(&[
            (
                "crates/a/src/lib.rs",
                "mod b;\n#[cfg(test)]\nmod support;\n#[cfg(test)]\nfn c(x: [u8; 2]) { d() }\nfn e() {}\n",
            ),
            (
                "crates/a/src/b.rs",
                "fn f() {}\n#[cfg(test)]\n#[expect(x)]\nmod tests;\n#[cfg(all(test, loom))]\nuse g;\n",
            ),
            ("crates/a/src/b/tests.rs", "fn h() {}"),
            ("crates/a/src/b/tests/more.rs", "fn i() {}"),
            ("crates/a/src/support/x.rs", "fn j() {}"),
            ("crates/a/src/support.rs", "fn k() {}"),
            ("crates/b/src/lib.rs", "fn l() {}"),
        ]);
        let found: Vec<_> = sources(&tree, "crates/a")
            .into_iter()
            .map(|(name, words)| {
                let texts: Vec<_> = words.iter().map(|word| word.text).collect();
                (name, texts.join(" "))
            })
            .collect();
        assert_eq!(
            found,
            [
                ("b.rs", "fn f ( ) { }".to_owned()),
                ("lib.rs", "mod b ; fn e ( ) { }".to_owned())
            ]
        );
    }
}
