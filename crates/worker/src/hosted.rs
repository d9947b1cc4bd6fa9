//! The files of a model that its worker hands out itself.
//!
//! Answers one question: how does a frontend on another machine get the tokenizer? A card that names paths helps only those who have the
//! same folder. With a status server the worker's card names URLs there instead, of the form that Dynamo's workers use; readers check
//! what they get against the card's checksums.
//!
//! What always holds: nothing is handed out but the files that the card names.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use kvasir_discovery::{Card, CardError, EndpointName, slug};

use crate::card::FILES;

/// Files by the path of their URL.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostedFiles {
    files: BTreeMap<String, PathBuf>,
}

impl HostedFiles {
    /// The files that the card of a worker at `endpoint` names by their paths.
    #[must_use]
    pub fn of(card: &Card, endpoint: &EndpointName) -> Self {
        let root = root(card, endpoint);
        let named = FILES.iter().filter_map(|(slot, ..)| card.artefact(slot));
        let local = named.filter(|file| !file.is_url());
        let files = local.map(|file| {
            let url = format!("{root}/{}", file.file_name());
            (url, PathBuf::from(file.path))
        });
        Self {
            files: files.collect(),
        }
    }

    /// The file that is asked for by this path, if it is one of them.
    #[must_use]
    pub fn find(&self, path: &str) -> Option<&Path> {
        self.files.get(path).map(PathBuf::as_path)
    }
}

/// The same card with the URLs of its files at `server`, which is `host:port`.
pub fn hosted_card(card: &Card, endpoint: &EndpointName, server: &str) -> Result<Card, CardError> {
    let root = root(card, endpoint);
    let mut json = card.to_json();
    for (slot, kind, _) in FILES {
        let Some(file) = card.artefact(slot).filter(|file| !file.is_url()) else {
            continue;
        };
        // A template's file stands one level deeper, beside a note.
        let file_at = &mut json[slot][kind];
        let file_at = match file_at.get("file").is_some() {
            true => &mut file_at["file"],
            false => file_at,
        };
        file_at["path"] = format!("http://{server}{root}/{}", file.file_name()).into();
    }
    Card::parse(&json)
}

/// As Dynamo's workers have it; `_base` is a model that is no adapter.
fn root(card: &Card, endpoint: &EndpointName) -> String {
    format!("/v1/metadata/{endpoint}/{}/_base", slug(&card.name))
}

#[cfg(test)]
mod tests {
    use kvasir_discovery::Artefact;
    use serde_json::json;

    use super::*;

    fn card() -> Card {
        let file = |name: &str| {
            let file = Artefact::new("", &format!("/models/m/{name}"), name.as_bytes());
            json!({"path": file.path, "checksum": file.checksum, "size": file.size})
        };
        let json = json!({
            "display_name": "org/M",
            "tokenizer": {"hf_tokenizer_json": file("tokenizer.json")},
            "prompt_formatter": {"hf_tokenizer_config_json": file("tokenizer_config.json")},
            "chat_template_file": {"hf_chat_template_jinja": {"is_custom": false, "file": file("chat_template.jinja")}},
            "gen_config": {"hf_generation_config_json": {"path": "http://elsewhere/generation_config.json"}},
        });
        Card::parse(&json).unwrap()
    }

    #[test]
    fn a_card_names_urls_under_which_its_files_and_no_others_are_found() {
        let (card, endpoint) = (card(), EndpointName::new("ns", "backend", "generate"));
        let hosted = hosted_card(&card, &endpoint, "10.0.0.7:9090").unwrap();
        let root = "/v1/metadata/ns/backend/generate/org_m/_base";
        let files = HostedFiles::of(&card, &endpoint);
        for (slot, name) in [
            ("tokenizer", "tokenizer.json"),
            ("prompt_formatter", "tokenizer_config.json"),
            ("chat_template_file", "chat_template.jinja"),
        ] {
            let (before, after) = (card.artefact(slot), hosted.artefact(slot));
            let (before, after) = (before.unwrap(), after.unwrap());
            assert_eq!(after.path, format!("http://10.0.0.7:9090{root}/{name}"));
            assert_eq!((after.checksum, after.size), (before.checksum, before.size));
            let path = format!("{root}/{name}");
            assert_eq!(files.find(&path), Some(Path::new(&before.path)));
        }
        // What is fetched from elsewhere already stays there.
        assert_eq!(hosted.artefact("gen_config"), card.artefact("gen_config"));
        assert_eq!(hosted.checksum(), card.checksum(), "they are served alike");
        for other in ["", "/", root, "/v1/metadata/../tokenizer.json"] {
            assert_eq!(files.find(other), None);
        }
        assert_eq!(files.find(&format!("{root}/generation_config.json")), None);
    }
}
