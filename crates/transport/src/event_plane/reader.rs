//! Messages of the event plane, read: the right topic, and each once.

use bytes::Bytes;
use kvasir_msgpack::DecodeError;
use kvasir_wire::frame::Frame;
use kvasir_wire::native::Envelope;

/// Parts of a message on ZeroMQ.
const PARTS: usize = 4;
/// How far back a message is known to have come.
const WINDOW: u64 = 64;
/// Publishers that are told apart; a reader usually has one. Past it the oldest is forgotten.
const PUBLISHERS_MAX: usize = 1024;

/// Reads the messages of one topic.
#[derive(Clone, Debug)]
pub struct PlaneReader {
    topic: String,
    seen: Vec<(u64, SequenceWindow)>,
}

impl PlaneReader {
    /// A reader that has read nothing.
    #[must_use]
    pub fn new(topic: &str) -> Self {
        Self {
            topic: topic.to_owned(),
            seen: Vec::new(),
        }
    }

    /// Reads a message of ZeroMQ; nothing if it is of another topic or came before.
    pub fn read_parts(&mut self, parts: &[Bytes]) -> Result<Option<Frame<Bytes>>, DecodeError> {
        let [topic, _, _, envelope] = parts else {
            let (found, expected) = (parts.len(), PARTS);
            return Err(DecodeError::Parts { found, expected });
        };
        // A subscription is a prefix: other topics may begin alike.
        if topic[..] != *self.topic.as_bytes() {
            return Ok(None);
        }
        let envelope = Envelope::decode_prefixed(envelope)?;
        Ok(self.once(envelope).map(|(_, frame)| frame))
    }

    /// Reads a message of NATS and says whose it is; nothing if it came before.
    pub fn read_envelope(
        &mut self,
        body: &[u8],
    ) -> Result<Option<(u64, Frame<Bytes>)>, DecodeError> {
        Ok(self.once(Envelope::decode(body)?))
    }

    fn once(&mut self, envelope: Envelope) -> Option<(u64, Frame<Bytes>)> {
        let (publisher, sequence) = (envelope.publisher, envelope.sequence);
        let payload = envelope.payload.into();
        self.window(publisher)
            .is_new(sequence)
            .then_some((publisher, Frame { sequence, payload }))
    }

    fn window(&mut self, publisher: u64) -> &mut SequenceWindow {
        let known = self.seen.iter().position(|(id, _)| *id == publisher);
        let at = known.unwrap_or_else(|| {
            if self.seen.len() >= PUBLISHERS_MAX {
                self.seen.remove(0);
            }
            self.seen.push((publisher, SequenceWindow::default()));
            self.seen.len() - 1
        });
        &mut self.seen[at].1
    }
}

/// Which of a publisher's last numbers have come.
#[derive(Clone, Copy, Debug, Default)]
struct SequenceWindow {
    newest: Option<u64>,
    /// Bit n: `newest - n` has come.
    came: u64,
}

impl SequenceWindow {
    /// Whether a number comes for the first time. One from before the window is of a publisher that began again.
    fn is_new(&mut self, sequence: u64) -> bool {
        let Some(newest) = self.newest else {
            (self.newest, self.came) = (Some(sequence), 1);
            return true;
        };
        if sequence > newest {
            let by = sequence - newest;
            self.came = if by < WINDOW { self.came << by | 1 } else { 1 };
            self.newest = Some(sequence);
            return true;
        }
        let back = newest - sequence;
        if back >= WINDOW {
            (self.newest, self.came) = (Some(sequence), 1);
            return true;
        }
        let is_new = self.came >> back & 1 == 0;
        self.came |= 1 << back;
        is_new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_comes_once() {
        let mut window = SequenceWindow::default();
        let new: Vec<u64> = [5, 5, 7, 6, 7, 6, 5, 70, 71, 7]
            .into_iter()
            .filter(|n| window.is_new(*n))
            .collect();
        assert_eq!(
            new,
            [5, 7, 6, 70, 71, 7],
            "7 again: the publisher began anew"
        );
        assert!(window.is_new(u64::MAX) && !window.is_new(u64::MAX) && window.is_new(0));
    }

    #[test]
    fn other_topics_and_other_shapes_are_told_apart() {
        let mut reader = PlaneReader::new("kv-events");
        let envelope = |sequence| {
            let (mut body, topic) = (Vec::new(), "kv-events".to_owned());
            let payload = b"x".to_vec();
            Envelope {
                publisher: 7,
                sequence,
                published_ms: 1,
                topic,
                payload,
            }
            .encode_prefixed(&mut body);
            Bytes::from(body)
        };
        let parts = |topic: &'static str, body| {
            let number = Bytes::from_static(&[0; 8]);
            vec![
                Bytes::from_static(topic.as_bytes()),
                number.clone(),
                number,
                body,
            ]
        };
        let read = reader.read_parts(&parts("kv-events", envelope(0))).unwrap();
        assert_eq!(read.unwrap().payload, "x");
        assert_eq!(
            reader.read_parts(&parts("kv-events", envelope(0))),
            Ok(None)
        );
        assert_eq!(
            reader.read_parts(&parts("kv-events2", envelope(1))),
            Ok(None)
        );
        assert!(
            reader
                .read_parts(&parts("kv-events", Bytes::new()))
                .is_err()
        );
        assert!(reader.read_parts(&[]).is_err());
        for publisher in 0..2 * PUBLISHERS_MAX as u64 {
            reader.window(publisher);
        }
        assert_eq!(reader.seen.len(), PUBLISHERS_MAX);
    }
}
