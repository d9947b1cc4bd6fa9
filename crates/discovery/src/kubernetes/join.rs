//! Custom resources joined with the pods that are ready.
//!
//! Answers one question: which records of workers count? A worker's pod writes all its records into one custom resource; they count
//! while a slice of endpoints says that the pod is ready. Objects in, changed records out; nothing here waits or asks.
//!
//! Invariants:
//! - Only what differs is told, however much is listed again.
//! - A resource, or a record in it, that cannot be read leaves what was known of it, as long as the resource is the same one. It is
//!   said once.
//! - A resource belongs to the pod that owns it; one without an owner to the pod of its name.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::object::{EndpointSlice, Item, WorkerResource};
use crate::record::{Bucket, Record, RecordKey};

/// Records of one resource at most.
const RECORDS_MAX: usize = 4096;

/// A record that is there, or is no longer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Put(RecordKey, Vec<u8>),
    Delete(RecordKey),
}

/// Where a record stands in its resource: its kind, and its key there.
type Place = (Bucket, String);

/// Keys and values, by place.
type Records = BTreeMap<Place, (RecordKey, Vec<u8>)>;

/// What one pod has announced.
#[derive(Debug, Default)]
struct Announced {
    pod: String,
    uid: Option<String>,
    records: Records,
    /// What cannot be read, which was said.
    unreadable: BTreeSet<Place>,
}

/// What is known. See the module.
#[derive(Debug, Default)]
pub(super) struct Join {
    resources: BTreeMap<String, Announced>,
    /// The resources of each pod.
    of_pod: BTreeMap<String, BTreeSet<String>>,
    /// The pods of each slice that are ready.
    slices: BTreeMap<String, BTreeSet<String>>,
    /// In how many slices each pod is ready.
    ready: BTreeMap<String, usize>,
}

impl Join {
    /// These resources are there and no others.
    pub(super) fn list_resources(&mut self, items: Vec<Item<WorkerResource>>) -> Vec<Step> {
        let named: BTreeSet<String> = items.iter().map(|item| item.name.clone()).collect();
        let known = self.resources.keys().cloned();
        let gone: Vec<String> = known.filter(|name| !named.contains(name)).collect();
        let mut steps = Vec::new();
        for name in gone {
            steps.extend(self.delete_resource(&name));
        }
        for item in items {
            steps.extend(self.put_resource(item));
        }
        steps
    }

    /// A resource is so now.
    pub(super) fn put_resource(&mut self, item: Item<WorkerResource>) -> Vec<Step> {
        let Some(resource) = item.object else {
            return Vec::new();
        };
        let before = self.take(&item.name).unwrap_or_default();
        let was_ready = self.is_ready(&before.pod);
        let is_same = before.uid == resource.metadata.uid;
        let pod = owner(&resource).unwrap_or(&item.name).to_owned();
        let told = match was_ready {
            true => before.records.clone(),
            false => BTreeMap::new(),
        };
        let known = match is_same {
            true => before,
            false => Announced::default(),
        };
        let mut announced = match &resource.spec.data {
            Value::Object(_) => read(&item.name, &resource.spec.data, known),
            _ => known,
        };
        (announced.pod, announced.uid) = (pod.clone(), resource.metadata.uid);
        let steps = match self.is_ready(&pod) {
            true => difference(&told, &announced.records),
            false => difference(&told, &BTreeMap::new()),
        };
        self.of_pod
            .entry(pod)
            .or_default()
            .insert(item.name.clone());
        self.resources.insert(item.name, announced);
        steps
    }

    /// A resource is gone.
    pub(super) fn delete_resource(&mut self, name: &str) -> Vec<Step> {
        match self.take(name) {
            Some(announced) if self.is_ready(&announced.pod) => {
                difference(&announced.records, &BTreeMap::new())
            }
            _ => Vec::new(),
        }
    }

    /// These slices are there and no others.
    pub(super) fn list_slices(&mut self, items: Vec<Item<EndpointSlice>>) -> Vec<Step> {
        let named: BTreeSet<String> = items.iter().map(|item| item.name.clone()).collect();
        let known = self.slices.keys().cloned();
        let gone: Vec<String> = known.filter(|name| !named.contains(name)).collect();
        let mut touched = BTreeSet::new();
        let before = self.ready_pods();
        // A pod that moves from one slice to another is ready throughout.
        for item in items {
            touched.extend(self.set_slice(item));
        }
        for name in gone {
            touched.extend(self.unset_slice(&name));
        }
        self.turned(&before, touched)
    }

    /// A slice is so now.
    pub(super) fn put_slice(&mut self, item: Item<EndpointSlice>) -> Vec<Step> {
        let before = self.ready_pods();
        let touched = self.set_slice(item);
        self.turned(&before, touched)
    }

    /// A slice is gone.
    pub(super) fn delete_slice(&mut self, name: &str) -> Vec<Step> {
        let before = self.ready_pods();
        let touched = self.unset_slice(name);
        self.turned(&before, touched)
    }

    fn is_ready(&self, pod: &str) -> bool {
        self.ready.contains_key(pod)
    }

    fn ready_pods(&self) -> BTreeSet<String> {
        self.ready.keys().cloned().collect()
    }

    /// What follows for those pods of `touched` that are ready now and were not, or the other way round.
    fn turned(&self, before: &BTreeSet<String>, touched: BTreeSet<String>) -> Vec<Step> {
        let mut steps = Vec::new();
        for pod in touched {
            let (was_ready, is_ready) = (before.contains(&pod), self.is_ready(&pod));
            if was_ready == is_ready {
                continue;
            }
            for name in self.of_pod.get(&pod).into_iter().flatten() {
                let Some(announced) = self.resources.get(name) else {
                    continue;
                };
                let none = BTreeMap::new();
                steps.extend(match is_ready {
                    true => difference(&none, &announced.records),
                    false => difference(&announced.records, &none),
                });
            }
        }
        steps
    }

    /// Says which pods it is about, before and now.
    fn set_slice(&mut self, item: Item<EndpointSlice>) -> BTreeSet<String> {
        let Some(slice) = item.object else {
            return BTreeSet::new();
        };
        let endpoints = slice.endpoints.iter().flatten();
        let ready = endpoints.filter(|endpoint| endpoint.is_ready());
        let pods = ready.filter_map(|endpoint| endpoint.pod()?.name.clone());
        let pods: BTreeSet<String> = pods.collect();
        for pod in &pods {
            *self.ready.entry(pod.clone()).or_default() += 1;
        }
        let mut touched = self.unset_slice(&item.name);
        touched.extend(pods.iter().cloned());
        self.slices.insert(item.name, pods);
        touched
    }

    fn unset_slice(&mut self, name: &str) -> BTreeSet<String> {
        let pods = self.slices.remove(name).unwrap_or_default();
        for pod in &pods {
            if let Some(slices) = self.ready.get_mut(pod) {
                *slices -= 1;
                if *slices == 0 {
                    self.ready.remove(pod);
                }
            }
        }
        pods
    }

    fn take(&mut self, name: &str) -> Option<Announced> {
        let announced = self.resources.remove(name)?;
        if let Some(names) = self.of_pod.get_mut(&announced.pod) {
            names.remove(name);
            if names.is_empty() {
                self.of_pod.remove(&announced.pod);
            }
        }
        Some(announced)
    }
}

/// The pod that a resource belongs to, where it says so.
fn owner(resource: &WorkerResource) -> Option<&String> {
    let owners = resource.metadata.owner_references.iter().flatten();
    let mut pods = owners.filter(|owner| owner.kind == "Pod" && !owner.name.is_empty());
    pods.next().map(|owner| &owner.name)
}

/// The name of a kind of record in a resource.
pub(super) const fn section(bucket: Bucket) -> &'static str {
    match bucket {
        Bucket::Instances => "endpoints",
        Bucket::Models => "model_cards",
        Bucket::EventChannels => "event_channels",
        Bucket::EventSources => "event_sources",
    }
}

/// The records of a resource; one that cannot be read is as it was `known`.
fn read(name: &str, data: &Value, mut known: Announced) -> Announced {
    let mut announced = Announced::default();
    for bucket in Bucket::ALL {
        let section = data.get(section(bucket)).and_then(Value::as_object);
        for (key, value) in section.into_iter().flatten() {
            if announced.records.len() >= RECORDS_MAX {
                return announced;
            }
            let place = (bucket, key.clone());
            let bytes = value.to_string().into_bytes();
            match Record::parse(bucket, &bytes) {
                Ok(record) => drop(announced.records.insert(place, (record.key(), bytes))),
                Err(error) => {
                    if !known.unreadable.contains(&place) {
                        tracing::warn!(resource = name, key, %error,
                            "a record cannot be read: what was known before stays; its writer has to put it right");
                    }
                    if let Some(before) = known.records.remove(&place) {
                        announced.records.insert(place.clone(), before);
                    }
                    announced.unreadable.insert(place);
                }
            }
        }
    }
    announced
}

/// What makes one set of records the other.
fn difference(before: &Records, now: &Records) -> Vec<Step> {
    let keys: BTreeSet<&RecordKey> = now.values().map(|(key, _)| key).collect();
    let values = before.values().map(|(key, bytes)| (key, bytes));
    let before: BTreeMap<&RecordKey, &Vec<u8>> = values.collect();
    let gone = before.keys().filter(|key| !keys.contains(**key));
    let mut steps: Vec<Step> = gone.map(|key| Step::Delete((*key).clone())).collect();
    for (key, bytes) in now.values() {
        if before.get(key) != Some(&bytes) {
            steps.push(Step::Put(key.clone(), bytes.clone()));
        }
    }
    steps
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn resource(pod: &str, uid: &str, ids: &[u64]) -> Item<WorkerResource> {
        let endpoints: serde_json::Map<String, Value> = ids
            .iter()
            .map(|id| {
                let record = json!({"type": "Endpoint", "component": "c", "endpoint": "e", "namespace": "n",
                    "instance_id": id, "transport": {"tcp": format!("{pod}:1")}});
                (format!("n/c/e/{id:x}"), record)
            })
            .collect();
        with_data(
            pod,
            uid,
            &json!({"endpoints": endpoints, "later": {"x": 1}}),
        )
    }

    fn with_data(pod: &str, uid: &str, data: &Value) -> Item<WorkerResource> {
        let object = json!({"metadata": {"name": pod, "uid": uid}, "spec": {"data": data}});
        Item {
            name: pod.into(),
            object: Some(serde_json::from_value(object).unwrap()),
        }
    }

    fn slice(name: &str, pods: &[(&str, bool)]) -> Item<EndpointSlice> {
        let endpoints: Vec<Value> = pods
            .iter()
            .map(|(pod, ready)| {
                json!({"addresses": ["10.0.0.1"], "conditions": {"ready": ready},
                    "targetRef": {"kind": "Pod", "name": pod}})
            })
            .collect();
        let object = json!({"metadata": {"name": name}, "endpoints": endpoints});
        Item {
            name: name.into(),
            object: Some(serde_json::from_value(object).unwrap()),
        }
    }

    fn shown(steps: Vec<Step>) -> Vec<String> {
        let show = |step| match step {
            Step::Put(key, _) => format!("+{}", key.key),
            Step::Delete(key) => format!("-{}", key.key),
        };
        steps.into_iter().map(show).collect()
    }

    #[test]
    fn a_worker_counts_while_its_pod_is_ready() {
        let mut join = Join::default();
        assert!(join.put_resource(resource("a", "u", &[1])).is_empty());
        assert_eq!(
            shown(join.put_slice(slice("s", &[("a", true), ("b", true)]))),
            ["+n/c/e/1"]
        );
        assert_eq!(
            shown(join.put_resource(resource("b", "u", &[2]))),
            ["+n/c/e/2"]
        );
        assert!(join.put_resource(resource("b", "u", &[2])).is_empty());
        assert_eq!(
            shown(join.put_slice(slice("s", &[("a", false), ("b", true)]))),
            ["-n/c/e/1"]
        );
        assert_eq!(
            shown(join.put_resource(resource("b", "u", &[3]))),
            ["-n/c/e/2", "+n/c/e/3"]
        );
        assert!(join.delete_resource("a").is_empty());
        assert_eq!(shown(join.delete_resource("b")), ["-n/c/e/3"]);
        assert!(join.of_pod.is_empty() && join.resources.is_empty());
    }

    #[test]
    fn a_pod_that_moves_between_slices_is_ready_throughout() {
        let mut join = Join::default();
        join.put_slice(slice("s", &[("a", true)]));
        join.put_resource(resource("a", "u", &[1]));
        assert!(join.put_slice(slice("t", &[("a", true)])).is_empty());
        assert!(join.delete_slice("s").is_empty());
        assert!(
            join.list_slices(vec![slice("u", &[("a", true)])])
                .is_empty()
        );
        assert_eq!(shown(join.list_slices(vec![])), ["-n/c/e/1"]);
        assert!(join.ready.is_empty());
    }

    #[test]
    fn a_listing_tells_only_what_differs() {
        let mut join = Join::default();
        let both = || vec![resource("a", "u", &[1]), resource("b", "u", &[2])];
        join.list_slices(vec![slice("s", &[("a", true), ("b", true)])]);
        assert_eq!(shown(join.list_resources(both())), ["+n/c/e/1", "+n/c/e/2"]);
        assert!(join.list_resources(both()).is_empty());
        assert_eq!(
            shown(join.list_resources(vec![resource("a", "u", &[1, 4])])),
            ["-n/c/e/2", "+n/c/e/4"]
        );
    }

    #[test]
    fn what_cannot_be_read_leaves_what_was_known_of_the_same_resource() {
        let mut join = Join::default();
        join.put_slice(slice("s", &[("a", true)]));
        join.put_resource(resource("a", "u", &[1]));
        assert!(
            join.put_resource(with_data("a", "u", &Value::Null))
                .is_empty()
        );
        let bad = json!({"endpoints": {"n/c/e/1": {"type": "Endpoint"}}});
        assert!(join.put_resource(with_data("a", "u", &bad)).is_empty());
        let unreadable = Item {
            name: "a".into(),
            object: None,
        };
        assert!(join.put_resource(unreadable).is_empty());
        // The same name, made anew: another worker.
        assert_eq!(
            shown(join.put_resource(with_data("a", "v", &Value::Null))),
            ["-n/c/e/1"]
        );
    }

    #[test]
    fn a_resource_belongs_to_the_pod_that_owns_it() {
        let mut join = Join::default();
        join.put_slice(slice("s", &[("a", true)]));
        let mut owned = resource("a-prefill", "u", &[1]);
        if let Some(object) = &mut owned.object {
            let owners = json!([{"kind": "Pod", "name": "a"}]);
            object.metadata.owner_references = serde_json::from_value(owners).unwrap();
        }
        assert_eq!(shown(join.put_resource(owned)), ["+n/c/e/1"]);
    }
}
