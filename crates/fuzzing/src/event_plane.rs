//! Messages of the event plane, and questions and answers of recovery: what is read is written back and read the same, and the
//! quick reader of answers agrees with the plain one.

use std::fmt::Debug;

use kvasir_msgpack::{DecodeError, Value};
use kvasir_wire::native::{
    ActiveLoad, Encoding, Envelope, ForwardPass, RecoveryReply, RecoveryRequest, SequenceEvent,
    SessionBinding,
};

pub(crate) const WORDS: &[&str] = &[
    "\"Events\":",
    "\"TreeDump\":",
    "\"TooNew\":",
    "\"last_event_id\":",
    "\"events\":",
    "\"worker_id\":",
    "\"dp_rank\":",
    "null",
    "18446744073709551615",
];

pub(crate) fn check(input: &[u8]) -> bool {
    let mut accepted = false;
    if let Ok(envelope) = Envelope::decode_prefixed(input) {
        let mut written = Vec::new();
        envelope.encode_prefixed(&mut written);
        assert_eq!(Envelope::decode_prefixed(&written).as_ref(), Ok(&envelope));
        accepted |= payload(&envelope.payload);
    }
    if let Ok(envelope) = Envelope::decode(input) {
        let mut written = Vec::new();
        envelope.encode(&mut written);
        assert_eq!(Envelope::decode(&written).as_ref(), Ok(&envelope));
        accepted |= payload(&envelope.payload);
    }
    accepted |= payload(input);
    for encoding in [Encoding::MessagePack, Encoding::Json] {
        accepted |= recovery(encoding, input);
    }
    accepted
}

/// Every kind of payload, whatever the topic would have been.
fn payload(bytes: &[u8]) -> bool {
    let Ok(value) = Value::from_msgpack(bytes) else {
        return false;
    };
    let load = same(&value, ActiveLoad::from_value, ActiveLoad::to_value);
    let session = same(&value, SessionBinding::from_value, SessionBinding::to_value);
    let bare = same(&value, SequenceEvent::from_value, SequenceEvent::to_value);
    let batch = same(&value, SequenceEvent::list_from_value, |events| {
        SequenceEvent::batch_to_value(events)
    });
    // Floats may be no numbers: compared as they are written.
    let step = ForwardPass::from_value(&value).map(|step| {
        let (once, mut first, mut second) = (step.to_value(), Vec::new(), Vec::new());
        once.to_msgpack(&mut first);
        let again = ForwardPass::from_value(&once).map(|step| step.to_value());
        let again = again.unwrap_or_else(|error| panic!("{error}: {once:?}"));
        again.to_msgpack(&mut second);
        assert_eq!(first, second);
    });
    load | session | bare | batch | step.is_ok()
}

fn same<T: PartialEq + Debug>(
    value: &Value,
    read: impl Fn(&Value) -> Result<T, DecodeError>,
    write: impl Fn(&T) -> Value,
) -> bool {
    let Ok(first) = read(value) else {
        return false;
    };
    assert_eq!(read(&write(&first)).as_ref(), Ok(&first));
    true
}

fn recovery(encoding: Encoding, bytes: &[u8]) -> bool {
    let question = RecoveryRequest::decode(encoding, bytes);
    if let Ok(question) = &question {
        let mut written = Vec::new();
        question.encode(encoding, &mut written);
        assert_eq!(RecoveryRequest::decode(encoding, &written), Ok(*question));
    }
    let reply = RecoveryReply::decode(encoding, bytes);
    if encoding == Encoding::MessagePack {
        let tree = Value::from_msgpack(bytes).and_then(|tree| RecoveryReply::from_value(&tree));
        if let Ok(tree) = tree {
            assert_eq!(reply.as_ref(), Ok(&tree));
        }
    }
    if let Ok(reply) = &reply {
        for encoding in [Encoding::MessagePack, Encoding::Json] {
            let mut written = Vec::new();
            reply.encode(encoding, &mut written);
            assert_eq!(
                RecoveryReply::decode(encoding, &written).as_ref(),
                Ok(reply)
            );
        }
    }
    question.is_ok() | reply.is_ok()
}
