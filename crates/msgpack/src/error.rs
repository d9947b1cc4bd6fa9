//! Why bytes were refused.

/// Why a frame could not be read. Always the sender's fault (or the path's): the frame is dropped, the
/// stream goes on with the next one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// The bytes end inside a value.
    #[error("the payload ends inside a value at byte {at}")]
    Truncated {
        /// Where.
        at: usize,
    },
    /// A value of another kind was needed here.
    #[error("expected {expected} at byte {at}, found marker {found:#04x}")]
    Kind {
        /// What was needed.
        expected: &'static str,
        /// The MessagePack marker that stood there.
        found: u8,
        /// Where.
        at: usize,
    },
    /// A number does not fit its field.
    #[error("{field} is out of range")]
    Range {
        /// Which field.
        field: &'static str,
    },
    /// A field that every release sends is missing.
    #[error("{field} is missing")]
    Missing {
        /// Which field.
        field: &'static str,
    },
    /// Values are nested deeper than any engine nests them.
    #[error("values are nested deeper than {} levels", crate::DEPTH_MAX)]
    Depth,
    /// A text is not UTF-8.
    #[error("text at byte {at} is not UTF-8")]
    Utf8 {
        /// Where.
        at: usize,
    },
    /// Bytes follow the value.
    #[error("{extra} bytes follow the value")]
    Trailing {
        /// How many.
        extra: usize,
    },
    /// The message has another number of parts than its protocol says.
    #[error("message has {found} parts, its protocol has {expected}")]
    Parts {
        /// Parts found.
        found: usize,
        /// Parts needed.
        expected: usize,
    },
    /// A sequence number is not 8 bytes long.
    #[error("sequence number has {found} bytes, not 8")]
    Sequence {
        /// Bytes found.
        found: usize,
    },
    /// The text is not JSON.
    #[error("not JSON: line {line}, column {column}")]
    Json {
        /// Line, from 1.
        line: usize,
        /// Column, from 1.
        column: usize,
    },
    /// A version that we do not speak.
    #[error("version {found} is not spoken here")]
    Version {
        /// What was found.
        found: u8,
    },
}
