//! Bodies cut at every byte, and bytes that are no bodies.

use super::*;
use proptest::prelude::*;

fn of(fields: &[(&'static str, &'static str)]) -> io::Result<Framing> {
    let mut headers = HeaderMap::new();
    for (name, value) in fields {
        headers.append(*name, http::HeaderValue::from_static(value));
    }
    Framing::of(&Method::POST, StatusCode::OK, &mut headers)
}

const CHUNKS: Framing = Framing::Chunks(Chunk::Size);

#[test]
fn the_head_says_where_the_body_ends() {
    assert_eq!(of(&[]).unwrap(), Framing::UntilClose);
    assert_eq!(of(&[("content-length", "5")]).unwrap(), Framing::Length(5));
    assert_eq!(of(&[("content-length", "0")]).unwrap(), Framing::Ended);
    let twice = of(&[("content-length", "5, 5"), ("content-length", "5")]);
    assert_eq!(twice.unwrap(), Framing::Length(5));
    assert!(of(&[("content-length", "5"), ("content-length", "6")]).is_err());
    for value in ["", "-1", "+5", "5x", "99999999999999999999"] {
        assert!(of(&[("content-length", value)]).is_err(), "{value}");
    }
    let both = of(&[("content-length", "5"), ("transfer-encoding", "Chunked")]);
    assert_eq!(both.unwrap(), CHUNKS);
    let plain = of(&[("transfer-encoding", "identity")]);
    assert_eq!(plain.unwrap(), Framing::UntilClose);
    let mut headers = HeaderMap::new();
    headers.insert(
        TRANSFER_ENCODING,
        http::HeaderValue::from_static("identity"),
    );
    Framing::of(&Method::POST, StatusCode::OK, &mut headers).unwrap();
    assert!(headers.is_empty(), "it says nothing about the end");
    for coded in ["gzip", "gzip, chunked", "chunked, chunked", "chunked,", ""] {
        assert!(of(&[("transfer-encoding", coded)]).is_err(), "{coded:?}");
    }
    let head = |method, status| Framing::of(method, status, &mut HeaderMap::new()).unwrap();
    assert_eq!(head(&Method::HEAD, StatusCode::OK), Framing::Ended);
    assert_eq!(head(&Method::POST, StatusCode::NO_CONTENT), Framing::Ended);
}

/// Readers of the head see one length.
#[test]
fn a_length_said_twice_is_passed_on_once() {
    for status in [StatusCode::OK, StatusCode::NOT_MODIFIED] {
        let mut headers = HeaderMap::new();
        for value in ["5, 5", "5"] {
            headers.append(CONTENT_LENGTH, http::HeaderValue::from_static(value));
        }
        Framing::of(&Method::POST, status, &mut headers).unwrap();
        let said: Vec<_> = headers.get_all(CONTENT_LENGTH).iter().collect();
        assert_eq!(said, ["5"]);
    }
}

/// All that can be taken when `pieces` come one after another; what is left behind; whether it ended.
fn run(mut framing: Framing, pieces: &[&[u8]]) -> io::Result<(Vec<u8>, BytesMut, bool)> {
    let (mut inbox, mut out) = (BytesMut::new(), Vec::new());
    for piece in pieces {
        inbox.extend_from_slice(piece);
        loop {
            match framing.step(&mut inbox)? {
                Step::Data(data) => {
                    assert!(!data.is_empty());
                    out.extend_from_slice(&data);
                }
                Step::More => break,
                Step::End => break,
            }
        }
    }
    Ok((out, inbox, framing == Framing::Ended))
}

#[test]
fn chunks_are_right_at_every_byte_boundary() {
    let text = b"5;ext=\"1\"\r\nhello\r\n00A \r\n, world!!!\r\n0\r\nx-t: 1\r\n\r\nNEXT";
    for cut in 0..=text.len() {
        let (out, rest, ended) = run(CHUNKS, &[&text[..cut], &text[cut..]]).unwrap();
        assert_eq!(
            (&out[..], &rest[..], ended),
            (&b"hello, world!!!"[..], &b"NEXT"[..], true)
        );
    }
    let single: Vec<&[u8]> = text.chunks(1).collect();
    let (out, _, ended) = run(CHUNKS, &single).unwrap();
    assert_eq!((&out[..], ended), (&b"hello, world!!!"[..], true));
}

#[test]
fn bad_chunks_are_refused() {
    let bad: [&[u8]; 7] = [
        b"\r\n",
        b"x\r\n",
        b"5\nhello",
        b"5\r\nhellooo\r\n",
        b"1000000000000000\r\n",
        b"-1\r\n",
        b"5 5\r\n",
    ];
    for text in bad {
        assert!(run(CHUNKS, &[text]).is_err(), "{text:?}");
    }
    let endless = vec![b'1'; LINE_BYTES_MAX];
    assert!(run(CHUNKS, &[&endless]).is_err());
    let trailers = [
        &b"0\r\n"[..],
        &b"a: b\r\n".repeat(TRAILER_BYTES_MAX / 6 + 1),
    ]
    .concat();
    assert!(run(CHUNKS, &[&trailers]).is_err());
}

#[test]
fn a_length_is_kept_and_what_follows_stays() {
    let (out, rest, ended) = run(Framing::Length(3), &[b"a", b"bcd"]).unwrap();
    assert_eq!((&out[..], &rest[..], ended), (&b"abc"[..], &b"d"[..], true));
    let (out, _, ended) = run(Framing::UntilClose, &[b"a", b"bcd"]).unwrap();
    assert_eq!((&out[..], ended), (&b"abcd"[..], false));
    assert!(Framing::UntilClose.ends_with_connection() && !CHUNKS.ends_with_connection());
}

proptest! {
    #[test]
    fn whatever_comes_nothing_panics_and_cuts_do_not_matter(
        text in proptest::collection::vec(prop_oneof![
            Just(b'\r'), Just(b'\n'), Just(b'0'), Just(b'2'), Just(b'a'), Just(b';'), any::<u8>()
        ], 0..60),
        cut in 0_usize..60,
    ) {
        let cut = cut.min(text.len());
        let whole = run(CHUNKS, &[&text]);
        let halves = run(CHUNKS, &[&text[..cut], &text[cut..]]);
        match (whole, halves) {
            (Ok(whole), Ok(halves)) => prop_assert_eq!(whole, halves),
            (whole, halves) => prop_assert_eq!(whole.is_err(), halves.is_err()),
        }
    }

    #[test]
    fn what_was_cut_into_chunks_comes_out_whole(
        pieces in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 1..40), 0..6),
        cut in 0_usize..400,
    ) {
        let mut text = Vec::new();
        for piece in &pieces {
            text.extend_from_slice(format!("{:x}\r\n", piece.len()).as_bytes());
            text.extend_from_slice(piece);
            text.extend_from_slice(b"\r\n");
        }
        text.extend_from_slice(b"0\r\n\r\n");
        let cut = cut.min(text.len());
        let (out, rest, ended) = run(CHUNKS, &[&text[..cut], &text[cut..]]).unwrap();
        prop_assert_eq!((out, rest.len(), ended), (pieces.concat(), 0, true));
    }
}
