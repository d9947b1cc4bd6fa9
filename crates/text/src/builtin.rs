//! The tokenizer that the binary carries, so that the demo needs no file.
//!
//! Answers one question: where do tokens come from when there is no model? Trained on the text beside it by
//! `cargo run -p kvasir-text --example train_builtin`, which writes the file again, byte for byte.

use crate::load::TextFiles;

/// The files of the built-in model.
pub(crate) fn files() -> TextFiles {
    TextFiles {
        folder: "(built-in)".into(),
        tokenizer: include_bytes!("builtin/tokenizer.json").to_vec(),
        tokenizer_config: Some(include_bytes!("builtin/tokenizer_config.json").to_vec()),
        generation_config: None,
        config: Some(include_bytes!("builtin/config.json").to_vec()),
        chat_template: Some(include_bytes!("builtin/chat_template.jinja").to_vec()),
    }
}
