//! Whether two servers share a request.

use crate::advice;
use crate::finding::{Check, Finding, Verdict};
use crate::observations::{PairOutcome, PairProbe};

/// What a server is started with that hands prompts to others.
const CONNECTOR: &str = r#"{"kv_connector": "NixlConnector", "kv_role": "kv_both"}"#;

/// Judges what came of one request through two servers.
#[must_use]
pub fn examine_pair(pair: &PairProbe) -> Finding {
    let verdict = match &pair.outcome {
        PairOutcome::Answered {
            prompt,
            answer,
            is_same,
        } => Verdict::pass(format!(
            "prompt computed in {:.0} ms, answered in {:.0} ms{}",
            prompt.as_secs_f64() * 1e3,
            answer.as_secs_f64() * 1e3,
            match is_same {
                true => "",
                false => "; the two say different first tokens",
            }
        )),
        PairOutcome::Unsupported(connector) => Verdict::fail(
            format!(
                "{connector} needs words from the router that Kvasir does not say: no prompt is handed over"
            ),
            vec![self::connector("both servers hand prompts over by it")],
        ),
        PairOutcome::Mixed => Verdict::fail(
            format!(
                "one of {} and {} is SGLang, the other is not: they cannot hand prompts over",
                pair.prefill, pair.decode
            ),
            vec![advice::kvasir(
                &["--prefill-worker", &pair.prefill],
                "only beside a --worker of the same engine",
            )],
        ),
        PairOutcome::PrefillFailed(error) => Verdict::fail(
            format!("{} does not compute the prompt: {error}", pair.prefill),
            Vec::new(),
        ),
        PairOutcome::NoTransfer => Verdict::fail(
            format!(
                "{} does not say where the prompt is: it has no KV connector",
                pair.prefill
            ),
            vec![connector(
                "the server of --prefill-worker hands prompts over",
            )],
        ),
        PairOutcome::NoConnector => Verdict::fail(
            format!(
                "{} has no KV connector: it computes every prompt itself",
                pair.decode
            ),
            vec![connector("the server of --worker fetches prompts")],
        ),
        PairOutcome::NotFetched { error, from } if pair.is_sglang => Verdict::fail(
            format!(
                "{} could not take the prompt over from {from}: {error}",
                pair.decode
            ),
            vec![advice::engine(
                &[
                    "--disaggregation-bootstrap-port",
                    from.rsplit(':').next().unwrap_or("8998"),
                ],
                "on the prefill server, reachable from the decode server under the host of its URL; one transfer backend, page size and dtype for both",
            )],
        ),
        PairOutcome::NotFetched { error, from } => Verdict::fail(
            format!(
                "{} could not fetch the prompt from {from}: {error}",
                pair.decode
            ),
            vec![advice::engine(
                &[],
                "set VLLM_NIXL_SIDE_CHANNEL_HOST on the prefill server to an address that the decode server reaches; vLLM version, model path, dtype and connector must be the same on both",
            )],
        ),
    };
    Finding {
        check: Check::Pair,
        outcome: verdict.outcome,
        why: verdict.why,
        advice: verdict.advice,
    }
}

fn connector(text: &str) -> crate::finding::Advice {
    advice::engine(&["--kv-transfer-config", CONNECTOR], text)
}
