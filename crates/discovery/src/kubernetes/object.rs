//! What the API server's JSON says.
//!
//! Answers one question: which objects are in a page of a list or a line of a watch, and what do they say? As much of each object is
//! read as is used here; members that are not known are ignored.
//!
//! What always holds: an object that cannot be read is told apart from one that is not there.

use std::collections::BTreeMap;
use std::fmt;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use serde_json::value::RawValue;

/// What an object says of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Meta {
    pub(super) name: String,
    pub(super) uid: Option<String>,
    pub(super) resource_version: Option<String>,
    pub(super) deletion_timestamp: Option<String>,
    pub(super) owner_references: Option<Vec<Owner>>,
    pub(super) labels: Option<BTreeMap<String, String>>,
}

/// What an object belongs to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct Owner {
    pub(super) kind: String,
    pub(super) name: String,
}

/// Addresses behind a Service, up to a hundred in one slice.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct EndpointSlice {
    pub(super) metadata: Meta,
    pub(super) address_type: String,
    pub(super) endpoints: Option<Vec<SliceEndpoint>>,
    pub(super) ports: Option<Vec<SlicePort>>,
}

/// One pod behind a Service.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct SliceEndpoint {
    pub(super) addresses: Vec<String>,
    pub(super) conditions: Option<Conditions>,
    pub(super) target_ref: Option<Target>,
}

/// What is known of an endpoint; what is not said counts as the API says it does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct Conditions {
    pub(super) ready: Option<bool>,
    pub(super) terminating: Option<bool>,
}

/// What an endpoint is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct Target {
    pub(super) kind: Option<String>,
    pub(super) name: Option<String>,
    pub(super) uid: Option<String>,
}

/// A port of all endpoints of a slice.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct SlicePort {
    pub(super) name: Option<String>,
    pub(super) port: Option<u16>,
    pub(super) protocol: Option<String>,
    pub(super) app_protocol: Option<String>,
}

impl SliceEndpoint {
    /// Whether requests may be sent there: it is ready, and it does not end.
    pub(super) fn is_ready(&self) -> bool {
        let conditions = self.conditions.unwrap_or_default();
        conditions.ready.unwrap_or(true) && !conditions.terminating.unwrap_or(false)
    }

    /// The pod that it is, if it is one.
    pub(super) fn pod(&self) -> Option<&Target> {
        let target = self.target_ref.as_ref()?;
        let is_pod = target.kind.as_deref().is_none_or(|kind| kind == "Pod");
        let has_name = target.name.as_deref().is_some_and(|name| !name.is_empty());
        (is_pod && has_name).then_some(target)
    }
}

/// A pod, as far as its engine matters.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct Pod {
    pub(super) metadata: Meta,
    pub(super) spec: PodSpec,
    pub(super) status: PodStatus,
}

/// What runs in a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct PodSpec {
    pub(super) containers: Vec<Container>,
}

/// One container of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct Container {
    pub(super) ports: Option<Vec<ContainerPort>>,
}

/// A port that a container says it has.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct ContainerPort {
    pub(super) name: Option<String>,
    pub(super) container_port: u16,
    pub(super) protocol: Option<String>,
}

/// How a pod does.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct PodStatus {
    #[serde(rename = "podIP")]
    pub(super) pod_ip: Option<String>,
    pub(super) conditions: Option<Vec<PodCondition>>,
}

/// One thing that is said of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct PodCondition {
    #[serde(rename = "type")]
    pub(super) kind: String,
    pub(super) status: String,
}

impl Pod {
    /// Whether requests may be sent there: it is ready, and it does not end.
    pub(super) fn is_ready(&self) -> bool {
        let conditions = self.status.conditions.iter().flatten();
        let mut ready = conditions.filter(|condition| condition.kind == "Ready");
        self.metadata.deletion_timestamp.is_none()
            && ready.any(|condition| condition.status == "True")
    }
}

/// What a worker's pod has announced: the custom resource `DynamoWorkerMetadata`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct WorkerResource {
    pub(super) metadata: Meta,
    pub(super) spec: WorkerSpec,
}

/// The records of one pod, by kind and key.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct WorkerSpec {
    pub(super) data: Value,
}

/// An object, by name; nothing where what it says cannot be read.
#[derive(Debug)]
pub(super) struct Item<T> {
    pub(super) name: String,
    pub(super) object: Option<T>,
}

#[derive(Deserialize)]
struct Named {
    #[serde(default)]
    metadata: Meta,
}

fn item<T: DeserializeOwned>(raw: &RawValue) -> Result<Item<T>, BadAnswer> {
    let named: Named = serde_json::from_str(raw.get()).map_err(bad)?;
    let object = match serde_json::from_str(raw.get()) {
        Ok(object) => Some(object),
        Err(error) => {
            tracing::warn!(name = %named.metadata.name, %error,
                "an object of the API server cannot be read: what was known of it stays");
            None
        }
    };
    Ok(Item {
        name: named.metadata.name,
        object,
    })
}

/// An answer that is not what the API promises.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an answer that is none of the API's: {0}")]
pub(super) struct BadAnswer(String);

fn bad(error: impl fmt::Display) -> BadAnswer {
    BadAnswer(error.to_string())
}

/// One page of a list.
#[derive(Debug)]
pub(super) struct ListPage<T> {
    pub(super) items: Vec<Item<T>>,
    /// As of which state of the server.
    pub(super) version: String,
    /// Where the next page begins.
    pub(super) next: Option<String>,
}

#[derive(Deserialize)]
struct RawList<'a> {
    #[serde(default)]
    metadata: ListMeta,
    #[serde(borrow, default)]
    items: Option<Vec<&'a RawValue>>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct ListMeta {
    resource_version: String,
    #[serde(rename = "continue")]
    next: Option<String>,
}

impl<T: DeserializeOwned> ListPage<T> {
    /// Reads a page.
    pub(super) fn read(bytes: &[u8]) -> Result<Self, BadAnswer> {
        let list: RawList<'_> = serde_json::from_slice(bytes).map_err(bad)?;
        let items = list.items.unwrap_or_default();
        Ok(Self {
            items: items.into_iter().map(item).collect::<Result<_, _>>()?,
            version: list.metadata.resource_version,
            next: list.metadata.next.filter(|next| !next.is_empty()),
        })
    }
}

/// One line of a watch.
#[derive(Debug)]
pub(super) enum WatchEvent<T> {
    /// The object is so now.
    Put(Item<T>, Option<String>),
    /// The object is gone.
    Deleted(String, Option<String>),
    /// All up to this version has been told.
    Bookmark(String),
    /// The watch cannot go on.
    Failed(Status),
}

/// What the API server says of a request that it did not follow.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct Status {
    pub(super) code: u16,
    pub(super) message: String,
    pub(super) reason: String,
}

#[derive(Deserialize)]
struct RawEvent<'a> {
    #[serde(rename = "type")]
    kind: &'a str,
    #[serde(borrow)]
    object: &'a RawValue,
}

impl<T: DeserializeOwned> WatchEvent<T> {
    /// Reads a line; nothing if it is of a kind that is not known.
    pub(super) fn read(line: &[u8]) -> Result<Option<Self>, BadAnswer> {
        let event: RawEvent<'_> = serde_json::from_slice(line).map_err(bad)?;
        if event.kind == "ERROR" {
            let status = serde_json::from_str(event.object.get()).unwrap_or_default();
            return Ok(Some(Self::Failed(status)));
        }
        let named: Named = serde_json::from_str(event.object.get()).map_err(bad)?;
        let version = named.metadata.resource_version;
        Ok(match event.kind {
            "ADDED" | "MODIFIED" => Some(Self::Put(item(event.object)?, version)),
            "DELETED" => Some(Self::Deleted(named.metadata.name, version)),
            "BOOKMARK" => version.map(Self::Bookmark),
            _ => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_has_items_a_version_and_where_the_next_begins() {
        let page = br#"{"kind":"EndpointSliceList","metadata":{"resourceVersion":"7","continue":"abc"},"items":[
            {"metadata":{"name":"a"},"addressType":"IPv4","endpoints":[{"addresses":["10.0.0.1"]}],"later":{}},
            {"metadata":{"name":"b"},"endpoints":7}]}"#;
        let page: ListPage<EndpointSlice> = ListPage::read(page).unwrap();
        assert_eq!((&*page.version, page.next.as_deref()), ("7", Some("abc")));
        let read: Vec<(&str, bool)> = page
            .items
            .iter()
            .map(|item| (&*item.name, item.object.is_some()))
            .collect();
        assert_eq!(read, [("a", true), ("b", false)]);
        let empty: ListPage<Pod> =
            ListPage::read(br#"{"metadata":{"resourceVersion":"1","continue":""},"items":null}"#)
                .unwrap();
        assert!(empty.items.is_empty() && empty.next.is_none());
        assert!(ListPage::<Pod>::read(b"<html>").is_err());
    }

    #[test]
    fn lines_of_a_watch_are_told_apart() {
        let read = |line: &str| WatchEvent::<EndpointSlice>::read(line.as_bytes());
        let shown = |line: &str| match read(line).unwrap() {
            Some(WatchEvent::Put(item, version)) => {
                format!("put {} {version:?} {}", item.name, item.object.is_some())
            }
            Some(WatchEvent::Deleted(name, version)) => format!("deleted {name} {version:?}"),
            Some(WatchEvent::Bookmark(version)) => format!("bookmark {version}"),
            Some(WatchEvent::Failed(status)) => format!("failed {}", status.code),
            None => "nothing".into(),
        };
        let of = |kind: &str| {
            format!(
                r#"{{"type":"{kind}","object":{{"metadata":{{"name":"a","resourceVersion":"9"}},"ports":null}}}}"#
            )
        };
        assert_eq!(shown(&of("ADDED")), r#"put a Some("9") true"#);
        assert_eq!(shown(&of("MODIFIED")), r#"put a Some("9") true"#);
        assert_eq!(shown(&of("DELETED")), r#"deleted a Some("9")"#);
        assert_eq!(shown(&of("BOOKMARK")), "bookmark 9");
        assert_eq!(shown(&of("LATER")), "nothing");
        let gone = r#"{"type":"ERROR","object":{"kind":"Status","code":410,"reason":"Expired","message":"too old"}}"#;
        assert_eq!(shown(gone), "failed 410");
        for bad in ["", "{", "[]", r#"{"type":"ADDED"}"#] {
            assert!(read(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn endpoints_are_ready_unless_they_say_otherwise_or_end() {
        let endpoint = |conditions: &str| -> SliceEndpoint {
            let text = format!(r#"{{"addresses":["10.0.0.1"],"conditions":{conditions}}}"#);
            serde_json::from_str(&text).unwrap()
        };
        for (conditions, ready) in [
            ("null", true),
            ("{}", true),
            (r#"{"ready":null}"#, true),
            (r#"{"ready":true}"#, true),
            (r#"{"ready":false}"#, false),
            (r#"{"ready":true,"terminating":true}"#, false),
            (
                r#"{"ready":false,"serving":true,"terminating":true}"#,
                false,
            ),
        ] {
            assert_eq!(endpoint(conditions).is_ready(), ready, "{conditions}");
        }
    }
}
