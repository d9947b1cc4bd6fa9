//! Where a worker is and what its user says about it: `http://host:8000,block-size=16,events=tcp://host:5557`.

use std::fmt;

use http::{HeaderValue, Uri};
use kvasir_types::WorkerId;
use xxhash_rust::xxh3::xxh3_64;

/// Ports of `http` and `https` when the address names none.
const HTTP_PORT: u16 = 80;
const HTTPS_PORT: u16 = 443;
/// What may follow the URL.
const ADDITIONS: &str = "block-size, kv-blocks, max-num-batched-tokens, max-num-seqs, data-parallel-size, events, replay, \
                         taint, api-key-file";
/// Taints that one worker may carry.
const TAINTS_MAX: usize = 32;
/// Longest taint.
const TAINT_BYTES_MAX: usize = 128;

/// An engine server, with what its user says about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerAddress {
    /// Whether it is reached by `https`.
    pub tls: bool,
    /// Host name or address, without brackets.
    pub host: String,
    /// Port.
    pub port: u16,
    /// What stands before every path, without a slash at its end; usually empty.
    pub prefix: String,
    /// Tokens in a block, where the engine does not say.
    pub block_size: Option<u32>,
    /// KV blocks of one rank, where the engine does not say.
    pub kv_blocks: Option<u64>,
    /// Tokens computed in one step, where the engine does not say.
    pub max_num_batched_tokens: Option<u64>,
    /// Sequences that it runs at once.
    pub max_num_seqs: Option<u64>,
    /// Data-parallel ranks, where the engine does not say.
    pub data_parallel_size: Option<u32>,
    /// Where its cache events are published.
    pub events: Option<String>,
    /// Where missed events are asked for.
    pub replay: Option<String>,
    /// What requests may require or prefer of it (`nvext.routing_constraints`); in order, each once.
    pub taints: Vec<String>,
    /// What it wants to be shown, where it wants anything.
    pub api_key: Option<WorkerKey>,
}

/// The key that an engine server wants; never shown.
#[derive(Clone, PartialEq, Eq)]
pub struct WorkerKey(HeaderValue);

impl WorkerKey {
    /// Reads a key; white space around it does not count.
    pub fn new(key: &str) -> Result<Self, AddressError> {
        let key = key.trim();
        let value = HeaderValue::try_from(format!("Bearer {key}"));
        match value {
            Ok(mut value) if !key.is_empty() => {
                value.set_sensitive(true);
                Ok(Self(value))
            }
            _ => Err(AddressError::Key),
        }
    }

    /// As the `authorization` header says it.
    #[must_use]
    pub fn header(&self) -> &HeaderValue {
        &self.0
    }
}

impl fmt::Debug for WorkerKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WorkerKey(hidden)")
    }
}

/// Why a worker's address cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// Not a URL.
    #[error("`{0}` is not a URL; write it as http://host:8000")]
    NotUrl(String),
    /// A URL of another kind.
    #[error("`{0}` is not reached by http or https; write it as http://host:8000")]
    Scheme(String),
    /// An addition that does not exist.
    #[error(
        "`{0}` is not known{meant}; after the URL may follow {ADDITIONS}, each as name=value after a comma",
        meant = meant(.0)
    )]
    Unknown(String),
    /// An addition with a bad value.
    #[error("`{value}` is not a value of {name}; it takes {expected}")]
    Value {
        /// The addition.
        name: &'static str,
        /// What was given.
        value: String,
        /// What it takes.
        expected: &'static str,
    },
    /// The address of a route, not of a server.
    #[error(
        "`{0}` names a route; give the base URL, without /v1 and what follows, as in http://host:8000"
    )]
    Route(String),
    /// A URL with a password, which would be shown wherever the URL is.
    #[error(
        "a URL with a user or a password in it is not taken; give a key with api-key-file=FILE"
    )]
    Credentials,
    /// A key that cannot be sent. It is not repeated here.
    #[error("the key is empty or holds characters that a header cannot carry")]
    Key,
    /// A key's file that cannot be read.
    #[error("api-key-file={path}: {error}")]
    KeyFile {
        /// Which.
        path: String,
        /// Why not.
        error: String,
    },
}

/// The addition that differs from `name` only by its signs, or what to do about a second URL.
fn meant(name: &str) -> String {
    if name.contains("://") {
        return " (one address stands here: give each server its own)".to_owned();
    }
    let plain = name.to_ascii_lowercase().replace('_', "-");
    let found = ADDITIONS.split(", ").find(|known| *known == plain);
    found.map_or_else(String::new, |known| format!(" (did you mean `{known}`?)"))
}

impl WorkerAddress {
    /// Reads an address.
    ///
    /// ```
    /// # use kvasir_upstream::WorkerAddress;
    /// let worker = WorkerAddress::parse("http://gpu-1:8000/,block-size=32")?;
    /// assert_eq!((worker.host.as_str(), worker.port, worker.block_size), ("gpu-1", 8000, Some(32)));
    /// assert!(WorkerAddress::parse("gpu-1:8000").is_err());
    /// # Ok::<(), kvasir_upstream::AddressError>(())
    /// ```
    pub fn parse(text: &str) -> Result<Self, AddressError> {
        Self::parse_with(text, |address, name, value| match name {
            "api-key-file" => address.read_key(value),
            _ => address.say(name, value),
        })
    }

    /// Reads an address that somebody else wrote: no file of ours is read for it.
    pub fn parse_remote(text: &str) -> Result<Self, AddressError> {
        Self::parse_with(text, Self::say)
    }

    fn parse_with(
        text: &str,
        say: impl Fn(&mut Self, &str, &str) -> Result<(), AddressError>,
    ) -> Result<Self, AddressError> {
        let mut parts = text.trim().split(',');
        let mut address = Self::parse_plain(parts.next().unwrap_or_default().trim())?;
        for part in parts.map(str::trim) {
            let (name, value) = part
                .split_once('=')
                .ok_or_else(|| match part.contains('@') {
                    true => AddressError::Credentials,
                    false => AddressError::Unknown(part.to_owned()),
                })?;
            say(&mut address, name, value)?;
        }
        Ok(address)
    }

    /// Reads the URL alone.
    pub fn parse_plain(url: &str) -> Result<Self, AddressError> {
        if url.contains('@') {
            return Err(AddressError::Credentials);
        }
        let uri: Uri = url
            .parse()
            .map_err(|_| AddressError::NotUrl(url.to_owned()))?;
        let tls = match uri.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            Some(_) => return Err(AddressError::Scheme(url.to_owned())),
            None => return Err(AddressError::NotUrl(url.to_owned())),
        };
        let host = uri
            .host()
            .unwrap_or_default()
            .trim_matches(['[', ']'])
            .to_ascii_lowercase();
        // A comma in a path would be read as the end of the URL elsewhere.
        if host.is_empty() || uri.query().is_some() || url.contains(',') {
            return Err(AddressError::NotUrl(url.to_owned()));
        }
        if uri.path().split('/').any(|part| part == "v1") {
            return Err(AddressError::Route(url.to_owned()));
        }
        let port = if tls { HTTPS_PORT } else { HTTP_PORT };
        Ok(Self {
            tls,
            host,
            port: uri.port_u16().unwrap_or(port),
            prefix: uri.path().trim_end_matches('/').to_owned(),
            block_size: None,
            kv_blocks: None,
            max_num_batched_tokens: None,
            max_num_seqs: None,
            data_parallel_size: None,
            events: None,
            replay: None,
            taints: Vec::new(),
            api_key: None,
        })
    }

    /// Takes one addition over.
    pub fn say(&mut self, name: &str, value: &str) -> Result<(), AddressError> {
        if name.contains('@') || value.contains('@') {
            return Err(AddressError::Credentials);
        }
        match name {
            "block-size" => self.block_size = Some(count("block-size", value)?),
            "kv-blocks" => self.kv_blocks = Some(count("kv-blocks", value)?.into()),
            "max-num-batched-tokens" => {
                let tokens = count("max-num-batched-tokens", value)?;
                self.max_num_batched_tokens = Some(tokens.into());
            }
            "max-num-seqs" => self.max_num_seqs = Some(count("max-num-seqs", value)?.into()),
            "data-parallel-size" => {
                self.data_parallel_size = Some(count("data-parallel-size", value)?);
            }
            "events" => self.events = Some(socket("events", value)?),
            "replay" => self.replay = Some(socket("replay", value)?),
            "taint" => self.taint(value)?,
            _ => return Err(AddressError::Unknown(name.to_owned())),
        }
        Ok(())
    }

    /// Takes one taint over, as requests spell it: any text without commas, such as `gpu=h200`.
    fn taint(&mut self, value: &str) -> Result<(), AddressError> {
        let value = value.trim();
        let fits = (1..=TAINT_BYTES_MAX).contains(&value.len())
            && !value.contains(|c: char| c.is_control() || c == ',');
        if !fits || self.taints.len() >= TAINTS_MAX {
            return Err(AddressError::Value {
                name: "taint",
                value: value.to_owned(),
                expected: "1 to 128 bytes without commas, such as gpu=h200; a worker has at most 32",
            });
        }
        if let Err(at) = self
            .taints
            .binary_search_by(|taint| taint.as_str().cmp(value))
        {
            self.taints.insert(at, value.to_owned());
        }
        Ok(())
    }

    /// Takes the key over that a file holds.
    fn read_key(&mut self, path: &str) -> Result<(), AddressError> {
        let text = std::fs::read_to_string(path).map_err(|error| AddressError::KeyFile {
            path: path.to_owned(),
            error: error.to_string(),
        })?;
        self.api_key = Some(WorkerKey::new(&text)?);
        Ok(())
    }

    /// The worker's id: it follows from the address, so that it survives a restart of ours. It has 53 bits: tools that
    /// read JSON numbers as floats keep it whole.
    #[must_use]
    pub fn id(&self) -> WorkerId {
        WorkerId(xxh3_64(self.to_string().as_bytes()) >> 11)
    }

    /// `host:port`, as the `host` header names it.
    #[must_use]
    pub fn authority(&self) -> String {
        match self.host.contains(':') {
            true => format!("[{}]:{}", self.host, self.port),
            false => format!("{}:{}", self.host, self.port),
        }
    }
}

/// The URL alone.
impl fmt::Display for WorkerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.tls { "https" } else { "http" };
        write!(f, "{scheme}://{}{}", self.authority(), self.prefix)
    }
}

fn count(name: &'static str, value: &str) -> Result<u32, AddressError> {
    let number = value.parse().ok().filter(|n| *n > 0);
    number.ok_or_else(|| AddressError::Value {
        name,
        value: value.to_owned(),
        expected: "a whole number from 1",
    })
}

fn socket(name: &'static str, value: &str) -> Result<String, AddressError> {
    let known = ["tcp://", "ipc://"]
        .iter()
        .any(|scheme| value.starts_with(scheme));
    if known {
        return Ok(value.to_owned());
    }
    Err(AddressError::Value {
        name,
        value: value.to_owned(),
        expected: "an address as tcp://host:5557",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_that_may_follow_the_url() {
        let text = "http://[::1]:9/base/,block-size=16,kv-blocks=100,max-num-batched-tokens=2048,\
                    data-parallel-size=2,events=tcp://h:5557,replay=tcp://h:5558,\
                    taint=zone=b,taint=gpu=h200, taint=zone=b";
        let worker = WorkerAddress::parse(text).unwrap();
        assert_eq!(worker.to_string(), "http://[::1]:9/base");
        assert_eq!((worker.block_size, worker.kv_blocks), (Some(16), Some(100)));
        assert_eq!(
            (worker.max_num_batched_tokens, worker.data_parallel_size),
            (Some(2048), Some(2))
        );
        assert_eq!(worker.events.as_deref(), Some("tcp://h:5557"));
        assert_eq!(worker.replay.as_deref(), Some("tcp://h:5558"));
        assert_eq!(worker.taints, ["gpu=h200", "zone=b"]);
    }

    #[test]
    fn taints_are_bounded() {
        let with = |taint: &str| WorkerAddress::parse(&format!("http://a,taint={taint}"));
        assert!(with(&"x".repeat(TAINT_BYTES_MAX)).is_ok());
        for wrong in ["", " ", "a\u{1}b", &"x".repeat(TAINT_BYTES_MAX + 1)] {
            let error = with(wrong).unwrap_err().to_string();
            assert!(error.contains("taint"), "{error}");
        }
        let many = |count: usize| {
            let taints: String = (0..count).map(|n| format!(",taint={n}")).collect();
            WorkerAddress::parse(&format!("http://a{taints}"))
        };
        assert!(many(TAINTS_MAX).is_ok() && many(TAINTS_MAX + 1).is_err());
    }

    #[test]
    fn the_id_follows_from_the_address_alone() {
        let id = |text: &str| WorkerAddress::parse(text).unwrap().id();
        assert_eq!(id("http://A:80"), id("http://a/,block-size=16"));
        assert_ne!(id("http://a:80"), id("http://a:81"));
        assert_ne!(id("http://a:443"), id("https://a"));
        assert_eq!(id("https://a"), id("https://a:443/"));
    }

    #[test]
    fn mistakes_are_named() {
        let error = |text: &str| WorkerAddress::parse(text).unwrap_err().to_string();
        assert!(error("a:8000").contains("http://host:8000"));
        assert!(error("").contains("not a URL"));
        assert!(error("ftp://a").contains("http or https"));
        assert!(error("http://user:secret@a").contains("api-key-file"));
        for told in [
            "http://user:secret@a",
            "user:secret@a",
            "http://a,http://user:secret@b",
            "http://a,events=tcp://user:secret@b:1",
            "http://a,block-size=user:secret@b",
        ] {
            assert!(error(told).contains("api-key-file"), "{told}");
            assert!(!error(told).contains("secret"), "{told}");
        }
        assert!(error("http://a,api-key-file=/none@home").contains("/none@home"));
        assert!(error("http://a,api-key-file=/nonexistent").contains("/nonexistent"));
        assert!(error("http://a,blocks=1").contains("`blocks` is not known"));
        assert!(error("http://a,block-size=0").contains("whole number from 1"));
        assert!(error("http://a,events=5557").contains("tcp://host:5557"));
        assert!(error("http://a,block-size").contains("`block-size` is not known"));
    }
}
