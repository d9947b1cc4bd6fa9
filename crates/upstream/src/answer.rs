//! An answer out of bytes, without a socket: what a connection makes of them, for whoever has the bytes.

use std::io;

use bytes::BytesMut;
use http::{HeaderMap, Method, StatusCode};

use crate::framing::{Framing, Step};
use crate::head::{Head, invalid};

/// An answer as far as its bytes came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadAnswer {
    /// Its status; informational ones are passed over.
    pub status: StatusCode,
    /// Its fields.
    pub headers: HeaderMap,
    /// Its body, unframed.
    pub body: Vec<u8>,
    /// The body is complete.
    pub ended: bool,
    /// Bytes after its end.
    pub rest: usize,
}

/// Reads the answer to a request with this method from bytes that come in pieces and then end. `None`: its head is not
/// complete.
///
/// # Errors
/// It is not HTTP, or its framing is not valid.
pub fn read_answer<'a>(
    method: &Method,
    pieces: impl IntoIterator<Item = &'a [u8]>,
) -> io::Result<Option<ReadAnswer>> {
    let mut inbox = BytesMut::new();
    let mut begun: Option<(Head, Framing)> = None;
    let mut body = Vec::new();
    for piece in pieces {
        inbox.extend_from_slice(piece);
        if begun.is_none() {
            begun = take_head(method, &mut inbox)?;
        }
        let Some((_, framing)) = &mut begun else {
            continue;
        };
        while let Step::Data(data) = framing.step(&mut inbox)? {
            body.extend_from_slice(&data);
        }
    }
    Ok(begun.map(|(head, framing)| ReadAnswer {
        status: head.status,
        headers: head.headers,
        body,
        ended: framing.ends_with_connection(),
        rest: inbox.len(),
    }))
}

/// The first head that is not informational, and how its body is framed.
fn take_head(method: &Method, inbox: &mut BytesMut) -> io::Result<Option<(Head, Framing)>> {
    while !inbox.is_empty()
        && let Some(mut head) = Head::take(inbox)?
    {
        if head.status == StatusCode::SWITCHING_PROTOCOLS {
            return Err(invalid("it switches protocols"));
        }
        if !head.status.is_informational() {
            let framing = Framing::of(method, head.status, &mut head.headers)?;
            return Ok(Some((head, framing)));
        }
    }
    Ok(None)
}
