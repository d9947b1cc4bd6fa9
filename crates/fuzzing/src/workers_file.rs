//! A workers file: comments and line ends mean nothing, and an error is one short line that can be printed.

use kvasir_frontend::WorkersFile;
use kvasir_upstream::parse_worker;

pub(crate) const WORDS: &[&str] = &[
    "http://",
    "https://",
    "10.0.0.7",
    "[::1]",
    ":8000",
    ":65536",
    ":0",
    "/v1",
    ",block-size=16",
    ",block-size=99999999999999999999",
    ",data-parallel-size=2",
    ",events=tcp://127.0.0.1:5557",
    ",taint=a",
    "\n",
    "# comment\n",
    "none\n",
    "\u{1b}[2J",
    "%2f",
    "@",
    "ä",
];

/// Longest message of an error.
const MESSAGE_BYTES_MAX: usize = 700;

pub(crate) fn check(bytes: &[u8]) -> bool {
    let parsed = WorkersFile::parse(bytes);
    let workers = match &parsed {
        Ok(workers) => workers,
        Err(error) => {
            let text = error.to_string();
            let printable = !text.chars().any(char::is_control);
            assert!(printable, "a message with control characters: {text:?}");
            assert!(text.len() <= MESSAGE_BYTES_MAX, "a long message: {text}");
            return false;
        }
    };
    let lines = bytes.split(|byte| *byte == b'\n');
    assert!(workers.len() <= lines.clone().count());
    let mut ids: Vec<_> = workers.iter().map(|worker| worker.id).collect();
    ids.dedup();
    assert_eq!(ids.len(), workers.len(), "a worker is there twice");
    if !bytes.contains(&b'\r') {
        let ends: Vec<u8> = lines.clone().collect::<Vec<_>>().join(&b"\r\n"[..]);
        assert_eq!(
            WorkersFile::parse(&ends),
            parsed,
            "line ends mean something"
        );
    }
    let comments: Vec<u8> = lines.collect::<Vec<_>>().join(&b"\n \n # http://x\n"[..]);
    assert_eq!(
        WorkersFile::parse(&comments),
        parsed,
        "comments mean something"
    );
    for worker in workers {
        if let Some(endpoint) = worker.transport.http() {
            let again = parse_worker(&endpoint.to_string());
            assert_eq!(
                again.map(|worker| worker.id).ok(),
                Some(worker.id),
                "{endpoint}"
            );
        }
    }
    true
}
