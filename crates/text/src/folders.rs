//! Which folder has the tokenizer of which model: one for every model, or one for each (`--model-path`).

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use crate::{LoadError, TextModel};

/// A folder that cannot be used, and why.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct FolderError(String);

impl FolderError {
    /// A name that only a hub knows is the usual slip.
    #[must_use]
    pub fn new(folder: &str, error: &LoadError) -> Self {
        Self(match Path::new(folder).exists() {
            true => format!("{folder}: {error}"),
            false => format!(
                "{folder}: there is no such folder; give a local one with tokenizer.json and \
                 tokenizer_config.json in it (names of a hub are not downloaded)"
            ),
        })
    }
}

/// Tokenizers and templates by model.
#[derive(Debug, Default)]
pub struct ModelFolders {
    by_name: BTreeMap<String, Arc<TextModel>>,
    /// Of models that are not named.
    others: Option<Arc<TextModel>>,
}

impl ModelFolders {
    /// Loads what the option names: `FOLDER`, or `NAME=FOLDER,NAME=FOLDER…`; an error names the folder.
    pub fn load(option: Option<&str>) -> Result<Self, FolderError> {
        let mut folders = Self::default();
        for (name, folder) in parts(option.unwrap_or_default()) {
            let text = TextModel::load(Path::new(folder))
                .map_err(|error| FolderError::new(folder, &error))?;
            match name {
                Some(name) => drop(folders.by_name.insert(name.to_owned(), Arc::new(text))),
                None => folders.others = Some(Arc::new(text)),
            }
        }
        Ok(folders)
    }

    /// That of `model`, or of the model that it is an adapter of.
    #[must_use]
    pub fn of(&self, model: &str, parent: Option<&str>) -> Option<Arc<TextModel>> {
        let named = |name: &str| self.by_name.get(name);
        let found = named(model).or_else(|| named(parent?));
        found.or(self.others.as_ref()).cloned()
    }
}

/// Names and folders. A folder that is there may have any name, signs of equality and commas included.
fn parts(option: &str) -> Vec<(Option<&str>, &str)> {
    if Path::new(option).is_dir() {
        return vec![(None, option)];
    }
    let given = option.split(',').filter(|part| !part.is_empty());
    given
        .map(|part| match part.split_once('=') {
            Some((name, folder)) => (Some(name), folder),
            None => (None, part),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_folder_or_one_for_each() {
        assert_eq!(parts(""), []);
        assert_eq!(parts("/no/such"), [(None, "/no/such")]);
        assert_eq!(
            parts("a/b=/x,c=/y,/z"),
            [(Some("a/b"), "/x"), (Some("c"), "/y"), (None, "/z")]
        );
    }

    #[test]
    fn a_folder_that_is_not_there_is_named() {
        let error = ModelFolders::load(Some("m=/no/such")).unwrap_err();
        let error = error.to_string();
        assert!(
            error.starts_with("/no/such: there is no such folder"),
            "{error}"
        );
        assert!(error.contains("not downloaded"), "{error}");
    }
}
