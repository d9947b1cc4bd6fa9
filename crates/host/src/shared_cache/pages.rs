//! Under which names the pages of a prompt lie in a Mooncake store.
//!
//! Answers one question: which objects does SGLang's hierarchical cache (HiCache) store for this page of this prompt? A page has the
//! SHA-256 of its tokens after the page before it; each rank of an engine stores its part of the page under that name with a suffix.
//! Workers say in their model cards how theirs are made (`sglang_hicache_mooncake`).

use std::fmt::Write as _;

use kvasir_types::Token;
use ring::digest;
use serde_json::Value;

/// Ranks of an engine that are believed.
const RANKS_MAX: u32 = 1024;
/// Longest text of a layout that is taken.
const TEXT_BYTES_MAX: usize = 4096;

/// How the engines of a model store pages. Two engines that differ in it share nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HicacheLayout {
    /// Tokens in a page.
    pub page_size: u32,
    tp_size: u32,
    pp_size: u32,
    is_mla: bool,
    /// Pages are named by pairs of tokens, as speculative decoding needs it.
    is_eagle: bool,
    /// What stands before each name, if anything.
    prefix: Option<String>,
}

/// The name of a page, without what ranks add.
type PageName = String;

impl HicacheLayout {
    /// Reads the runtime data of a card; an error says what is wrong with it. The second value is where the store publishes its events,
    /// if the worker says.
    pub fn read(data: &Value) -> Result<(Self, Option<String>), String> {
        // A worker may have written it as text.
        let parsed: Value;
        let data = match data.as_str() {
            Some(text) => {
                parsed = serde_json::from_str(text).map_err(|error| error.to_string())?;
                &parsed
            }
            None => data,
        };
        let text = |name: &str| {
            let text = data.get(name).and_then(Value::as_str);
            text.filter(|text| !text.is_empty() && text.len() <= TEXT_BYTES_MAX)
        };
        let number = |name: &str| {
            let number = data.get(name).and_then(Value::as_u64).unwrap_or(1);
            u32::try_from(number.max(1)).map_err(|_| format!("{name} is out of range"))
        };
        let flag = |name: &str| data.get(name).and_then(Value::as_bool) == Some(true);
        match text("backend") {
            Some("mooncake") => {}
            other => return Err(format!("backend {other:?}, and only mooncake is followed")),
        }
        let page_size = data.get("page_size").and_then(Value::as_u64);
        let page_size = page_size.and_then(|size| u32::try_from(size).ok());
        let own = number("tp_size")?;
        let split = match flag("should_split_heads") && data.get("tp_lcm_size").is_some() {
            true => number("tp_lcm_size")?.max(own),
            false => own,
        };
        let layout = Self {
            page_size: page_size
                .filter(|&size| size > 0)
                .ok_or("page_size is missing")?,
            tp_size: split,
            pp_size: number("pp_size")?,
            is_mla: flag("is_mla_model"),
            is_eagle: flag("is_eagle"),
            prefix: text("key_prefix")
                .or_else(|| text("extra_backend_tag"))
                .map(Into::into),
        };
        match layout.tp_size.saturating_mul(layout.pp_size) > RANKS_MAX {
            true => Err(format!("more than {RANKS_MAX} ranks")),
            false => Ok((layout, text("kv_events_endpoint").map(Into::into))),
        }
    }

    /// The names of a prompt's whole pages, in order.
    pub(super) fn page_names(&self, tokens: &[Token]) -> Vec<PageName> {
        let size = self.page_size as usize;
        let count = tokens.len().saturating_sub(usize::from(self.is_eagle)) / size;
        let mut names = Vec::with_capacity(count);
        let mut before: Option<digest::Digest> = None;
        for page in 0..count {
            let mut hasher = digest::Context::new(&digest::SHA256);
            if let Some(before) = &before {
                hasher.update(before.as_ref());
            }
            let first = page * size;
            if self.is_eagle {
                let pairs = tokens.get(first..=first + size).unwrap_or_default();
                for pair in pairs.windows(2) {
                    pair.iter()
                        .for_each(|token| hasher.update(&token.to_le_bytes()));
                }
            } else {
                let page = tokens.get(first..first + size).unwrap_or_default();
                let bytes: Vec<u8> = page.iter().flat_map(|token| token.to_le_bytes()).collect();
                hasher.update(&bytes);
            }
            let name = hasher.finish();
            names.push(self.name(name.as_ref()));
            before = Some(name);
        }
        names
    }

    fn name(&self, digest: &[u8]) -> PageName {
        let mut name = self.prefix.clone().unwrap_or_default();
        if !name.is_empty() {
            name.push('_');
        }
        for byte in digest {
            let _ = write!(name, "{byte:02x}");
        }
        name
    }

    /// Whether all objects of a page are there.
    pub(super) fn is_there(&self, page: &str, mut has: impl FnMut(&str) -> bool) -> bool {
        let mut key = String::with_capacity(page.len() + 16);
        let mut has = |suffix: std::fmt::Arguments<'_>| {
            key.clear();
            let _ = write!(key, "{page}_{suffix}");
            has(&key)
        };
        let staged = self.pp_size > 1;
        (0..self.pp_size).all(|stage| match (self.is_mla, staged) {
            (true, true) => has(format_args!("{stage}_k")),
            (true, false) => has(format_args!("_k")),
            (false, true) => (0..self.tp_size).all(|rank| {
                has(format_args!("{rank}_{stage}_k")) && has(format_args!("{rank}_{stage}_v"))
            }),
            (false, false) => (0..self.tp_size)
                .all(|rank| has(format_args!("{rank}_k")) && has(format_args!("{rank}_v"))),
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn layout(more: &Value) -> HicacheLayout {
        let mut data = json!({"backend": "mooncake", "page_size": 4, "tp_size": 1, "pp_size": 1});
        let more = more.as_object().unwrap().clone();
        data.as_object_mut().unwrap().extend(more);
        HicacheLayout::read(&data).unwrap().0
    }

    fn keys(layout: &HicacheLayout) -> Vec<String> {
        let mut keys = Vec::new();
        layout.is_there("p", |key| {
            keys.push(key.to_owned());
            true
        });
        keys
    }

    /// The names were computed with Python's hashlib, as SGLang does.
    #[test]
    fn pages_have_the_names_that_sglang_gives_them() {
        let tokens: Vec<Token> = (1..=10).collect();
        let first = "cf97adeedb59e05bfd73a2b4c2a8885708c4f4f70c84c64b27120e72ab733b72";
        let second = "4ebfa8a1f3c341517621838c6e1b9aa350307e3f00b3cbd1a07ef740f54396d6";
        assert_eq!(layout(&json!({})).page_names(&tokens), [first, second]);
        let named = layout(&json!({"extra_backend_tag": "tag", "key_prefix": "tag_org-m"}));
        assert_eq!(named.page_names(&tokens)[0], format!("tag_org-m_{first}"));
        let eagle = layout(&json!({"page_size": 2, "is_eagle": true}));
        assert_eq!(
            eagle.page_names(&[10, 11, 12, 13, 14]),
            [
                "4bde82677ba8b6de843da1713b58a439678ec01b642bbdcffec4acfa81b0ec8e",
                "75ab93a767bad1e254945d1a0ccfa1588d6ebb803303e412d984baedcbbf04b9",
            ]
        );
        // The last pair of a page needs the token after it.
        assert_eq!(eagle.page_names(&[10, 11]).len(), 0);
        assert_eq!(eagle.page_names(&[10, 11, 12]).len(), 1);
    }

    #[test]
    fn each_rank_and_stage_stores_its_part_of_a_page() {
        assert_eq!(keys(&layout(&json!({}))), ["p_0_k", "p_0_v"]);
        assert_eq!(
            keys(&layout(&json!({"is_mla_model": true, "tp_size": 8}))),
            ["p__k"]
        );
        assert_eq!(
            keys(&layout(&json!({"is_mla_model": true, "pp_size": 2}))),
            ["p_0_k", "p_1_k"]
        );
        let staged = keys(&layout(&json!({"tp_size": 2, "pp_size": 2})));
        assert_eq!(staged.len(), 8);
        assert_eq!(
            (&*staged[0], &*staged[2], &*staged[7]),
            ("p_0_0_k", "p_1_0_k", "p_1_1_v")
        );
        let split = json!({"tp_size": 2, "tp_lcm_size": 4, "should_split_heads": true});
        assert_eq!(keys(&layout(&split)).last().unwrap(), "p_3_v");
    }

    #[test]
    fn a_layout_that_cannot_be_used_says_why() {
        for (data, said) in [
            (json!({"backend": "file", "page_size": 1}), "only mooncake"),
            (json!({"backend": "mooncake"}), "page_size"),
            (
                json!({"backend": "mooncake", "page_size": 1, "tp_size": 1_u64 << 40}),
                "tp_size",
            ),
            (
                json!({"backend": "mooncake", "page_size": 1, "tp_size": 999, "pp_size": 9}),
                "ranks",
            ),
            (json!("{"), "EOF"),
        ] {
            let error = HicacheLayout::read(&data).unwrap_err();
            assert!(error.contains(said), "{error}");
        }
        let text =
            json!(r#"{"backend":"mooncake","page_size":64,"kv_events_endpoint":"tcp://h:1"}"#);
        let (layout, endpoint) = HicacheLayout::read(&text).unwrap();
        assert_eq!(
            (layout.page_size, endpoint.as_deref()),
            (64, Some("tcp://h:1"))
        );
    }
}
