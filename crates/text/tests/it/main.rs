//! The public interface with whole models: the built-in one always, Qwen2.5 where it is installed.
#![expect(clippy::unwrap_used, reason = "a helper that fails is a failed test")]
#![expect(clippy::print_stderr, reason = "a skipped test says so")]

mod builtin;
mod noise;
mod qwen;

use std::path::PathBuf;
use std::sync::LazyLock;

use kvasir_text::TextModel;

/// The folder of the Qwen2.5 tokenizer, where `./test` has installed it.
fn qwen_folder() -> Option<PathBuf> {
    #[expect(
        clippy::disallowed_methods,
        reason = "how ./test says where the files are"
    )]
    let named = std::env::var_os("KVASIR_TEST_QWEN_DIR").map(PathBuf::from);
    let installed = concat!(env!("CARGO_MANIFEST_DIR"), "/../../.test-tools/qwen2.5");
    named
        .into_iter()
        .chain([PathBuf::from(installed)])
        .find(|folder| folder.join("tokenizer.json").exists())
}

/// The Qwen2.5 model; none (and a line that says so) where it is not installed.
fn qwen() -> Option<&'static TextModel> {
    static QWEN: LazyLock<Option<TextModel>> =
        LazyLock::new(|| qwen_folder().map(|folder| TextModel::load(&folder).unwrap()));
    if QWEN.is_none() {
        eprintln!("SKIPPED: no Qwen2.5 tokenizer; ./test installs it");
    }
    QWEN.as_ref()
}
