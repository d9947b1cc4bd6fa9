//! A worker as an operator writes it: `http://host:8000,block-size=16,events=tcp://host:5557`.
//!
//! Reads that text into a [`WorkerRecord`]. What always holds: no text of a URL with a password, and no key, comes back
//! in an error.

use std::path::Path;
use std::sync::Arc;

use http::uri::Authority;
use http::{HeaderValue, Uri};
use kvasir_transport::zmq::Endpoint;
use kvasir_types::{
    ApiKey, BootstrapAddress, Device, EventFeed, HttpEndpoint, Role, TransferRule, Transport,
    WorkerId, WorkerRecord, topology_taint,
};
use xxhash_rust::xxh3::xxh3_64;

use crate::bounded_file::{KEY_FILE_BYTES_MAX, read_bounded_text};

/// Ports of `http` and `https` when the address names none.
const HTTP_PORT: u16 = 80;
const HTTPS_PORT: u16 = 443;
/// What may follow the URL.
const ADDITIONS: &str = "block-size, kv-blocks, max-num-batched-tokens, max-num-seqs, data-parallel-size, events, replay, \
                         taint, device, role, bootstrap-port, topology, kv-transfer-domain, kv-transfer-preferred-weight, \
                         api-key-file";
/// Taints that one worker may carry.
const TAINTS_MAX: usize = 32;
/// Longest taint.
const TAINT_BYTES_MAX: usize = 128;

/// Characters of a given text that an error repeats.
const SHOWN_CHARS_MAX: usize = 100;

/// Why a worker's address cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// Not a URL.
    #[error("`{}` is not a URL; write it as http://host:8000", shown(.0))]
    NotUrl(String),
    /// A URL of another kind.
    #[error("`{}` is not reached by http or https; write it as http://host:8000", shown(.0))]
    Scheme(String),
    /// A port that there is not.
    #[error("`{}` has a port that there is not; ports are from 1 to 65535", shown(.0))]
    Port(String),
    /// An addition that does not exist.
    #[error(
        "`{}` is not known{}; after the URL may follow {ADDITIONS}, each as name=value after a comma",
        shown(.0),
        meant(.0)
    )]
    Unknown(String),
    /// An addition with a bad value.
    #[error("`{}` is not a value of {name}; it takes {expected}", shown(.value))]
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
        "`{}` names a route; give the base URL, without /v1 and what follows, as in http://host:8000",
        shown(.0)
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
    #[error("api-key-file={}: {error}", shown(.path))]
    KeyFile {
        /// Which.
        path: String,
        /// Why not.
        error: String,
    },
}

/// A given text as an error repeats it: short, and without what a terminal would act on.
fn shown(text: &str) -> String {
    let mut shown: String = text.chars().take(SHOWN_CHARS_MAX).collect();
    if shown.len() < text.len() {
        shown.push('…');
    }
    match shown.contains(char::is_control) {
        true => shown.escape_debug().to_string(),
        false => shown,
    }
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

/// Reads a worker: a URL and what is said about the server there.
///
/// ```
/// # use kvasir_upstream::parse_worker;
/// let worker = parse_worker("http://gpu-1:8000/,block-size=32")?;
/// assert_eq!((worker.transport.to_string(), worker.block_size), ("http://gpu-1:8000".into(), Some(32)));
/// assert!(parse_worker("gpu-1:8000").is_err());
/// # Ok::<(), kvasir_upstream::AddressError>(())
/// ```
pub fn parse_worker(text: &str) -> Result<WorkerRecord, AddressError> {
    parse_with(text, |worker, name, value| match name {
        "api-key-file" => set_api_key(worker, read_key(value)?),
        _ => set_field(worker, name, value),
    })
}

/// Reads a worker that a remote operator wrote: no local file is read for it.
pub fn parse_remote_worker(text: &str) -> Result<WorkerRecord, AddressError> {
    parse_with(text, set_field)
}

fn parse_with(
    text: &str,
    set: impl Fn(&mut WorkerRecord, &str, &str) -> Result<(), AddressError>,
) -> Result<WorkerRecord, AddressError> {
    let mut parts = text.trim().split(',');
    let endpoint = parse_url(parts.next().unwrap_or_default().trim())?;
    let mut worker = worker_at(endpoint);
    for part in parts.map(str::trim) {
        let (name, value) = part
            .split_once('=')
            .ok_or_else(|| match part.contains('@') {
                true => AddressError::Credentials,
                false => AddressError::Unknown(part.to_owned()),
            })?;
        set(&mut worker, name, value)?;
    }
    Ok(worker)
}

/// Reads the URL alone.
pub fn parse_url(url: &str) -> Result<HttpEndpoint, AddressError> {
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
    let port = match uri.authority().and_then(port_text) {
        None if tls => HTTPS_PORT,
        None => HTTP_PORT,
        // The library takes a port that there is not for none.
        Some(port) => match port.parse() {
            Ok(port) if port > 0 => port,
            _ => return Err(AddressError::Port(url.to_owned())),
        },
    };
    Ok(HttpEndpoint {
        tls,
        host,
        port,
        prefix: uri.path().trim_end_matches('/').to_owned(),
        api_key: None,
    })
}

/// What stands where the port does.
fn port_text(authority: &Authority) -> Option<&str> {
    let after = authority.as_str().strip_prefix(authority.host())?;
    after.strip_prefix(':')
}

/// The worker at an HTTP server, about which nothing else is known.
#[must_use]
pub fn worker_at(endpoint: HttpEndpoint) -> WorkerRecord {
    WorkerRecord::new(worker_id(&endpoint), Transport::Http(endpoint))
}

/// The id of the worker at an HTTP server: it follows from the URL, so that it survives a restart of ours. It has 53 bits:
/// tools that read JSON numbers as floats keep it whole.
#[must_use]
pub fn worker_id(endpoint: &HttpEndpoint) -> WorkerId {
    WorkerId(xxh3_64(endpoint.to_string().as_bytes()) >> 11)
}

/// The worker in a pod. A pod that has the address of an earlier one is another worker: its cache is another.
#[must_use]
pub fn worker_in_pod(endpoint: HttpEndpoint, uid: &str) -> WorkerRecord {
    if uid.is_empty() {
        return worker_at(endpoint);
    }
    let id = xxh3_64(format!("{endpoint} {uid}").as_bytes()) >> 11;
    WorkerRecord::new(WorkerId(id), Transport::Http(endpoint))
}

/// Sets one field of a worker, by the name that may follow its URL.
pub fn set_field(worker: &mut WorkerRecord, name: &str, value: &str) -> Result<(), AddressError> {
    if name.contains('@') || value.contains('@') {
        return Err(AddressError::Credentials);
    }
    let capacity = &mut worker.capacity;
    match name {
        "block-size" => worker.block_size = Some(count("block-size", value)?),
        "kv-blocks" => capacity.kv_blocks = Some(count("kv-blocks", value)?.into()),
        "max-num-batched-tokens" => {
            let tokens = count("max-num-batched-tokens", value)?;
            capacity.max_num_batched_tokens = Some(tokens.into());
        }
        "max-num-seqs" => capacity.max_num_seqs = Some(count("max-num-seqs", value)?.into()),
        "data-parallel-size" => worker.ranks = Some(count("data-parallel-size", value)?),
        "events" => set_sockets(worker, Some(socket("events", value)?), None),
        "replay" => set_sockets(worker, None, Some(socket("replay", value)?)),
        "taint" => add_taint(&mut worker.taints, value)?,
        "device" => worker.device = Some(device(value)?),
        "role" => worker.role = role(value)?,
        "bootstrap-port" => worker.bootstrap = Some(bootstrap(worker, value)?),
        "topology" => add_taint(&mut worker.taints, &place(value)?)?,
        "kv-transfer-domain" => rule(worker).domain = domain(value)?.into(),
        "kv-transfer-preferred-weight" => rule(worker).preferred = Some(thousandths(value)?),
        _ => return Err(AddressError::Unknown(name.to_owned())),
    }
    // Whichever of the two was said first.
    if let Some(rule) = &mut worker.transfer {
        let prefix = topology_taint(&rule.domain, "");
        let mut taints = worker.taints.iter();
        rule.taint = taints.find(|taint| taint.starts_with(&prefix)).cloned();
    }
    Ok(())
}

/// Who may take over the prompts of a worker.
fn rule(worker: &mut WorkerRecord) -> &mut TransferRule {
    worker.transfer.get_or_insert_with(|| TransferRule {
        domain: "zone".into(),
        taint: None,
        preferred: None,
    })
}

/// The label of workers in a place, which is written `zone:a1`.
fn place(value: &str) -> Result<String, AddressError> {
    let parts = value.split_once(':');
    let named = parts.filter(|(domain, name)| !domain.is_empty() && !name.is_empty());
    let (domain, name) = named.ok_or_else(|| AddressError::Value {
        name: "topology",
        value: value.to_owned(),
        expected: "a kind of place and its name, such as zone:a1",
    })?;
    Ok(topology_taint(domain, name))
}

fn domain(value: &str) -> Result<&str, AddressError> {
    let fits = (1..=TAINT_BYTES_MAX).contains(&value.len());
    fits.then_some(value).ok_or_else(|| AddressError::Value {
        name: "kv-transfer-domain",
        value: value.to_owned(),
        expected: "a kind of place, such as zone",
    })
}

fn thousandths(value: &str) -> Result<u16, AddressError> {
    let weight = value.parse::<f64>().ok();
    let weight = weight.filter(|weight| (0.0..=1.0).contains(weight));
    let weight = weight.ok_or_else(|| AddressError::Value {
        name: "kv-transfer-preferred-weight",
        value: value.to_owned(),
        expected: "a number from 0 to 1",
    })?;
    Ok((weight * 1000.0).round() as u16)
}

/// A worker as [`parse_worker`] reads it, without its key; `None` for one that is not reached over HTTP.
///
/// ```
/// # use kvasir_upstream::{parse_worker, worker_words};
/// let words = "http://gpu-1:8000,block-size=32,taint=gpu=h200";
/// assert_eq!(worker_words(&parse_worker(words).unwrap()).unwrap(), words);
/// ```
#[must_use]
pub fn worker_words(worker: &WorkerRecord) -> Option<String> {
    let mut words = worker.transport.http()?.to_string();
    let mut say = |name: &str, value: Option<String>| {
        if let Some(value) = value {
            words.extend([",", name, "=", &value]);
        }
    };
    let number = |number: Option<u64>| number.map(|number| number.to_string());
    say("block-size", number(worker.block_size.map(u64::from)));
    say("kv-blocks", number(worker.capacity.kv_blocks));
    let batched = worker.capacity.max_num_batched_tokens;
    say("max-num-batched-tokens", number(batched));
    say("max-num-seqs", number(worker.capacity.max_num_seqs));
    say("data-parallel-size", number(worker.ranks.map(u64::from)));
    say("device", worker.device.map(|device| device.name().into()));
    let role = (worker.role != Role::default()).then(|| worker.role.name().to_owned());
    say("role", role);
    let bootstrap = worker.bootstrap.as_ref();
    say("bootstrap-port", number(bootstrap.map(|at| at.port.into())));
    let transfer = worker.transfer.as_ref();
    say(
        "kv-transfer-domain",
        transfer.map(|rule| rule.domain.to_string()),
    );
    let weight = transfer.and_then(|rule| rule.preferred);
    let weight = weight.map(|thousandths| (f64::from(thousandths) / 1000.0).to_string());
    say("kv-transfer-preferred-weight", weight);
    say("events", worker.events.publish().map(Into::into));
    say("replay", worker.events.replay().map(Into::into));
    for taint in &worker.taints {
        say("taint", Some(taint.to_string()));
    }
    Some(words)
}

fn device(value: &str) -> Result<Device, AddressError> {
    Device::from_name(value).ok_or_else(|| AddressError::Value {
        name: "device",
        value: value.to_owned(),
        expected: "cpu or gpu",
    })
}

fn role(value: &str) -> Result<Role, AddressError> {
    Role::from_name(value).ok_or_else(|| AddressError::Value {
        name: "role",
        value: value.to_owned(),
        expected: "prefill, decode or aggregated",
    })
}

/// Where decode servers meet this one.
fn bootstrap(worker: &WorkerRecord, value: &str) -> Result<BootstrapAddress, AddressError> {
    let host = worker.transport.http().map(|endpoint| &*endpoint.host);
    let port = value.parse().ok().filter(|port| *port > 0);
    match (host, port) {
        (Some(host), Some(port)) => Ok(BootstrapAddress {
            host: host.into(),
            port,
        }),
        _ => Err(AddressError::Value {
            name: "bootstrap-port",
            value: value.to_owned(),
            expected: "a port from 1 to 65535",
        }),
    }
}

fn set_sockets(worker: &mut WorkerRecord, publish: Option<String>, replay: Option<String>) {
    let before = &worker.events;
    worker.events = EventFeed::Sockets {
        publish: publish.or_else(|| before.publish().map(Into::into)),
        replay: replay.or_else(|| before.replay().map(Into::into)),
    };
}

/// Adds one taint as requests spell it: any text without commas, such as `gpu=h200`.
fn add_taint(taints: &mut Vec<Arc<str>>, value: &str) -> Result<(), AddressError> {
    let value = value.trim();
    let fits = (1..=TAINT_BYTES_MAX).contains(&value.len())
        && !value.contains(|c: char| c.is_control() || c == ',');
    if !fits || taints.len() >= TAINTS_MAX {
        return Err(AddressError::Value {
            name: "taint",
            value: value.to_owned(),
            expected: "1 to 128 bytes without commas, such as gpu=h200; a worker has at most 32",
        });
    }
    if let Err(at) = taints.binary_search_by(|taint| (**taint).cmp(value)) {
        taints.insert(at, value.into());
    }
    Ok(())
}

/// Sets the key of a worker that is reached over HTTP.
pub fn set_api_key(worker: &mut WorkerRecord, key: ApiKey) -> Result<(), AddressError> {
    match &mut worker.transport {
        Transport::Http(endpoint) => endpoint.api_key = Some(key),
        Transport::Plane(_) => return Err(AddressError::Key),
    }
    Ok(())
}

/// Gives a worker this key if it is reached over HTTP and has none of its own.
pub fn default_api_key(worker: &mut WorkerRecord, key: Option<&ApiKey>) {
    if let Transport::Http(endpoint) = &mut worker.transport
        && endpoint.api_key.is_none()
    {
        endpoint.api_key = key.cloned();
    }
}

/// Reads a key; white space around it does not count.
pub fn parse_api_key(text: &str) -> Result<ApiKey, AddressError> {
    let key = ApiKey::new(text.trim());
    match bearer(&key) {
        Some(_) if !key.reveal().is_empty() => Ok(key),
        _ => Err(AddressError::Key),
    }
}

/// A key as the `authorization` header carries it.
pub(crate) fn bearer(key: &ApiKey) -> Option<HeaderValue> {
    let mut value = HeaderValue::try_from(format!("Bearer {}", key.reveal())).ok()?;
    value.set_sensitive(true);
    Some(value)
}

/// The key that a file holds.
fn read_key(path: &str) -> Result<ApiKey, AddressError> {
    let text = read_bounded_text(Path::new(path), KEY_FILE_BYTES_MAX);
    let text = text.map_err(|error| AddressError::KeyFile {
        path: path.to_owned(),
        error: error.to_string(),
    })?;
    parse_api_key(&text)
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
    match value.parse::<Endpoint>() {
        Ok(endpoint) if endpoint.port() > 0 => Ok(value.to_owned()),
        _ => Err(AddressError::Value {
            name,
            value: value.to_owned(),
            expected: "an address as tcp://host:5557, with a port from 1 to 65535",
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_may_be_said_to_have_no_gpu() {
        let device = |text: &str| parse_worker(text).map(|worker| worker.device);
        assert_eq!(device("http://a:1"), Ok(None));
        assert_eq!(device("http://a:1,device=cpu"), Ok(Some(Device::Cpu)));
        let gpu = Ok(Some(Device::Accelerator));
        assert_eq!(device("http://a:1,device=gpu"), gpu);
        let error = device("http://a:1,device=abacus").unwrap_err();
        assert_eq!(
            error.to_string(),
            "`abacus` is not a value of device; it takes cpu or gpu"
        );
    }

    #[test]
    fn a_worker_may_compute_a_part_of_requests() {
        let placed = "http://gpu-1:8000,role=prefill,kv-transfer-domain=zone,kv-transfer-preferred-weight=0.85,taint=dynamo.topology/zone=a1";
        let worker = parse_worker(placed).unwrap();
        let rule = worker.transfer.clone().unwrap();
        assert_eq!(rule.taint.as_deref(), Some("dynamo.topology/zone=a1"));
        assert_eq!((&*rule.domain, rule.preferred), ("zone", Some(850)));
        assert_eq!(worker_words(&worker).unwrap(), placed);
        let said = placed.replace("taint=dynamo.topology/zone=a1", "topology=zone:a1");
        assert_eq!(parse_worker(&said).unwrap(), worker);
        for bad in [
            "topology=a1",
            "kv-transfer-domain=",
            "kv-transfer-preferred-weight=2",
        ] {
            assert!(parse_worker(&format!("http://a,{bad}")).is_err(), "{bad}");
        }
        let text = "http://gpu-1:8000,role=prefill,bootstrap-port=8998";
        let worker = parse_worker(text).unwrap();
        assert_eq!(worker.role, Role::Prefill);
        let met = worker.bootstrap.as_ref().unwrap();
        assert_eq!((&*met.host, met.port), ("gpu-1", 8998));
        assert_eq!(worker_words(&worker).unwrap(), text);
        for bad in ["role=both", "bootstrap-port=0", "bootstrap-port=x"] {
            assert!(parse_worker(&format!("http://a:1,{bad}")).is_err(), "{bad}");
        }
    }

    #[test]
    fn everything_that_may_follow_the_url() {
        let text = "http://[::1]:9/base/,block-size=16,kv-blocks=100,max-num-batched-tokens=2048,\
                    data-parallel-size=2,events=tcp://h:5557,replay=tcp://h:5558,\
                    taint=zone=b,taint=gpu=h200, taint=zone=b";
        let worker = parse_worker(text).unwrap();
        assert_eq!(worker.transport.to_string(), "http://[::1]:9/base");
        assert_eq!(
            (worker.block_size, worker.capacity.kv_blocks),
            (Some(16), Some(100))
        );
        assert_eq!(
            (worker.capacity.max_num_batched_tokens, worker.ranks),
            (Some(2048), Some(2))
        );
        assert_eq!(worker.events.publish(), Some("tcp://h:5557"));
        assert_eq!(worker.events.replay(), Some("tcp://h:5558"));
        assert_eq!(worker.taints, ["gpu=h200".into(), "zone=b".into()]);
    }

    #[test]
    fn an_error_repeats_little_and_nothing_that_a_terminal_acts_on() {
        let error = |text: &str| parse_worker(text).unwrap_err().to_string();
        let escape = "\u{1b}[2J";
        for text in [
            format!("{escape}x"),
            format!("ftp://{escape}"),
            format!("http://a,{escape}=1"),
            format!("http://a,block-size={escape}"),
            format!("http://a,{}=1", "x".repeat(5000)),
        ] {
            let error = error(&text);
            assert!(!error.contains(char::is_control), "{error:?}");
            assert!(error.len() < 600, "{error}");
        }
    }

    #[test]
    fn taints_are_bounded() {
        let with = |taint: &str| parse_worker(&format!("http://a,taint={taint}"));
        assert!(with(&"x".repeat(TAINT_BYTES_MAX)).is_ok());
        for wrong in ["", " ", "a\u{1}b", &"x".repeat(TAINT_BYTES_MAX + 1)] {
            let error = with(wrong).unwrap_err().to_string();
            assert!(error.contains("taint"), "{error}");
        }
        let many = |count: usize| {
            let taints: String = (0..count).map(|n| format!(",taint={n}")).collect();
            parse_worker(&format!("http://a{taints}"))
        };
        assert!(many(TAINTS_MAX).is_ok() && many(TAINTS_MAX + 1).is_err());
    }

    #[test]
    fn the_id_follows_from_the_address_alone() {
        let id = |text: &str| parse_worker(text).unwrap().id;
        assert_eq!(id("http://A:80"), id("http://a/,block-size=16"));
        assert_ne!(id("http://a:80"), id("http://a:81"));
        assert_ne!(id("http://a:443"), id("https://a"));
        assert_eq!(id("https://a"), id("https://a:443/"));
    }

    #[test]
    fn mistakes_are_named() {
        let error = |text: &str| parse_worker(text).unwrap_err().to_string();
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
        for events in [
            "5557",
            "ipc:///tmp/s",
            "tcp://h",
            "tcp://h:0",
            "tcp://h:65536",
            "tcp://:1",
        ] {
            for name in ["events", "replay"] {
                let told = error(&format!("http://a,{name}={events}"));
                assert!(told.contains("tcp://host:5557"), "{told}");
            }
        }
        for port in ["0", "65536", "70000", "99999999999", "x", "-1", ""] {
            for url in [
                format!("http://a:{port}"),
                format!("https://[::1]:{port}/b"),
            ] {
                let told = error(&url);
                assert!(
                    told.contains("1 to 65535") || told.contains("not a URL"),
                    "{url}: {told}"
                );
            }
        }
        assert!(error("http://a,block-size").contains("`block-size` is not known"));
    }
}
