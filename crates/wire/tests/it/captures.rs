//! The recordings under `testdata/`, read as they were written.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value as Json;

/// Lines of a JSON-lines file of `testdata/`.
pub(crate) fn lines(path: &str) -> Vec<Json> {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/");
    let text = std::fs::read_to_string(format!("{root}{path}")).unwrap();
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

/// Bytes from base64.
pub(crate) fn bytes(value: &Json) -> Vec<u8> {
    STANDARD.decode(value.as_str().unwrap()).unwrap()
}

/// The parts of each message in a file of messages.
pub(crate) fn messages(path: &str) -> Vec<Vec<Vec<u8>>> {
    let parts = |line: &Json| {
        let parts = line.get("frames_b64").or(line.get("frames")).unwrap();
        parts.as_array().unwrap().iter().map(bytes).collect()
    };
    lines(path).iter().map(parts).collect()
}

/// Folders with a recorded session.
pub(crate) const SESSIONS: [&str; 5] = [
    "bytes-sha256_cbor",
    "int-sha256",
    "int-sha256-aligned",
    "int-sha256-duplicates",
    "int-sha256-hybrid-swa",
];
