//! What the master of a Mooncake store says of its objects.
//!
//! Answers one question: which objects came into the pool that workers share, and which left it? Messages have the three parts of an
//! engine's event socket ([`crate::frame`]); the payload is MessagePack: time, events, rank. An event is a map of names, or the same
//! values in order.

use kvasir_msgpack::{DecodeError, Kind, Reader};

/// Events of one message that are read.
pub const POOL_EVENTS_MAX: usize = 1 << 16;

/// One object of a pool came or went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolEvent<'a> {
    /// Its name.
    pub key: &'a str,
    /// Whether it is there now.
    pub stored: bool,
    /// Whose it is; empty or `default` where there is one tenant.
    pub tenant: &'a str,
}

impl PoolEvent<'_> {
    /// Whether it belongs to the tenant that workers have unless they are told otherwise.
    #[must_use]
    pub fn is_default_tenant(&self) -> bool {
        matches!(self.tenant, "" | "default")
    }
}

/// The events of a message, in order. Kinds that are not known are left out.
///
/// ```
/// # use kvasir_wire::mooncake::pool_events;
/// let payload = [0x93, 0, 0x91, 0x92, 0xa6, b's', b't', b'o', b'r', b'e', b'd', 0xa1, b'k', 0];
/// assert_eq!(pool_events(&payload)?[0].key, "k");
/// # Ok::<(), kvasir_msgpack::DecodeError>(())
/// ```
pub fn pool_events(payload: &[u8]) -> Result<Vec<PoolEvent<'_>>, DecodeError> {
    let mut reader = Reader::new(payload);
    let parts = reader.array()?;
    if parts < 2 {
        return Err(DecodeError::Missing { field: "events" });
    }
    // The time.
    reader.skip()?;
    let count = reader.array()?;
    if count > POOL_EVENTS_MAX {
        return Err(DecodeError::Range { field: "events" });
    }
    let mut events = Vec::new();
    for _ in 0..count {
        events.extend(event(&mut reader)?);
    }
    for _ in 2..parts {
        reader.skip()?;
    }
    reader.finish()?;
    Ok(events)
}

fn event<'a>(reader: &mut Reader<'a>) -> Result<Option<PoolEvent<'a>>, DecodeError> {
    let [mut kind, mut key, mut tenant] = [""; 3];
    if reader.peek()? == Kind::Array {
        let fields = reader.array()?;
        for at in 0..fields {
            match at {
                0 => kind = text(reader)?,
                1 => key = text(reader)?,
                2 => tenant = text(reader)?,
                _ => reader.skip()?,
            }
        }
    } else {
        for _ in 0..reader.map()? {
            match reader.text_bytes()? {
                b"event_type" => kind = text(reader)?,
                b"object_key" => key = text(reader)?,
                b"tenant_id" => tenant = text(reader)?,
                _ => reader.skip()?,
            }
        }
    }
    let stored = match kind {
        "stored" => true,
        "removed" => false,
        _ => return Ok(None),
    };
    let event = PoolEvent {
        key,
        stored,
        tenant,
    };
    Ok((!key.is_empty()).then_some(event))
}

/// A text, or nothing.
fn text<'a>(reader: &mut Reader<'a>) -> Result<&'a str, DecodeError> {
    match reader.nil()? {
        true => Ok(""),
        false => reader.str(),
    }
}

#[cfg(test)]
mod tests {
    use kvasir_msgpack::Value;

    use super::*;

    fn payload(json: &str) -> Vec<u8> {
        let mut bytes = Vec::new();
        let value = Value::from_json(json.as_bytes()).unwrap();
        value.to_msgpack(&mut bytes);
        bytes
    }

    #[test]
    fn events_are_maps_or_lists_and_unknown_ones_are_left_out() {
        let bytes = payload(
            r#"[17, [{"event_type": "stored", "object_key": "a_0_k", "tenant_id": "default", "group_id": "g", "new": [1]},
                ["removed", "b", null, null],
                {"event_type": "moved", "object_key": "c"}, {"event_type": "stored", "object_key": null},
                {"event_type": "stored", "object_key": "d", "tenant_id": "other"}], 3, "more"]"#,
        );
        let events = pool_events(&bytes).unwrap();
        let seen: Vec<_> = events
            .iter()
            .map(|e| (e.key, e.stored, e.is_default_tenant()))
            .collect();
        assert_eq!(
            seen,
            [
                ("a_0_k", true, true),
                ("b", false, true),
                ("d", true, false)
            ]
        );
    }

    #[test]
    fn what_is_no_batch_is_refused_and_never_read_past_its_end() {
        let bytes = payload(r#"[17, [["stored", "a"]], 0]"#);
        for end in 0..bytes.len() {
            assert!(pool_events(&bytes[..end]).is_err(), "{end}");
        }
        assert!(pool_events(&[bytes.as_slice(), &[0]].concat()).is_err());
        for bad in ["[1]", "{}", "[1, 2, 3]", r#"[1, ["stored"], 0]"#] {
            assert!(pool_events(&payload(bad)).is_err(), "{bad}");
        }
        // Says that more events follow than anybody sends.
        assert!(pool_events(&[0x92, 0, 0xdd, 0xff, 0xff, 0xff, 0xff]).is_err());
    }
}
