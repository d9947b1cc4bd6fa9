//! The files of the repository.
//!
//! Answers: which files are there, and what do they say? Rules get a [`Tree`] and never touch the
//! disk themselves, so that their tests can build one from a few lines.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Largest file whose text is looked at; beyond it are recordings.
const TEXT_BYTES_MAX: u64 = 1 << 20;

/// Paths from the root, with their text where they are text.
#[derive(Debug, Default)]
pub(crate) struct Tree {
    /// Where the repository is.
    pub(crate) root: PathBuf,
    files: BTreeMap<String, Option<String>>,
}

impl Tree {
    /// Reads what git tracks or would track.
    pub(crate) fn open() -> Result<Self, String> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"))
            .parent()
            .ok_or("xtask has no parent directory")?
            .to_path_buf();
        let listing = Command::new("git")
            .args([
                "ls-files",
                "-z",
                "--cached",
                "--others",
                "--exclude-standard",
            ])
            .current_dir(&root)
            .output()
            .map_err(|error| format!("cannot run git: {error}"))?;
        if !listing.status.success() {
            let reason = String::from_utf8_lossy(&listing.stderr).into_owned();
            return Err(format!("git ls-files failed: {reason}"));
        }
        let names = String::from_utf8_lossy(&listing.stdout).into_owned();
        let files = names
            .split('\0')
            .filter(|name| !name.is_empty() && root.join(name).is_file())
            .map(|name| (name.to_owned(), read_text(&root.join(name))))
            .collect();
        Ok(Self { root, files })
    }

    /// A tree of a few files, for the tests of rules.
    #[cfg(test)]
    pub(crate) fn of(files: &[(&str, &str)]) -> Self {
        let files = files
            .iter()
            .map(|(name, text)| ((*name).to_owned(), Some((*text).to_owned())));
        Self {
            root: PathBuf::new(),
            files: files.collect(),
        }
    }

    /// Text files, in the order of their names.
    pub(crate) fn texts(&self) -> impl Iterator<Item = (&str, &str)> {
        self.files
            .iter()
            .filter_map(|(name, text)| Some((name.as_str(), text.as_deref()?)))
    }

    /// Rust sources.
    pub(crate) fn sources(&self) -> impl Iterator<Item = (&str, &str)> {
        self.texts().filter(|(name, _)| has_extension(name, "rs"))
    }

    /// Names of all files.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.files.keys().map(String::as_str)
    }

    /// The text of a file.
    pub(crate) fn text(&self, name: &str) -> Option<&str> {
        self.files.get(name)?.as_deref()
    }

    /// Whether a path is a file or a directory of the repository.
    pub(crate) fn has(&self, path: &str) -> bool {
        let path = path.trim_end_matches('/');
        let below = format!("{path}/");
        self.files.contains_key(path) || self.files.keys().any(|name| name.starts_with(&below))
    }
}

fn read_text(path: &Path) -> Option<String> {
    let size = std::fs::metadata(path).ok()?.len();
    if size > TEXT_BYTES_MAX {
        return None;
    }
    std::fs::read_to_string(path).ok()
}

/// Whether a name ends in `.extension`.
pub(crate) fn has_extension(name: &str, extension: &str) -> bool {
    Path::new(name)
        .extension()
        .is_some_and(|found| found == extension)
}
