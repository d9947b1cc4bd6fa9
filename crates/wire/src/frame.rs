//! Messages of an engine's two event sockets: which part is what.
//!
//! Live messages have three parts: topic, sequence number, payload. Answers of the replay socket have an
//! empty part in front, and the last one has the sequence number -1 and no payload.

use kvasir_msgpack::DecodeError;

/// Sequence number of the message that ends a replay.
pub const REPLAY_END: u64 = u64::MAX;

/// One message of an event socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame<P> {
    /// Consecutive per publisher, from 0; [`REPLAY_END`] ends a replay.
    pub sequence: u64,
    /// A batch, in the engine's dialect.
    pub payload: P,
}

/// What a replay socket answered with one message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplayPart<P> {
    /// A batch from the publisher's buffer.
    Frame(Frame<P>),
    /// Nothing more will come.
    End,
}

/// Reads a live message.
///
/// ```
/// # use kvasir_wire::frame::parse_live;
/// let parts = [vec![], 7u64.to_be_bytes().to_vec(), vec![0x93]];
/// let frame = parse_live(&parts)?;
/// assert_eq!((frame.sequence, frame.payload), (7, vec![0x93]));
/// assert!(parse_live(&parts[1..]).is_err());
/// # Ok::<(), kvasir_msgpack::DecodeError>(())
/// ```
pub fn parse_live<P: AsRef<[u8]> + Clone>(parts: &[P]) -> Result<Frame<P>, DecodeError> {
    let [_topic, sequence, payload] = parts else {
        return Err(DecodeError::Parts {
            found: parts.len(),
            expected: 3,
        });
    };
    Ok(Frame {
        sequence: read_sequence(sequence.as_ref())?,
        payload: payload.clone(),
    })
}

/// Reads an answer of a replay socket as a DEALER receives it, the empty part included.
pub fn parse_replay<P: AsRef<[u8]> + Clone>(parts: &[P]) -> Result<ReplayPart<P>, DecodeError> {
    let [_delimiter, _topic, sequence, payload] = parts else {
        return Err(DecodeError::Parts {
            found: parts.len(),
            expected: 4,
        });
    };
    let sequence = read_sequence(sequence.as_ref())?;
    if sequence == REPLAY_END && payload.as_ref().is_empty() {
        return Ok(ReplayPart::End);
    }
    Ok(ReplayPart::Frame(Frame {
        sequence,
        payload: payload.clone(),
    }))
}

/// Reads what a client asked of a replay socket: from which sequence number on. As engines do, takes
/// fewer bytes for a smaller number, and none for 0.
///
/// ```
/// # use kvasir_wire::frame::parse_replay_request;
/// assert_eq!(parse_replay_request(&3u64.to_be_bytes()), Some(3));
/// assert_eq!(parse_replay_request(&[]), Some(0));
/// assert_eq!(parse_replay_request(&[0; 9]), None);
/// ```
#[must_use]
pub fn parse_replay_request(start: &[u8]) -> Option<u64> {
    if start.len() > 8 {
        return None;
    }
    Some(start.iter().fold(0, |n, byte| n << 8 | u64::from(*byte)))
}

fn read_sequence(bytes: &[u8]) -> Result<u64, DecodeError> {
    let found = <[u8; 8]>::try_from(bytes);
    let found = found.map_err(|_| DecodeError::Sequence { found: bytes.len() })?;
    Ok(u64::from_be_bytes(found))
}
