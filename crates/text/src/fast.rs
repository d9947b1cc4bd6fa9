//! The quick tokenizer, and the watch over it.
//!
//! Answers one question: can `fastokens` stand in for the reference library here, and does it still? It is some
//! ninety times as fast on prose and has agreed on every text tried, but it is a second implementation: it
//! must agree on a battery of texts when a model is loaded, and one text in two thousand is compared in use, 64 at a time, on a
//! thread of its own that loads the reference library for it. At the first difference (or panic) the reference takes over for good.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use kvasir_types::Token;

use crate::error::TextError;
use crate::reference::{self, Reference};

/// Of this many texts one is compared.
const CHECK_EVERY: u64 = 2_000;
/// Texts that are compared at once: loading the reference library takes most of a second.
const SAMPLES: usize = 64;
/// A longer text is not compared.
const SAMPLE_BYTES_MAX: usize = 128 << 10;

/// A quick tokenizer that is trusted until it differs.
pub(crate) struct Fast {
    watched: Arc<Watched>,
    encodes: AtomicU64,
    samples: Mutex<Vec<Sample>>,
}

struct Watched {
    inner: fastokens::Tokenizer,
    distrusted: AtomicBool,
    checks: AtomicU64,
    differences: AtomicU64,
}

/// A text and the tokens that were made of it.
struct Sample {
    text: Box<str>,
    add_special: bool,
    ids: Vec<Token>,
}

impl Fast {
    /// Loads a `tokenizer.json`.
    ///
    /// # Errors
    /// Why it cannot stand in: the file is refused, or a text of the battery has other tokens.
    pub(crate) fn load(json: &[u8], reference: &Reference) -> Result<Self, String> {
        let json = serde_json::from_slice(json).map_err(|e| e.to_string())?;
        let inner = catch_unwind(|| fastokens::Tokenizer::from_json(json))
            .map_err(|_| "fastokens panicked on this tokenizer.json".to_owned())?
            .map_err(|e| e.to_string())?;
        let watched = Watched {
            inner,
            distrusted: AtomicBool::new(false),
            checks: AtomicU64::new(0),
            differences: AtomicU64::new(0),
        };
        for text in battery() {
            let wanted = reference.encode(&text, false).map_err(|e| e.to_string())?;
            if watched.try_encode(&text, false).as_ref() != Some(&wanted) {
                return Err(format!("fastokens differs on {text:?}"));
            }
        }
        Ok(Self {
            watched: Arc::new(watched),
            encodes: AtomicU64::new(0),
            samples: Mutex::default(),
        })
    }

    /// The tokens of `text`, from whichever tokenizer is trusted.
    pub(crate) fn encode(
        &self,
        text: &str,
        add_special: bool,
        reference: &Arc<Reference>,
    ) -> Result<Vec<Token>, TextError> {
        if !self.is_trusted() {
            return reference.encode(text, add_special);
        }
        let number = self.encodes.fetch_add(1, Ordering::Relaxed);
        match self.watched.try_encode(text, add_special) {
            Some(ids) => {
                if number.is_multiple_of(CHECK_EVERY) && text.len() <= SAMPLE_BYTES_MAX {
                    let (text, ids) = (text.into(), ids.clone());
                    self.sample(
                        Sample {
                            text,
                            add_special,
                            ids,
                        },
                        reference,
                    );
                }
                Ok(ids)
            }
            None => {
                let wanted = reference.encode(text, add_special)?;
                self.watched.compare(None, &wanted);
                Ok(wanted)
            }
        }
    }

    /// Keeps a text to be compared, and has a full set compared.
    fn sample(&self, sample: Sample, reference: &Arc<Reference>) {
        let mut samples = self.samples.lock().unwrap_or_else(PoisonError::into_inner);
        samples.push(sample);
        if samples.len() < SAMPLES {
            return;
        }
        let samples = std::mem::take(&mut *samples);
        let (watched, reference) = (Arc::clone(&self.watched), Arc::clone(reference));
        // Where no thread can be had these are not compared.
        let _ = std::thread::Builder::new()
            .name("tokenizer-check".into())
            .spawn(move || watched.check(&samples, &reference));
    }

    pub(crate) fn is_trusted(&self) -> bool {
        !self.watched.distrusted.load(Ordering::Relaxed)
    }

    /// Texts that were checked, and how many differed.
    pub(crate) fn checks(&self) -> (u64, u64) {
        let get = |count: &AtomicU64| count.load(Ordering::Relaxed);
        (get(&self.watched.checks), get(&self.watched.differences))
    }
}

impl Watched {
    fn try_encode(&self, text: &str, add_special: bool) -> Option<Vec<Token>> {
        let encode = || self.inner.encode_with_special_tokens(text, add_special);
        catch_unwind(AssertUnwindSafe(encode)).ok()?.ok()
    }

    /// Compares these texts, with a reference library that is there for as long as this takes.
    fn check(&self, samples: &[Sample], reference: &Reference) {
        let Ok(library) = reference.read_again() else {
            return;
        };
        for sample in samples {
            if let Ok(wanted) = reference::encode(&library, &sample.text, sample.add_special)
                && sample.ids != wanted
            {
                // It is there before anybody is sent to it.
                reference.keep(library);
                self.compare(Some(&sample.ids), &wanted);
                return;
            }
            self.checks.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn compare(&self, ids: Option<&[Token]>, wanted: &[Token]) {
        self.checks.fetch_add(1, Ordering::Relaxed);
        if ids != Some(wanted) {
            self.differences.fetch_add(1, Ordering::Relaxed);
            self.distrusted.store(true, Ordering::Relaxed);
        }
    }
}

/// Texts on which tokenizers have been seen to differ: white space, digits, marks, scripts, added tokens.
fn battery() -> Vec<String> {
    let pieces = [
        "Hello, world! It's 12345 o'clock; don't WE'LL.",
        "  two  spaces   three\n\n\n  indented\r\n\ttab\t\t(bs2 ",
        "e\u{301}\u{323} \u{1100}\u{1161} ﬁ ½ ²³ ٣٤ Ⅷ",
        "中文字符，日本語のテキスト。한국어 텍스트",
        "שלום عليكم नमस्ते ไทย Ελληνικά Русский",
        "🚀👍🏽👩\u{200d}👩\u{200d}👧 \u{fe0f}\u{feff}\u{a0}\u{3000}",
        "<|im_start|>user\n<|im_end|><|endoftext|><|im_",
        "fn main() { let x: Vec<u32> = vec![1_000; 0xff]; } // a/b\n/*c*/",
        "{\"key\": [1.5e-10, null, true], \"é\\n\": \"\\u0000\"}",
        "\u{0}\u{1}\u{7f}\u{80}\u{85}\u{2028}",
        "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
        "ǅ ʰ ß ſ İ ı Å Å",
    ];
    let mut texts: Vec<String> = pieces.iter().map(|p| (*p).to_owned()).collect();
    for (i, first) in pieces.iter().enumerate() {
        let second = pieces[(i * 5 + 3) % pieces.len()];
        texts.push(format!("{first}{second}"));
        texts.push(format!("{first} {second}\n{first}"));
    }
    texts.push(String::new());
    texts
}

#[cfg(test)]
mod tests;
