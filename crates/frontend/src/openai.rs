//! The handlers of OpenAI's endpoints: which kind of worker serves the model, and so who answers.

pub(crate) mod generate;
mod mixed;
pub(crate) mod models;
