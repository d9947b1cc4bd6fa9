//! What holds for any bytes that come from outside.
//!
//! A [`Target`] is a function of bytes that panics when a property does not hold, and says whether the bytes were accepted.
//! libFuzzer calls it (`fuzz/`), and so do bounded runs from seeds in the tests of this crate, which change the kept inputs of
//! `fuzz/seeds` with a [`Mutator`]. Nothing else depends on this crate.
//!
//! A property is never only "does not panic": the same bytes in other pieces give the same result, a second reader agrees,
//! what was read is written back the same, limits are kept.

mod answer;
mod answer_text;
mod body;
mod event_plane;
mod events;
mod mutate;
mod pieces;
mod request_plane;
mod snapshot;
mod sse;
mod template;
mod workers_file;

pub use mutate::Mutator;

/// One kind of input and what holds for it.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Its name, and that of its folder in `fuzz/seeds`.
    pub name: &'static str,
    /// Panics when a property does not hold; says whether the bytes were accepted.
    pub check: fn(&[u8]) -> bool,
    /// Longer inputs find little and take long.
    pub len_max: usize,
    /// What inputs are made of: put in where bytes are inserted.
    pub words: &'static [&'static str],
}

/// All of them.
pub const TARGETS: &[Target] = &[
    Target {
        name: "answer",
        check: answer::check,
        len_max: 4096,
        words: answer::WORDS,
    },
    Target {
        name: "answer_text",
        check: answer_text::check,
        len_max: 4096,
        words: answer_text::WORDS,
    },
    Target {
        name: "body",
        check: body::check,
        len_max: 4096,
        words: body::WORDS,
    },
    Target {
        name: "event_plane",
        check: event_plane::check,
        len_max: 4096,
        words: event_plane::WORDS,
    },
    Target {
        name: "events",
        check: events::check,
        len_max: 4096,
        words: &[],
    },
    Target {
        name: "index_snapshot",
        check: snapshot::check_index,
        len_max: 4096,
        words: &[],
    },
    Target {
        name: "request_plane",
        check: request_plane::check,
        len_max: 4096,
        words: request_plane::WORDS,
    },
    Target {
        name: "snapshot",
        check: snapshot::check,
        len_max: 4096,
        words: &[],
    },
    Target {
        name: "sse",
        check: sse::check,
        len_max: 4096,
        words: sse::WORDS,
    },
    Target {
        name: "template",
        check: template::check,
        len_max: 2048,
        words: template::WORDS,
    },
    Target {
        name: "workers_file",
        check: workers_file::check,
        len_max: 2048,
        words: workers_file::WORDS,
    },
];

/// Runs the target of this name, for a fuzzer.
///
/// # Panics
/// When a property does not hold, or there is no such target.
pub fn check(name: &str, bytes: &[u8]) {
    let target = TARGETS.iter().find(|target| target.name == name);
    assert!(target.is_some(), "there is no target {name}");
    if let Some(target) = target.filter(|target| bytes.len() <= target.len_max) {
        (target.check)(bytes);
    }
}
