//! One request's way through the fleet.

use kvasir_types::{Time, WorkerId};

use crate::prompt::PromptHashes;

/// Where a request is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum State {
    /// Not here yet.
    #[default]
    Ahead,
    /// At a router.
    Routing,
    /// In an engine.
    Running {
        /// Which.
        host: usize,
    },
    /// Answered.
    Completed,
    /// No worker took it.
    Refused,
    /// No engine can compute it.
    Rejected,
    /// A turn of a conversation that ended earlier.
    Dropped,
}

/// What is being done of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Leg {
    /// All of it, on one worker.
    #[default]
    Whole,
    /// Nothing yet: it is asked where it would be answered.
    Question,
    /// Its prompt.
    Prefill,
    /// Its answer, to a prompt that another worker has computed.
    Decode,
}

/// What is known of a request.
#[derive(Clone, Debug, Default)]
pub(crate) struct Request {
    pub(crate) state: State,
    pub(crate) replica: usize,
    pub(crate) leg: Leg,
    /// Where its prompt was computed, if elsewhere.
    pub(crate) prefilled_on: usize,
    pub(crate) arrived: Time,
    /// When it first entered a batch, 0 before.
    pub(crate) started: Time,
    pub(crate) first_token: Time,
    pub(crate) last_token: Time,
    /// Tokens answered, by all workers that served it.
    pub(crate) generated: u32,
    /// Of these, by workers that died.
    pub(crate) carried: u32,
    /// Prompt tokens found in a cache, first attempt to enter a batch.
    pub(crate) cached: Option<u32>,
    pub(crate) attempts: u32,
    pub(crate) failed: Vec<WorkerId>,
    /// Hashed when it arrives, handed to the engine.
    pub(crate) prompt: Option<Box<PromptHashes>>,
}
