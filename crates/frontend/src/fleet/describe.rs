//! What is known about a worker, said once: what it tells, what its user tells, and what had to be assumed.

use kvasir_router::WorkerSpec;
use kvasir_upstream::{Facts, WorkerAddress};

use super::Watcher;

impl Watcher {
    /// Says what is known about the worker, if that is new.
    pub(super) fn describe(
        &mut self,
        facts: &Facts,
        block_size: u32,
        spec: &WorkerSpec,
        sockets: usize,
    ) {
        let known = description(self.pool.address(), facts, block_size, spec, sockets);
        if known != self.described {
            tracing::info!(worker = %self.pool.address(), "worker is {known}");
            self.described = known;
        }
    }
}

fn description(
    told: &WorkerAddress,
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
    let ranks = by(told.data_parallel_size.is_some(), facts.ranks.is_some());
    let kv = match spec.kv_total_blocks {
        Some(blocks) => format!("{blocks} KV blocks"),
        None => {
            "KV blocks unknown, so --active-decode-blocks-threshold has no effect for it".into()
        }
    };
    let batch = match spec.max_num_batched_tokens {
        Some(tokens) => format!("{tokens} tokens in a batch"),
        None => "tokens in a batch unknown, so --router-queue-threshold and \
                 --active-prefill-tokens-threshold-frac have no effect for it \
                 (say max-num-batched-tokens)"
            .into(),
    };
    format!(
        "{}{}: block size {block_size} ({block}), ranks {} ({ranks}), {kv}, {batch}, cache events from {sockets} sockets",
        facts.kind.name(),
        facts
            .version
            .as_deref()
            .map(|v| format!(" {v}"))
            .unwrap_or_default(),
        spec.rank_count(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_assumed_is_said_with_what_it_means() {
        let told = WorkerAddress::parse("http://a:1,data-parallel-size=2").unwrap();
        let mut facts = Facts::default();
        facts.read_metrics("sglang:num_running_reqs 1\n", &Facts::default());
        let mut spec = WorkerSpec::new(told.id());
        spec.ranks = 2;
        let said = description(&told, &facts, 16, &spec, 0);
        assert!(
            said.starts_with("SGLang: block size 16 (assumed), ranks 2 (told), KV blocks unknown"),
            "{said}"
        );
        assert!(said.contains("--active-prefill-tokens-threshold-frac have no effect"));
        (spec.kv_total_blocks, spec.max_num_batched_tokens) = (Some(9), Some(8192));
        facts.block_size = Some(64);
        facts.version = Some("0.5.9".into());
        let said = description(&told, &facts, 64, &spec, 2);
        assert_eq!(
            said,
            "SGLang 0.5.9: block size 64 (found), ranks 2 (told), 9 KV blocks, 8192 tokens in a batch, \
             cache events from 2 sockets"
        );
    }
}
