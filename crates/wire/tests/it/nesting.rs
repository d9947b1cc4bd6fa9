//! Nesting costs no stack. Damaged and random bytes are tried by `kvasir-fuzzing`, target `events`.

use kvasir_msgpack::{Reader, Value};
use kvasir_wire::engine::Batch;

/// A megabyte of open arrays is refused.
#[test]
fn deep_nesting_is_refused() {
    let deep = vec![0x91; 1 << 20];
    assert!(Reader::new(&deep).skip().is_err());
    assert!(Value::from_msgpack(&deep).is_err());
    assert!(Batch::new().decode(&deep).is_err());
    let json = "[".repeat(1 << 20);
    assert!(Value::from_json(json.as_bytes()).is_err());
}
