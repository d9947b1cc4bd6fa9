//! What the caches of tokenized text have done, as counters.
//!
//! A cache counts for itself; when metrics are asked for, what came since the last time is added. Models may share a
//! tokenizer (an adapter has its base's): what it did is added once, to the first of them by name.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use kvasir_telemetry::Metrics;
use kvasir_text::{CacheStats, TextModel};

use crate::models::ServedModel;

/// What was added already, by tokenizer.
#[derive(Default)]
pub(crate) struct TextCounts {
    added: Mutex<Vec<(Weak<TextModel>, CacheStats)>>,
}

impl TextCounts {
    /// Adds what came since the last time.
    pub(crate) fn add(&self, models: &[Arc<ServedModel>], metrics: &Metrics) {
        let mut added = self.added.lock().unwrap_or_else(PoisonError::into_inner);
        added.retain(|(text, _)| text.strong_count() > 0);
        for model in models {
            let Some(text) = model.text() else {
                continue;
            };
            let Some(now) = text.cache_stats() else {
                continue;
            };
            // A tokenizer that another model has, too, has nothing new by then.
            let known = added
                .iter_mut()
                .find(|(known, _)| std::ptr::eq(known.as_ptr(), Arc::as_ptr(text)));
            let before = match known {
                Some((_, before)) => std::mem::replace(before, now),
                None => {
                    added.push((Arc::downgrade(text), now));
                    CacheStats::default()
                }
            };
            count(&model.name, &before, &now, metrics);
        }
    }
}

fn count(model: &str, before: &CacheStats, now: &CacheStats, metrics: &Metrics) {
    let all = [
        (
            &metrics.tokenizer_cache_hits_total,
            before.hit_texts,
            now.hit_texts,
        ),
        (
            &metrics.tokenizer_cache_misses_total,
            before.miss_texts,
            now.miss_texts,
        ),
    ];
    for (counter, before, now) in all {
        counter.inc_by(now.saturating_sub(before));
    }
    let of_model = [
        (
            &metrics.tokenizer_cache_cached_tokens_total,
            before.hit_tokens,
            now.hit_tokens,
        ),
        (
            &metrics.tokenizer_cache_uncached_tokens_total,
            before.miss_tokens,
            now.miss_tokens,
        ),
    ];
    for (counter, before, now) in of_model {
        counter
            .with_label_values(&[model])
            .inc_by(now.saturating_sub(before));
    }
}
