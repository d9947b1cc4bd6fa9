//! Ids to bytes, one token at a time.
//!
//! Answers one question: what does one more token add to the text? The library decodes whole lists; a
//! stream needs the same text piece by piece. Two families of decoders are a concatenation of bytes and are
//! done here exactly: byte-level BPE, and pieces with byte fall-back. For any other the library is asked about a
//! growing window.
//!
//! Invariant: for the two families, pieces joined equal the library's decoding of all ids, at every split.

use kvasir_types::Token;
use tokenizers::decoders::DecoderWrapper;
use tokenizers::{Decoder as _, Tokenizer as Reference};

/// How tokens become text.
#[derive(Debug)]
pub(crate) enum Decoding {
    /// Each token is bytes; the text is all bytes read as UTF-8, bad ones replaced.
    Bytes(Pieces),
    /// Each token is text or one raw byte; a run of raw bytes is text if it is UTF-8 as a whole.
    Fallback {
        pieces: Pieces,
        /// Spaces taken from the beginning of the whole text.
        strip: usize,
    },
    /// Only the library knows.
    Library,
}

/// The bytes of each token, in one buffer.
#[derive(Debug, Default)]
pub(crate) struct Pieces {
    bytes: Vec<u8>,
    ends: Vec<u32>,
    /// Tokens that are one raw byte.
    raw: Vec<bool>,
}

impl Pieces {
    fn push(&mut self, piece: &[u8], raw: bool) {
        self.bytes.extend_from_slice(piece);
        self.ends.push(self.bytes.len() as u32);
        self.raw.push(raw);
    }

    /// The bytes of token `id`; none for ids without a token.
    pub(crate) fn get(&self, id: Token) -> &[u8] {
        let at = id as usize;
        let Some(&end) = self.ends.get(at) else {
            return &[];
        };
        let start = at.checked_sub(1).and_then(|b| self.ends.get(b));
        let start = start.map_or(0, |s| *s as usize);
        self.bytes.get(start..end as usize).unwrap_or_default()
    }

    pub(crate) fn is_raw(&self, id: Token) -> bool {
        self.raw.get(id as usize).copied().unwrap_or(false)
    }
}

impl Decoding {
    pub(crate) fn new(reference: &Reference, size: u32) -> Self {
        match reference.get_decoder() {
            Some(DecoderWrapper::ByteLevel(_)) => Self::Bytes(byte_level(reference, size)),
            Some(DecoderWrapper::Sequence(sequence)) => {
                let steps = sequence.get_decoders();
                match fallback_strip(steps) {
                    Some(strip) => Self::Fallback {
                        pieces: fallback(reference, size, steps),
                        strip,
                    },
                    None if matches!(steps, [DecoderWrapper::ByteLevel(_)]) => {
                        Self::Bytes(byte_level(reference, size))
                    }
                    None => Self::Library,
                }
            }
            _ => Self::Library,
        }
    }
}

/// The printable character that stands for each byte in a byte-level vocabulary.
fn byte_of(symbol: char) -> Option<u8> {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let code = u32::from(symbol);
    if let Ok(byte) = u8::try_from(code) {
        return printable(byte).then_some(byte);
    }
    let nth = code.checked_sub(256)? as usize;
    (0..=255).filter(|b| !printable(*b)).nth(nth)
}

fn byte_level(reference: &Reference, size: u32) -> Pieces {
    let mut pieces = Pieces::default();
    let mut buffer = Vec::new();
    for id in 0..size {
        let token = reference.id_to_token(id).unwrap_or_default();
        buffer.clear();
        let mapped = token.chars().try_for_each(|c| {
            buffer.push(byte_of(c)?);
            Some(())
        });
        match mapped {
            Some(()) => pieces.push(&buffer, false),
            None => pieces.push(token.as_bytes(), false),
        }
    }
    pieces
}

/// Whether the steps are: replace the word mark, byte fall-back, fuse, strip from the left. Gives the spaces
/// that are stripped.
fn fallback_strip(steps: &[DecoderWrapper]) -> Option<usize> {
    match steps {
        [
            DecoderWrapper::Replace(_),
            DecoderWrapper::ByteFallback(_),
            DecoderWrapper::Fuse(_),
        ] => Some(0),
        [
            DecoderWrapper::Replace(_),
            DecoderWrapper::ByteFallback(_),
            DecoderWrapper::Fuse(_),
            DecoderWrapper::Strip(strip),
        ] if strip.content == ' ' && strip.stop == 0 => Some(strip.start),
        _ => None,
    }
}

fn fallback(reference: &Reference, size: u32, steps: &[DecoderWrapper]) -> Pieces {
    let mut pieces = Pieces::default();
    for id in 0..size {
        let token = reference.id_to_token(id).unwrap_or_default();
        if let Some(byte) = raw_byte(&token) {
            pieces.push(&[byte], true);
            continue;
        }
        let replaced = match steps.first() {
            Some(step) => step.decode_chain(vec![token.clone()]).map(|t| t.concat()),
            None => Ok(token.clone()),
        };
        pieces.push(replaced.unwrap_or(token).as_bytes(), false);
    }
    pieces
}

/// The byte of a token like `<0x0A>`.
fn raw_byte(token: &str) -> Option<u8> {
    let hex = token.strip_prefix("<0x")?.strip_suffix('>')?;
    (hex.len() == 2).then(|| u8::from_str_radix(hex, 16).ok())?
}

/// Takes the text that is certain out of `bytes`: whole characters, and U+FFFD for each maximal part that no
/// later byte can mend, as lossy decoding of the whole does. What is left may be the head of a character.
pub(crate) fn drain_utf8(bytes: &mut Vec<u8>, out: &mut String) {
    let mut done = 0;
    while let Some(rest) = bytes.get(done..).filter(|r| !r.is_empty()) {
        match std::str::from_utf8(rest) {
            Ok(text) => {
                out.push_str(text);
                done = bytes.len();
            }
            Err(error) => {
                let valid = error.valid_up_to();
                out.push_str(std::str::from_utf8(&rest[..valid]).unwrap_or_default());
                done += valid;
                match error.error_len() {
                    Some(bad) => {
                        out.push(char::REPLACEMENT_CHARACTER);
                        done += bad;
                    }
                    None => break,
                }
            }
        }
    }
    bytes.drain(..done);
}
