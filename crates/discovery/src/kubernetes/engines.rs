//! Engine servers in pods that have labels and nothing else.
//!
//! Answers one question: at which addresses are stock engines ready, where only labels say which pods they are? Services with the
//! labels have slices of endpoints with the same labels; pods with the labels count, too, where no such slice names them.
//!
//! Invariants:
//! - A pod counts once, at one address, though it stands in slices of both address families or of several Services.
//! - A pod that a slice names is ready when the slice says so; another one when it says so itself. One that ends is not ready.
//! - A port is never guessed where several could be meant.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};

use kvasir_types::Role;
use tokio::sync::watch;

use super::object::{EndpointSlice, Item, Meta, Pod, SliceEndpoint};
use super::reflector::{Collection, Told, follow};
use super::{KubernetesStore, SLICES_GROUP, SLICES_PLURAL};
use crate::pods::{PodEngine, PodView, PodWatch};

/// Where engines listen unless something else is said.
const ENGINE_PORT: u16 = 8000;
/// The label that says which part of requests a pod computes, or all pods of a Service.
const ROLE_LABEL: &str = "kvasir.dev/role";

/// Which pods, and which of their ports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodSelector {
    /// A label selector, such as `app=vllm`.
    pub labels: String,
    /// The port; the only one there is if none is said.
    pub port: Option<PodPort>,
}

/// A port of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PodPort {
    /// By number.
    Number(u16),
    /// By the name that the Service or the container gives it.
    Name(String),
}

impl PodPort {
    /// A number is a number, all else a name.
    #[must_use]
    pub fn parse(text: &str) -> Self {
        match text.parse() {
            Ok(number) => Self::Number(number),
            Err(_) => Self::Name(text.to_owned()),
        }
    }
}

impl KubernetesStore {
    /// Follows the engine servers in pods with these labels, until the watch is dropped.
    #[must_use]
    pub fn watch_pods(&self, selector: PodSelector) -> PodWatch {
        let (sender, receiver) = watch::channel(Arc::new(PodView::default()));
        let collection = |group, plural| Collection {
            group,
            plural,
            selector: Some(selector.labels.clone()),
        };
        let slices = collection(SLICES_GROUP, SLICES_PLURAL);
        let pods = collection("api/v1", "pods");
        let address = format!("{} labels {}", self.address, selector.labels);
        let client = self.client.clone();
        self.tasks.spawn(async move {
            let state = Mutex::new(Following::new(selector.port));
            let with = |change: &mut dyn FnMut(&mut Following)| {
                let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
                change(&mut state);
                let view = state.view();
                sender.send_if_modified(|known| {
                    let is_new = **known != view;
                    if is_new {
                        *known = Arc::new(view);
                    }
                    is_new
                });
            };
            let of_slices = follow(&client, &slices, |told| {
                let mut told = Some(told);
                with(&mut |state| told.take().into_iter().for_each(|told| state.slices(told)));
            });
            let of_pods = follow(&client, &pods, |told| {
                let mut told = Some(told);
                with(&mut |state| told.take().into_iter().for_each(|told| state.pods(told)));
            });
            tokio::select! {
                () = of_slices => {}
                () = of_pods => {}
                () = sender.closed() => {}
            }
        });
        PodWatch::new(receiver, address)
    }
}

/// How one kind of object is followed.
#[derive(Debug, Default)]
struct Link {
    is_listed: bool,
    lost: Option<String>,
}

/// What is known of slices and pods.
#[derive(Debug)]
struct Following {
    join: EngineJoin,
    slices: Link,
    pods: Link,
    /// We may not read pods, which was said.
    is_forbidden: bool,
}

impl Following {
    fn new(port: Option<PodPort>) -> Self {
        Self {
            join: EngineJoin {
                port,
                slices: BTreeMap::new(),
                pods: BTreeMap::new(),
            },
            slices: Link::default(),
            pods: Link::default(),
            is_forbidden: false,
        }
    }

    fn slices(&mut self, told: Told<EndpointSlice>) {
        let known = &mut self.join.slices;
        match told {
            Told::Listed(items) => {
                list(known, items);
                self.slices.is_listed = true;
            }
            Told::Put(item) => put(known, item),
            Told::Deleted(name) => drop(known.remove(&name)),
            Told::Reached => self.slices.lost = None,
            Told::Lost(error) => self.slices.lost = Some(error.to_string()),
        }
    }

    fn pods(&mut self, told: Told<Pod>) {
        let known = &mut self.join.pods;
        match told {
            Told::Listed(items) => {
                list(known, items);
                self.pods.is_listed = true;
            }
            Told::Put(item) => put(known, item),
            Told::Deleted(name) => drop(known.remove(&name)),
            Told::Reached => (self.pods.lost, self.is_forbidden) = (None, false),
            // Slices are enough where Services have the labels.
            Told::Lost(error) if error.is_forbidden() => {
                if !std::mem::replace(&mut self.is_forbidden, true) {
                    tracing::info!(%error, "pods may not be read: engines are found by the labels of their Services alone");
                }
                known.clear();
                (self.pods.is_listed, self.pods.lost) = (true, None);
            }
            Told::Lost(error) => self.pods.lost = Some(error.to_string()),
        }
    }

    fn view(&self) -> PodView {
        let (engines, notes) = self.join.engines();
        PodView {
            engines,
            notes,
            is_listed: self.slices.is_listed && self.pods.is_listed,
            lost: self.slices.lost.clone().or_else(|| self.pods.lost.clone()),
        }
    }
}

/// These are there and no others; one that cannot be read is as it was.
fn list<T>(known: &mut BTreeMap<String, T>, items: Vec<Item<T>>) {
    let mut before = std::mem::take(known);
    for item in items {
        let object = item.object.or_else(|| before.remove(&item.name));
        if let Some(object) = object {
            known.insert(item.name, object);
        }
    }
}

fn put<T>(known: &mut BTreeMap<String, T>, item: Item<T>) {
    if let Some(object) = item.object {
        known.insert(item.name, object);
    }
}

/// Slices and pods, joined into engines.
#[derive(Debug)]
struct EngineJoin {
    port: Option<PodPort>,
    slices: BTreeMap<String, EndpointSlice>,
    pods: BTreeMap<String, Pod>,
}

/// A port as a Service or a container gives it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct OpenPort {
    name: String,
    number: u16,
    tls: bool,
}

impl EngineJoin {
    /// Who is ready, and what keeps others from being used.
    fn engines(&self) -> (BTreeSet<PodEngine>, BTreeSet<String>) {
        let mut found: BTreeMap<String, PodEngine> = BTreeMap::new();
        let mut notes = BTreeSet::new();
        let mut in_slices: BTreeSet<&str> = BTreeSet::new();
        // Addresses of the first family count.
        let mut slices: Vec<_> = self.slices.iter().collect();
        slices.sort_by_key(|(name, slice)| (slice.address_type != "IPv4", *name));
        for (name, slice) in slices {
            let endpoints = slice.endpoints.iter().flatten();
            let pods = endpoints.clone().filter_map(SliceEndpoint::pod);
            in_slices.extend(pods.filter_map(|pod| pod.name.as_deref()));
            let ready: Vec<_> = endpoints.filter(|endpoint| endpoint.is_ready()).collect();
            if ready.is_empty() {
                continue;
            }
            match choose(self.port.as_ref(), &ports_of_slice(slice)) {
                Ok(port) => {
                    let of_service = role_in(&slice.metadata);
                    for endpoint in ready {
                        let pod = endpoint.pod().and_then(|pod| pod.name.as_ref());
                        let pod = pod.and_then(|name| self.pods.get(name));
                        let role = pod.and_then(|pod| role_in(&pod.metadata)).or(of_service);
                        add_endpoint(&mut found, endpoint, &port, role.unwrap_or_default());
                    }
                }
                Err(why) => drop(notes.insert(format!("EndpointSlice {name}: {why}"))),
            }
        }
        for (name, pod) in &self.pods {
            if in_slices.contains(&**name) || !pod.is_ready() {
                continue;
            }
            let Some(host) = pod.status.pod_ip.clone().filter(|ip| !ip.is_empty()) else {
                continue;
            };
            match choose(self.port.as_ref(), &ports_of_pod(pod)) {
                Ok(port) => {
                    let engine = PodEngine {
                        pod: name.clone(),
                        uid: pod.metadata.uid.clone().unwrap_or_default(),
                        host,
                        port: port.number,
                        tls: port.tls,
                        role: role_in(&pod.metadata).unwrap_or_default(),
                    };
                    found.entry(name.clone()).or_insert(engine);
                }
                Err(why) => drop(notes.insert(format!("pod {name}: {why}"))),
            }
        }
        (found.into_values().collect(), notes)
    }
}

fn add_endpoint(
    found: &mut BTreeMap<String, PodEngine>,
    endpoint: &SliceEndpoint,
    port: &OpenPort,
    role: Role,
) {
    let Some(host) = endpoint.addresses.first().filter(|host| !host.is_empty()) else {
        return;
    };
    let pod = endpoint.pod();
    let name = pod.and_then(|pod| pod.name.clone()).unwrap_or_default();
    let key = match name.is_empty() {
        true => format!("{host}:{}", port.number),
        false => name.clone(),
    };
    let engine = PodEngine {
        uid: pod.and_then(|pod| pod.uid.clone()).unwrap_or_default(),
        pod: name,
        host: host.clone(),
        port: port.number,
        tls: port.tls,
        role,
    };
    found.entry(key).or_insert(engine);
}

/// The part of requests that labels say a pod computes, or all pods of a Service; none if they say none that is known.
fn role_in(object: &Meta) -> Option<Role> {
    let role = object.labels.as_ref()?.get(ROLE_LABEL)?;
    Role::from_name(role)
}

fn ports_of_slice(slice: &EndpointSlice) -> Vec<OpenPort> {
    let ports = slice.ports.iter().flatten();
    let open = ports.filter(|port| port.protocol.as_deref().is_none_or(|name| name == "TCP"));
    let open = open.filter_map(|port| {
        let name = port.name.clone().unwrap_or_default();
        let protocol = port.app_protocol.as_deref().unwrap_or(&name);
        Some(OpenPort {
            number: port.port.filter(|number| *number > 0)?,
            tls: protocol == "https",
            name,
        })
    });
    open.collect()
}

fn ports_of_pod(pod: &Pod) -> Vec<OpenPort> {
    let containers = pod.spec.containers.iter();
    let ports = containers.flat_map(|container| container.ports.iter().flatten());
    let open = ports.filter(|port| port.protocol.as_deref().is_none_or(|name| name == "TCP"));
    let open = open.filter(|port| port.container_port > 0);
    let open = open.map(|port| OpenPort {
        number: port.container_port,
        tls: port.name.as_deref() == Some("https"),
        name: port.name.clone().unwrap_or_default(),
    });
    open.collect()
}

/// The port that is meant, or why that is not clear.
fn choose(wanted: Option<&PodPort>, open: &[OpenPort]) -> Result<OpenPort, String> {
    let shown = || {
        let show = |port: &OpenPort| match port.name.is_empty() {
            true => port.number.to_string(),
            false => format!("{} ({})", port.number, port.name),
        };
        open.iter().map(show).collect::<Vec<_>>().join(", ")
    };
    let at = |number: u16| OpenPort {
        name: String::new(),
        number,
        tls: false,
    };
    match wanted {
        Some(PodPort::Number(number)) => {
            let known = open.iter().find(|port| port.number == *number);
            Ok(known.cloned().unwrap_or_else(|| at(*number)))
        }
        Some(PodPort::Name(name)) => {
            let known = open.iter().find(|port| port.name == *name);
            let missing = || format!("no port is named {name}; there are {}", shown());
            known.cloned().ok_or_else(missing)
        }
        None => match open {
            [] => Ok(at(ENGINE_PORT)),
            [only] => Ok(only.clone()),
            several => {
                let mut plain = several.iter().filter(|port| port.name == "http");
                let unclear = || format!("several ports, {}: choose with --worker-port", shown());
                plain.next().cloned().ok_or_else(unclear)
            }
        },
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn join(port: Option<&str>, slices: &[Value], pods: &[Value]) -> (Vec<String>, Vec<String>) {
        let name = |object: &Value| object["metadata"]["name"].as_str().unwrap().to_owned();
        let join = EngineJoin {
            port: port.map(PodPort::parse),
            slices: slices
                .iter()
                .map(|slice| (name(slice), serde_json::from_value(slice.clone()).unwrap()))
                .collect(),
            pods: pods
                .iter()
                .map(|pod| (name(pod), serde_json::from_value(pod.clone()).unwrap()))
                .collect(),
        };
        let (engines, notes) = join.engines();
        let show = |engine: PodEngine| {
            let scheme = if engine.tls { "https" } else { "http" };
            let PodEngine {
                pod,
                uid,
                host,
                port,
                role: engine_role,
                ..
            } = engine;
            let role = match engine_role {
                Role::Aggregated => String::new(),
                role => format!(" {}", role.name()),
            };
            format!("{pod}/{uid} {scheme}://{host}:{port}{role}")
        };
        (
            engines.into_iter().map(show).collect(),
            notes.into_iter().collect(),
        )
    }

    fn endpoint(pod: &str, address: &str, ready: bool, terminating: bool) -> Value {
        json!({"addresses": [address], "conditions": {"ready": ready, "serving": true, "terminating": terminating},
            "targetRef": {"kind": "Pod", "name": pod, "uid": format!("{pod}-uid")}})
    }

    fn slice(name: &str, family: &str, ports: &Value, endpoints: &[Value]) -> Value {
        json!({"metadata": {"name": name}, "addressType": family, "ports": ports, "endpoints": endpoints})
    }

    fn pod(name: &str, ip: &str, ready: &str, ports: &Value) -> Value {
        json!({"metadata": {"name": name, "uid": format!("{name}-uid")}, "spec": {"containers": [{"ports": ports}, {}]},
            "status": {"podIP": ip, "conditions": [{"type": "Ready", "status": ready}]}})
    }

    #[test]
    fn ready_endpoints_count_once_whatever_names_them() {
        let http = json!([{"name": "http", "port": 8000, "protocol": "TCP"}]);
        let four = slice(
            "a4",
            "IPv4",
            &http,
            &[
                endpoint("a", "10.0.0.1", true, false),
                endpoint("b", "10.0.0.2", false, false),
                endpoint("c", "10.0.0.3", true, true),
            ],
        );
        let six = slice(
            "a6",
            "IPv6",
            &http,
            &[
                endpoint("a", "fd00::1", true, false),
                endpoint("d", "fd00::4", true, false),
            ],
        );
        // Pods that a slice names are not asked themselves.
        let pods = [
            pod("a", "10.0.0.1", "True", &Value::Null),
            pod("b", "10.0.0.2", "True", &Value::Null),
            pod("e", "10.0.0.5", "True", &Value::Null),
            pod("f", "10.0.0.6", "False", &Value::Null),
        ];
        let (engines, notes) = join(None, &[six, four], &pods);
        assert_eq!(
            engines,
            [
                "a/a-uid http://10.0.0.1:8000",
                "d/d-uid http://fd00::4:8000",
                "e/e-uid http://10.0.0.5:8000",
            ]
        );
        assert!(notes.is_empty());
    }

    #[test]
    fn a_port_is_the_one_that_is_said_or_the_only_one() {
        let one = [endpoint("a", "10.0.0.1", true, false)];
        let two = json!([{"name": "metrics", "port": 9090}, {"name": "api", "port": 8001, "appProtocol": "https"}]);
        let of = |port, ports: &Value| join(port, &[slice("s", "IPv4", ports, &one)], &[]);
        let found = |port, ports: &Value| of(port, ports).0.concat();
        assert_eq!(found(Some("api"), &two), "a/a-uid https://10.0.0.1:8001");
        assert_eq!(found(Some("8001"), &two), "a/a-uid https://10.0.0.1:8001");
        assert_eq!(found(Some("7000"), &two), "a/a-uid http://10.0.0.1:7000");
        assert_eq!(
            of(None, &two),
            (
                vec![],
                vec![
                    "EndpointSlice s: several ports, 9090 (metrics), 8001 (api): choose with --worker-port"
                        .into()
                ]
            )
        );
        assert_eq!(
            of(Some("grpc"), &two).1,
            ["EndpointSlice s: no port is named grpc; there are 9090 (metrics), 8001 (api)"]
        );
        let plain = json!([{"name": "metrics", "port": 9090}, {"name": "http", "port": 8080},
            {"name": "quic", "port": 8443, "protocol": "UDP"}]);
        assert_eq!(found(None, &plain), "a/a-uid http://10.0.0.1:8080");
        assert_eq!(found(None, &Value::Null), "a/a-uid http://10.0.0.1:8000");
    }

    #[test]
    fn labels_say_which_part_of_requests_a_pod_computes() {
        let labelled = |mut object: Value, role: &str| {
            object["metadata"]["labels"] = json!({"app": "vllm", ROLE_LABEL: role});
            object
        };
        let ports = json!([{"name": "http", "port": 8000}]);
        let here = endpoint("a", "10.0.0.1", true, false);
        let service = labelled(slice("s", "IPv4", &ports, &[here]), "prefill");
        let (engines, _) = join(None, std::slice::from_ref(&service), &[]);
        assert_eq!(engines, ["a/a-uid http://10.0.0.1:8000 prefill"]);
        let own = labelled(pod("a", "10.0.0.1", "True", &Value::Null), "decode");
        let (engines, _) = join(None, &[service], std::slice::from_ref(&own));
        assert_eq!(engines, ["a/a-uid http://10.0.0.1:8000 decode"]);
        let unknown = labelled(own, "both");
        let (engines, _) = join(None, &[], &[unknown]);
        assert_eq!(engines, ["a/a-uid http://10.0.0.1:8000"]);
    }

    #[test]
    fn pods_without_a_service_are_found_by_their_own_labels() {
        let ports = json!([{"name": "serve", "containerPort": 8123}]);
        let ready = pod("a", "10.0.0.1", "True", &ports);
        let mut ending = pod("b", "10.0.0.2", "True", &ports);
        ending["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        let (engines, _) = join(None, &[], &[ready.clone(), ending]);
        assert_eq!(engines, ["a/a-uid http://10.0.0.1:8123"]);
        let (engines, _) = join(Some("serve"), &[], &[ready]);
        assert_eq!(engines, ["a/a-uid http://10.0.0.1:8123"]);
    }
}
