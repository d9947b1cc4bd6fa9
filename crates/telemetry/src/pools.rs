//! Series of the pools of prefill workers, as the page shows them.
//!
//! Answers one question: which model and which kind of worker is a series of? Inside, the pool of a model's prefill workers has a name of its own, so that its series
//! are apart from those of the workers that answer. On the page it is the model, and the label `worker_type` says `prefill`.

use prometheus::proto::{LabelPair, MetricFamily};

/// What stands behind a model's name where its pool of prefill workers is meant.
pub const PREFILL_POOL: &str = "@prefill";

/// The labels that name a model or its router.
const NAMING: [&str; 2] = ["model", "router"];
/// The label that tells kinds of workers apart.
const KIND: &str = "worker_type";
const PREFILL: &str = "prefill";

/// Names pools by their models.
pub(crate) fn name_pools(families: &mut [MetricFamily]) {
    for metric in families.iter_mut().flat_map(MetricFamily::mut_metric) {
        if !metric.get_label().iter().any(is_of_pool) {
            continue;
        }
        let mut labels = metric.take_label();
        for label in labels.iter_mut().filter(|label| is_of_pool(label)) {
            let model = label.value().strip_suffix(PREFILL_POOL);
            let model = model.unwrap_or_default().to_owned();
            label.set_value(model);
        }
        if !labels.iter().any(|label| label.name() == KIND) {
            let mut kind = LabelPair::default();
            kind.set_name(KIND.to_owned());
            kind.set_value(PREFILL.to_owned());
            labels.push(kind);
            labels.sort_by(|a, b| a.name().cmp(b.name()));
        }
        metric.set_label(labels);
    }
}

fn is_of_pool(label: &LabelPair) -> bool {
    NAMING.contains(&label.name()) && label.value().ends_with(PREFILL_POOL)
}

#[cfg(test)]
mod tests {
    use crate::{MetricOptions, Metrics};

    #[test]
    fn a_pool_is_its_model_and_says_what_it_computes() {
        let metrics = Metrics::new(&MetricOptions::default()).unwrap();
        for (model, ready) in [("m", 1.0), ("m@prefill", 2.0)] {
            metrics.model_ready.with_label_values(&[model]).set(ready);
        }
        let class = ["m@prefill", "prefill", "default"];
        let pending = &metrics.router_queue_pending_requests;
        pending.with_label_values(&class).set(3.0);
        let mut page = String::new();
        metrics.render(&mut page).unwrap();
        for line in [
            "model_ready{model=\"m\"} 1",
            "model_ready{model=\"m\",worker_type=\"prefill\"} 2",
            "router_queue_pending_requests{model=\"m\",policy_class=\"default\",worker_type=\"prefill\"} 3",
        ] {
            assert!(page.contains(line), "{line}\n{page}");
        }
        assert!(!page.contains("@prefill"));
    }
}
