//! There and back, in pieces, and bytes that nobody should send.

use kvasir_types::Rng;

use super::*;

fn all(decoder: &mut Decoder, bytes: &[u8]) -> Result<Vec<Item>, ZmtpError> {
    let mut buffer = BytesMut::from(bytes);
    let mut items = Vec::new();
    while let Some(item) = decoder.decode(&mut buffer)? {
        items.push(item);
    }
    Ok(items)
}

/// Lengths around the change from one to eight bytes, and empty parts.
#[test]
fn messages_survive_whole_and_byte_by_byte() {
    let mut bytes = BytesMut::new();
    let sizes = [0, 1, 254, 255, 256, 70_000];
    for size in sizes {
        let part = vec![7u8; size];
        put_message(&[&b""[..], &part, &part[..size.min(3)]], &mut bytes);
    }
    let whole = all(&mut Decoder::new(1 << 20), &bytes).unwrap();
    assert_eq!(whole.len(), sizes.len());
    for (item, size) in whole.iter().zip(sizes) {
        let Item::Message(parts) = item else {
            panic!("{item:?}");
        };
        let lengths: Vec<usize> = parts.iter().map(Bytes::len).collect();
        assert_eq!(lengths, [0, size, size.min(3)]);
    }
    let (mut decoder, mut buffer, mut items) = (Decoder::new(1 << 20), BytesMut::new(), vec![]);
    for byte in &bytes {
        buffer.put_u8(*byte);
        items.extend(decoder.decode(&mut buffer).unwrap());
    }
    assert_eq!(items, whole);
}

#[test]
fn commands_are_told_apart() {
    let mut bytes = BytesMut::new();
    put_ready("DEALER", &mut bytes);
    put_ping(30, &mut bytes);
    put_pong(b"ctx", &mut bytes);
    put_command(b"SUBSCRIBE", b"kv", &mut bytes);
    put_command(b"CANCEL", b"kv", &mut bytes);
    put_command(b"ERROR", b"\x02no", &mut bytes);
    put_command(b"NEW", b"", &mut bytes);
    let items = all(&mut Decoder::new(1 << 20), &bytes).unwrap();
    let kv = Bytes::from_static(b"kv");
    let expected = [
        Item::Ready("DEALER".to_owned()),
        Item::Ping(Bytes::new()),
        Item::Pong,
        Item::Subscribe(kv.clone(), true),
        Item::Subscribe(kv, false),
        Item::Error("no".to_owned()),
        Item::Other,
    ];
    assert_eq!(items, expected);
}

#[test]
fn a_claimed_length_over_the_limit_is_refused_before_its_bytes_come() {
    let mut huge = vec![LONG];
    huge.extend((1u64 << 40).to_be_bytes());
    let error = all(&mut Decoder::new(1000), &huge).unwrap_err();
    let (size, limit) = (1 << 40, 1000);
    assert_eq!(error, ZmtpError::TooLarge { size, limit });

    // The limit is on the message, not on each part.
    let mut parts = BytesMut::new();
    put_message(&[vec![0; 600], vec![0; 600]], &mut parts);
    assert!(all(&mut Decoder::new(1000), &parts).is_err());
    assert!(all(&mut Decoder::new(1200), &parts).is_ok());

    let mut many = BytesMut::new();
    put_message(&[b""; PARTS_MAX + 1], &mut many);
    assert_eq!(
        all(&mut Decoder::new(1000), &many),
        Err(ZmtpError::TooManyParts)
    );
}

#[test]
fn greetings_of_others_are_named() {
    assert_eq!(check_greeting(&greeting()), Ok(1));
    let mut http = [b' '; GREETING_LEN];
    http[..4].copy_from_slice(b"HTTP");
    assert_eq!(check_greeting(&http), Err(ZmtpError::Greeting(*b"HTTP")));
    let mut old = greeting();
    old[10] = 1;
    assert_eq!(check_greeting(&old), Err(ZmtpError::Version(1)));
    let mut curve = greeting();
    curve[12..17].copy_from_slice(b"CURVE");
    let wants = ZmtpError::Mechanism("CURVE".to_owned());
    assert_eq!(check_greeting(&curve), Err(wants));
}

/// Seeded noise: never a panic, never more kept than came.
#[test]
fn noise_is_refused_without_panic() {
    let mut rng = Rng::new(11);
    for _ in 0..20_000 {
        let mut bytes = BytesMut::new();
        put_message(&[vec![1; rng.below(300) as usize]], &mut bytes);
        put_ready("PUB", &mut bytes);
        for _ in 0..=rng.below(3) {
            let at = rng.below(bytes.len() as u64) as usize;
            bytes[at] = rng.next_u64() as u8;
        }
        let _ = all(&mut Decoder::new(1 << 16), &bytes);
    }
}
