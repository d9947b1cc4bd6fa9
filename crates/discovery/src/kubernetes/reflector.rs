//! One kind of object, followed.
//!
//! Answers one question: which objects does the API server have, and what changes? It is listed page by page, then watched from the
//! version of the list on; a watch that ends goes on from the last version that was told, and where that is too old to go on from, all
//! is listed again.
//!
//! What always holds: whoever follows is told a whole list or single changes, never half a list; an API server that cannot be asked
//! takes nothing away, and is told as lost only when a second try has failed, too: a connection that breaks is no news.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::de::DeserializeOwned;
use tokio::time::Instant;

use super::client::{ApiClient, ApiConnection, ApiError, encode};
use super::object::{Item, ListPage, WatchEvent};

/// Objects in a page of a list.
const PAGE_OBJECTS: usize = 500;
/// How often a listing begins anew because the server forgot it halfway.
const LISTINGS_MAX: u32 = 3;
/// Objects of one kind that are followed.
const OBJECTS_MAX: usize = 1 << 16;
/// A watch is ended by the server after so long, and begun anew: what stands between us and it may have forgotten the connection.
const WATCH_TIME: Duration = Duration::from_secs(240);
/// A watch in which nothing came for so long is dead.
const WATCH_SILENCE: Duration = Duration::from_secs(255);
/// Before the second try; doubled after each.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// Between two tries at most.
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// A watch that ends sooner is not begun anew at once.
const SHORT_WATCH: Duration = Duration::from_secs(1);

/// Which objects.
#[derive(Clone, Debug)]
pub(super) struct Collection {
    /// The API group with its version, such as `apis/discovery.k8s.io/v1`.
    pub(super) group: &'static str,
    /// The kind, as paths name it.
    pub(super) plural: &'static str,
    /// The labels that they must have.
    pub(super) selector: Option<String>,
}

impl Collection {
    fn path(&self, namespace: &str, query: &str) -> String {
        let (group, plural) = (self.group, self.plural);
        let namespace = encode(namespace);
        let selector = match &self.selector {
            Some(selector) => format!("&labelSelector={}", encode(selector)),
            None => String::new(),
        };
        format!("/{group}/namespaces/{namespace}/{plural}?{query}{selector}")
    }
}

/// What whoever follows is told.
#[derive(Debug)]
pub(super) enum Told<T> {
    /// These objects are there, and no others.
    Listed(Vec<Item<T>>),
    /// An object is so now.
    Put(Item<T>),
    /// An object is gone.
    Deleted(String),
    /// The API server is in reach, and all that was told is so.
    Reached,
    /// The API server cannot be asked, and why.
    Lost(ApiError),
}

/// How a watch ended.
enum WatchEnd {
    /// It ended, and goes on from the version that was told last.
    Closed,
    /// What follows that version is forgotten.
    Gone,
}

/// Follows objects for ever.
pub(super) async fn follow<T: DeserializeOwned>(
    client: &ApiClient,
    collection: &Collection,
    mut tell: impl FnMut(Told<T>),
) {
    let mut reflector = Reflector {
        client,
        collection,
        version: None,
        failures: 0,
    };
    loop {
        let began = Instant::now();
        match reflector.run(&mut tell).await {
            Ok(end) => {
                if matches!(end, WatchEnd::Gone) {
                    tracing::info!(
                        objects = collection.plural,
                        "the API server has forgotten what changed since: all are listed again"
                    );
                    reflector.version = None;
                }
                if began.elapsed() < SHORT_WATCH {
                    tokio::time::sleep(FIRST_PAUSE).await;
                }
            }
            Err(error) => {
                let pause = reflector.pause_after(&error);
                if reflector.failures > 1 {
                    tell(Told::Lost(error));
                }
                tokio::time::sleep(pause).await;
            }
        }
    }
}

struct Reflector<'a> {
    client: &'a ApiClient,
    collection: &'a Collection,
    /// All up to here has been told.
    version: Option<String>,
    /// Tries in a row that failed.
    failures: u32,
}

impl Reflector<'_> {
    /// Lists, unless it is known from where to go on, and watches until that ends.
    async fn run<T: DeserializeOwned>(
        &mut self,
        tell: &mut impl FnMut(Told<T>),
    ) -> Result<WatchEnd, ApiError> {
        let mut connection = self.client.connect().await?;
        let version = match &self.version {
            Some(version) => version.clone(),
            None => {
                let (items, version) = self.list(&mut connection).await?;
                tell(Told::Listed(items));
                self.version = Some(version.clone());
                self.reached(tell);
                version
            }
        };
        let seconds = WATCH_TIME.as_secs();
        let version = encode(&version);
        let query = format!(
            "watch=true&allowWatchBookmarks=true&timeoutSeconds={seconds}&resourceVersion={version}"
        );
        let path = self.collection.path(connection.namespace(), &query);
        let mut lines = match connection.lines(&path, WATCH_SILENCE).await {
            Err(error) if error.is_gone() => return Ok(WatchEnd::Gone),
            lines => lines?,
        };
        self.reached(tell);
        while let Some(line) = lines.next().await? {
            let told = match WatchEvent::read(&line)? {
                None => continue,
                Some(WatchEvent::Failed(status)) => {
                    let error = ApiError::of_status(status);
                    return match error.is_gone() {
                        true => Ok(WatchEnd::Gone),
                        false => Err(error),
                    };
                }
                Some(WatchEvent::Put(item, version)) => (Some(Told::Put(item)), version),
                Some(WatchEvent::Deleted(name, version)) => (Some(Told::Deleted(name)), version),
                Some(WatchEvent::Bookmark(version)) => (None, Some(version)),
            };
            let (told, version) = told;
            if let Some(told) = told {
                tell(told);
            }
            self.version = version.or(self.version.take());
        }
        Ok(WatchEnd::Closed)
    }

    fn reached<T>(&mut self, tell: &mut impl FnMut(Told<T>)) {
        self.failures = 0;
        tell(Told::Reached);
    }

    /// All objects, and as of which version. Pages that are gone before they were read are read again from the first.
    async fn list<T: DeserializeOwned>(
        &self,
        connection: &mut ApiConnection,
    ) -> Result<(Vec<Item<T>>, String), ApiError> {
        let mut items: BTreeMap<String, Item<T>> = BTreeMap::new();
        let mut next: Option<String> = None;
        let mut begun = 1;
        loop {
            let from = match &next {
                Some(next) => format!("&continue={}", encode(next)),
                None => String::new(),
            };
            let query = format!("limit={PAGE_OBJECTS}{from}");
            let path = self.collection.path(connection.namespace(), &query);
            let page: ListPage<T> = match connection.get(&path).await {
                Err(error) if error.is_gone() && next.is_some() && begun < LISTINGS_MAX => {
                    (items, next, begun) = (BTreeMap::new(), None, begun + 1);
                    continue;
                }
                page => ListPage::read(&page?)?,
            };
            let named = page.items.into_iter();
            items.extend(named.map(|item| (item.name.clone(), item)));
            if items.len() > OBJECTS_MAX {
                return Err(ApiError::Unreachable(format!(
                    "more than {OBJECTS_MAX} {} match: name fewer by their labels",
                    self.collection.plural
                )));
            }
            next = page.next;
            if next.is_none() {
                return Ok((items.into_values().collect(), page.version));
            }
        }
    }

    /// How long to wait after a failure.
    fn pause_after(&mut self, error: &ApiError) -> Duration {
        self.failures = self.failures.saturating_add(1);
        let doublings = (self.failures - 1).min(8);
        let pause = (FIRST_PAUSE * (1 << doublings)).min(PAUSE_MAX);
        match error.retry_after() {
            Some(wanted) => wanted.max(pause),
            None => pause,
        }
    }
}
