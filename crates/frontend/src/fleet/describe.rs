//! What is known about a worker, said once: what it tells, what its user tells, and what had to be assumed.

use kvasir_router::WorkerSpec;
use kvasir_types::WorkerRecord;
use kvasir_upstream::Facts;

use super::registration::Registration;
use crate::models::ServedModel;

impl Registration {
    /// Says what is known about the worker, if that is new, and that its blocks are not those of `served`'s index.
    pub(super) fn describe(
        &mut self,
        facts: &Facts,
        block_size: u32,
        served: &ServedModel,
        spec: &WorkerSpec,
        sockets: usize,
    ) {
        let told = &*self.record;
        let known = description(told, facts, block_size, spec, sockets);
        if known == self.described {
            return;
        }
        tracing::info!(worker = %told.transport, "worker is {known}");
        if self.wants_events_of(served) && served.block_size != block_size {
            let asked = self.fleet.context.kv_cache_block_size;
            let how = mismatch(served.block_size, asked, told, facts, block_size);
            tracing::error!(worker = %told.transport, model = %served.name, "{how}");
        }
        self.described = known;
    }
}

/// Who said which of two block sizes, and which flag to change.
fn mismatch(
    index: u32,
    asked: Option<u32>,
    told: &WorkerRecord,
    facts: &Facts,
    block_size: u32,
) -> String {
    let own = match (told.block_size, facts.block_size) {
        (Some(_), _) => "as block-size= of the worker says",
        (None, Some(_)) => "as the engine says",
        (None, None) => "assumed, the engine does not say",
    };
    let (whose, advice) = match asked {
        Some(_) => (
            "as --kv-cache-block-size says",
            format!("set --kv-cache-block-size {block_size}, or leave it out"),
        ),
        None => (
            "as the worker that joined first has it",
            format!(
                "start all engines of a model with one --block-size; \
                 --kv-cache-block-size {block_size} lets this one count and not the others"
            ),
        ),
    };
    format!(
        "blocks of {block_size} tokens ({own}), those of the model's index have {index} ({whose}): \
         the worker serves, its cache events do not count; {advice}"
    )
}

fn plural(count: usize) -> &'static str {
    if count == 1 { "" } else { "s" }
}

fn description(
    told: &WorkerRecord,
    facts: &Facts,
    block_size: u32,
    spec: &WorkerSpec,
    sockets: usize,
) -> String {
    let by = |told: bool, found: bool| match (told, found) {
        (true, _) => "told",
        (false, true) => "found",
        (false, false) => "assumed",
    };
    let block = by(told.block_size.is_some(), facts.block_size.is_some());
    let ranks = by(told.ranks.is_some(), facts.ranks.is_some());
    let kv = match spec.kv_total_blocks {
        Some(blocks) => format!("{blocks} KV blocks"),
        None => {
            "KV blocks unknown, so --active-decode-blocks-threshold has no effect for it".into()
        }
    };
    let told_batch = told.capacity.max_num_batched_tokens;
    let batch = match spec.max_num_batched_tokens {
        Some(tokens) if told_batch.or(facts.max_batched_tokens).is_some() => {
            format!("{tokens} tokens in a batch")
        }
        Some(tokens) => format!(
            "{tokens} tokens in a batch (assumed; --router-queue-threshold and \
             --active-prefill-tokens-threshold-frac count in batches, set max-num-batched-tokens)"
        ),
        None => "tokens in a batch unknown, so --router-queue-threshold and \
                 --active-prefill-tokens-threshold-frac have no effect for it \
                 (set max-num-batched-tokens)"
            .into(),
    };
    format!(
        "{}{}: block size {block_size} ({block}), ranks {} ({ranks}), {kv}, {batch}, cache events from {sockets} socket{}",
        facts.kind.name(),
        facts
            .version
            .as_deref()
            .map(|v| format!(" {v}"))
            .unwrap_or_default(),
        spec.rank_count(),
        plural(sockets),
    )
}

#[cfg(test)]
mod tests {
    use kvasir_upstream::parse_worker;

    use super::*;

    #[test]
    fn what_was_assumed_is_said_with_what_it_means() {
        let told = parse_worker("http://a:1,data-parallel-size=2").unwrap();
        let mut facts = Facts::default();
        facts.read_metrics("sglang:num_running_reqs 1\n", &Facts::default());
        let mut spec = WorkerSpec::new(told.id);
        spec.ranks = 2;
        let said = description(&told, &facts, 16, &spec, 0);
        assert!(
            said.starts_with("SGLang: block size 16 (assumed), ranks 2 (told), KV blocks unknown"),
            "{said}"
        );
        assert!(said.contains("--active-prefill-tokens-threshold-frac have no effect"));
        (spec.kv_total_blocks, spec.max_num_batched_tokens) = (Some(9), Some(8192));
        let said = description(&told, &facts, 16, &spec, 0);
        assert!(said.contains("8192 tokens in a batch (assumed; "), "{said}");
        facts.max_batched_tokens = Some(8192);
        facts.block_size = Some(64);
        facts.version = Some("0.5.9".into());
        let said = description(&told, &facts, 64, &spec, 2);
        assert_eq!(
            said,
            "SGLang 0.5.9: block size 64 (found), ranks 2 (told), 9 KV blocks, 8192 tokens in a batch, \
             cache events from 2 sockets"
        );
        let said = description(&told, &facts, 64, &spec, 1);
        assert!(said.ends_with("cache events from 1 socket"), "{said}");
    }

    #[test]
    fn two_block_sizes_are_named_with_their_origins_and_the_flag_to_change() {
        let told = parse_worker("http://a:1").unwrap();
        let facts = Facts {
            block_size: Some(16),
            ..Facts::default()
        };
        assert_eq!(
            mismatch(64, Some(64), &told, &facts, 16),
            "blocks of 16 tokens (as the engine says), those of the model's index have 64 (as \
             --kv-cache-block-size says): the worker serves, its cache events do not count; set \
             --kv-cache-block-size 16, or leave it out"
        );
        let said = mismatch(32, None, &told, &facts, 16);
        assert!(
            said.contains("have 32 (as the worker that joined first has it)"),
            "{said}"
        );
        assert!(
            said.contains("start all engines of a model with one --block-size"),
            "{said}"
        );
        let told = parse_worker("http://a:1,block-size=8").unwrap();
        let said = mismatch(32, None, &told, &facts, 8);
        assert!(
            said.starts_with("blocks of 8 tokens (as block-size= of the worker says)"),
            "{said}"
        );
    }
}
