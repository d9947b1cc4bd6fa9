//! The header of the C library.
//!
//! Answers: what does a C compiler have to know of `bindings/c/src/ffi.rs`? Reads its exported functions, its `repr` types and their
//! comments, in the shape that rustfmt gives them. A line that it does not understand is a finding, not a guess.

use std::fmt::Write as _;

use crate::tree::Tree;

const SOURCE: &str = "bindings/c/src/ffi.rs";

const HEAD: &str = "\
/* libkvasir: an engine tells of its cache, a gateway asks which worker a request should go to.
 *
 * Written by `cargo xtask docs` from bindings/c/src/ffi.rs; not to be changed by hand.
 *
 * Any function may be called from any thread. Pointers that are given are read during the call and never kept. What a result points to
 * belongs to the library and is given back with free_routing_result. A handle is looked up and never followed: one that was destroyed is an
 * error code. Where a call fails, kvasir_last_error says why.
 *
 * A process that forks uses the library in the child only if the parent had not begun to.
 */
#ifndef KVASIR_H
#define KVASIR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern \"C\" {
#endif
";

const FOOT: &str = "
#ifdef __cplusplus
}
#endif

#endif /* KVASIR_H */
";

/// The header as the source would have it; empty where there is no source.
pub(crate) fn page(tree: &Tree) -> String {
    let Some(source) = tree.text(SOURCE) else {
        return String::new();
    };
    match header(source) {
        Ok(text) => text,
        // It differs from what is checked in, so that tidy shows it.
        Err((line, why)) => format!("#error \"{SOURCE}:{line}: {why}\"\n"),
    }
}

/// A line of the source that cannot be said in C, and why.
type Unknown = (usize, String);

fn header(source: &str) -> Result<String, Unknown> {
    let mut out = String::from(HEAD);
    let mut comment: Vec<&str> = Vec::new();
    let mut lines = source.lines().enumerate();
    while let Some((at, line)) = lines.next() {
        let bad = |why: String| (at + 1, why);
        if let Some(text) = line.strip_prefix("///") {
            comment.push(text);
            continue;
        }
        if let Some(name) = between(line, "pub enum ", " {") {
            let body = taken(&mut lines, |line| line == "}");
            codes(name, &comment, &body, &mut out).map_err(bad)?;
        } else if let Some(name) = between(line, "pub struct ", " {") {
            let body = taken(&mut lines, |line| line == "}");
            structure(name, &comment, &body, &mut out).map_err(bad)?;
        } else if let Some(begin) = exported(line) {
            let mut whole = begin.to_owned();
            if !whole.ends_with('{') {
                for line in taken(&mut lines, |line| line.starts_with(')')) {
                    whole.push_str(line.trim());
                    whole.push(' ');
                }
            }
            function(&whole, &comment, &mut out).map_err(bad)?;
        } else if line.starts_with("pub ") {
            return Err(bad(format!("`{line}` is not something that C can see")));
        } else if !line.is_empty() {
            // An attribute, or something that is not exported: an empty line ends it.
            continue;
        }
        comment.clear();
    }
    out.push_str(FOOT);
    Ok(out)
}

fn between<'a>(line: &'a str, begin: &str, end: &str) -> Option<&'a str> {
    line.strip_prefix(begin)?.strip_suffix(end)
}

/// An exported function from its name on.
fn exported(line: &str) -> Option<&str> {
    let line = line.strip_prefix("pub ")?;
    let line = line.strip_prefix("unsafe ").unwrap_or(line);
    line.strip_prefix("extern \"C\" fn ")
}

/// Lines up to one that ends them, with it.
fn taken<'a>(
    lines: &mut impl Iterator<Item = (usize, &'a str)>,
    is_last: impl Fn(&str) -> bool,
) -> Vec<&'a str> {
    let mut body = Vec::new();
    for (_, line) in lines {
        body.push(line);
        if is_last(line) {
            break;
        }
    }
    body
}

/// A comment, in front of what it is about.
fn remark(comment: &[&str], indent: &str, out: &mut String) {
    let lines: Vec<String> = comment
        .iter()
        .map(|line| line.trim().trim_start_matches("# ").replace('`', ""))
        .collect();
    let _ = match &lines[..] {
        [] => Ok(()),
        [one] => writeln!(out, "{indent}/* {one} */"),
        [first, rest @ ..] => {
            let _ = writeln!(out, "{indent}/* {first}");
            for line in rest {
                let _ = writeln!(out, "{}", format!("{indent} * {line}").trim_end());
            }
            writeln!(out, "{indent} */")
        }
    };
}

/// An enumeration is its number: a value that a newer library adds is no undefined behaviour in an older program.
fn codes(name: &str, comment: &[&str], body: &[&str], out: &mut String) -> Result<(), String> {
    out.push('\n');
    remark(comment, "", out);
    let _ = writeln!(out, "typedef uint32_t {name};");
    out.push_str("enum {\n");
    let mut about: Vec<&str> = Vec::new();
    for line in body.iter().map(|line| line.trim()) {
        if let Some(text) = line.strip_prefix("///") {
            about.push(text);
        } else if let Some((variant, value)) = line.trim_end_matches(',').split_once(" = ") {
            remark(&about, "    ", out);
            about.clear();
            let _ = writeln!(out, "    {}_{} = {value},", loud(name), loud(variant));
        } else if line != "}" {
            return Err(format!("`{line}` is no variant with a number"));
        }
    }
    out.push_str("};\n");
    Ok(())
}

/// `ErrInvalidHandle` as `ERR_INVALID_HANDLE`.
fn loud(name: &str) -> String {
    let mut out = String::new();
    for (at, letter) in name.char_indices() {
        if letter.is_ascii_uppercase() && at > 0 {
            out.push('_');
        }
        out.push(letter.to_ascii_uppercase());
    }
    out
}

fn structure(name: &str, comment: &[&str], body: &[&str], out: &mut String) -> Result<(), String> {
    out.push('\n');
    remark(comment, "", out);
    if !body.iter().any(|line| line.trim().starts_with("pub ")) {
        let _ = writeln!(out, "typedef struct {name} {name};");
        return Ok(());
    }
    let _ = writeln!(out, "typedef struct {name} {{");
    let mut about: Vec<&str> = Vec::new();
    for line in body.iter().map(|line| line.trim()) {
        if let Some(text) = line.strip_prefix("///") {
            about.push(text);
        } else if let Some(field) = line.strip_prefix("pub ") {
            remark(&about, "    ", out);
            about.clear();
            let _ = writeln!(out, "    {};", declared(field.trim_end_matches(','))?);
        } else if line != "}" {
            return Err(format!("`{line}` is no field"));
        }
    }
    let _ = writeln!(out, "}} {name};");
    Ok(())
}

/// `name(a: A, b: B) -> C {`
fn function(whole: &str, comment: &[&str], out: &mut String) -> Result<(), String> {
    let parts = whole.trim().trim_end_matches('{').trim();
    let (name, rest) = parts.split_once('(').ok_or("no arguments")?;
    let (arguments, result) = rest.rsplit_once(')').ok_or("no end of the arguments")?;
    let result = match result.trim().strip_prefix("-> ") {
        None => "void ".to_owned(),
        Some(of) => in_c(of)?,
    };
    let arguments: Result<Vec<String>, String> = arguments
        .split(',')
        .map(str::trim)
        .filter(|argument| !argument.is_empty())
        .map(declared)
        .collect();
    let arguments = match arguments?.join(", ") {
        none if none.is_empty() => "void".to_owned(),
        some => some,
    };
    out.push('\n');
    remark(comment, "", out);
    let _ = writeln!(out, "{result}{name}({arguments});");
    Ok(())
}

/// `name: T` as C declares it.
fn declared(field: &str) -> Result<String, String> {
    let (name, of) = field
        .split_once(": ")
        .ok_or_else(|| format!("`{field}` has no type"))?;
    Ok(format!("{}{name}", in_c(of)?))
}

/// A type in C, with what stands between it and a name.
fn in_c(of: &str) -> Result<String, String> {
    if let Some(of) = of.strip_prefix("*const ") {
        return Ok(format!("const {}*", in_c(of)?));
    }
    if let Some(of) = of.strip_prefix("*mut ") {
        return Ok(format!("{}*", in_c(of)?));
    }
    Ok(match of {
        "bool" => "bool ",
        "c_char" => "char ",
        "u8" => "uint8_t ",
        "u32" => "uint32_t ",
        "u64" => "uint64_t ",
        "usize" => "size_t ",
        name if name.starts_with(|c: char| c.is_ascii_uppercase()) => {
            return Ok(format!("{name} "));
        }
        other => return Err(format!("`{other}` has no name in C")),
    }
    .to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE_TEXT: &str = "\
//! Header.

const HIDDEN: usize = 1;

/// Codes.
#[repr(u32)]
#[derive(Clone, Copy)]
pub enum QueryResult {
    /// Fine.
    Ok = 0,
    ErrInvalidHandle = 1,
}

/// Opaque.
#[repr(C)]
pub struct Handles {
    _opaque: [u8; 0],
}

#[repr(C)]
pub struct Found {
    /// How many.
    pub count: usize,
    pub ids: *mut u32,
}

/// Asks.
///
/// # Safety
/// Text.
#[unsafe(no_mangle)]
pub unsafe extern \"C\" fn ask(
    name: *const c_char,
    out: *mut *mut Handles,
) -> QueryResult {
    pub_like();
}

#[unsafe(no_mangle)]
pub extern \"C\" fn end(handle: *mut Handles) {
}

#[unsafe(no_mangle)]
pub extern \"C\" fn version() -> *const c_char {
}

fn hidden() {}
";

    #[test]
    fn what_is_exported_is_said_in_c() {
        let text = header(SOURCE_TEXT).unwrap();
        for line in [
            "/* Codes. */\ntypedef uint32_t QueryResult;\nenum {\n    /* Fine. */\n    QUERY_RESULT_OK = 0,\n    QUERY_RESULT_ERR_INVALID_HANDLE = 1,\n};",
            "/* Opaque. */\ntypedef struct Handles Handles;",
            "typedef struct Found {\n    /* How many. */\n    size_t count;\n    uint32_t *ids;\n} Found;",
            "/* Asks.\n *\n * Safety\n * Text.\n */\nQueryResult ask(const char *name, Handles **out);",
            "void end(Handles *handle);",
            "const char *version(void);",
        ] {
            assert!(text.contains(line), "{line}\n---\n{text}");
        }
        assert!(!text.contains("hidden") && !text.contains("HIDDEN"));
    }

    #[test]
    fn what_c_cannot_see_is_named_with_its_line() {
        let (line, why) = header("//! H.\n\npub fn plain() {}\n").unwrap_err();
        assert_eq!(line, 3);
        assert!(why.contains("pub fn plain"), "{why}");
        let (_, why) = header("pub extern \"C\" fn f(text: &str) {\n}\n").unwrap_err();
        assert!(why.contains("&str"), "{why}");
    }
}
