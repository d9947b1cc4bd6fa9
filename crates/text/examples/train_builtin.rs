//! Trains the built-in tokenizer on `src/builtin/corpus.txt` and writes `src/builtin/tokenizer.json`.
//!
//! Run it after changing the corpus: `cargo run -p kvasir-text --example train_builtin`. The outcome depends on
//! the corpus alone; with `--check` it only says whether the file is fresh.

use std::error::Error;

use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainerBuilder};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::tokenizer::SplitDelimiterBehavior;
use tokenizers::{AddedToken, Tokenizer};

const VOCABULARY: usize = 4096;
const SPECIAL: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];
/// A word with the space before it, one digit, punctuation with its line end, line ends, other white space (the
/// last space of a run belongs to the word after it).
const PATTERN: &str = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s";

fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/builtin");
    let corpus = std::fs::read_to_string(format!("{folder}/corpus.txt"))?;
    let json = train(&corpus)?;
    let path = format!("{folder}/tokenizer.json");
    if std::env::args().any(|a| a == "--check") {
        if std::fs::read_to_string(&path)? == json {
            return Ok(());
        }
        return Err("src/builtin/tokenizer.json is stale: run this without --check".into());
    }
    std::fs::write(path, json)?;
    Ok(())
}

fn train(corpus: &str) -> Result<String, Box<dyn Error + Send + Sync>> {
    let mut tokenizer = Tokenizer::new(BPE::default());
    let split = Split::new(
        SplitPattern::Regex(PATTERN.to_owned()),
        SplitDelimiterBehavior::Isolated,
        false,
    )?;
    let bytes = ByteLevel::new(false, false, false);
    tokenizer.with_pre_tokenizer(Some(Sequence::new(vec![split.into(), bytes.into()])));
    tokenizer.with_decoder(Some(bytes));
    let mut trainer: TrainerWrapper = BpeTrainerBuilder::new()
        .vocab_size(VOCABULARY)
        .min_frequency(1)
        .show_progress(false)
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .special_tokens(SPECIAL.map(|t| AddedToken::from(t, true)).to_vec())
        .build()
        .into();
    tokenizer.train(&mut trainer, lines(corpus).iter())?;
    tokenizer.to_string(false)
}

/// The corpus line by line, and each line of bare words also with capitals.
fn lines(corpus: &str) -> Vec<String> {
    let mut lines = Vec::new();
    for line in corpus.lines() {
        lines.push(format!("{line}\n"));
        if line.split(' ').all(|w| w.chars().all(char::is_lowercase)) {
            let capitals = line.split(' ').map(|word| {
                let mut chars = word.chars();
                let first = chars.next().map(|c| c.to_uppercase().to_string());
                format!(" {}{}", first.unwrap_or_default(), chars.as_str())
            });
            lines.push(capitals.collect());
        }
    }
    lines
}
