//! The messages of etcd that are used here, as bytes.
//!
//! Answers one question: what do the fields of a message say? Protocol buffers of `etcdserverpb`, a dozen of their messages and of
//! those the fields that matter; others are skipped. Pure: bytes in, values out, and nothing from the network can make it panic.

/// A field of a message.
enum Field<'a> {
    Number(u64),
    Bytes(&'a [u8]),
    Other,
}

/// Reads the fields of a message one after another.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn varint(&mut self) -> Option<u64> {
        let mut value = 0_u64;
        for shift in (0..64).step_by(7) {
            let (&byte, rest) = self.0.split_first()?;
            self.0 = rest;
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }

    fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(taken)
    }

    /// The next field; an error if the bytes are no message.
    fn next(&mut self) -> Option<Result<(u64, Field<'a>), BadMessage>> {
        if self.0.is_empty() {
            return None;
        }
        Some(self.field().ok_or(BadMessage))
    }

    fn field(&mut self) -> Option<(u64, Field<'a>)> {
        let tag = self.varint()?;
        let field = match tag & 7 {
            0 => Field::Number(self.varint()?),
            1 => {
                self.take(8)?;
                Field::Other
            }
            2 => {
                let length = usize::try_from(self.varint()?).ok()?;
                Field::Bytes(self.take(length)?)
            }
            5 => {
                self.take(4)?;
                Field::Other
            }
            _ => return None,
        };
        Some((tag >> 3, field))
    }
}

/// Bytes that are no message of the kind that was expected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("etcd sent a message that cannot be read")]
pub(super) struct BadMessage;

/// Calls `each` with every field of a message.
fn fields<'a>(message: &'a [u8], mut each: impl FnMut(u64, Field<'a>)) -> Result<(), BadMessage> {
    let mut reader = Reader(message);
    while let Some(field) = reader.next() {
        let (number, field) = field?;
        each(number, field);
    }
    Ok(())
}

/// Writes a message.
#[derive(Default)]
pub(super) struct Writer(Vec<u8>);

impl Writer {
    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push((value & 0x7f) as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    pub(super) fn number(mut self, field: u64, value: u64) -> Self {
        if value != 0 {
            self.varint(field << 3);
            self.varint(value);
        }
        self
    }

    pub(super) fn bytes(mut self, field: u64, value: &[u8]) -> Self {
        if !value.is_empty() {
            self.varint((field << 3) | 2);
            self.varint(value.len() as u64);
            self.0.extend_from_slice(value);
        }
        self
    }

    pub(super) fn done(self) -> Vec<u8> {
        self.0
    }
}

/// The end of the range of keys that begin with `prefix`.
pub(super) fn range_end(prefix: &[u8]) -> Vec<u8> {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if last < u8::MAX {
            end.push(last + 1);
            return end;
        }
    }
    // All that follow.
    vec![0]
}

/// A key with its value.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct KeyValue {
    pub(super) key: Vec<u8>,
    pub(super) value: Vec<u8>,
}

impl KeyValue {
    fn read(message: &[u8]) -> Result<Self, BadMessage> {
        let mut this = Self::default();
        fields(message, |number, field| match (number, field) {
            (1, Field::Bytes(key)) => this.key = key.to_vec(),
            (5, Field::Bytes(value)) => this.value = value.to_vec(),
            _ => {}
        })?;
        Ok(this)
    }
}

fn revision(header: &[u8]) -> Result<u64, BadMessage> {
    let mut revision = 0;
    fields(header, |number, field| {
        if let (3, Field::Number(value)) = (number, field) {
            revision = value;
        }
    })?;
    Ok(revision)
}

/// Keys of a range, and whether there are more.
#[derive(Debug, Default)]
pub(super) struct Page {
    pub(super) revision: u64,
    pub(super) values: Vec<KeyValue>,
    pub(super) more: bool,
}

impl Page {
    /// Asks for keys from `key` to `end`; as they were at `revision`, unless that is 0.
    pub(super) fn ask(key: &[u8], end: &[u8], limit: u64, revision: u64) -> Vec<u8> {
        let request = Writer::default().bytes(1, key).bytes(2, end);
        request.number(3, limit).number(4, revision).done()
    }

    pub(super) fn read(message: &[u8]) -> Result<Self, BadMessage> {
        let (mut this, mut kvs, mut header) = (Self::default(), Vec::new(), None);
        fields(message, |number, field| match (number, field) {
            (1, Field::Bytes(bytes)) => header = Some(bytes),
            (2, Field::Bytes(bytes)) => kvs.push(bytes),
            (3, Field::Number(more)) => this.more = more != 0,
            _ => {}
        })?;
        this.revision = revision(header.unwrap_or_default())?;
        this.values = kvs
            .into_iter()
            .map(KeyValue::read)
            .collect::<Result<_, _>>()?;
        Ok(this)
    }
}

/// What a watch hears.
#[derive(Debug, Default)]
pub(super) struct Heard {
    /// Why the watch has ended, if it has.
    pub(super) ended: Option<String>,
    /// Values that were put, keys that went.
    pub(super) events: Vec<Heading>,
}

/// One change that a watch hears.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Heading {
    Put(KeyValue),
    Deleted(Vec<u8>),
}

impl Heard {
    /// Asks for changes of keys from `key` to `end`, beginning with `revision`.
    pub(super) fn ask(key: &[u8], end: &[u8], revision: u64) -> Vec<u8> {
        let create = Writer::default().bytes(1, key).bytes(2, end);
        let create = create.number(3, revision).done();
        Writer::default().bytes(1, &create).done()
    }

    pub(super) fn read(message: &[u8]) -> Result<Self, BadMessage> {
        let (mut cancelled, mut compacted, mut reason) = (false, 0, String::new());
        let mut events = Vec::new();
        fields(message, |number, field| match (number, field) {
            (4, Field::Number(value)) => cancelled = value != 0,
            (5, Field::Number(value)) => compacted = value,
            (6, Field::Bytes(text)) => reason = String::from_utf8_lossy(text).into_owned(),
            (11, Field::Bytes(event)) => events.push(event),
            _ => {}
        })?;
        let ended = match (cancelled, compacted) {
            (false, 0) => None,
            (_, 0) => Some(reason),
            _ => Some("the changes since the listing are no longer kept".into()),
        };
        let events = events
            .into_iter()
            .map(Heading::read)
            .collect::<Result<_, _>>()?;
        Ok(Self { ended, events })
    }
}

impl Heading {
    fn read(message: &[u8]) -> Result<Self, BadMessage> {
        let (mut is_delete, mut kv) = (false, None);
        fields(message, |number, field| match (number, field) {
            (1, Field::Number(kind)) => is_delete = kind == 1,
            (2, Field::Bytes(bytes)) => kv = Some(bytes),
            _ => {}
        })?;
        let kv = KeyValue::read(kv.unwrap_or_default())?;
        Ok(match is_delete {
            true => Self::Deleted(kv.key),
            false => Self::Put(kv),
        })
    }
}

/// Whether a key was written that only one may write.
pub(super) struct Taken;

impl Taken {
    /// Asks for `put` to be done if `key` is not there.
    pub(super) fn ask(key: &[u8], put: &[u8]) -> Vec<u8> {
        // The revision at which it was created is 0.
        const CREATED: u64 = 1;
        let absent = Writer::default().number(2, CREATED).bytes(3, key).done();
        let write = Writer::default().bytes(2, put).done();
        let request = Writer::default().bytes(1, &absent);
        request.bytes(2, &write).done()
    }

    pub(super) fn read(message: &[u8]) -> Result<bool, BadMessage> {
        let mut succeeded = false;
        fields(message, |number, field| {
            if let (2, Field::Number(value)) = (number, field) {
                succeeded = value != 0;
            }
        })?;
        Ok(succeeded)
    }
}

/// A lease as etcd tells of it: its id, and how many seconds it has left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct LeaseState {
    pub(super) id: u64,
    pub(super) ttl: i64,
}

impl LeaseState {
    pub(super) fn read(message: &[u8]) -> Result<Self, BadMessage> {
        let mut this = Self::default();
        fields(message, |number, field| match (number, field) {
            (2, Field::Number(id)) => this.id = id,
            (3, Field::Number(ttl)) => this.ttl = ttl.cast_signed(),
            _ => {}
        })?;
        Ok(this)
    }
}

/// The token of an answer to a name and a password.
pub(super) fn token(message: &[u8]) -> Result<String, BadMessage> {
    let mut token = String::new();
    fields(message, |number, field| {
        if let (2, Field::Bytes(text)) = (number, field) {
            token = String::from_utf8_lossy(text).into_owned();
        }
    })?;
    Ok(token)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kv(key: &str, value: &str) -> Vec<u8> {
        let kv = Writer::default().bytes(1, key.as_bytes()).number(2, 7);
        kv.bytes(5, value.as_bytes()).number(6, u64::MAX).done()
    }

    #[test]
    fn messages_are_read_as_they_were_written() {
        let header = Writer::default().number(1, 1 << 63).number(3, 300).done();
        let page = Writer::default()
            .bytes(1, &header)
            .bytes(2, &kv("a", "x"))
            .bytes(2, &kv("b", ""));
        let page = Page::read(&page.number(3, 1).number(99, 5).done()).unwrap();
        assert_eq!(
            (page.revision, page.more, page.values.len()),
            (300, true, 2)
        );
        assert_eq!(page.values[0].value, b"x");
        let put = Writer::default().bytes(2, &kv("k", "v")).done();
        let delete = Writer::default().number(1, 1).bytes(2, &kv("k", "")).done();
        let heard = Writer::default().bytes(11, &put).bytes(11, &delete).done();
        let heard = Heard::read(&heard).unwrap();
        assert!(heard.ended.is_none());
        assert_eq!(heard.events[1], Heading::Deleted(b"k".to_vec()));
        let gone = Writer::default().number(4, 1).bytes(6, b"why").done();
        assert_eq!(Heard::read(&gone).unwrap().ended.as_deref(), Some("why"));
        let lease = Writer::default().number(2, 9).number(3, 30).done();
        assert_eq!(
            LeaseState::read(&lease).unwrap(),
            LeaseState { id: 9, ttl: 30 }
        );
        assert_eq!(
            Page::ask(b"v1/", b"v10", 2, 0),
            b"\x0a\x03v1/\x12\x03v10\x18\x02"
        );
        assert_eq!(range_end(b"v1/"), b"v10");
        assert_eq!(range_end(b"\xff"), b"\0");
    }

    #[test]
    fn any_bytes_are_a_message_or_an_error() {
        let whole = Writer::default()
            .bytes(11, &Writer::default().bytes(2, &kv("k", "v")).done())
            .done();
        for cut in 1..whole.len() {
            assert_eq!(Heard::read(&whole[..cut]).err(), Some(BadMessage), "{cut}");
        }
        let endless = [0xff; 12];
        assert!(Page::read(&endless).is_err() && LeaseState::read(&[0x0f]).is_err());
        assert!(token(&[0x12, 0xff, 0xff, 0xff, 0xff, 0x0f]).is_err());
    }
}
