//! The index of another service, for one that starts: `--indexer-peers`.

use std::time::Duration;

use bytes::Bytes;
use http::{Request, StatusCode, Uri};
use kvasir_config::{Settings, keys};
use kvasir_host::LoadedSnapshot;
use kvasir_types::HttpEndpoint;
use kvasir_upstream::{Bounds, Client, WorkerTls, error_message, parse_url};

use crate::wiring::{BadConfig, Failure};

/// How long one peer may take to send its index.
const FETCH_TIMEOUT: Duration = Duration::from_secs(10);

/// A peer that an option names.
pub(crate) struct IndexPeer {
    /// As it was written.
    pub(crate) url: String,
    address: HttpEndpoint,
}

/// The peers, in their order; an error names the option.
pub(crate) fn named(settings: &Settings) -> Result<Vec<IndexPeer>, Failure> {
    let urls: String = settings.get(keys::INDEXER_PEERS).unwrap_or_default();
    let urls = urls.split(',').map(str::trim).filter(|url| !url.is_empty());
    let peer = |url: &str| match parse_url(url) {
        Ok(address) => Ok(IndexPeer {
            url: url.to_owned(),
            address,
        }),
        Err(error) => Err(BadConfig(format!("--indexer-peers: {error}")).into()),
    };
    urls.map(peer).collect()
}

/// The index of the first peer that gives one. Peers that do not answer hold up the start for a while and nothing else.
pub(crate) async fn fetch(peers: &[IndexPeer], settings: &Settings) -> Option<LoadedSnapshot> {
    let bytes_max = settings.get(keys::INDEX_MAX_BYTES).0;
    let bounds = Bounds {
        timeout: FETCH_TIMEOUT,
        answer_bytes_max: usize::try_from(bytes_max).unwrap_or(usize::MAX),
    };
    let client = Client::new(WorkerTls::default(), bounds);
    for peer in peers {
        match ask(&client, &peer.address).await {
            Ok((index, bytes)) => {
                tracing::info!(peer = %peer.url, bytes, "the index of a peer is taken over");
                return Some(index);
            }
            Err(error) => {
                tracing::warn!(peer = %peer.url, %error, "the index of a peer cannot be had");
            }
        }
    }
    if !peers.is_empty() {
        tracing::warn!("no peer has an index to begin with: starting empty");
    }
    None
}

async fn ask(client: &Client, peer: &HttpEndpoint) -> Result<(LoadedSnapshot, usize), String> {
    let mut request = Request::new(Bytes::new());
    *request.uri_mut() = Uri::from_static("/snapshot");
    let answer = client.fetch(peer, request).await;
    let answer = answer.map_err(|error| error.to_string())?;
    match answer.status() {
        StatusCode::OK => {}
        StatusCode::NOT_FOUND => {
            return Err("it has no /snapshot, as services of Kvasir have".to_owned());
        }
        status => {
            let message = error_message(answer.body());
            return Err(format!("{}: {message}", status.as_u16()));
        }
    }
    let bytes = answer.into_body();
    let size = bytes.len();
    let index = LoadedSnapshot::from_bytes(bytes.into());
    index
        .map(|index| (index, size))
        .map_err(|error| error.to_string())
}
