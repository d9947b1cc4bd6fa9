//! The table against a recorded page of Dynamo 1.6.1.
//!
//! Answers: does every series of that page exist here with the same type, labels and bounds, or is it said why not?

#![expect(
    clippy::unwrap_used,
    reason = "a test says by failing what it expected"
)]

use std::collections::{BTreeMap, BTreeSet};

use kvasir_telemetry::{
    ABSENT, Group, Identity, Kind, MetricOptions, ProcessKind, SPECS, Spec, TunedBounds,
};

const RECORDED: &str = include_str!("../../../../testdata/dynamo-http/metrics.txt");

/// One name of the recorded page.
#[derive(Debug, Default)]
struct Family {
    kind: String,
    labels: BTreeSet<String>,
    bounds: Vec<f64>,
}

fn recorded() -> BTreeMap<String, Family> {
    let mut families: BTreeMap<String, Family> = BTreeMap::new();
    for line in RECORDED.lines() {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            families.entry(name.into()).or_default().kind = kind.into();
            continue;
        }
        if line.starts_with('#') {
            continue;
        }
        let (series, _) = line.rsplit_once(' ').unwrap();
        let (name, labels) = series.split_once('{').unwrap_or((series, ""));
        let plain = ["_bucket", "_sum", "_count"]
            .iter()
            .find_map(|end| name.strip_suffix(end).filter(|n| families.contains_key(*n)));
        let family = families.get_mut(plain.unwrap_or(name)).unwrap();
        for pair in labels.trim_end_matches('}').split("\",") {
            let Some((label, value)) = pair.split_once("=\"") else {
                continue;
            };
            let value = value.trim_end_matches('"');
            if label != "le" {
                family.labels.insert(label.into());
            } else if let Ok(bound) = value.parse::<f64>()
                && bound.is_finite()
                && !family.bounds.contains(&bound)
            {
                family.bounds.push(bound);
            }
        }
    }
    families
}

fn labels(spec: &Spec) -> BTreeSet<String> {
    let place = ["dynamo_namespace", "dynamo_component", "worker_id"];
    let added: &[&str] = match spec.group {
        Group::Router => &[
            "dynamo_namespace",
            "dynamo_component",
            "worker_id",
            "router_id",
        ],
        Group::RouterFleet | Group::Component => &place,
        Group::Overhead | Group::RouterTotal => &["router_id"],
        _ => &[],
    };
    let all = spec.labels.iter().chain(added);
    all.map(|label| (*label).to_owned()).collect()
}

fn ours() -> BTreeMap<String, &'static Spec> {
    let identity = Identity::default();
    let named = SPECS.iter().map(|spec| (spec.name(&identity), spec));
    named.collect()
}

#[test]
fn every_recorded_series_is_here_as_it_was_or_its_absence_is_explained() {
    let (ours, mut wrong) = (ours(), Vec::new());
    for (name, family) in recorded() {
        let Some(spec) = ours.get(&name) else {
            if !ABSENT.iter().any(|absent| absent.covers(&name)) {
                wrong.push(format!("{name}: neither here nor explained"));
            }
            continue;
        };
        let kind = match spec.kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
        };
        if kind != family.kind {
            wrong.push(format!("{name}: {kind}, was {}", family.kind));
        }
        if labels(spec) != family.labels {
            wrong.push(format!(
                "{name}: {:?}, was {:?}",
                labels(spec),
                family.labels
            ));
        }
        let bounds = spec.buckets.bounds(&TunedBounds::default());
        let same = bounds.len() == family.bounds.len()
            && bounds
                .iter()
                .zip(&family.bounds)
                .all(|(a, b)| (a - b).abs() <= b.abs() * 1e-9);
        if !same {
            wrong.push(format!("{name}: {bounds:?}, was {:?}", family.bounds));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn an_absence_is_of_something_recorded_or_documented() {
    let recorded = recorded();
    for absent in ABSENT {
        // Of workers' own pages, which this recording does not show.
        let known = absent.name == "dynamo_work_handler_*"
            || recorded.keys().any(|name| absent.covers(name));
        assert!(known, "{} is nobody's name", absent.name);
        assert!(!absent.why.is_empty());
    }
}

#[test]
fn what_only_a_router_by_cache_measures_is_marked_so() {
    let without = MetricOptions {
        by_cache: false,
        ..MetricOptions::default()
    };
    let hidden: BTreeSet<String> = SPECS
        .iter()
        .filter(|spec| spec.is_shown(&MetricOptions::default()) && !spec.is_shown(&without))
        .map(|spec| spec.name(&Identity::default()))
        .collect();
    let expected = [
        "dynamo_component_kv_cache_",
        "dynamo_frontend_router_admission_",
        "dynamo_frontend_router_queue_",
        "dynamo_router_overhead_",
        "dynamo_router_shared_cache_",
    ];
    for begins in expected {
        assert!(
            hidden.iter().any(|name| name.starts_with(begins)),
            "{begins}"
        );
    }
    for name in &hidden {
        assert!(expected.iter().any(|e| name.starts_with(e)), "{name}");
    }
}

/// Each process shows its own: a worker nothing of a router, a frontend nothing of an indexer.
#[test]
fn a_page_has_the_series_of_its_process() {
    let shown = |process| {
        let options = MetricOptions {
            process,
            ..MetricOptions::default()
        };
        let shown = SPECS.iter().filter(move |spec| spec.is_shown(&options));
        shown.map(|spec| spec.group).collect::<Vec<_>>()
    };
    let has = |process, group| shown(process).contains(&group);
    let worker = shown(ProcessKind::Worker);
    assert!(!worker.is_empty() && worker.iter().all(|group| *group == Group::Worker));
    assert!(
        has(ProcessKind::Indexer, Group::KvIndexer) && !has(ProcessKind::Indexer, Group::Worker)
    );
    assert!(has(ProcessKind::Router, Group::Worker) && has(ProcessKind::Router, Group::Router));
    for group in [Group::Worker, Group::KvIndexer] {
        assert!(!has(ProcessKind::Frontend, group));
    }
}
