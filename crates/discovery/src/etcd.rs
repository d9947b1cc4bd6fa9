//! Records in etcd.
//!
//! Answers one question: who is there, where an etcd cluster says so? Keys are those of the buckets with plain slashes. A worker has one
//! lease, whose id is the worker's; when it is not kept alive for [`LEASE_TTL`], its keys go.
//!
//! What always holds: a watch lists all keys, then hears every change since; when it cannot go on from where it was, it lists again and
//! tells what differs. A lease that was lost is granted anew under the same id, with all its keys.
//!
//! Elsewhere: bytes of messages (`proto`), calls (`grpc`). Why the client is our own: decision 0108.

mod claim;
mod grpc;
mod lease;
mod proto;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kvasir_tasks::Tasks;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use self::grpc::{Address, CallError, Channel};
use self::lease::EtcdLease;
use self::proto::{Heading, Heard, KeyValue, Page, Writer, range_end};
use crate::coordination::Coordination;
use crate::record::{Bucket, RecordKey};
use crate::store::{Feed, Lease, Store, StoreError, StoreFuture, Watch, watch};

/// Seconds that a lease lives without being kept alive.
pub const LEASE_TTL: u64 = 30;
/// What all keys begin with.
const ROOT: &str = "v1/";
/// Keys in one page of a listing.
const PAGE_KEYS: u64 = 1000;
/// Before the second try to reach a store that is lost; doubled after each.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// Between two tries at most.
const PAUSE_MAX: Duration = Duration::from_secs(2);

/// How etcd is reached.
#[derive(Clone, Default)]
pub struct EtcdOptions {
    /// URLs, with commas between them (`--etcd-endpoints`).
    pub endpoints: String,
    /// Name and password.
    pub user: Option<(String, String)>,
    /// Who vouches for the servers, instead of the system's authorities.
    pub authority: Option<PathBuf>,
    /// Our certificate and its key.
    pub identity: Option<(PathBuf, PathBuf)>,
    /// Seconds that a lease lives; [`LEASE_TTL`] if 0.
    pub lease_ttl: u64,
}

/// Why options cannot be followed. Whoever set them is at fault.
#[derive(Debug, thiserror::Error)]
pub enum EtcdOptionsError {
    /// An endpoint is no URL.
    #[error("{0} is not an address of etcd; write http://HOST:PORT or https://HOST:PORT")]
    BadEndpoint(String),
    /// A file of certificates cannot be used.
    #[error("{path}: {cause}")]
    BadFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        cause: String,
    },
}

/// A store in etcd. Clones are one.
#[derive(Clone)]
pub struct EtcdStore {
    channel: Channel,
    endpoints: Arc<str>,
    user: Option<(String, String)>,
    lease_ttl: u64,
    tasks: Tasks,
}

impl EtcdStore {
    /// The store at these endpoints, which is reached when it is first needed. `tasks` keep it in step.
    pub fn new(options: EtcdOptions, tasks: &Tasks) -> Result<Self, EtcdOptionsError> {
        let named = options.endpoints.split(',').map(str::trim);
        let named = named.filter(|endpoint| !endpoint.is_empty());
        let addresses = named.map(address).collect::<Result<Vec<_>, _>>()?;
        if addresses.is_empty() {
            return Err(EtcdOptionsError::BadEndpoint("an empty list".into()));
        }
        let tls = match addresses.iter().any(|address| address.tls) {
            true => Some(connector(&options)?),
            false => None,
        };
        let tasks = tasks.background();
        Ok(Self {
            channel: Channel::new(addresses, tls, &tasks),
            endpoints: options.endpoints.into(),
            user: options.user,
            lease_ttl: match options.lease_ttl {
                0 => LEASE_TTL,
                ttl => ttl,
            },
            tasks,
        })
    }

    fn error(&self, error: &CallError) -> StoreError {
        let (address, cause) = (self.address(), error.to_string());
        match error {
            CallError::Unreachable(_) => StoreError::Unreachable { address, cause },
            CallError::Status { .. } => StoreError::Refused { address, cause },
        }
    }

    /// A call, with our name said first where that is asked for.
    async fn call(&self, path: &'static str, message: Vec<u8>) -> Result<bytes::Bytes, CallError> {
        let answer = self.channel.call(path, message.clone()).await;
        match answer {
            Err(error) if error.is_unauthenticated() && self.user.is_some() => {
                self.authenticate().await?;
                self.channel.call(path, message).await
            }
            answer => answer,
        }
    }

    async fn authenticate(&self) -> Result<(), CallError> {
        let Some((name, password)) = &self.user else {
            return Ok(());
        };
        let request = Writer::default().bytes(1, name.as_bytes());
        let request = request.bytes(2, password.as_bytes()).done();
        let answer = self
            .channel
            .call("/etcdserverpb.Auth/Authenticate", request)
            .await?;
        let token = proto::token(&answer).map_err(bad)?;
        self.channel.set_token(&token);
        Ok(())
    }

    async fn put(&self, key: &RecordKey, value: &[u8], lease: u64) -> Result<(), CallError> {
        let request = Writer::default().bytes(1, key.to_string().as_bytes());
        let request = request.bytes(2, value).number(3, lease).done();
        self.call("/etcdserverpb.KV/Put", request).await.map(drop)
    }

    async fn delete(&self, key: &RecordKey) -> Result<(), CallError> {
        let request = Writer::default().bytes(1, key.to_string().as_bytes());
        self.call("/etcdserverpb.KV/DeleteRange", request.done())
            .await
            .map(drop)
    }

    /// Follows the store until nobody reads any more.
    async fn feed(self, buckets: Vec<Bucket>, feed: Feed) {
        let mut pause = FIRST_PAUSE;
        loop {
            let followed = tokio::select! {
                followed = self.follow(&buckets, &feed) => followed,
                () = feed.closed() => return,
            };
            match followed {
                // A watch that ran and ended is begun anew at once.
                Ok(()) => pause = FIRST_PAUSE,
                Err(error) => {
                    feed.lost(&error.to_string());
                    tokio::select! {
                        () = tokio::time::sleep(pause) => {}
                        () = feed.closed() => return,
                    }
                    pause = (pause * 2).min(PAUSE_MAX);
                }
            }
        }
    }

    /// Lists all keys and hears changes until that cannot go on; an error means that the store is lost.
    async fn follow(&self, buckets: &[Bucket], feed: &Feed) -> Result<(), CallError> {
        if self.user.is_some() {
            self.authenticate().await?;
        }
        let revision = self.list(buckets, feed).await?;
        let (key, end) = (ROOT.as_bytes(), range_end(ROOT.as_bytes()));
        let request = Heard::ask(key, &end, revision + 1);
        let mut answers = self
            .channel
            .stream("/etcdserverpb.Watch/Watch", request)
            .await?;
        feed.synced();
        while let Some(message) = answers.next().await? {
            let heard = Heard::read(&message).map_err(bad)?;
            for event in heard.events {
                tell(event, buckets, feed);
            }
            if let Some(why) = heard.ended {
                tracing::info!(store = %self.endpoints, why, "a watch of etcd ended: all keys are listed again");
                return Ok(());
            }
        }
        Err(CallError::Unreachable("etcd ended the watch".into()))
    }

    /// Tells all that the store holds; says as of which revision.
    async fn list(&self, buckets: &[Bucket], feed: &Feed) -> Result<u64, CallError> {
        let end = range_end(ROOT.as_bytes());
        let mut start = ROOT.as_bytes().to_vec();
        let mut revision = 0;
        let mut keys: BTreeMap<Bucket, BTreeSet<String>> = BTreeMap::new();
        loop {
            let request = Page::ask(&start, &end, PAGE_KEYS, revision);
            let answer = self.call("/etcdserverpb.KV/Range", request).await?;
            let page = Page::read(&answer).map_err(bad)?;
            if revision == 0 {
                revision = page.revision;
            }
            let last = page.values.last().map(|kv| kv.key.clone());
            for kv in page.values {
                if let Some(key) = record_key(&kv.key, buckets) {
                    feed.put(&key, &kv.value);
                    keys.entry(key.bucket).or_default().insert(key.key);
                }
            }
            match last.filter(|_| page.more) {
                Some(mut last) => {
                    last.push(0);
                    start = last;
                }
                None => break,
            }
        }
        for bucket in buckets {
            feed.retain(*bucket, &keys.remove(bucket).unwrap_or_default());
        }
        Ok(revision)
    }
}

fn bad(error: proto::BadMessage) -> CallError {
    CallError::Unreachable(error.to_string())
}

fn tell(event: Heading, buckets: &[Bucket], feed: &Feed) {
    match event {
        Heading::Put(KeyValue { key, value }) => {
            if let Some(key) = record_key(&key, buckets) {
                feed.put(&key, &value);
            }
        }
        Heading::Deleted(key) => {
            if let Some(key) = record_key(&key, buckets) {
                feed.delete(&key);
            }
        }
    }
}

/// The key of a record, if it is one of these buckets.
fn record_key(key: &[u8], buckets: &[Bucket]) -> Option<RecordKey> {
    let (bucket, key) = Bucket::split(std::str::from_utf8(key).ok()?)?;
    buckets
        .contains(&bucket)
        .then(|| RecordKey::new(bucket, key))
}

impl Store for EtcdStore {
    fn backend(&self) -> &'static str {
        "etcd"
    }

    fn address(&self) -> String {
        self.endpoints.to_string()
    }

    fn watch(&self, buckets: &[Bucket]) -> Watch {
        let (feed, watch) = watch(&self.address());
        self.tasks.spawn(self.clone().feed(buckets.to_vec(), feed));
        watch
    }

    fn lease(&self) -> StoreFuture<'_, Result<Arc<dyn Lease>, StoreError>> {
        Box::pin(async move {
            let lease = EtcdLease::start(self).await;
            let lease: Arc<dyn Lease> = lease.map_err(|error| self.error(&error))?;
            Ok(lease)
        })
    }

    fn coordination(&self) -> Option<Arc<dyn Coordination>> {
        Some(Arc::new(self.clone()))
    }
}

/// Where one endpoint is.
fn address(endpoint: &str) -> Result<Address, EtcdOptionsError> {
    let bad = || EtcdOptionsError::BadEndpoint(endpoint.into());
    let (tls, rest) = match endpoint.split_once("://") {
        Some(("http", rest)) => (false, rest),
        Some(("https", rest)) => (true, rest),
        Some(_) => return Err(bad()),
        None => (false, endpoint),
    };
    let authority = rest.split('/').next().unwrap_or_default();
    let (host, port) = match authority.rsplit_once(':') {
        Some((host, port)) if !port.contains(']') => (host, port.parse().map_err(|_| bad())?),
        _ => (authority, 2379),
    };
    let host = host.trim_matches(['[', ']']).to_owned();
    match host.is_empty() {
        true => Err(bad()),
        false => Ok(Address { tls, host, port }),
    }
}

fn connector(options: &EtcdOptions) -> Result<TlsConnector, EtcdOptionsError> {
    let mut roots = RootCertStore::empty();
    match &options.authority {
        Some(path) => {
            for certificate in certificates(path)? {
                let added = roots.add(certificate);
                added.map_err(|error| bad_file(path, error))?;
            }
        }
        None => {
            for certificate in rustls_native_certs::load_native_certs().certs {
                let _ = roots.add(certificate);
            }
        }
    }
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions();
    let unusable = |error| bad_file(Path::new("TLS"), error);
    let builder = builder.map_err(unusable)?.with_root_certificates(roots);
    let mut config = match &options.identity {
        None => builder.with_no_client_auth(),
        Some((certificate, key)) => {
            let chain = certificates(certificate)?;
            let key_file = PrivateKeyDer::from_pem_file(key);
            let key_file = key_file.map_err(|error| bad_file(key, error))?;
            let config = builder.with_client_auth_cert(chain, key_file);
            config.map_err(|error| bad_file(certificate, error))?
        }
    };
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(TlsConnector::from(Arc::new(config)))
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, EtcdOptionsError> {
    let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect);
    read.map_err(|error| bad_file(path, error))
}

fn bad_file(path: &Path, cause: impl std::fmt::Display) -> EtcdOptionsError {
    EtcdOptionsError::BadFile {
        path: path.to_owned(),
        cause: cause.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_read_as_operators_write_them() {
        let at = |tls, host: &str, port| Address {
            tls,
            host: host.into(),
            port,
        };
        for (text, expected) in [
            ("http://localhost:2379", at(false, "localhost", 2379)),
            ("https://etcd-0.etcd:12379/", at(true, "etcd-0.etcd", 12379)),
            ("10.0.0.1:4001", at(false, "10.0.0.1", 4001)),
            ("http://[::1]:2379", at(false, "::1", 2379)),
            ("http://[::1]", at(false, "::1", 2379)),
            ("etcd", at(false, "etcd", 2379)),
        ] {
            assert_eq!(address(text).unwrap(), expected, "{text}");
        }
        for bad in ["", "ftp://x", "http://", "http://h:port"] {
            assert!(address(bad).is_err(), "{bad}");
        }
    }
}
