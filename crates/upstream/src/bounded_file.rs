//! Files that an operator names: keys, certificates, lists.
//!
//! Answers one question: what does this small file hold? What always holds: no more than the bound is read, whatever the
//! file says of its size: a device has none.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// Longest file of keys.
pub const KEY_FILE_BYTES_MAX: u64 = 1 << 20;
/// Longest file of certificates: some ten times what systems trust together.
pub const PEM_BYTES_MAX: u64 = 4 << 20;

/// Reads a file of at most `max` bytes.
pub fn read_bounded(path: &Path, max: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(max + 1).read_to_end(&mut bytes)?;
    match bytes.len() as u64 > max {
        true => Err(io::Error::other(format!(
            "it is longer than {max} bytes, the most that is read"
        ))),
        false => Ok(bytes),
    }
}

/// As [`read_bounded`], of text.
pub fn read_bounded_text(path: &Path, max: u64) -> io::Result<String> {
    let text = String::from_utf8(read_bounded(path, max)?);
    text.map_err(|_| io::Error::other("it is not UTF-8 text"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bound_is_exact_and_holds_for_files_without_a_size() {
        let path = std::env::temp_dir().join(format!("kvasir-bounded-{}", std::process::id()));
        std::fs::write(&path, [b'x'; 10]).unwrap();
        assert_eq!(read_bounded_text(&path, 10).unwrap(), "xxxxxxxxxx");
        let long = read_bounded(&path, 9).unwrap_err().to_string();
        assert!(long.contains("longer than 9 bytes"), "{long}");
        std::fs::write(&path, [0xff]).unwrap();
        assert!(read_bounded_text(&path, 9).is_err());
        std::fs::remove_file(&path).unwrap();
        for other in ["/dev/zero", "/tmp", "/nonexistent"] {
            assert!(read_bounded(Path::new(other), 9).is_err(), "{other}");
        }
    }
}
