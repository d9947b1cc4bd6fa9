//! The test prompt: made of tokens that the engine knows, never the same twice, sent twice.

use std::time::Duration;

use kvasir_hash::{Scope, local_hashes};
use kvasir_text::TextModel;
use kvasir_types::{HttpEndpoint, Rng, Token, WorkerId};
use serde_json::{Value, json};

use super::event_probe::EventProbe;
use super::http::Client;
use super::vocabulary;
use crate::observations::{Observations, ProbeError, ProbeResult, RepeatedPrompt, StoredText};

/// JsonReport blocks of the test prompt, if the model takes so many.
const BLOCKS: u32 = 4;
/// Its least tokens: of fewer random words some would have been asked before.
const TOKENS_MIN: u32 = 64;
/// Tokens left for the answer and for what an engine may put in front.
const SPARE_TOKENS: u32 = 16;
/// Ids of the vocabulary in a text that is sent as text, if the model takes so many.
const TEXT_TOKENS: u32 = 384;
/// Where tokens are drawn from if the engine does not tokenize; every vocabulary is larger.
const TOKENS: std::ops::Range<u64> = 1000..8000;
/// The host by which SGLang knows that nobody is to be met.
const NOBODY: &str = "2.2.2.2";
/// Words that any tokenizer knows; which follow which makes a prompt new.
const WORDS: [&str; 16] = [
    "the", "sea", "and", "rain", "over", "hill", "when", "light", "from", "stone", "under", "bird",
    "with", "river", "after", "wind",
];

/// Test requests to one worker.
pub(crate) struct TestRequests<'c> {
    client: &'c Client,
    worker: WorkerId,
    endpoint: HttpEndpoint,
    model: String,
    block_size: u32,
    prompt_len: u32,
    /// Tokens that the model takes.
    context: u32,
    /// Whether a request must say which rank it is for.
    several_ranks: bool,
    /// It computes a part of requests, and takes none without a place to meet the other.
    meets: bool,
    rng: Rng,
}

impl<'c> TestRequests<'c> {
    pub(crate) fn new(
        client: &'c Client,
        observed: &Observations,
        block_size: u32,
        ranks: u32,
        rng: Rng,
    ) -> Self {
        let models = &observed.facts.models;
        let wanted = observed.target.model.as_ref();
        let served = wanted.and_then(|name| models.iter().find(|m| m.name == *name));
        let served = served.or(models.first());
        let longest = served.and_then(|m| m.max_model_len).unwrap_or(u32::MAX);
        let blocks = TOKENS_MIN.div_ceil(block_size.max(1)).max(BLOCKS);
        let whole = block_size.saturating_mul(blocks);
        let len = whole.saturating_add((block_size / 2).max(1));
        Self {
            client,
            worker: observed.target.worker.id,
            endpoint: observed.target.endpoint.clone(),
            model: served.map_or_else(String::new, |m| m.name.clone()),
            block_size,
            context: longest,
            prompt_len: len.min(longest.saturating_sub(SPARE_TOKENS)).max(1),
            several_ranks: ranks > 1,
            meets: observed.facts.info.part.is_some(),
            rng,
        }
    }

    pub(crate) fn worker(&self) -> WorkerId {
        self.worker
    }

    pub(crate) fn model(&self) -> &str {
        &self.model
    }

    pub(crate) const fn block_size(&self) -> u32 {
        self.block_size
    }

    /// Sends a new prompt twice, listening meanwhile.
    pub(crate) async fn send_twice(
        &mut self,
        rank: u32,
        events: Option<&mut EventProbe>,
        wait: Duration,
    ) -> ProbeResult<RepeatedPrompt> {
        let prompt = self.prompt().await;
        self.ask(json!(prompt), rank).await?;
        let mut locals = local_hashes(&prompt, self.block_size as usize, &Scope::default());
        // An engine computes at least the last token, so a prompt of whole blocks is never found as a whole.
        locals.truncate(prompt.len().saturating_sub(1) / self.block_size.max(1) as usize);
        let predicted = match events {
            None => None,
            Some(events) => Some(events.predicted(&locals, wait).await * self.block_size),
        };
        let before = self.hits().await;
        let reported = self.ask(json!(prompt), rank).await?;
        let after = self.hits().await;
        Ok(RepeatedPrompt {
            prompt: prompt.len() as u32,
            predicted,
            reported,
            hits: after.zip(before).map(|(a, b)| a.saturating_sub(b)),
        })
    }

    /// Sends a text as text; how many of its blocks, as we name them, the engine then stores.
    pub(crate) async fn send_text(
        &mut self,
        text: &TextModel,
        rank: u32,
        events: &mut EventProbe,
        wait: Duration,
    ) -> Option<StoredText> {
        let longest = self.context.saturating_sub(SPARE_TOKENS);
        let mut tokens = TEXT_TOKENS.min(longest / 2);
        let (words, ours) = loop {
            let words = vocabulary::random_text(text.tokenizer(), tokens, &mut self.rng);
            let ours = text.encode_prompt(&words).ok()?;
            match ours.len() <= longest as usize {
                true => break (words, ours),
                false => tokens /= 2,
            }
        };
        self.ask(json!(words), rank).await.ok()?;
        let locals = local_hashes(&ours, self.block_size as usize, &Scope::default());
        let expected = u32::try_from(locals.len()).ok().filter(|n| *n > 0)?;
        let found = events.predicted(&locals, wait).await;
        Some(StoredText { expected, found })
    }

    /// One token of an answer; the cached tokens that `usage` tells.
    async fn ask(&self, prompt: Value, rank: u32) -> ProbeResult<Option<u32>> {
        let mut body = json!({
            "model": self.model,
            "prompt": prompt,
            "max_tokens": 1,
            "temperature": 0,
        });
        if self.meets {
            body["bootstrap_host"] = NOBODY.into();
            body["bootstrap_room"] = 0.into();
        }
        let rank = self.several_ranks.then_some(rank);
        let answer = self
            .client
            .post(&self.endpoint, "/v1/completions", &body, rank)
            .await?;
        read_cached(&answer)
    }

    /// Tokens of a text of random words, as the engine makes them.
    pub(crate) async fn prompt(&mut self) -> Vec<Token> {
        let words = self.prompt_len as usize + 8;
        let text: Vec<&str> = (0..words)
            .filter_map(|_| {
                WORDS
                    .get(self.rng.below(WORDS.len() as u64) as usize)
                    .copied()
            })
            .collect();
        let body = json!({
            "model": self.model,
            "prompt": text.join(" "),
            "add_special_tokens": false,
        });
        let told = self
            .client
            .post(&self.endpoint, "/tokenize", &body, None)
            .await;
        let told = told.ok().and_then(|body| read_tokens(&body));
        let mut tokens = told.unwrap_or_default();
        let len = self.prompt_len as usize;
        while tokens.len() < len {
            let span = TOKENS.end - TOKENS.start;
            tokens.push((TOKENS.start + self.rng.below(span)) as Token);
        }
        tokens.truncate(len);
        tokens
    }

    /// Tokens that the engine found in its cache since it began, by its own count.
    async fn hits(&self) -> Option<u64> {
        let page = self.client.get(&self.endpoint, "/metrics").await.ok()?;
        hits_on(super::text_of(&page).ok()?)
    }
}

/// The cached tokens that an answer's `usage` tells, if it tells them.
fn read_cached(body: &[u8]) -> ProbeResult<Option<u32>> {
    let answer: Value =
        serde_json::from_slice(body).map_err(|error| ProbeError::Unreadable(error.to_string()))?;
    let cached = answer.pointer("/usage/prompt_tokens_details/cached_tokens");
    Ok(cached
        .and_then(Value::as_u64)
        .and_then(|n| u32::try_from(n).ok()))
}

/// `tokens` of an answer of `/tokenize`.
pub(crate) fn read_tokens(body: &[u8]) -> Option<Vec<Token>> {
    let answer: Value = serde_json::from_slice(body).ok()?;
    let tokens = answer.get("tokens")?.as_array()?;
    let token = |value: &Value| Token::try_from(value.as_u64()?).ok();
    tokens.iter().map(token).collect()
}

fn hits_on(page: &str) -> Option<u64> {
    /// vLLM's and SGLang's counters.
    const HITS: [&str; 2] = ["vllm:prefix_cache_hits_total", "sglang:cached_tokens_total"];
    let rows = page
        .lines()
        .filter(|line| HITS.iter().any(|name| line.starts_with(name)));
    let values = rows.filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok());
    values.fold(None, |sum, value| Some(sum.unwrap_or(0) + value as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A recorded answer of a real vLLM.
    fn recorded(name: &str) -> Vec<u8> {
        let cases = include_str!("../../../../testdata/vllm-http/cases.jsonl");
        let mut cases = cases
            .lines()
            .map(|line| serde_json::from_str::<Value>(line).unwrap());
        let case = cases.find(|case| case["name"] == name).unwrap();
        case["answer"].as_str().unwrap().as_bytes().to_vec()
    }

    #[test]
    fn a_real_vllm_is_understood() {
        let cached = |name| read_cached(&recorded(name)).unwrap();
        assert_eq!(cached("chat_cached_tokens_1"), Some(0));
        assert_eq!(cached("chat_cached_tokens_2"), Some(32));
        assert_eq!(cached("completions_token_ids"), Some(0));
        for name in ["tokenize_prompt", "tokenize_chat"] {
            let answer = recorded(name);
            let count = serde_json::from_slice::<Value>(&answer).unwrap()["count"].as_u64();
            let tokens = read_tokens(&answer).unwrap();
            assert_eq!(Some(tokens.len() as u64), count);
        }
        let page = include_str!("../../../../testdata/vllm-facts/metrics.txt");
        assert!(hits_on(page).is_some());
    }

    #[test]
    fn answers_are_read() {
        assert_eq!(
            read_cached(br#"{"usage":{"prompt_tokens_details":null}}"#),
            Ok(None)
        );
        assert!(read_cached(b"<html>").is_err());
        assert_eq!(read_tokens(br#"{"tokens":[1,2]}"#), Some(vec![1, 2]));
        assert_eq!(read_tokens(br#"{"tokens":[1,-2]}"#), None);
        let page = "# TYPE x\nvllm:prefix_cache_hits_total{engine=\"0\"} 64.0\n\
                    vllm:prefix_cache_hits_total{engine=\"1\"} 1e2\nvllm:prefix_cache_hits_created 5\n";
        assert_eq!(hits_on(page), Some(164));
        let sglang = "sglang:cached_tokens_total{model_name=\"m\",cache_source=\"device\"} 32.0\n\
                      sglang:cached_tokens_total{model_name=\"m\",cache_source=\"host\"} 8.0\n\
                      sglang:cache_hit_rate{model_name=\"m\"} 0.5\n";
        assert_eq!(hits_on(sglang), Some(40));
        assert_eq!(hits_on(""), None);
    }
}
