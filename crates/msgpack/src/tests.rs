//! What is written is read again; what is claimed is not believed.

use crate::{DecodeError, Int, Reader, Writer};

fn written(write: impl Fn(&mut Writer<'_>)) -> Vec<u8> {
    let mut out = Vec::new();
    write(&mut Writer::new(&mut out));
    out
}

/// Each width's first and last value keeps its value and takes the shortest form.
#[test]
fn integers_keep_their_value_at_every_width() {
    let lengths = [
        (0, 1),
        (0x7f, 1),
        (0x80, 2),
        (0xff, 2),
        (0x100, 3),
        (0xffff, 3),
        (0x1_0000, 5),
        (0xffff_ffff, 5),
        (0x1_0000_0000, 9),
        (u64::MAX, 9),
    ];
    for (value, len) in lengths {
        let bytes = written(|w| w.uint(value));
        assert_eq!(bytes.len(), len, "{value}");
        assert_eq!(Reader::new(&bytes).int(), Ok(Int::Unsigned(value)));
    }
    for value in [
        -1,
        -32,
        -33,
        -128,
        -129,
        -32768,
        -32769,
        i64::from(i32::MIN),
        i64::MIN,
    ] {
        let bytes = written(|w| w.sint(value));
        assert_eq!(Reader::new(&bytes).int(), Ok(Int::Negative(value)));
        assert_eq!(Reader::new(&bytes).int().unwrap().bits(), value as u64);
    }
}

#[test]
fn skipping_ends_where_reading_ends() {
    let bytes = written(|w| {
        w.array(6);
        w.map(1);
        w.str("k");
        w.array(2);
        w.nil();
        w.bool(true);
        w.bin(&[0; 300]);
        w.str(&"x".repeat(70_000));
        w.float(1.5);
        w.sint(-5);
        w.uint(7);
    });
    let mut reader = Reader::new(&bytes);
    reader.skip().unwrap();
    reader.finish().unwrap();
    for cut in [0, 1, 5, 200, bytes.len() - 1] {
        let error = Reader::new(&bytes[..cut]).skip();
        assert!(matches!(error, Err(DecodeError::Truncated { .. })), "{cut}");
    }
}

/// A claimed length of 4 billion values is refused when the bytes end, not allocated.
#[test]
fn a_claimed_length_is_not_believed() {
    for head in [0xdd, 0xdf, 0xdb, 0xc6, 0xc9] {
        let bytes = [head, 0xff, 0xff, 0xff, 0xff, 0x00];
        assert!(Reader::new(&bytes).skip().is_err());
    }
    assert!(Reader::new(&[0xc1]).skip().is_err());
}
