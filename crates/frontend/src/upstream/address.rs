//! Where a worker is and what its user says about it: `http://host:8000,block-size=16,events=tcp://host:5557`.

use std::fmt;

use http::Uri;
use kvasir_types::WorkerId;
use xxhash_rust::xxh3::xxh3_64;

/// The port of `http` when the address names none.
const HTTP_PORT: u16 = 80;

/// An engine server, with what its user says about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerAddress {
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
    /// Data-parallel ranks, where the engine does not say.
    pub data_parallel_size: Option<u32>,
    /// Where its cache events are published.
    pub events: Option<String>,
    /// Where missed events are asked for.
    pub replay: Option<String>,
}

/// Why a worker's address cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// Not a URL.
    #[error("`{0}` is not a URL; write it as http://host:8000")]
    NotUrl(String),
    /// A URL of another kind.
    #[error("`{0}` is not reached by plain http; write it as http://host:8000")]
    Scheme(String),
    /// An addition that does not exist.
    #[error(
        "`{0}` is not known; after the URL may follow block-size, kv-blocks, max-num-batched-tokens, \
             data-parallel-size, events, replay, each as name=value after a comma"
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
}

impl WorkerAddress {
    /// Reads an address.
    ///
    /// ```
    /// # use kvasir_frontend::WorkerAddress;
    /// let worker = WorkerAddress::parse("http://gpu-1:8000/,block-size=32")?;
    /// assert_eq!((worker.host.as_str(), worker.port, worker.block_size), ("gpu-1", 8000, Some(32)));
    /// assert!(WorkerAddress::parse("gpu-1:8000").is_err());
    /// # Ok::<(), kvasir_frontend::AddressError>(())
    /// ```
    pub fn parse(text: &str) -> Result<Self, AddressError> {
        let mut parts = text.trim().split(',');
        let mut address = Self::parse_url(parts.next().unwrap_or_default().trim())?;
        for part in parts {
            address.add(part.trim())?;
        }
        Ok(address)
    }

    fn parse_url(url: &str) -> Result<Self, AddressError> {
        let uri: Uri = url
            .parse()
            .map_err(|_| AddressError::NotUrl(url.to_owned()))?;
        match uri.scheme_str() {
            Some("http") => {}
            Some(_) => return Err(AddressError::Scheme(url.to_owned())),
            None => return Err(AddressError::NotUrl(url.to_owned())),
        }
        let host = uri
            .host()
            .unwrap_or_default()
            .trim_matches(['[', ']'])
            .to_ascii_lowercase();
        if host.is_empty() || uri.query().is_some() {
            return Err(AddressError::NotUrl(url.to_owned()));
        }
        Ok(Self {
            host,
            port: uri.port_u16().unwrap_or(HTTP_PORT),
            prefix: uri.path().trim_end_matches('/').to_owned(),
            block_size: None,
            kv_blocks: None,
            max_num_batched_tokens: None,
            data_parallel_size: None,
            events: None,
            replay: None,
        })
    }

    fn add(&mut self, part: &str) -> Result<(), AddressError> {
        let (name, value) = part
            .split_once('=')
            .ok_or_else(|| AddressError::Unknown(part.to_owned()))?;
        match name {
            "block-size" => self.block_size = Some(count("block-size", value)?),
            "kv-blocks" => self.kv_blocks = Some(count("kv-blocks", value)?.into()),
            "max-num-batched-tokens" => {
                let tokens = count("max-num-batched-tokens", value)?;
                self.max_num_batched_tokens = Some(tokens.into());
            }
            "data-parallel-size" => {
                self.data_parallel_size = Some(count("data-parallel-size", value)?);
            }
            "events" => self.events = Some(socket("events", value)?),
            "replay" => self.replay = Some(socket("replay", value)?),
            _ => return Err(AddressError::Unknown(name.to_owned())),
        }
        Ok(())
    }

    /// The worker's id: it follows from the address, so that it survives a restart of ours.
    #[must_use]
    pub fn id(&self) -> WorkerId {
        WorkerId(xxh3_64(self.to_string().as_bytes()))
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
        write!(f, "http://{}{}", self.authority(), self.prefix)
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
                    data-parallel-size=2,events=tcp://h:5557,replay=tcp://h:5558";
        let worker = WorkerAddress::parse(text).unwrap();
        assert_eq!(worker.to_string(), "http://[::1]:9/base");
        assert_eq!((worker.block_size, worker.kv_blocks), (Some(16), Some(100)));
        assert_eq!(
            (worker.max_num_batched_tokens, worker.data_parallel_size),
            (Some(2048), Some(2))
        );
        assert_eq!(worker.events.as_deref(), Some("tcp://h:5557"));
        assert_eq!(worker.replay.as_deref(), Some("tcp://h:5558"));
    }

    #[test]
    fn the_id_follows_from_the_address_alone() {
        let id = |text: &str| WorkerAddress::parse(text).unwrap().id();
        assert_eq!(id("http://A:80"), id("http://a/,block-size=16"));
        assert_ne!(id("http://a:80"), id("http://a:81"));
    }

    #[test]
    fn mistakes_are_named() {
        let error = |text: &str| WorkerAddress::parse(text).unwrap_err().to_string();
        assert!(error("a:8000").contains("http://host:8000"));
        assert!(error("").contains("not a URL"));
        assert!(error("https://a").contains("plain http"));
        assert!(error("http://a,blocks=1").contains("`blocks` is not known"));
        assert!(error("http://a,block-size=0").contains("whole number from 1"));
        assert!(error("http://a,events=5557").contains("tcp://host:5557"));
        assert!(error("http://a,block-size").contains("`block-size` is not known"));
    }
}
