//! Can a template be parsed at all without harm?
//!
//! The parser, the compiler and the tree they share go as deep as a template makes them: ten thousand `elif`, or a hundred
//! thousand `not`, take more stack than a thread has. So a template is looked through token by token first, and what is within
//! the bounds is parsed on a thread whose stack is known to hold it.

use std::thread;

use minijinja::machinery::{Token, tokenize};
use minijinja::syntax::SyntaxConfig;

/// Bytes of a template; the longest known ones have some 30,000.
const SOURCE_BYTES_MAX: usize = 1 << 20;
/// Tokens between `{%` and `%}`, or `{{` and `}}`: no expression is deeper than it has tokens.
const TAG_TOKENS_MAX: usize = 4096;
/// `elif` in one template: each is inside the one before it.
const ELIFS_MAX: usize = 1024;
/// What one level of the tree may take of the stack, with some to spare, where nothing is optimised.
const STACK_BYTES_PER_LEVEL: usize = 16 << 10;
/// The stack of the thread that parses: pages of it that are not used cost nothing.
const STACK_BYTES: usize = (TAG_TOKENS_MAX + ELIFS_MAX) * STACK_BYTES_PER_LEVEL;

/// Why a template is not parsed; none if it can be.
pub(super) fn obstacle(source: &str, syntax: SyntaxConfig) -> Option<String> {
    if source.len() > SOURCE_BYTES_MAX {
        let len = source.len();
        return Some(format!("{len} bytes; the limit is {SOURCE_BYTES_MAX}"));
    }
    let (mut in_tag, mut elifs) = (0, 0);
    for token in tokenize(source, false, syntax) {
        let Ok((token, _)) = token else {
            return None; // The parser says what is wrong.
        };
        match token {
            Token::BlockStart | Token::VariableStart | Token::TemplateData(_) => in_tag = 0,
            Token::Ident("elif") => elifs += 1,
            _ => {}
        }
        in_tag += 1;
        if in_tag > TAG_TOKENS_MAX {
            return Some(format!("a tag of more than {TAG_TOKENS_MAX} tokens"));
        }
        if elifs > ELIFS_MAX {
            return Some(format!("more than {ELIFS_MAX} `elif`"));
        }
    }
    None
}

/// Runs `work` on a thread whose stack holds any tree that is within the bounds; none if there is no thread to be had, or
/// if it panicked.
pub(super) fn with_stack<T: Send>(work: impl FnOnce() -> T + Send) -> Option<T> {
    thread::scope(|scope| {
        let thread = thread::Builder::new().stack_size(STACK_BYTES);
        thread.spawn_scoped(scope, work).ok()?.join().ok()
    })
}
