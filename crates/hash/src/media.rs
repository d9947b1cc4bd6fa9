//! Image placeholders: one pad token per object, so that equal images give equal blocks.
//!
//! Engines that announce blocks with placeholder tokens replaced must meet requests that were treated
//! alike: the request side and the event side both call [`normalize_media_runs`], then hash without
//! media keys.

use kvasir_types::Token;

/// First pad token; far above any vocabulary.
const PAD_BASE: u64 = 1_000_000;
/// How much of the object's hash enters its pad token.
const PAD_MASK: u64 = (1 << 30) - 1;

/// A run of placeholder tokens that was replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MediaRun {
    /// Position of the run's first token.
    pub start: usize,
    /// Its length.
    pub len: usize,
    /// What stands there now.
    pub pad: Token,
}

/// The token that stands for an object in place of the model's placeholder.
///
/// ```
/// # use kvasir_hash::media_pad_token;
/// assert_eq!(media_pad_token(5), 1_000_005);
/// assert_eq!(media_pad_token(1 << 30), 1_000_000);
/// ```
#[must_use]
pub const fn media_pad_token(media_hash: u64) -> Token {
    (PAD_BASE + (media_hash & PAD_MASK)) as Token
}

/// Replaces each run of `placeholder` by the pad token of its object, in order; runs past the last
/// object reuse it. Without objects nothing changes. Returns what was replaced.
pub fn normalize_media_runs(
    tokens: &mut [Token],
    placeholder: Token,
    media: &[u64],
) -> Vec<MediaRun> {
    let mut runs = Vec::new();
    let Some(&last) = media.last() else {
        return runs;
    };
    let mut objects = media.iter();
    let mut at = 0;
    for chunk in tokens.chunk_by_mut(|a, b| (*a == placeholder) == (*b == placeholder)) {
        let (start, len) = (at, chunk.len());
        at += len;
        if chunk.first() == Some(&placeholder) {
            let pad = media_pad_token(*objects.next().unwrap_or(&last));
            chunk.fill(pad);
            runs.push(MediaRun { start, len, pad });
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_run_takes_one_object_and_the_last_is_reused() {
        let mut tokens = [9, 9, 1, 9, 2, 9];
        let runs = normalize_media_runs(&mut tokens, 9, &[5, 6]);
        assert_eq!(tokens, [1_000_005, 1_000_005, 1, 1_000_006, 2, 1_000_006]);
        assert_eq!(
            runs.iter().map(|r| (r.start, r.len)).collect::<Vec<_>>(),
            [(0, 2), (3, 1), (5, 1)]
        );
    }

    #[test]
    fn text_without_objects_or_placeholders_stays() {
        let mut tokens = [9, 1, 9];
        assert!(normalize_media_runs(&mut tokens, 9, &[]).is_empty());
        assert!(normalize_media_runs(&mut tokens, 8, &[1]).is_empty());
        assert_eq!(tokens, [9, 1, 9]);
        assert!(normalize_media_runs(&mut [], 9, &[1]).is_empty());
    }

    #[test]
    fn a_pad_token_fits_a_token() {
        assert_eq!(media_pad_token(u64::MAX), 1_000_000 + ((1 << 30) - 1));
    }
}
