//! Log probabilities in an answer.
//!
//! Answers one question: how do chat and completions, which differ, write the same log probabilities?

use bytes::{BufMut, BytesMut};

use crate::json::{Fields, write_float, write_int, write_json_str};

/// One token and how likely it was.
#[derive(Clone, Debug, PartialEq)]
pub struct Logprob {
    /// The token's text; bytes that are no UTF-8 alone are shown as U+FFFD.
    pub text: String,
    /// The token's bytes, where known.
    pub bytes: Option<Vec<u8>>,
    /// Natural logarithm of its probability.
    pub logprob: f64,
}

/// A token of the answer with its alternatives.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprob {
    /// The token that was drawn.
    pub chosen: Logprob,
    /// The likeliest ones, at most as many as the client asked for.
    pub top: Vec<Logprob>,
}

impl Logprob {
    fn write_inner(&self, fields: &mut Fields<'_>) {
        fields.str("token", &self.text);
        write_float(fields.key("logprob"), self.logprob);
        let out = fields.key("bytes");
        let Some(bytes) = &self.bytes else {
            return out.extend_from_slice(b"null");
        };
        list(out, bytes, |out, byte| write_int(out, u64::from(*byte)));
    }
}

/// Appends the chat form.
pub(crate) fn write_chat(out: &mut BytesMut, tokens: &[TokenLogprob]) {
    out.extend_from_slice(b"{\"content\":");
    list(out, tokens, |out, token| {
        let mut fields = Fields::open(out);
        token.chosen.write_inner(&mut fields);
        list(fields.key("top_logprobs"), &token.top, |out, top| {
            let mut fields = Fields::open(out);
            top.write_inner(&mut fields);
            fields.close();
        });
        fields.close();
    });
    out.extend_from_slice(b",\"refusal\":null}");
}

/// Appends the completions form; `offset` is where the first token begins in the answer, in characters.
pub(crate) fn write_completion(out: &mut BytesMut, tokens: &[TokenLogprob], offset: usize) {
    let mut fields = Fields::open(out);
    list(fields.key("tokens"), tokens, |out, t| {
        write_json_str(out, &t.chosen.text);
    });
    list(fields.key("token_logprobs"), tokens, |out, t| {
        write_float(out, t.chosen.logprob);
    });
    list(fields.key("top_logprobs"), tokens, |out, t| {
        out.put_u8(b'{');
        for (i, top) in t.top.iter().enumerate() {
            if i > 0 {
                out.put_u8(b',');
            }
            write_json_str(out, &top.text);
            out.put_u8(b':');
            write_float(out, top.logprob);
        }
        out.put_u8(b'}');
    });
    let mut at = offset;
    list(fields.key("text_offset"), tokens, |out, t| {
        write_int(out, at as u64);
        at += t.chosen.text.chars().count();
    });
    fields.close();
}

fn list<T>(out: &mut BytesMut, items: &[T], mut write: impl FnMut(&mut BytesMut, &T)) {
    out.put_u8(b'[');
    for (i, item) in items.iter().enumerate() {
        if i > 0 {
            out.put_u8(b',');
        }
        write(out, item);
    }
    out.put_u8(b']');
}
