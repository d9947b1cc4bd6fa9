//! What has shown that a prompt is computed.

use kvasir_types::Time;

/// What has shown that a request's prompt is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sign {
    /// Nothing yet.
    Awaited,
    /// Nothing, but by now it should be.
    Presumed,
    /// Its first token.
    Seen,
}

/// A sign that was news.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SignChange {
    /// Where the request is.
    pub slot: u32,
    /// What was known before.
    pub before: Sign,
    /// What is known now.
    pub sign: Sign,
    /// When it was booked.
    pub booked_at: Time,
    /// Prompts that were to be computed there then.
    pub ahead: u32,
    /// Its answer comes in one piece: its first token is its last.
    pub silent: bool,
}
