//! What the probes found at one worker, as values. Nothing here sends requests, and nothing judges.

use std::time::Duration;

use kvasir_transport::SourceFault;
use kvasir_types::{EventFeed, HttpEndpoint, Token, WorkerRecord};
use kvasir_upstream::{EventSource, Facts};

/// The result of one probe.
pub type ProbeResult<T> = Result<T, ProbeError>;

/// Why a probe failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProbeError {
    /// Nothing listens there, the name is unknown, or a firewall blocks it.
    #[error("cannot connect: {0}")]
    Unreachable(String),
    /// The TLS handshake fails.
    #[error("no secure connection: {0}")]
    Insecure(String),
    /// No answer came in time.
    #[error("no answer within {} s", .0.as_secs_f64())]
    TimedOut(Duration),
    /// An error: its status, and its message.
    #[error("it answers {0}: {1}")]
    Status(u16, String),
    /// An answer that cannot be parsed.
    #[error("its answer cannot be read: {0}")]
    Unreadable(String),
    /// Not probed, since an earlier probe failed.
    #[error("not asked")]
    Skipped,
}

/// The worker and its settings, as `kvasir frontend` would be given them.
#[derive(Clone, Debug, PartialEq)]
pub struct Target {
    /// `--worker`.
    pub worker: WorkerRecord,
    /// Its URL.
    pub endpoint: HttpEndpoint,
    /// `--model-name`.
    pub model: Option<String>,
    /// `--kv-cache-block-size`.
    pub block_size: Option<u32>,
    /// `--model-path`.
    pub model_path: Option<String>,
    /// Tokens in a block of the index that a running frontend has for the worker's model.
    pub index_block_size: Option<u32>,
}

/// What came of one request through two servers.
#[derive(Clone, Debug)]
pub struct PairProbe {
    /// Who computed the prompt.
    pub prefill: String,
    /// Who answered.
    pub decode: String,
    /// They meet, as SGLang's do.
    pub is_sglang: bool,
    /// What came of it.
    pub outcome: PairOutcome,
}

/// The same, without the servers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PairOutcome {
    /// An answer.
    Answered {
        /// How long the prompt took.
        prompt: Duration,
        /// How long the answer took.
        answer: Duration,
        /// Both say the same first token.
        is_same: bool,
    },
    /// The prompt was not computed.
    PrefillFailed(ProbeError),
    /// It is not said where the prompt is.
    NoTransfer,
    /// The server that answers has nothing to fetch it with.
    NoConnector,
    /// This connector hands prompts over by words that we do not say.
    Unsupported(String),
    /// One of the two is SGLang, the other is not.
    Mixed,
    /// It could not be fetched.
    NotFetched {
        /// Why.
        error: ProbeError,
        /// From where.
        from: String,
    },
}

/// What was found at one worker.
#[derive(Clone, Debug)]
pub struct Observations {
    /// The worker and its settings.
    pub target: Target,
    /// Whether it lists its models, and after how long.
    pub models: ProbeResult<Duration>,
    /// Whether it says its version.
    pub version: ProbeResult<()>,
    /// Whether it has metrics.
    pub metrics: ProbeResult<()>,
    /// Whether it says where its events are.
    pub event_route: ProbeResult<()>,
    /// What it says.
    pub facts: Facts,
    /// What was seen at each rank that was looked at; empty if the worker did not answer.
    pub ranks: Vec<RankProbe>,
    /// Whether our tokens are its tokens.
    pub text: TokenizerProbe,
    /// The block size of most other workers that serve the model, and one of them.
    pub peers_block_size: Option<(u32, String)>,
    /// Where its events could be published without meeting a neighbour on its host.
    pub free_event_port: u16,
}

/// One rank of a worker.
#[derive(Clone, Debug, PartialEq)]
pub struct RankProbe {
    /// Which.
    pub rank: u32,
    /// Where the frontend would listen, if it knew of a place.
    pub source: Option<EventSource>,
    /// Whether the socket is connected; without a source it is not.
    pub link: Result<(), SourceFault>,
    /// What came.
    pub events: EventCounts,
    /// What the replay socket answered.
    pub replay: ReplayProbe,
    /// One prompt, sent twice.
    pub repeated_prompt: ProbeResult<RepeatedPrompt>,
    /// Blocks of a text, named by us and by the engine's events; none without a tokenizer here or without events.
    pub stored_text: Option<StoredText>,
}

/// A text that was sent as text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredText {
    /// Complete blocks of it, by our tokenizer.
    pub expected: u32,
    /// Those of them, from the first on, that the engine stored with the same tokens.
    pub found: u32,
}

/// What came over an event socket while the test requests ran.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EventCounts {
    /// Batches.
    pub batches: u64,
    /// Blocks that the index took.
    pub blocks: u64,
    /// Another block size than expected, as events say it.
    pub other_block_size: Option<u32>,
    /// A message that could not be read.
    pub refused: Option<String>,
    /// From the answer to the first event.
    pub after: Option<Duration>,
}

/// What the replay socket answered.
#[derive(Clone, Debug, PartialEq)]
pub enum ReplayProbe {
    /// Not probed.
    Skipped,
    /// Its address is not known.
    Unknown,
    /// It answered to the end.
    Answered {
        /// Batches that it repeated.
        batches: u64,
        /// Whether the batch that came live last was among them; unknown if none came.
        has_last: Option<bool>,
    },
    /// It failed.
    Failed(SourceFault),
    /// It did not answer for this long.
    TimedOut(Duration),
}

/// One prompt, sent twice, as tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RepeatedPrompt {
    /// Tokens of the prompt.
    pub prompt: u32,
    /// Cached tokens that the index predicted before the second time; none if no events came.
    pub predicted: Option<u32>,
    /// What `usage` said the second time.
    pub reported: Option<u32>,
    /// By how much the engine's own counter of hits grew meanwhile.
    pub hits: Option<u64>,
}

/// Whether our tokens are the engine's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenizerProbe {
    /// Not probed, since the engine does not answer.
    Skipped,
    /// `--model-path` is not given.
    NoModelPath {
        /// The engine's own folder, if it is on this machine too.
        folder: Option<String>,
        /// Whether the engine makes tokens of a prompt when it is asked.
        tokenizes: bool,
    },
    /// The folder cannot be used.
    Unusable(String),
    /// Both have tokens.
    Compared(Comparison),
    /// The engine does not return tokens.
    NoEngineTokens(ProbeError),
}

/// Our tokens beside the engine's.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Comparison {
    /// Of a text without template.
    pub plain: Option<Difference>,
    /// Of a conversation.
    pub chat: Option<Difference>,
    /// Tokens of the conversation, as we count them.
    pub chat_tokens: usize,
    /// Tokens of texts made of the vocabulary, as we count them.
    pub vocabulary_tokens: usize,
    /// The engine returned only their number.
    pub counts_only: bool,
    /// The engine's own folder, if it is on this machine too and is another one than ours.
    pub engine_folder: Option<String>,
}

/// Where two lists of tokens begin to differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Position of the first token that differs.
    pub at: usize,
    /// How many we have.
    pub ours: usize,
    /// How many the engine has.
    pub theirs: usize,
    /// Ours from there on, as text.
    pub our_text: String,
    /// Theirs from there on, as text.
    pub their_text: String,
}

impl Difference {
    /// Compares; `text` shows a few tokens.
    pub fn between(
        ours: &[Token],
        theirs: &[Token],
        text: impl Fn(&[Token]) -> String,
    ) -> Option<Self> {
        /// Tokens shown on each side.
        const SHOWN: usize = 6;
        if ours == theirs {
            return None;
        }
        let same = ours.iter().zip(theirs).take_while(|(a, b)| a == b).count();
        let from = |tokens: &[Token]| {
            let rest = tokens.get(same..).unwrap_or_default();
            text(rest.get(..SHOWN).unwrap_or(rest))
        };
        Some(Self {
            at: same,
            ours: ours.len(),
            theirs: theirs.len(),
            our_text: from(ours),
            their_text: from(theirs),
        })
    }
}

impl Observations {
    /// Tokens in a block as the frontend is configured.
    #[must_use]
    pub fn configured_block_size(&self) -> Option<u32> {
        self.target.block_size.or(self.target.worker.block_size)
    }

    /// Tokens in a block as the engine's events say it, else as the engine says it.
    #[must_use]
    pub fn true_block_size(&self) -> Option<u32> {
        let by_events = self.ranks.iter().find_map(|r| r.events.other_block_size);
        by_events.or(self.facts.block_size)
    }

    /// Whether the frontend would read this worker's blocks in the right size.
    #[must_use]
    pub fn block_size_fits(&self) -> bool {
        let differs = self
            .ranks
            .iter()
            .any(|r| r.events.other_block_size.is_some());
        let configured = self.configured_block_size();
        let fits = |size| self.facts.block_size.is_none_or(|b| b == size);
        !differs && configured.is_none_or(fits)
    }

    /// Where the engine itself says that a rank's events are, seen from here.
    #[must_use]
    pub fn own_source(&self, rank: u32) -> Option<EventSource> {
        let plain = WorkerRecord {
            events: EventFeed::default(),
            ..self.target.worker.clone()
        };
        kvasir_upstream::event_sources(&plain, &self.facts, 1).remove(&rank)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_difference_is_shown() {
        let text = |tokens: &[Token]| format!("{tokens:?}");
        assert_eq!(Difference::between(&[1, 2], &[1, 2], text), None);
        let found = Difference::between(&[1, 2, 3], &[1, 9], text).unwrap();
        assert_eq!((found.at, found.ours, found.theirs), (1, 3, 2));
        assert_eq!(
            (found.our_text.as_str(), found.their_text.as_str()),
            ("[2, 3]", "[9]")
        );
        let longer = Difference::between(&[1], &[1, 2], text).unwrap();
        assert_eq!((longer.at, longer.our_text.as_str()), (1, "[]"));
    }
}
