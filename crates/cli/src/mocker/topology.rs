//! Where a mock engine says that it is, and how near it those are to be that take its prompts over.
//!
//! As workers of Dynamo do it: a folder has a file for each kind of place (`zone`, `rack`), which says the place's name. Who starts a
//! worker may still be writing them.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::time::Duration;

use kvasir_config::{Settings, TransferEnforcement, keys};
use serde_json::{Value, json};

use crate::wiring::{BadConfig, Failure};

/// How often the folder is read until it says what is needed.
const POLL: Duration = Duration::from_secs(1);
/// How many times.
const POLLS_MAX: u32 = 30;
/// Longest name of a place; what a file has behind that is not read.
const NAME_BYTES_MAX: usize = 256;

/// What a card says of it: fields and their values.
pub(super) type TopologyFields = Vec<(&'static str, Value)>;

/// Reads it, and waits for it where it is needed.
pub(super) async fn fields(settings: &Settings) -> Result<TopologyFields, Failure> {
    if !settings.get(keys::TOPOLOGY_ENABLED) {
        return Ok(Vec::new());
    }
    let folder = settings.get(keys::TOPOLOGY_MOUNT_PATH);
    let domain = settings.get(keys::KV_TRANSFER_DOMAIN);
    let is_told = |places: &BTreeMap<String, String>| match &domain {
        Some(domain) => places.contains_key(domain),
        None => !places.is_empty(),
    };
    let mut polls = 0;
    let places = loop {
        let places = read(&folder);
        match places {
            Ok(places) if is_told(&places) => break places,
            _ if polls < POLLS_MAX => polls += 1,
            Ok(_) => return Err(untold(&folder, domain.as_deref(), "it is not there")),
            Err(error) => return Err(untold(&folder, domain.as_deref(), &error.to_string())),
        }
        tokio::time::sleep(POLL).await;
    };
    let mut fields: TopologyFields = vec![("topology_domains", json!(places))];
    if let Some(domain) = domain {
        let enforcement = match settings.get(keys::KV_TRANSFER_ENFORCEMENT) {
            TransferEnforcement::Required => "required",
            TransferEnforcement::Preferred => "preferred",
        };
        fields.push(("kv_transfer_domain", domain.into()));
        fields.push(("kv_transfer_enforcement", enforcement.into()));
        if let Some(weight) = settings.get(keys::KV_TRANSFER_PREFERRED_WEIGHT) {
            fields.push(("kv_transfer_preferred_weight", weight.into()));
        }
    }
    Ok(fields)
}

fn untold(folder: &Path, domain: Option<&str>, why: &str) -> Failure {
    let file = folder.join(domain.unwrap_or("zone"));
    let text = format!(
        "--topology-enabled: {} was to say where this worker is: {why}",
        file.display()
    );
    BadConfig(text).into()
}

/// The places that the folder names, by kind. Hidden files are how a mounted folder is changed at once.
fn read(folder: &Path) -> io::Result<BTreeMap<String, String>> {
    let mut places = BTreeMap::new();
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let Ok(kind) = entry.file_name().into_string() else {
            continue;
        };
        if kind.starts_with('.') || !entry.path().is_file() {
            continue;
        }
        let text = std::fs::read_to_string(entry.path())?;
        let name: String = text.trim().chars().take(NAME_BYTES_MAX).collect();
        if !name.is_empty() {
            places.insert(kind, name);
        }
    }
    Ok(places)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_the_files_of_a_folder() {
        let name = format!("kvasir-topology-{}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        std::fs::create_dir_all(folder.join("more")).unwrap();
        let write = |name: &str, text: &str| std::fs::write(folder.join(name), text);
        write("zone", "a1\n").unwrap();
        write("rack", "  r7 ").unwrap();
        write("empty", "\n").unwrap();
        write("..data", "x").unwrap();
        let places = read(&folder).unwrap();
        let expected = [("rack", "r7"), ("zone", "a1")];
        let expected = expected.map(|(kind, name)| (kind.to_owned(), name.to_owned()));
        assert_eq!(places, BTreeMap::from(expected));
        assert!(read(&folder.join("nowhere")).is_err());
        std::fs::remove_dir_all(folder).unwrap();
    }
}
