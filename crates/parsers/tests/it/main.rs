//! Answers as models write them, and what is read from them.

#![expect(clippy::unwrap_used, reason = "a helper that fails is a failed test")]

mod cases;
mod cuts;
mod dynamo;
