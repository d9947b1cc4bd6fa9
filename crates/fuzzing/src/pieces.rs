//! The same bytes in other pieces.

use kvasir_types::Rng;

/// Ways to cut an input: whole, byte by byte, and at places that the input itself decides.
pub(crate) fn ways(bytes: &[u8]) -> [Vec<&[u8]>; 3] {
    let mut rng = Rng::new(
        bytes
            .iter()
            .fold(7, |sum, byte| sum * 31 % 1_000_003 + u64::from(*byte)),
    );
    let mut random = Vec::new();
    let mut rest = bytes;
    while !rest.is_empty() {
        let (piece, after) = rest.split_at(rest.len().min(1 + rng.below(40) as usize));
        random.push(piece);
        rest = after;
    }
    [vec![bytes], bytes.chunks(1).collect(), random]
}
