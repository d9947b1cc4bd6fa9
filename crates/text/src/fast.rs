//! The quick tokenizer, and the watch over it.
//!
//! Answers one question: can `fastokens` stand in for the reference library here, and does it still? It is some
//! ninety times as fast on prose and has agreed on every text tried, but it is a second implementation: it
//! must agree on a battery of texts when a model is loaded, one text in ten thousand is checked in use, and
//! at the first difference (or panic) the reference takes over for good.
//!
//! Invariant: a text that was checked gets the reference's tokens.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use kvasir_types::Token;

use crate::error::TextError;

/// Of this many texts one is tokenized twice.
const CHECK_EVERY: u64 = 10_000;

/// A quick tokenizer that is trusted until it differs.
pub(crate) struct Fast {
    inner: fastokens::Tokenizer,
    distrusted: AtomicBool,
    encodes: AtomicU64,
    checks: AtomicU64,
    differences: AtomicU64,
}

impl Fast {
    /// Loads a `tokenizer.json`.
    ///
    /// # Errors
    /// Why it cannot stand in: the file is refused, or a text of the battery has other tokens.
    pub(crate) fn load(
        json: &[u8],
        reference: impl Fn(&str) -> Result<Vec<Token>, TextError>,
    ) -> Result<Self, String> {
        let json = serde_json::from_slice(json).map_err(|e| e.to_string())?;
        let inner = catch_unwind(|| fastokens::Tokenizer::from_json(json))
            .map_err(|_| "fastokens panicked on this tokenizer.json".to_owned())?
            .map_err(|e| e.to_string())?;
        let fast = Self {
            inner,
            distrusted: AtomicBool::new(false),
            encodes: AtomicU64::new(0),
            checks: AtomicU64::new(0),
            differences: AtomicU64::new(0),
        };
        for text in battery() {
            let wanted = reference(&text).map_err(|e| e.to_string())?;
            if fast.try_encode(&text, false).as_ref() != Some(&wanted) {
                return Err(format!("fastokens differs on {text:?}"));
            }
        }
        Ok(fast)
    }

    /// The tokens of `text`, from whichever tokenizer is trusted.
    pub(crate) fn encode(
        &self,
        text: &str,
        add_special: bool,
        reference: impl Fn() -> Result<Vec<Token>, TextError>,
    ) -> Result<Vec<Token>, TextError> {
        if self.distrusted.load(Ordering::Relaxed) {
            return reference();
        }
        let ids = self.try_encode(text, add_special);
        let number = self.encodes.fetch_add(1, Ordering::Relaxed);
        match ids {
            Some(ids) if !number.is_multiple_of(CHECK_EVERY) => Ok(ids),
            ids => {
                let wanted = reference()?;
                self.compare(ids.as_deref(), &wanted);
                Ok(wanted)
            }
        }
    }

    fn compare(&self, ids: Option<&[Token]>, wanted: &[Token]) {
        self.checks.fetch_add(1, Ordering::Relaxed);
        if ids != Some(wanted) {
            self.differences.fetch_add(1, Ordering::Relaxed);
            self.distrusted.store(true, Ordering::Relaxed);
        }
    }

    fn try_encode(&self, text: &str, add_special: bool) -> Option<Vec<Token>> {
        let encode = || self.inner.encode_with_special_tokens(text, add_special);
        catch_unwind(AssertUnwindSafe(encode)).ok()?.ok()
    }

    pub(crate) fn is_trusted(&self) -> bool {
        !self.distrusted.load(Ordering::Relaxed)
    }

    /// Texts that were checked, and how many differed.
    pub(crate) fn checks(&self) -> (u64, u64) {
        (
            self.checks.load(Ordering::Relaxed),
            self.differences.load(Ordering::Relaxed),
        )
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
