//! Where a message begins and ends: two-part frames, request frames and their acknowledgements.
//!
//! ```text
//! two-part  u64 header length | u64 body length | u64 checksum | header | body         all numbers big-endian
//! request   u16 n | path (n) | u16 n | headers, JSON (n) | u32 n | two-part frame (n)
//! ack       u32 n | text (n)      n = 0: accepted
//! ```
//!
//! The checksum is written as 0 and never looked at, as every release does.

use bytes::{Buf, BufMut, Bytes, BytesMut};

use crate::ProtocolError;

/// Largest message that is accepted unless told otherwise.
pub const FRAME_BYTES_MAX: usize = 32 << 20;
/// Largest header of a two-part frame: control messages are a few hundred bytes.
pub const HEADER_BYTES_MAX: usize = 1 << 20;
/// Longest path of an endpoint.
pub const PATH_BYTES_MAX: usize = 1024;
/// Longest text of an acknowledgement that is read; a worker says a line.
pub const ACK_BYTES_MAX: usize = 64 << 10;

/// Room that is made at once for a message that is not all there.
const ROOM_BYTES_MAX: usize = 64 << 10;

/// Bytes before the header of a two-part frame.
pub const TWO_PART_HEAD_BYTES: usize = 24;

const TWO_PART: &str = "a two-part frame";
const REQUEST: &str = "a request frame";
const ACK: &str = "an acknowledgement";

/// A frame of two parts, either of which may be empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TwoPart {
    /// What is said about the body, or what is said instead of one.
    pub header: Bytes,
    /// The payload.
    pub body: Bytes,
}

impl TwoPart {
    /// A frame without a body.
    #[must_use]
    pub fn of_header(header: impl Into<Bytes>) -> Self {
        Self {
            header: header.into(),
            body: Bytes::new(),
        }
    }

    /// A frame without a header.
    #[must_use]
    pub fn of_body(body: impl Into<Bytes>) -> Self {
        Self {
            header: Bytes::new(),
            body: body.into(),
        }
    }

    /// How many bytes it has on the wire.
    #[must_use]
    pub fn wire_len(&self) -> usize {
        TWO_PART_HEAD_BYTES + self.header.len() + self.body.len()
    }

    /// Appends it.
    pub fn encode(&self, out: &mut BytesMut) {
        out.reserve(self.wire_len());
        out.put_u64(self.header.len() as u64);
        out.put_u64(self.body.len() as u64);
        out.put_u64(0);
        out.put_slice(&self.header);
        out.put_slice(&self.body);
    }

    /// It alone, as bytes.
    #[must_use]
    pub fn to_bytes(&self) -> Bytes {
        let mut out = BytesMut::new();
        self.encode(&mut out);
        out.freeze()
    }

    /// Takes a frame from the front of `buffer` once all of it is there. A frame of more than `max` bytes is refused as
    /// soon as it says so.
    pub fn take(buffer: &mut BytesMut, max: usize) -> Result<Option<Self>, ProtocolError> {
        let Some((header, body)) = lengths(buffer, max)? else {
            return Ok(None);
        };
        let total = TWO_PART_HEAD_BYTES + header + body;
        if buffer.len() < total {
            make_room(buffer, total);
            return Ok(None);
        }
        buffer.advance(TWO_PART_HEAD_BYTES);
        Ok(Some(Self {
            header: buffer.split_to(header).freeze(),
            body: buffer.split_to(body).freeze(),
        }))
    }

    /// The body of the frame at the front of `buffer`, if all of it is there and it has no header, and the frame's length.
    #[must_use]
    pub fn peek_body(buffer: &[u8], max: usize) -> Option<(&[u8], usize)> {
        let (0, body) = lengths(buffer, max).ok()?? else {
            return None;
        };
        let total = TWO_PART_HEAD_BYTES + body;
        Some((buffer.get(TWO_PART_HEAD_BYTES..total)?, total))
    }

    /// Reads a frame that is all of `bytes`.
    pub fn decode(bytes: &Bytes) -> Result<Self, ProtocolError> {
        let Some((header, body)) = lengths(bytes, bytes.len())? else {
            return Err(ProtocolError::Truncated { what: TWO_PART });
        };
        if TWO_PART_HEAD_BYTES + header + body != bytes.len() {
            return Err(ProtocolError::Truncated { what: TWO_PART });
        }
        let at = TWO_PART_HEAD_BYTES + header;
        Ok(Self {
            header: bytes.slice(TWO_PART_HEAD_BYTES..at),
            body: bytes.slice(at..),
        })
    }
}

/// The lengths of header and body, once they are there. They fit into `max` together.
fn lengths(bytes: &[u8], max: usize) -> Result<Option<(usize, usize)>, ProtocolError> {
    let Some(mut head) = bytes.get(..TWO_PART_HEAD_BYTES) else {
        return Ok(None);
    };
    let (header, body) = (head.get_u64(), head.get_u64());
    let fits = |bytes: u64, max: usize| match usize::try_from(bytes) {
        Ok(small) if small <= max => Ok(small),
        _ => Err(ProtocolError::TooLarge {
            what: TWO_PART,
            bytes,
            max: max as u64,
        }),
    };
    let header = fits(header, HEADER_BYTES_MAX.min(max))?;
    Ok(Some((header, fits(body, max - header)?)))
}

/// Makes room for what is missing of a message, a piece at a time: its length is only a claim until its bytes are there.
fn make_room(buffer: &mut BytesMut, total: usize) {
    let missing = total.saturating_sub(buffer.len());
    buffer.reserve(missing.min(ROOM_BYTES_MAX));
}

/// A request as it travels to a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestFrame {
    /// The endpoint: what follows the first `/` of a worker's address.
    pub path: Bytes,
    /// JSON of an object whose members are text.
    pub headers: Bytes,
    /// A two-part frame: a control message and the payload.
    pub payload: Bytes,
}

impl RequestFrame {
    /// Appends a request for `path` whose payload is this frame. False if a part is too long for its length field.
    #[must_use]
    pub fn encode(path: &str, headers: &[u8], payload: &TwoPart, out: &mut BytesMut) -> bool {
        let (Ok(path_len), Ok(headers_len), Ok(payload_len)) = (
            u16::try_from(path.len()),
            u16::try_from(headers.len()),
            u32::try_from(payload.wire_len()),
        ) else {
            return false;
        };
        out.reserve(8 + path.len() + headers.len() + payload.wire_len());
        out.put_u16(path_len);
        out.put_slice(path.as_bytes());
        out.put_u16(headers_len);
        out.put_slice(headers);
        out.put_u32(payload_len);
        payload.encode(out);
        true
    }

    /// Takes a request from the front of `buffer` once all of it is there. One whose payload has more than `max` bytes is
    /// refused as soon as it says so.
    pub fn take(buffer: &mut BytesMut, max: usize) -> Result<Option<Self>, ProtocolError> {
        let Some(path) = length16(buffer, 0) else {
            return Ok(None);
        };
        if path > PATH_BYTES_MAX {
            return Err(ProtocolError::TooLarge {
                what: "an endpoint's path",
                bytes: path as u64,
                max: PATH_BYTES_MAX as u64,
            });
        }
        let Some(headers) = length16(buffer, 2 + path) else {
            return Ok(None);
        };
        let at = 4 + path + headers;
        let Some(mut length) = buffer.get(at..at + 4) else {
            return Ok(None);
        };
        let payload = length.get_u32() as usize;
        if payload > max {
            return Err(ProtocolError::TooLarge {
                what: REQUEST,
                bytes: payload as u64,
                max: max as u64,
            });
        }
        let total = at + 4 + payload;
        if buffer.len() < total {
            make_room(buffer, total);
            return Ok(None);
        }
        let mut frame = buffer.split_to(total).freeze();
        frame.advance(2);
        let path = frame.split_to(path);
        frame.advance(2);
        let headers = frame.split_to(headers);
        frame.advance(4);
        Ok(Some(Self {
            path,
            headers,
            payload: frame,
        }))
    }
}

fn length16(buffer: &[u8], at: usize) -> Option<usize> {
    let mut length = buffer.get(at..at + 2)?;
    Some(usize::from(length.get_u16()))
}

/// Begins the text of a worker that has no room.
pub const OVERLOADED: &str = "Server overloaded:";
/// Begins the text of a worker that does not serve the endpoint.
pub const UNAVAILABLE: &str = "Server unavailable:";
/// What a full worker says.
pub const AT_CAPACITY: &str = "Server overloaded: worker at capacity";

/// What a worker says to a request before it answers it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ack {
    /// It has it. Any text that means nothing else is this.
    Accepted,
    /// It is full.
    Overloaded,
    /// It does not serve this endpoint; its own words.
    Unavailable(String),
}

impl Ack {
    /// What this text means.
    #[must_use]
    pub fn of_text(text: &[u8]) -> Self {
        if text.starts_with(OVERLOADED.as_bytes()) {
            Self::Overloaded
        } else if let Some(why) = text.strip_prefix(UNAVAILABLE.as_bytes()) {
            Self::Unavailable(String::from_utf8_lossy(why).trim().to_owned())
        } else {
            Self::Accepted
        }
    }

    /// The text of it.
    #[must_use]
    pub fn text(&self) -> String {
        match self {
            Self::Accepted => String::new(),
            Self::Overloaded => AT_CAPACITY.to_owned(),
            Self::Unavailable(why) => format!("{UNAVAILABLE} {why}"),
        }
    }

    /// A worker does not serve `path`.
    #[must_use]
    pub fn unknown_endpoint(path: &str) -> Self {
        Self::Unavailable(format!("unknown endpoint {path}"))
    }

    /// Appends it.
    pub fn encode(&self, out: &mut BytesMut) {
        let text = self.text();
        out.put_u32(text.len() as u32);
        out.put_slice(text.as_bytes());
    }

    /// Takes one from the front of `buffer` once all of it is there.
    pub fn take(buffer: &mut BytesMut) -> Result<Option<Self>, ProtocolError> {
        let Some(mut length) = buffer.get(..4) else {
            return Ok(None);
        };
        let length = length.get_u32() as usize;
        if length > ACK_BYTES_MAX {
            return Err(ProtocolError::TooLarge {
                what: ACK,
                bytes: length as u64,
                max: ACK_BYTES_MAX as u64,
            });
        }
        if buffer.len() < 4 + length {
            return Ok(None);
        }
        buffer.advance(4);
        Ok(Some(Self::of_text(&buffer.split_to(length))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_is_taken_when_its_last_byte_is_there() {
        let frame = TwoPart {
            header: Bytes::from_static(b"{}"),
            body: Bytes::from_static(b"body"),
        };
        let bytes = frame.to_bytes();
        for cut in 0..bytes.len() {
            let mut buffer = BytesMut::from(&bytes[..cut]);
            assert_eq!(TwoPart::take(&mut buffer, 64), Ok(None), "{cut}");
        }
        let mut buffer = BytesMut::from(&[&bytes[..], b"rest"].concat()[..]);
        assert_eq!(TwoPart::take(&mut buffer, 64), Ok(Some(frame.clone())));
        assert_eq!(&buffer[..], b"rest");
        assert_eq!(TwoPart::decode(&bytes), Ok(frame));
        assert!(TwoPart::decode(&bytes.slice(..29)).is_err());
        assert_eq!(TwoPart::peek_body(&bytes, 64), None, "it has a header");
        let bare = [&TwoPart::of_body("body").to_bytes()[..], b"rest"].concat();
        assert_eq!(TwoPart::peek_body(&bare, 64), Some((&b"body"[..], 28)));
        assert_eq!(TwoPart::peek_body(&bare[..27], 64), None);
        assert_eq!(TwoPart::peek_body(&bare, 3), None);
    }

    /// The limit is for header and body together, and no sum overflows.
    #[test]
    fn a_frame_over_the_limit_is_refused_by_its_head() {
        let head = |header: u64, body: u64| {
            let mut out = BytesMut::new();
            out.put_u64(header);
            out.put_u64(body);
            out.put_u64(0);
            out
        };
        assert_eq!(TwoPart::take(&mut head(2, 62), 64), Ok(None));
        for (header, body) in [
            (2, 63),
            (65, 0),
            (u64::MAX, u64::MAX),
            (0, u64::MAX),
            (1, 64),
        ] {
            let refused = TwoPart::take(&mut head(header, body), 64);
            assert!(matches!(refused, Err(ProtocolError::TooLarge { .. })));
        }
    }

    #[test]
    fn a_request_is_taken_when_its_last_byte_is_there() {
        let payload = TwoPart::of_body("x");
        let mut all = BytesMut::new();
        assert!(RequestFrame::encode("1/ns/c/e", b"{}", &payload, &mut all));
        for cut in 0..all.len() {
            let mut buffer = BytesMut::from(&all[..cut]);
            assert_eq!(RequestFrame::take(&mut buffer, 64), Ok(None), "{cut}");
        }
        let taken = RequestFrame::take(&mut all.clone(), 25).unwrap().unwrap();
        assert_eq!(
            (&taken.path[..], &taken.headers[..]),
            (&b"1/ns/c/e"[..], &b"{}"[..])
        );
        assert_eq!(TwoPart::decode(&taken.payload), Ok(payload));
        assert!(RequestFrame::take(&mut all.clone(), 24).is_err());
        let long = "x".repeat(usize::from(u16::MAX) + 1);
        let nothing = TwoPart::default();
        assert!(!RequestFrame::encode(
            &long,
            b"",
            &nothing,
            &mut BytesMut::new()
        ));
        let mut long = BytesMut::from(&[0xff, 0xff][..]);
        assert!(RequestFrame::take(&mut long, 64).is_err());
    }

    /// Twenty bytes that claim thirty megabytes cost their sender more than us.
    #[test]
    fn a_claimed_length_makes_little_room() {
        let mut frame = BytesMut::new();
        frame.put_u64(0);
        frame.put_u64(30 << 20);
        frame.put_u64(0);
        assert_eq!(TwoPart::take(&mut frame, FRAME_BYTES_MAX), Ok(None));
        assert!(frame.capacity() <= 2 * ROOM_BYTES_MAX);
        let mut request = BytesMut::from(&b"\x00\x01x\x00\x02{}"[..]);
        request.put_u32(30 << 20);
        assert_eq!(RequestFrame::take(&mut request, FRAME_BYTES_MAX), Ok(None));
        assert!(request.capacity() <= 2 * ROOM_BYTES_MAX);
    }

    #[test]
    fn an_ack_means_what_its_text_begins_with() {
        for (text, ack) in [
            ("", Ack::Accepted),
            ("something odd", Ack::Accepted),
            ("Server overloaded: worker at capacity", Ack::Overloaded),
            (
                "Server unavailable: unknown endpoint x",
                Ack::unknown_endpoint("x"),
            ),
        ] {
            let mut buffer = BytesMut::new();
            buffer.put_u32(text.len() as u32);
            buffer.put_slice(text.as_bytes());
            if text != "something odd" {
                let mut written = BytesMut::new();
                ack.encode(&mut written);
                assert_eq!(written, buffer);
            }
            assert_eq!(Ack::take(&mut buffer), Ok(Some(ack)));
            assert!(buffer.is_empty());
        }
        let mut long = BytesMut::from(&[0, 1, 0, 1][..]);
        assert!(Ack::take(&mut long).is_err());
        assert_eq!(
            Ack::take(&mut BytesMut::from(&[0, 0, 0, 2, b'x'][..])),
            Ok(None)
        );
    }
}
