//! Which frames of an answer say nothing but one more token?
//!
//! A worker sends a frame for every token, and but for the token they are the same bytes. When one of them has been read in full,
//! the next ones are known by comparing bytes: a tenth of the work. A frame that differs in anything else is read in full.

use kvasir_msgpack::Reader;
use kvasir_types::{Codec, Token};

use crate::read::{Result, map};
use crate::{Annotated, Output};

const TOKEN_IDS: &str = "token_ids";

/// The bytes before and behind the token of such a frame's body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenFrame {
    before: Box<[u8]>,
    after: Box<[u8]>,
}

impl TokenFrame {
    /// That of `body`, whose item was read as `item`; none if it says anything but one token.
    #[must_use]
    pub fn of(codec: Codec, body: &[u8], item: &Annotated) -> Option<Self> {
        let output = item.data.as_ref()?;
        let plain = Output {
            token_ids: output.token_ids.clone(),
            index: output.index,
            ..Output::default()
        };
        let is_plain = *output == plain && output.token_ids.len() == 1;
        let is_bare = item.event.is_none() && item.comment.is_none() && item.error.is_none();
        if codec != Codec::MessagePack || !is_plain || !is_bare || item.id.is_some() {
            return None;
        }
        let (start, end) = token_span(body).ok()??;
        Some(Self {
            before: body.get(..start)?.into(),
            after: body.get(end..)?.into(),
        })
    }

    /// The token of `body`, if that is all it says.
    #[must_use]
    pub fn token(&self, body: &[u8]) -> Option<Token> {
        let rest = body.strip_prefix(&*self.before)?;
        let mut reader = Reader::new(rest);
        let token = reader.u32(TOKEN_IDS).ok()?;
        (rest.get(reader.position()..)? == &*self.after).then_some(token)
    }
}

/// Where the one token of an item's body begins and ends.
fn token_span(body: &[u8]) -> Result<Option<(usize, usize)>> {
    let mut span = None;
    let mut reader = Reader::new(body);
    member(&mut reader, b"data", |item| {
        member(item, b"data", |output| {
            member(output, TOKEN_IDS.as_bytes(), |tokens| {
                if tokens.array()? == 1 {
                    let start = tokens.position();
                    tokens.u32(TOKEN_IDS)?;
                    span = Some((start, tokens.position()));
                }
                Ok(())
            })
        })
    })?;
    Ok(span)
}

/// Reads a map of which one member counts.
fn member<'a>(
    reader: &mut Reader<'a>,
    wanted: &[u8],
    mut read: impl FnMut(&mut Reader<'a>) -> Result<()>,
) -> Result<()> {
    map(reader, |reader, name| match name == wanted {
        true => read(reader),
        false => reader.skip(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Finish, Item, Usage};

    fn body(output: &Output) -> bytes::Bytes {
        let item = Annotated::of_output(output.clone());
        Item::encode_data(Codec::MessagePack, |writer| item.write(writer))
    }

    fn of(output: &Output) -> Option<TokenFrame> {
        let item = Annotated::of_output(output.clone());
        TokenFrame::of(Codec::MessagePack, &body(output), &item)
    }

    fn one(token: Token) -> Output {
        Output {
            token_ids: vec![token],
            ..Output::default()
        }
    }

    #[test]
    fn frames_that_differ_in_their_token_alone_are_known() {
        let known = of(&one(7)).unwrap();
        for token in [0, 7, 127, 128, 255, 256, 65_535, 65_536, u32::MAX] {
            assert_eq!(known.token(&body(&one(token))), Some(token));
            assert_eq!(of(&one(token)), Some(known.clone()));
        }
    }

    #[test]
    fn whatever_says_more_or_less_is_not() {
        let known = of(&one(7)).unwrap();
        let others = [
            Output::default(),
            Output {
                token_ids: vec![1, 2],
                ..Output::default()
            },
            Output {
                finish_reason: Some(Finish::Length),
                ..one(7)
            },
            Output {
                usage: Some(Usage::default()),
                ..one(7)
            },
            Output {
                log_probs: Some(vec![0.5]),
                ..one(7)
            },
            Output {
                cum_log_probs: Some(0.5),
                ..one(7)
            },
        ];
        for other in &others {
            assert_eq!(known.token(&body(other)), None, "{other:?}");
            assert_eq!(of(other), None, "{other:?}");
        }
        let all = body(&one(7));
        for cut in 0..all.len() {
            assert_eq!(known.token(&all[..cut]), None, "{cut}");
        }
        let mut longer = all.to_vec();
        longer.push(0);
        assert_eq!(known.token(&longer), None);
        assert_eq!(
            known.token(&Item::end(true).encode(Codec::MessagePack)),
            None
        );
        let item = Annotated::of_output(one(7));
        assert_eq!(TokenFrame::of(Codec::Json, &all, &item), None);
        let remark = Annotated {
            event: Some("remark".into()),
            ..item
        };
        assert_eq!(TokenFrame::of(Codec::MessagePack, &all, &remark), None);
        assert_eq!(
            TokenFrame::of(Codec::MessagePack, b"\xc0", &Annotated::of_output(one(7))),
            None
        );
    }
}
